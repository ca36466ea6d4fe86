"""The keeper: the program on the batch host that sees one start of a job through, including its requeue.

It is the process that Slurm signals: the batch script replaces itself with it (``exec``), submitit calls it. It decides
from what the run has recorded and what Slurm reports about the job, not from the exit status of the job step, since
torchrun turns every outcome into 0 or 1. It is plain Python, without torch, and without pydantic until the job step has
started.
"""

from __future__ import annotations

import math
import os
import resource
import signal
from collections.abc import Callable, Sequence
from typing import TypeVar

from cluster_ddp.errors import ClusterDDPError
from cluster_ddp.launch.keeper.allocation import Allocation
from cluster_ddp.launch.keeper.bad_hosts import hosts_to_avoid
from cluster_ddp.launch.keeper.batch_host import BatchHost, say
from cluster_ddp.launch.keeper.beginning import begin
from cluster_ddp.launch.keeper.deciding import DECIDE_SECONDS, AttemptDecision, Decider, KeptStart, job_action_for
from cluster_ddp.launch.keeper.end_of_job import EndOfJob
from cluster_ddp.launch.keeper.job_step import leaves_port_open, with_attempt
from cluster_ddp.launch.keeper.lost_nodes import record_failed_nodes
from cluster_ddp.launch.keeper.patience import patiently, storage_error
from cluster_ddp.launch.keeper.records import RECORD_SECONDS, KeeperRecords
from cluster_ddp.launch.keeper.requeueing import RequeueFailed, requeue
from cluster_ddp.launch.keeper.running_job_step import START_SECONDS
from cluster_ddp.launch.notice import NOTICE_SECONDS, give_notice
from cluster_ddp.launch.ports import NoFreePort, attempt_port, free_port
from cluster_ddp.launch.variables import OPEN_FILES_VARIABLE
from cluster_ddp.run.attempt_record import is_superseded
from cluster_ddp.run.directory import AttemptDirectory, RunDirectory
from cluster_ddp.run.errors import RunAlive, RunError, to_continue
from cluster_ddp.run.events import (
    NODE_FAILED,
    REQUEUE_DELAYED,
    REQUEUE_FAILED,
    WARNING,
    EventWriter,
)
from cluster_ddp.run.history import read_history
from cluster_ddp.run.requeue.decision import Decision, next_of_chain, prepare_to_decide
from cluster_ddp.slurm.job_info import ALREADY_REQUEUED, REQUEUED

T = TypeVar("T")


