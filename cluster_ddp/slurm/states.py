"""A job as squeue shows it, and the meaning of Slurm's job states, which are defined only here."""

from __future__ import annotations

import re
from typing import NamedTuple

HELD = frozenset({"REQUEUE_HOLD", "SPECIAL_EXIT"})
"""To be started (again), but not before a person releases it. A job that is PENDING may be held, too."""

WAITING = frozenset({"PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_FED", "EXPEDITING", "RESV_DEL_HOLD"}) | HELD
"""To be started (again). In CONFIGURING the nodes are given, but nothing of the job runs on them yet.

RESV_DEL_HOLD is a hold by its reason alone: a job whose reservation was deleted keeps that state when it is released.

EXPEDITING (since 25.11) is a requeue on the job's own nodes, ahead of all others.
"""

ACTIVE = frozenset({"RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "SIGNALING", "STAGE_OUT", "RESIZING"})
"""The job's processes may still be there."""

LETS_RUN = frozenset({"RUNNING", "SIGNALING", "RESIZING", "SUSPENDED", "STOPPED"})
"""Slurm has not begun to end the job. SIGNALING shows for a moment (since 23.11) while a signal is delivered."""

_JOB_ID = re.compile(r"[0-9]{1,12}(_[0-9]{1,9})?")


def is_job_id(text: str) -> bool:
    """Whether `text` is the id of a job or an array task, and nothing that Slurm's commands would read as more."""
    return _JOB_ID.fullmatch(text) is not None


SUSPENDED = frozenset({"SUSPENDED", "STOPPED"})
"""Of the active ones: its processes are there, and stand still."""


class SlurmJob(NamedTuple):
    """One line of squeue."""

    job_id: str  # as squeue shows it: ``123``, or ``123_4`` for an array task
    state: str  # Slurm's long state word, such as ``RUNNING``
    reason: str  # why it waits or ended (``Priority``, ``TimeLimit``, ...); ``None`` if Slurm gives no reason
    nodes: str  # the node list as Slurm writes it, empty while waiting
    comment: str  # its ``--comment``
    # Unix seconds when it has started, or when Slurm expects a waiting job to start; None if unknown
    starts: float | None = None
    name: str = ""  # empty if unknown
    owner: int | None = None  # the id of its user; None if unknown

    @property
    def held(self) -> bool:
        """Whether it stays in the queue until a person releases it."""
        return self.state in HELD or (self.state in WAITING and _says_held(self.reason))

    @property
    def is_running(self) -> bool:
        """Whether it runs, and Slurm has not begun to end it."""
        return self.state == "RUNNING"

    @property
    def is_completing(self) -> bool:
        """Whether Slurm is still cleaning up after its end."""
        return self.state == "COMPLETING"

    @property
    def ended_by_itself(self) -> bool:
        """Whether its batch script has exited, with whatever status."""
        return self.state in ("COMPLETED", "FAILED")

    @property
    def is_cancelled(self) -> bool:
        """Whether its owner or an administrator has cancelled it."""
        return self.state == "CANCELLED"

    @property
    def batch_was_killed(self) -> bool:
        """Whether Slurm's reason for its end is that the batch process was killed; 22.05 gives the latter."""
        return self.reason.startswith(("RaisedSignal", "JobLaunchFailure"))

    @property
    def output_failed(self) -> bool:
        """Whether it may be that slurmstepd could not open its output."""
        return self.reason.startswith(("RaisedSignal:53", "JobLaunchFailure"))


def _says_held(reason: str) -> bool:
    """Whether a reason means a hold: a word such as JobHeldUser, or a sentence, perhaps with underscores."""
    return reason.startswith(("JobHeld", "JobHoldMaxRequeue")) or reason.replace("_", " ").endswith(
        ("requeued held", "requeued in held state", "requeued in special exit state", "was deleted")
    )
