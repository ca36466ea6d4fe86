"""The nodes of a job as its keeper sees them: why and when they are taken away, and how to get others."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Protocol

from cluster_ddp.launch.keeper.bad_hosts import enough_others
from cluster_ddp.launch.processes import ASK_TO_END
from cluster_ddp.process import host_name
from cluster_ddp.slurm.commands import SlurmError, cancel_job
from cluster_ddp.slurm.control import (
    BRIEF_SECONDS,
    DEFAULT_KILL_WAIT,
    all_nodes,
    closed_hosts,
    down_nodes,
    exclude_hosts,
    forbid_requeue,
    grace_time,
    kill_wait,
    requeue_job,
    required_hosts,
    show_job,
    usable_nodes,
)
from cluster_ddp.slurm.job_info import (
    NODE_FAILURE,
    REQUEUED,
    JobInfo,
    grace_end,
    is_ending,
    seconds_until_kill,
    unix_time,
    unseen_grace_end,
    why_it_ends,
)
from cluster_ddp.slurm.nodelist import short_name
from cluster_ddp.slurm.start import SlurmStart, step_environment
from cluster_ddp.slurm.states import LETS_RUN


class Allocation(Protocol):
    """What a keeper needs from whatever provides the nodes."""

    @property
    def start(self) -> SlurmStart | None:
        """Which start of which Slurm job this is; None outside of Slurm."""

    def environment(self) -> dict[str, str]:
        """Return the environment of the job step."""

    def ask_ahead(self) -> bool:
        """Query in advance what is needed at the end; return whether the end has been announced already."""

    def why_it_ends(self, seconds: float) -> str | None:
        """Return why a signal was sent, as a reason in `cluster_ddp.slurm.job_info`; None without an answer in time."""

    def end(self, since: float, seconds: float) -> tuple[str, float | None] | None:
        """Return why the allocation ends, a reason in `cluster_ddp.slurm.job_info`, and the seconds left until SIGKILL.

        The seconds are a lower bound, or None if unknown. Returns None without an answer in `seconds`. `since` is the
        monotonic time at which the signal arrived.
        """

    @property
    def ends_at(self) -> float | None:
        """When the time limit is reached, in Unix seconds, as last reported; None without one or before an answer."""

    @property
    def kill_wait(self) -> float:
        """Seconds from SIGTERM to SIGKILL when the allocation ends."""

    def missing_command(self) -> str | None:
        """Describe the command that is needed to query Slurm but cannot be found here; None if it can."""

    def requeue(self) -> None:
        """Requeue the job; may not return. Raises `SlurmRefused` and `SlurmError` as Slurm's commands do."""

    def prevent_restart(self, *, unwanted: bool) -> None:
        """Keep Slurm, or whatever provides the nodes, from restarting the job, which is over.

        Parameters
        ----------
        unwanted
            Whether a person has asked that the run not continue. Then a job that has been requeued already is removed
            from the queue.
        """

    def has_enough_others(self, bad: Sequence[str]) -> bool:
        """Whether there are enough nodes besides the bad ones, and the job can do without those."""

    def exclude(self, bad: Sequence[str], link: str | None = None) -> bool:
        """Exclude the bad hosts from the job, which is requeued; return whether that was accepted.

        Parameters
        ----------
        link
            The next job of its chain, from which to exclude them instead.
        """


