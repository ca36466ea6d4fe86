"""The errors that users see.

Every package derives its own errors from `ClusterDDPError`; the command line prints the message and exits with
`exit_status`, so a message must say what happened, where, and what to do about it.
"""

from __future__ import annotations

from cluster_ddp import exit_statuses


class ClusterDDPError(Exception):
    """An error that the user can fix. ``str()`` of it is the whole message, possibly of several lines."""

    exit_status: int = exit_statuses.WRONG_INPUT
    comes_back: bool = False  # whether it recurs in every attempt, however far earlier ones got, until a person acts


class JobFileError(ClusterDDPError):
    """The job file, an override of it, or something that it names is wrong."""


class BatchError(ClusterDDPError):
    """The global batch cannot be divided among the ranks."""
