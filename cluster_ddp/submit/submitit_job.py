"""What submitit pickles and calls on every node: a run directory's name, and the way from there to the node program.

submitit requeues by one signal alone (USR2), and passes SIGTERM by. Here both become a stop request for all nodes; when
the ranks have saved and ended, the run's own verdict decides, and submitit's handler is called to requeue the job.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cluster_ddp.run.directory import AttemptDirectory, RunDirectory
from cluster_ddp.spec.errors import ClusterDDPError

if TYPE_CHECKING:
    from submitit.helpers import DelayedSubmission

    from cluster_ddp.spec import JobSpec

_REQUEUED = "requeued"
_POLL_SECONDS = 0.5
_MARGIN_SECONDS = 4.0
"""Before Slurm's SIGKILL: the time that judging and requeueing take."""


class SubmititRunFailed(ClusterDDPError):
    """The run has failed or stalled; submitit takes any exception for a failed job."""

    exit_status = 4


class SubmititJob:
    """A run, as submitit's executors call it.

    Parameters
    ----------
    run_directory
        Absolute path. It is all that is pickled: whatever else a node needs, it reads there.
    """

    def __init__(self, run_directory: str) -> None:
        self.run_directory = run_directory

    def __call__(self) -> str:
        """Run this node's part of an attempt, to the end.

        Returns
        -------
        str
            ``done`` or ``stop``. (When the run is requeued this does not return.)

        Raises
        ------
        SubmititRunFailed
            The run has failed or stalled, or the attempt cannot begin.
        """
        return _NodeOfRun(RunDirectory(Path(self.run_directory))).run()

    def checkpoint(self) -> DelayedSubmission:
        """Ask the ranks to save and end, wait for it, and hand submitit what to requeue: the same run directory."""
        import submitit

        from cluster_ddp.launch.node import wait_for_ranks

        # Already so when the requeue comes from `__call__`. A handler of submitit's own may come before that.
        if _running is not None and not wait_for_ranks(0.0):
            _running.ask_to_stop()
            wait_for_ranks(_running.patience)
        return submitit.helpers.DelayedSubmission(SubmititJob(self.run_directory))


_running: _NodeOfRun | None = None


