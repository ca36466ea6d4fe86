"""The errors that users see.

Every package derives its own from `ClusterDDPError`; the command line prints the message and ends with
`exit_status`, so a message has to say by itself what happened, where, and what to do about it.
"""

from __future__ import annotations


class ClusterDDPError(Exception):
    """An error that the user can fix. ``str()`` of it is the whole message, perhaps of several lines."""

    exit_status: int = 2
    comes_back: bool = False  # in every further attempt, however far earlier ones have come, until a person acts


class JobFileError(ClusterDDPError):
    """The job file, an override of it, or what it names is wrong."""


class BatchError(ClusterDDPError):
    """The global batch cannot be divided among the ranks."""
