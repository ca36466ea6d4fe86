"""The base of the errors that users see.

Every package derives its own errors from `ClusterDDPError`; the command line prints the message and exits with
`exit_status`, so a message must say what happened, where, and what to do about it.
"""

from __future__ import annotations

import enum

from cluster_ddp import exit_statuses


class Cause(str, enum.Enum):
    """What made a rank fail. Events record it, and decisions read it instead of the message."""

    PROGRAM = "program"  # an error of the program itself, which would happen again
    OUTSIDE = "outside"  # the network, a peer, storage, a signal: a restart may help
    HOST = "host"  # the machine that the rank ran on: a restart helps, perhaps only on a different one
    FOLLOWS = "follows"  # another rank has failed; no event is written for this one


class ClusterDDPError(Exception):
    """An error that the user can fix. ``str()`` of it is the whole message, possibly of several lines."""

    exit_status: int = exit_statuses.WRONG_INPUT
    comes_back: bool = False  # whether it recurs in every attempt, however far earlier ones got, until a person acts
    cause: Cause | None = None  # None: that of the error it was raised from, else the program

    def __init__(self, *args: object, cause: Cause | None = None) -> None:
        super().__init__(*args)
        if cause is not None:
            self.cause = cause