class _NodeOfRun:
    """One node of an attempt under submitit."""

    def __init__(self, run: RunDirectory) -> None:
        from cluster_ddp.spec import load_resolved

        self._run = run
        self._spec: JobSpec = load_resolved(run.job_file)
        self._job_id = os.environ.get("SLURM_JOB_ID")
        self._node = int(os.environ.get("SLURM_NODEID", "0"))
        self._restart_count = int(os.environ.get("SLURM_RESTART_COUNT") or 0)
        self._attempt: AttemptDirectory | None = None
        self._requeued = False
        self.patience = float(self._spec.requeue.warning)

    def run(self) -> str:
        """Begin or join the attempt, run the node program, and on node 0 act on the verdict."""
        global _running
        from cluster_ddp.launch.node import run_node
        from cluster_ddp.run.errors import RunEnded

        requeue = signal.getsignal(_submitit_signal())
        try:
            if self._node == 0:
                self._give_back_suspects(requeue)
            self._attempt = self._begin() if self._node == 0 else self._join()
        except RunEnded as error:
            if error.state == "COMPLETED":
                return "done"
            raise
        _running = self
        for number in (signal.SIGTERM, _submitit_signal()):
            signal.signal(number, self._on_signal)
        _apply_network(self._spec)
        status = run_node(
            self._run.path, self._attempt.number, self._command(), node_rank=self._node, take_signals=False
        )
        if self._node != 0:
            return "done" if status == 0 else "fail"
        return self._conclude(requeue)

    def ask_to_stop(self) -> None:
        """Leave the stop file for all nodes, with the reason that Slurm gives."""
        from cluster_ddp.run.stopfile import TIME_LIMIT, request_stop

        if self._attempt is not None:
            request_stop(self._attempt, reason=TIME_LIMIT, by=f"submitit on {socket.gethostname()}")

    def _on_signal(self, number: int, _frame: Any) -> None:
        """Node 0 asks all nodes to stop. The others have had the same signal, and read the same file."""
        if self._node != 0:
            return
        if number == signal.SIGTERM:
            self._stop_for_term()
        else:
            self.ask_to_stop()

    def _stop_for_term(self) -> None:
        from cluster_ddp.run.stopfile import PREEMPTION, TERMINATED, request_stop
        from cluster_ddp.slurm.commands import seconds_left

        assert self._attempt is not None
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # Slurm sends it more than once
        by = f"SIGTERM to {socket.gethostname()}"
        if self._job_id is None:
            request_stop(self._attempt, reason=TERMINATED, by=by)
            return
        reason = self._slurm_says()
        self._requeued = reason == _REQUEUED
        grace = max(1.0, seconds_left(self._job_id) - _MARGIN_SECONDS)
        request_stop(self._attempt, reason=PREEMPTION if self._requeued else reason, grace=grace, by=by)

    def _slurm_says(self) -> str:
        from cluster_ddp.slurm.commands import termination_reason

        return termination_reason(str(self._job_id), self._restart_count)

    def _give_back_suspects(self, requeue: Any) -> None:
        """Queue the job again, before an attempt has begun, if Slurm has given it hosts that failed more than once.

        The other nodes, which wait to join, end with the requeue.
        """
        from cluster_ddp.launch.avoid import hosts_to_avoid

        hosts = hosts_to_avoid(self._run)
        if not hosts:
            return
        bad = " ".join(hosts)
        if self._has_enough_others(hosts):
            print(f"cluster-ddp: this allocation has hosts that failed more than once ({bad}): starting again without")
            self._queue_again(requeue, hosts)
        print(f"cluster-ddp: {bad} failed more than once, but the partition has too few other nodes: going on")

    def _begin(self) -> AttemptDirectory:
        from cluster_ddp.launch.attempt import begin
        from cluster_ddp.run.attempt import begin_attempt

        if self._job_id is not None:
            return begin(self._run)
        return begin_attempt(
            self._run, host=socket.gethostname(), pid=os.getpid(), nodes=1, procs=self._spec.procs_per_node
        )

    def _join(self) -> AttemptDirectory:
        """Wait for node 0 to begin the attempt."""
        from cluster_ddp.run.attempt import find_attempt
        from cluster_ddp.run.history import read_history
        from cluster_ddp.run.outcome import refuse_ended

        assert self._job_id is not None
        deadline = time.monotonic() + self._spec.launch.join_timeout
        while time.monotonic() < deadline:
            attempt = find_attempt(self._run, self._job_id, self._restart_count)
            if attempt is not None:
                return attempt
            refuse_ended(read_history(self._run))
            time.sleep(_POLL_SECONDS)
        raise SubmititRunFailed(
            f"node 0 has not begun an attempt of {self._run.id} within launch.join_timeout "
            f"({self._spec.launch.join_timeout} s)"
        )

    def _command(self) -> list[str]:
        from cluster_ddp.launch.address import LOOPBACK, free_port
        from cluster_ddp.launch.torchrun import torchrun_command
        from cluster_ddp.slurm.nodelist import first_host
        from cluster_ddp.slurm.script import FIRST_PORT, PORTS

        assert self._attempt is not None
        if self._job_id is None:
            nodes, address, port, rendezvous = 1, LOOPBACK, free_port(), self._run.id
        else:
            nodes = int(os.environ["SLURM_JOB_NUM_NODES"])
            address = first_host(os.environ["SLURM_JOB_NODELIST"])
            port, rendezvous = FIRST_PORT + int(self._job_id) % PORTS, f"{self._job_id}.{self._attempt.number}"
        if self._spec.launch.port != "auto":
            port = int(self._spec.launch.port)
        return torchrun_command(
            self._spec,
            run_directory=str(self._run.path),
            nodes=nodes,
            procs=self._spec.procs_per_node,
            rdzv_id=rendezvous,
            endpoint=f"{address}:{port}",
        )

    def _conclude(self, requeue: Any) -> str:
        """Act on the verdict as the batch script does."""
        from cluster_ddp.launch.attempt import end
        from cluster_ddp.run.stopfile import PREEMPTION, TIME_LIMIT, read_stop, request_stop

        assert self._attempt is not None
        stop = read_stop(self._attempt)
        # A preemption may come by the same signal as the time limit, or without any that reached this process.
        open_question = self._job_id is not None and (stop is None or stop.reason == TIME_LIMIT)
        if open_question and self._slurm_says() == PREEMPTION:
            request_stop(self._attempt, reason=PREEMPTION, by="Slurm")
        verdict = end(self._attempt, writer=f"submitit-{self._job_id or os.getpid()}")
        print(f"cluster-ddp: attempt {self._attempt.number}: {verdict.action}: {verdict.reason}", flush=True)
        if verdict.action == "requeue":
            self._queue_again(requeue, self._suspects())
        if verdict.action in ("done", "stop"):
            return verdict.action
        raise SubmititRunFailed(f"run {self._run.id}: {verdict.action}: {verdict.reason}")

    def _queue_again(self, requeue: Any, bad: list[str]) -> None:
        """Have the job queued again, keep it from the bad hosts, and end this process."""
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # Slurm's, for the requeue, would end the calls below, too
        try:
            if self._requeued:
                sys.exit(0)  # Slurm has done it already; for submitit the job is not over, so no result
            requeue(_submitit_signal(), None)  # asks `checkpoint` what to requeue, requeues, and ends this process
        finally:
            self._exclude(bad)

    def _suspects(self) -> list[str]:
        from cluster_ddp.run.history import read_history
        from cluster_ddp.run.suspects import suspects

        assert self._attempt is not None
        return suspects(read_history(self._run), self._attempt.number)

    def _has_enough_others(self, hosts: list[str]) -> bool:
        from cluster_ddp.slurm.commands import SlurmError, has_enough_others

        partition, nodes = os.environ.get("SLURM_JOB_PARTITION", ""), int(os.environ["SLURM_JOB_NUM_NODES"])
        with contextlib.suppress(SlurmError):
            return has_enough_others(str(self._job_id), hosts, partition=partition, nodes=nodes)
        return False

    def _exclude(self, hosts: list[str]) -> None:
        """Keep the job, which is queued again, from some hosts, as long as enough others are left."""
        from cluster_ddp.slurm.commands import SlurmError, exclude_hosts

        if self._job_id is None or not hosts or not self._has_enough_others(hosts):
            return
        with contextlib.suppress(SlurmError):  # the job is queued; that is what counts
            exclude_hosts(self._job_id, hosts)
            print(f"cluster-ddp: {' '.join(hosts)} failed more than once: excluded from now on", flush=True)


def _submitit_signal() -> signal.Signals:
    return signal.Signals[f"SIG{os.environ.get('SUBMITIT_PREEMPT_SIGNAL', 'USR2')}"]


def _apply_network(spec: JobSpec) -> None:
    """Export what the batch script would: the node program leaves alone what it finds set."""
    from cluster_ddp.network import resolve

    os.environ.update(resolve(spec.network).variables)
