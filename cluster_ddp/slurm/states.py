"""What Slurm says about a job, and what its state words mean for a run."""

from __future__ import annotations

from typing import NamedTuple

WAITING = frozenset(
    {"PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT", "RESV_DEL_HOLD"}
)
ACTIVE = frozenset({"RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "SIGNALING", "STAGE_OUT", "RESIZING"})


class SlurmJob(NamedTuple):
    """One line of squeue.

    Attributes
    ----------
    job_id : str
        As squeue shows it: ``123``, or ``123_4`` for a task of an array.
    state : str
        Slurm's long state word, such as ``RUNNING``.
    reason : str
        Why it waits or ended (``Priority``, ``TimeLimit``, ...); ``None`` where Slurm has nothing to say.
    nodes : str
        The node list as Slurm writes it, empty while waiting.
    run_id : str or None
        The run that this job was submitted for. Slurm uses job ids again: another run's job is a stranger.
    """

    job_id: str
    state: str
    reason: str
    nodes: str
    run_id: str | None

    @property
    def waiting(self) -> bool:
        """In the queue, to be started (again)."""
        return self.state in WAITING

    @property
    def active(self) -> bool:
        """Holds nodes now."""
        return self.state in ACTIVE

    @property
    def alive(self) -> bool:
        """Waiting or active: Slurm will still run something of it."""
        return self.waiting or self.active