@contextlib.contextmanager
def _shielded_from_signals() -> Iterator[None]:
    """Protect commands started in here from the warning and from Slurm's SIGTERM, which goes to all of a job.

    They inherit blocked signals. Signals that arrive meanwhile are handled afterwards, or by other threads.
    """
    blocked = {signal.SIGTERM, *ASK_TO_END}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, blocked)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class SlurmAllocation:
    """The nodes of one start of a Slurm job."""

    def __init__(self, start: SlurmStart) -> None:
        self._start = start
        self._restarts = start.restart_count  # as Slurm counts them now
        self._kill_wait: float | None = None
        self._grace_end = ""
        self._full_names: dict[str, str] = {}  # by short names
        ends_at = os.environ.get("SLURM_JOB_END_TIME", "")  # until Slurm has been asked
        self._ends_at = float(ends_at) if ends_at.isdecimal() else None

    @property
    def start(self) -> SlurmStart:
        return self._start

    @property
    def ends_at(self) -> float | None:
        return self._ends_at

    @property
    def kill_wait(self) -> float:
        return DEFAULT_KILL_WAIT if self._kill_wait is None else self._kill_wait

    def environment(self) -> dict[str, str]:
        return step_environment(os.environ)

    @_shielded_from_signals()
    def ask_ahead(self) -> bool:
        job = self._show()
        self._learn_kill_wait()
        if job is None:
            return False
        return is_ending(job)

    @_shielded_from_signals()
    def why_it_ends(self, seconds: float) -> str | None:
        job = self._show(seconds)
        return None if job is None else why_it_ends(job, self._restarts, self._grace_end)

    @_shielded_from_signals()
    def end(self, since: float, seconds: float) -> tuple[str, float | None] | None:
        learning = threading.Thread(target=self._learn_kill_wait, daemon=True)
        learning.start()
        job = self._show(seconds)
        if job is None:
            return None
        learning.join()
        why = why_it_ends(job, self._restarts, self._grace_end)
        if why == REQUEUED and down_nodes(self._start.hosts):
            why = NODE_FAILURE
        waited = time.monotonic() - since
        return why, seconds_until_kill(job, max(0.0, self.kill_wait - waited), waited)

    def _learn_kill_wait(self) -> None:
        """Query KillWait again, as the site may change it while the job runs; keep the old value without an answer."""
        if (answer := kill_wait(seconds=BRIEF_SECONDS)) is not None:
            self._kill_wait = answer

    def _show(self, seconds: float = BRIEF_SECONDS) -> JobInfo | None:
        job = show_job(self._start.task, seconds=seconds)
        if job is not None:
            if job.state in LETS_RUN and job.restarts.isdigit():  # fewer, if the controller has lost its latest state
                self._restarts = min(self._restarts, int(job.restarts))
            if job.state in LETS_RUN and not is_ending(job):  # otherwise it is the time at which the job ends
                self._ends_at = unix_time(job.end_time) or self._ends_at  # an answer may lack it
            self._grace_end = grace_end(job) or self._grace_end
            if not self._grace_end and job.preempt_time[:1].isdigit() and job.state not in LETS_RUN:
                self._grace_end = unseen_grace_end(job, lambda: grace_time(self._start.partition, job.qos))
        return job

    def missing_command(self) -> str | None:
        if shutil.which("scontrol") is not None:
            return None
        return f"scontrol is not on PATH on {host_name()}: a line of launch.setup may have taken it off (module purge)"

    @_shielded_from_signals()
    def requeue(self) -> None:
        requeue_job(self._start.task, self._start.partition)

    @_shielded_from_signals()
    def prevent_restart(self, *, unwanted: bool) -> None:
        """See `Allocation`. Sites may requeue after certain exit statuses, and Slurm after a preemption with grace.

        Newer Slurm versions (24.05, 26.05) mark a job preempted with grace. If that is prevented from restarting, they
        call it PREEMPTED in the end, not COMPLETED or FAILED: only the restart itself would remove the mark. If the
        restart cannot be prevented, it exits immediately.
        """
        job = self._show()
        if job is None:
            return
        queued = job.restarts != str(self._restarts)
        with contextlib.suppress(SlurmError):
            if queued and unwanted:
                cancel_job(self._start.task)
            elif job.requeued_by_slurm and not queued:  # a newer start, which has replaced this one, may need it
                forbid_requeue(self._start.task)

    @_shielded_from_signals()
    def has_enough_others(self, bad: Sequence[str]) -> bool:
        start = self._start
        try:
            usable = usable_nodes(start.partition)
            self._full_names = {short_name(host): host for host in [*start.hosts, *usable]}
            if not self._full_names.keys() >= set(bad):  # such as one that is down by now
                self._full_names |= {short_name(host): host for host in all_nodes(start.partition)}
            bad = self._as_slurm_names(bad)
            if not set(bad).isdisjoint(required_hosts(start.task)):
                return False  # Slurm never starts the job without them, and they cannot be taken off the list again
            closed = closed_hosts(start)
        except SlurmError:
            return False
        return enough_others(usable, bad=bad, excluded=closed, nodes=start.nodes)

    @_shielded_from_signals()
    def exclude(self, bad: Sequence[str], link: str | None = None) -> bool:
        try:
            exclude_hosts(link or self._start.task, self._as_slurm_names(bad))
        except SlurmError:
            return False  # what matters is that the job is queued
        return True

    def _as_slurm_names(self, hosts: Sequence[str]) -> list[str]:
        """Return hosts as Slurm names them: by full names on some clusters."""
        return [self._full_names.get(host, host) for host in hosts]
