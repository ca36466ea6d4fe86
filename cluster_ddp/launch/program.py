"""What the node program does from start to end: start the agent, hand on stop requests, watch, record."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Sequence
from typing import TextIO

from cluster_ddp.launch import evidence
from cluster_ddp.launch.address import LOOPBACK, local_address
from cluster_ddp.launch.agent import SURVIVED, Agent
from cluster_ddp.launch.environment import ADDRESS_VARIABLE, node_environment, report
from cluster_ddp.launch.failures import Failures
from cluster_ddp.launch.guard import Guard
from cluster_ddp.launch.processes import catches, kill_all, send
from cluster_ddp.launch.ranks import LocalRanks, Rank
from cluster_ddp.launch.relay import Tail
from cluster_ddp.launch.stopping import Stopping
from cluster_ddp.launch.torchrun import fill_in, option, trains_a_task
from cluster_ddp.launch.watchdog import Hang, Watchdog
from cluster_ddp.run import events
from cluster_ddp.run.board import Board, Phase
from cluster_ddp.run.directory import RunDirectory
from cluster_ddp.run.stopfile import AGENT_LOST, AT_ONCE, HANG
from cluster_ddp.run.storage import Storage, write_json
from cluster_ddp.spec import load_resolved, unknown_keys

TICK_SECONDS = 0.2
_WATCHDOG_SECONDS = 1.0
_NO_RANKS_SECONDS = 2.0  # a stop before there are ranks: the agent waits for other nodes, nothing can be lost
_OTHERS_SECONDS = 10.0  # after the last rank has ended: agents end together, so that none loses the rendezvous too soon
_NO_OTHERS_SECONDS = 1.0  # the same where an agent is known to be gone: those that are left would wait for it
_COMPLETED_SECONDS = 60.0  # the same where nothing asks for an end: ranks elsewhere may still finish their uploads
_STARTING_SECONDS = 20.0  # a stop while ranks still start: they may end by themselves
_SCRIPT_SECONDS = 30.0  # what torchrun gives ranks after a signal
_LOST_AGENT_SECONDS = 60

# How a node ended, in the event `node-finished`.
DONE = "done"
STOPPED = "stopped"
FAILED = "failed"
KILLED = "killed"
HUNG = "hang"


class NodeProgram:
    """Watches over one torchrun agent and its ranks, from start to end.

    Parameters
    ----------
    command
        The torchrun line with its placeholders.
    take_signals
        Signals to this process are stop requests. When False, another owns the signals of this process (submitit).
    """

    def __init__(
        self, run: RunDirectory, attempt: int, command: Sequence[str], *, node_rank: int, take_signals: bool = True
    ) -> None:
        self._spec = load_resolved(run.job_file)
        for remark in unknown_keys(run.job_file):
            print(f"cluster-ddp: {remark}", file=sys.stderr, flush=True)
        self._attempt = run.attempt(attempt)
        self._node_rank = node_rank
        self._procs = int(option(command, "--nproc-per-node"))
        self._trains_a_task = trains_a_task(command)
        self._log_dir = self._attempt.logs(node_rank)
        self._log_dir.mkdir(parents=True, exist_ok=True)
        self._events = events.EventWriter(run, f"node-{node_rank}")
        self._board = Board.create(slots=self._procs)
        self._command = fill_in(
            command, is_host=node_rank == 0, local_addr=self._address(command), log_dir=str(self._log_dir)
        )
        self._environment = node_environment(
            self._spec, self._attempt, node_rank=node_rank, procs=self._procs, board=self._board.path, base=os.environ
        )
        warning = signal.Signals[f"SIG{self._spec.requeue.signal}"]
        self._survives = {*SURVIVED, warning}
        self._stopping = Stopping(
            self._attempt,
            self._board,
            self._events,
            node_rank=node_rank,
            warning=warning,
            share="SLURM_JOB_ID" not in os.environ,
        )
        if take_signals:
            self._stopping.listen()
        self._ranks = LocalRanks(self._board, self._procs)
        self._watchdog = Watchdog(self._spec.launch.hang_timeout, self._spec.launch.join_timeout)
        self._next_watch = 0.0
        self._shown: Tail | None = None
        self._outcome: str | None = None
        self._passed_on = False
        self._lost = False
        self._alone_since: float | None = None
        self._reporter: threading.Thread | None = None

    def start(self) -> None:
        """Start the agent and the guard. To be called from a thread that lives until the end."""
        self._began = time.monotonic()
        self._agent = Agent(self._command, self._environment.variables, self._log_dir / "agent.log", self._survives)
        self._guard = Guard(self._board.path)  # the agent takes a second to become more than one process
        self._failures = Failures(self._ranks, self._agent, self._events, self._attempt, self._node_rank)
        self._events.write(
            events.NODE_STARTED,
            attempt=self._attempt.number,
            node=self._node_rank,
            host=socket.gethostname(),
            procs=self._procs,
            pid=os.getpid(),
            script=not self._trains_a_task,
        )

    def watch(self) -> int:
        """Watch until the agent and all ranks have ended.

        Returns
        -------
        int
            0 when the ranks did what they were asked to, trained to the end or stopped; 1 when they failed.
        """
        try:
            while not self._tick():
                time.sleep(TICK_SECONDS)
        finally:
            kill_all(self._board.path, self._agent.pid)
            self._relay(rest=True)
            self._guard.dismiss()
        return self._finish()

    def _tick(self) -> bool:
        """One look at everything; True when all has ended."""
        agent_status = self._agent.poll()  # before the ranks: who is alive now has outlived it
        gone = self._ranks.look()
        self._note_whether_alone()
        self._relay()
        if self._outcome is None:
            self._failures.note(gone, agent_ended=agent_status is not None)
        self._report_once()
        self._stopping.look()
        if self._stopping.reason is not None:
            self._stop()
        elif time.monotonic() >= self._next_watch:
            self._watch_for_hang()
            self._leave_completed()
        if agent_status is None:
            return False
        if not self._ranks.living:
            return True
        if self._outcome is None and not self._lost:
            self._lost_agent()
        return False

    def _relay(self, rest: bool = False) -> None:
        """Pass on what torchrun says, and what rank 0 prints if it is one of ours."""
        for line in self._agent.new_lines():
            say(line, sys.stderr)
        logs = [rank.stdout for rank in self._ranks.seen.values() if rank.rank == 0 and rank.stdout is not None]
        if logs and (self._shown is None or self._shown.path != logs[-1]):  # the first, or one restarted since
            self._show(rest=True)
            self._shown = Tail(logs[-1])
        self._show(rest=rest)

    def _show(self, *, rest: bool) -> None:
        for line in self._shown.lines(rest=rest) if self._shown else []:
            say(line, sys.stdout)

    def _stop(self) -> None:
        stopping = self._stopping
        if stopping.reason == HANG:
            self._end_hung()
        elif stopping.overdue:
            self._end(KILLED)
        elif not self._ranks.living:
            self._stop_agent()
        elif not self._trains_a_task:
            self._stop_script()
        elif stopping.waited() > _STARTING_SECONDS and not any(map(self._can_save, self._ranks.living)):
            self._end(STOPPED)
        if self._outcome is None and time.monotonic() >= self._next_watch:
            self._watch_for_hang()

    def _note_whether_alone(self) -> None:
        """An agent whose ranks have ended waits for those of other nodes, perhaps in vain, to end or to restart."""
        if self._ranks.living or not self._ranks.seen:
            self._alone_since = None
        elif self._alone_since is None:
            self._alone_since = time.monotonic()

    def _alone_for(self) -> float:
        return 0.0 if self._alone_since is None else time.monotonic() - self._alone_since

    def _stop_agent(self) -> None:
        """End an agent without ranks: they have saved what there was to save."""
        if not self._ranks.seen:
            overdue = self._stopping.waited() > _NO_RANKS_SECONDS
        else:
            lost = self._stopping.reason == AGENT_LOST and self._ranks.all_done()
            overdue = self._alone_for() > (_NO_OTHERS_SECONDS if lost else _OTHERS_SECONDS)
        if overdue:
            self._stopping.tell_others()  # they would wait for the ranks of this node until network.timeout
            self._end(STOPPED)

    def _leave_completed(self) -> None:
        """End an agent that waits for others although all is done; torchrun would hold the machines for minutes."""
        if self._alone_for() > _COMPLETED_SECONDS and (self._ranks.all_done() or self._run_is_complete()):
            self._end(DONE)

    def _run_is_complete(self) -> bool:
        told = (event for event in events.read_events(self._attempt.run) if event["event"] == events.COMPLETED)
        return any(event.get("attempt") == self._attempt.number for event in told)

    def _can_save(self, rank: Rank) -> bool:
        return self._ranks.phase(rank) not in (None, Phase.STARTING)

    def _stop_script(self) -> None:
        """Ranks that do not know the board are sent SIGTERM. Where none handles it, there is nothing to wait for."""
        strangers = [rank for rank in self._ranks.living if self._ranks.phase(rank) is None]
        listening = [rank for rank in strangers if catches(rank.pid, signal.SIGTERM)]
        if len(strangers) == len(self._ranks.living) and (not listening or self._stopping.level == AT_ONCE):
            self._end(STOPPED)
        elif listening and not self._passed_on:
            self._passed_on = True
            for rank in listening:
                send(rank.pid, signal.SIGTERM)
            if self._stopping.deadline is None:
                self._stopping.end_within(_SCRIPT_SECONDS)

    def _watch_for_hang(self) -> None:
        self._next_watch = time.monotonic() + _WATCHDOG_SECONDS
        stopping_for = None if self._stopping.reason is None else self._stopping.waited()
        hang = self._watchdog.look(self._ranks.slots(), time.monotonic_ns(), stopping_for=stopping_for)
        if hang is None and self._trains_a_task:
            hang = self._watchdog.look_at_strangers(self._ranks.strangers())
        if hang is not None and self._outcome is None:
            self._record_hang(hang)
            self._stopping.ask(HANG, step=hang.step)
            self._end_hung()

    def _record_hang(self, hang: Hang) -> None:
        reason = hang.describe(socket.gethostname())
        say(f"cluster-ddp: {reason}", sys.stderr)
        self._events.write(
            events.HANG,
            attempt=self._attempt.number,
            step=hang.step,
            node=self._node_rank,
            host=socket.gethostname(),
            rank=hang.rank,
            phase=hang.phase.name.lower(),
            seconds=round(hang.silent, 1),
            timeout=round(hang.timeout, 1),
            reason=reason,
        )

    def _end_hung(self) -> None:
        if self._outcome is None:
            collected = evidence.collect(self._ranks.living, self._board.path)
            say(f"cluster-ddp: in {self._attempt.path}: {', '.join(collected) or 'nothing'}", sys.stderr)
            self._end(HUNG)

    def _lost_agent(self) -> None:
        """Ranks without an agent can still save: all of them stop, here and on the other nodes."""
        self._lost = True
        self._stopping.ask(AGENT_LOST, grace=max(_LOST_AGENT_SECONDS, self._spec.requeue.warning))

    def _end(self, outcome: str) -> None:
        if self._outcome is None:
            self._outcome = outcome
            kill_all(self._board.path, self._agent.pid)

    def _finish(self) -> int:
        agent_status = self._agent.poll()
        if self._outcome is None:
            # Status travels by the board: torchrun turns everything into 0 or 1, and a rank that has done all its work
            # may still abort while Python shuts down.
            clean = agent_status == 0 or self._ranks.all_done()
            self._outcome = FAILED if not clean else DONE if self._stopping.reason is None else STOPPED
        status = 0 if self._outcome in (DONE, STOPPED) else 1
        self._events.write(
            events.NODE_FINISHED,
            attempt=self._attempt.number,
            node=self._node_rank,
            host=socket.gethostname(),
            outcome=self._outcome,
            reason=self._stopping.reason,
            status=status,
            agent_status=agent_status,
            seconds=round(time.monotonic() - self._began, 1),
        )
        self._report_once(final=True)
        evidence.remove_pipes(self._board.path)
        self._board.unlink()
        return status

    def _report_once(self, final: bool = False) -> None:
        """Write the environment report when the ranks are known, beside the watching: asking for GPUs takes a while."""
        if self._reporter is None and (final or len(self._ranks.seen) >= self._procs):
            self._reporter = threading.Thread(target=self._write_report, name="environment-report", daemon=True)
            self._reporter.start()
        if final and self._reporter is not None:
            self._reporter.join()

    def _write_report(self) -> None:
        ranks = [
            {"rank": rank.rank, "local_rank": rank.local_rank, "pid": rank.pid}
            for rank in sorted(self._ranks.seen.values(), key=lambda rank: rank.local_rank)
        ]
        content = report(self._environment, node_rank=self._node_rank, ranks=ranks, command=self._command)
        with contextlib.suppress(OSError):  # a full disk must not end the training
            write_json(Storage(), self._attempt.report_file(self._node_rank), content)

    def _address(self, command: Sequence[str]) -> str:
        given = os.environ.get(ADDRESS_VARIABLE)
        if given:
            return given
        master = option(command, "--rdzv-endpoint").rpartition(":")[0].strip("[]")
        nodes = int(option(command, "--nnodes").rpartition(":")[2])
        interface = os.environ.get("NCCL_SOCKET_IFNAME") or self._spec.network.socket_ifname
        return local_address(master or LOOPBACK, nodes=nodes, interface=interface)


def say(line: str, stream: TextIO) -> None:
    """Print a line. A terminal that was closed, or a full disk behind the output, must not end the training."""
    with contextlib.suppress(OSError):
        print(line, file=stream, flush=True)