class Keeper:
    """Sees one start of a job through.

    Parameters
    ----------
    job_step
        The command that runs one node program on each node, with a placeholder for the attempt.
    warning
        The signal that announces the end of the job.
    host
        The machine it runs on; this one by default.
    """

    def __init__(
        self,
        run: RunDirectory,
        job_step: Sequence[str],
        allocation: Allocation,
        *,
        warning: signal.Signals,
        host: BatchHost | None = None,
    ) -> None:
        self._run = run
        self._job_step = job_step
        self._allocation = allocation
        self._host = host or BatchHost()
        self._end = EndOfJob(allocation, self._host, warning=warning)
        self._records = KeeperRecords(run, allocation, self._host)
        self._storage_answers = True
        self._gave_up = False  # on beginning an attempt, which may still be under way in the background

    def keep(self) -> KeptStart:
        """See the job through to the end.

        Raises
        ------
        RunAlive, RunEnded, RunError
            The attempt cannot begin.
        RequeueFailed
            Slurm does not requeue the job.
        """
        try:
            kept = self._keep()
        except ClusterDDPError as error:
            if isinstance(error, RunAlive):
                self._records.write_refused_start()
            self._conclude_job()
            raise
        if kept.job_action != "requeue":
            self._conclude_job()
        return kept

    def _conclude_job(self) -> None:
        """See to it that the job is not started again, and notify the user."""
        self._end.stop_listening()
        self._allocation.prevent_restart(unwanted=self._end.unwanted())
        seconds = NOTICE_SECONDS + RECORD_SECONDS
        self._records.if_possible(lambda: give_notice(self._run, writer=self._records.writer), seconds=seconds)

    def _keep(self) -> KeptStart:
        self._end.listen()
        bad = self._patiently(self._bad_hosts)
        if bad and self._gives_nodes_back(bad):
            return self._requeue(None, bad, "hosts that failed more than once")
        attempt = None if bad is None else self._patiently(self._begin)
        if attempt is None:
            return self._give_up()
        self._records.attempt = attempt
        self._end.begin(attempt)
        self._train(attempt)
        self._end.react_to_all()
        if self._is_superseded():
            why = "a newer attempt has begun: what this one did after that does not count"
            return KeptStart("end", "stop", why)
        self._end.find_out_why(self._say_delayed)
        decider = Decider(
            attempt,
            self._allocation,
            self._host,
            self._end,
            host_name=self._records.host_name,
            writer=self._records.writer,
        )
        return self._act_on(attempt, decider.decide(storage_answers=self._storage_answers))

    # -- the beginning -------------------------------------------------------------------------------------------------

    def _patiently(self, do: Callable[[], T]) -> T | None:
        """Do what needs storage; None if storage hangs, or if the job is ended while storage is full or fails."""

        def is_ended() -> bool:
            self._end.react_to_all()
            return self._end.reason is not None

        try:
            return patiently(
                do,
                self._run,
                host=self._host,
                pause=self._end.pause,
                unless=is_ended,
                too_near=self._end.has_come_too_near,
            )
        except (RunError, OSError) as error:
            if storage_error(error) is None or self._end.reason is None:
                raise
            say(str(error))
            return None

    def _bad_hosts(self) -> list[str]:
        start = self._allocation.start
        return hosts_to_avoid(self._run, start) if start is not None else []

    def _gives_nodes_back(self, bad: Sequence[str]) -> bool:
        """Whether this allocation is given back before anything is trained on it, because of these bad hosts."""
        names = " ".join(bad)
        if not self._allocation.has_enough_others(bad):
            say(f"{names} failed more than once, but the partition has too few other nodes: continuing with them")
            return False
        say(f"this allocation includes hosts that failed more than once ({names}): starting again without them")
        self._end.react_to_all()
        return True

    def _begin(self) -> AttemptDirectory:
        return begin(self._run, self._allocation.start, pid=os.getpid(), given_up=lambda: self._gave_up)

    def _give_up(self) -> KeptStart:
        """Requeue the job, whose attempt could not begin."""
        self._gave_up = True
        if self._end.reason is not None:
            self._end.find_out_why(self._say_delayed)
            return self._requeue(None, [], "the job ended before its attempt could begin")
        why = f"the attempt could not begin: storage does not respond on {self._records.host_name}"
        say(f"{why}: starting again, elsewhere if possible")
        return self._requeue(None, [self._records.host_name], why)

    # -- the job step --------------------------------------------------------------------------------------------------

    def _train(self, attempt: AttemptDirectory) -> None:
        """Run the job step until it ends, or until there is no time left to wait for it."""
        command, environment = self._job_step, self._allocation.environment()
        start = self._allocation.start
        environment[OPEN_FILES_VARIABLE] = str(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
        try:
            port = None
            if leaves_port_open(command):
                port = attempt_port(int(start.job_id), attempt.number) if start else free_port()
                environment["MASTER_PORT"] = str(port)
            command = with_attempt(command, attempt.number, port)
            nodes = start.nodes if start else 1
            job_step = self._host.start_job_step(command, environment, attempt, nodes, parent=os.getpid())
        except (OSError, NoFreePort, RuntimeError) as error:  # RuntimeError: no more threads
            why = f"cannot start the job step: {error}"
            say(why)
            self._records.write(NODE_FAILED, host=self._records.host_name, error=why, suspect=True)
            self._end.job_step_has_ended()
            return
        self._host.in_background(prepare_to_decide)
        self._end.ask_ahead()
        exited_at = math.inf
        while not (has_ended := self._host.glance(job_step.has_ended)) and not self._end.out_of_time():
            if has_ended is None and job_step.end_unbegun():
                say(
                    f"no node program has started for {START_SECONDS / 60:.0f} min, and storage does not respond on "
                    f"{self._records.host_name}: ending the job step"
                )
            if job_step.has_exited:  # storage hides how it ended
                exited_at = min(exited_at, self._host.now())
                self._storage_answers = self._host.now() - exited_at < DECIDE_SECONDS
            if not self._storage_answers:
                break
            self._end.react_to_next()
        if not has_ended and self._storage_answers:
            return
        self._end.job_step_has_ended()
        self._end.react_to_all()  # including what arrived while storage blocked this process
        if start is not None and self._storage_answers:
            writer, job_ends = EventWriter(self._run, self._records.writer), self._end.reason is not None
            self._records.if_possible(
                lambda: record_failed_nodes(attempt, writer, start, job_step, job_ends=job_ends),
                unless=self._end.has_come_too_near,
            )

    # -- done, failed or requeued? -------------------------------------------------------------------------------------

    def _act_on(self, attempt: AttemptDirectory, decided: AttemptDecision) -> KeptStart:
        job_action = job_action_for(decided.action, reason=self._end.reason, cannot_decide=decided.cannot_decide)
        ending = f" ({self._end.reason})" if self._end.reason else ""
        say(f"attempt {attempt.number} has ended; decision: {decided.action or job_action}{ending}: {decided.why}")
        if job_action == "requeue":
            return self._requeue(attempt, decided.bad_hosts, decided.why)
        if decided.decision is not None:
            self._records.write_decision(attempt, decided.decision)
            if (link := decided.decision.continued_by) is not None:
                self._exclude(decided.bad_hosts, link)  # that job passes them on if it, too, ends early
        elif job_action == "fail":
            self._records.write(REQUEUE_FAILED, reason=decided.why)
        return KeptStart(job_action, decided.action or "fail", decided.why)

    def _requeue(self, attempt: AttemptDirectory | None, bad: list[str], why: str) -> KeptStart:
        """Requeue the job, and only then record it: an event states what was accepted, not what was intended."""
        try:
            queued = not self._end.unwanted() and (
                self._end.reason in ALREADY_REQUEUED  # Slurm has already requeued it
                or requeue(
                    self._allocation,
                    known=self._why_it_ends,
                    until=self._end.give_up_at,
                    delayed=self._say_delayed,
                    unwanted=self._end.unwanted,
                    clock=self._host.now,
                    sleep=self._end.pause,
                )
            )
        except RequeueFailed as error:
            self._records.write(REQUEUE_FAILED, reason=str(error).splitlines()[0])
            self._exclude_from_chain(bad)
            raise RequeueFailed(f"{error}\n{to_continue(self._run.path)}") from error
        if not queued:
            say("not requeued: its owner has ended it meanwhile")
            if not self._end.unwanted():
                self._end.note_cancel()
            if attempt is not None:
                self._records.write_decision(attempt, Decision("stop", "its owner has ended it meanwhile"))
            return KeptStart("end", "stop", "its owner has ended it meanwhile")
        if attempt is not None:
            self._records.write_decision(attempt, Decision("requeue", why))
        self._exclude(bad)
        return KeptStart("requeue", "requeue", why)

    def _exclude_from_chain(self, bad: list[str]) -> None:
        """Exclude bad hosts from the next job of the chain, if storage can be read, which tells which job that is."""
        start = self._allocation.start
        if not bad or start is None:
            return
        link = self._host.within(RECORD_SECONDS, lambda: next_of_chain(read_history(self._run), start.task))
        if link is not None:
            self._exclude(bad, link)

    def _exclude(self, bad: list[str], link: str | None = None) -> None:
        """Exclude bad hosts from the job's further starts, or from the next job of its chain."""
        if bad and self._allocation.has_enough_others(bad) and self._allocation.exclude(bad, link):
            names, further = " ".join(bad), f"Slurm job {link}" if link else "further starts of this job"
            say(f"excluded from {further}: {names}")
            self._records.write(WARNING, message=f"the bad hosts are excluded from {further}: {names}")

    def _why_it_ends(self) -> str | None:
        """Return why the job ends, as far as is certain. A newer attempt shows that it has already been requeued."""
        return REQUEUED if self._is_superseded() else self._end.certain_reason()

    def _is_superseded(self) -> bool:
        attempt = self._records.attempt
        return attempt is not None and bool(self._host.glance(lambda: is_superseded(attempt)))

    def _say_delayed(self, reason: str) -> None:
        say(f"cannot be requeued yet; trying again: {reason}")
        self._records.write(REQUEUE_DELAYED, reason=reason)
