"""What the node program does: start the agent, pass on stop requests, watch for faults, and record how it ended."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence

from cluster_ddp.job import JobSpec, load_run_job
from cluster_ddp.launch.address import LOOPBACK, interface_for_gloo, local_address, wait_for_name
from cluster_ddp.launch.environment import node_environment
from cluster_ddp.launch.node import hang_dump
from cluster_ddp.launch.node.forced_end import ForcedEnd
from cluster_ddp.launch.node.heartbeat import HeartbeatFile
from cluster_ddp.launch.node.node_failures import NodeFailures
from cluster_ddp.launch.node.rank_failures import Failures
from cluster_ddp.launch.node.rank_output import AGENT_LOG, RankOutput, RankWarnings, Relay
from cluster_ddp.launch.node.ranks import LocalRanks
from cluster_ddp.launch.node.reaper import Reaper
from cluster_ddp.launch.node.report import EnvironmentReport
from cluster_ddp.launch.node.stopping import Stopping
from cluster_ddp.launch.node.vanished import RunWatch
from cluster_ddp.launch.node.watchdog import Hang, Watchdog
from cluster_ddp.launch.processes import is_stopped, kill_all, marked_processes, name_of
from cluster_ddp.launch.sign_of_life import SignOfLife
from cluster_ddp.launch.torchrun.agent import SURVIVED, Agent
from cluster_ddp.launch.torchrun.command import fill_in, option, trains_a_task
from cluster_ddp.launch.variables import ADDRESS_VARIABLE
from cluster_ddp.printing import say
from cluster_ddp.process import host_name
from cluster_ddp.run import events
from cluster_ddp.run.attempt_record import is_superseded
from cluster_ddp.run.code import kept_path
from cluster_ddp.run.directory import RunDirectory
from cluster_ddp.run.node_outcome import DONE, FAILED, HUNG, STOPPED, SUPERSEDED
from cluster_ddp.run.stopfile import AGENT_LOST, HANG

TICK_SECONDS = 0.2
_WATCHDOG_SECONDS = 1.0
_NEWER_SECONDS = 2.0
_STANDSTILL_SECONDS = 5.0
_NAME_SECONDS = 120.0
_AGENT_LOST_SECONDS = 60.0  # for ranks to save once their agent is gone


class NodeProgram:
    """Starts one torchrun agent and watches over it and its ranks until the end.

    The constructor prepares everything that can fail; `start` starts the agent, `watch` stays with it until the end.

    Parameters
    ----------
    command
        The torchrun command line with its placeholders.

    Raises
    ------
    ClusterDDPError
        The job cannot be read, or this node has no address for the others.
    """

    def __init__(self, run: RunDirectory, attempt: int, command: Sequence[str], *, node_rank: int) -> None:
        job = load_run_job(run.job_file)
        for remark in job.remarks:
            say(f"cluster-ddp: {remark}")
        self._attempt = run.attempt(attempt)
        self._node_rank = node_rank
        self._host = host_name()
        self._procs = int(option(command, "--nproc-per-node"))
        self._trains_a_task = trains_a_task(command)
        self._events = events.EventWriter(run, events.on_this_host("node"))
        self._prepare_agent(job.spec, command)
        self._prepare_watch(job.spec, endpoint=option(command, "--rdzv-endpoint"))
        self._stopping.listen()

    def _prepare_agent(self, spec: JobSpec, command: Sequence[str]) -> None:
        """Make the agent's files, command line and environment."""
        if spec.launch.snapshot:
            command = [kept_path(self._attempt.run, word) if word == spec.script else word for word in command]
        address = _own_address(spec, command)
        self._heartbeat = HeartbeatFile.create(slots=self._procs)
        try:
            self._output = RankOutput.prepare(self._attempt.log_file(self._node_rank))
        except OSError:
            self._heartbeat.unlink()
            raise
        folder = str(self._output.folder)
        self._command = fill_in(command, is_host=self._node_rank == 0, local_addr=address, log_dir=folder)
        if self._attempt.number > 0:
            self._command += spec.args_on_resume
        self._environment = node_environment(
            spec,
            self._attempt,
            node_rank=self._node_rank,
            procs=self._procs,
            heartbeat=self._heartbeat.path,
            base=os.environ,
            gloo_interface=interface_for_gloo(address),
        )
        self._warning = signal.Signals[f"SIG{spec.requeue.signal}"]
        self._survives = {*SURVIVED, self._warning}

    def _prepare_watch(self, spec: JobSpec, *, endpoint: str) -> None:
        """Make what watches over the agent and the ranks."""
        join_timeout = spec.launch.join_timeout
        self._agent_lost_grace = max(_AGENT_LOST_SECONDS, spec.requeue.warning)
        self._node_failures = NodeFailures(
            self._attempt,
            self._events,
            self._output,
            node_rank=self._node_rank,
            endpoint=endpoint,
            join_timeout=join_timeout,
        )
        self._ranks = LocalRanks(self._heartbeat, self._procs)
        self._watchdog = Watchdog(spec.launch.hang_timeout, join_timeout)
        self._stopping = Stopping(
            self._attempt,
            self._heartbeat,
            self._events,
            node_rank=self._node_rank,
            warning=self._warning,
            share="SLURM_JOB_ID" not in os.environ,
        )
        self._forced_end = ForcedEnd(
            self._ranks,
            self._stopping,
            self._attempt,
            trains_a_task=self._trains_a_task,
            join_timeout=join_timeout,
            warn=self._warn,
        )
        self._run_watch = RunWatch(self._attempt)
        self._last_words = ""  # what cannot be recorded on storage that is unavailable
        self._sign_of_life = SignOfLife(self._attempt.alive_file(self._node_rank))
        self._next_watch = 0.0
        self._next_look_for_newer = 0.0
        self._ticked = time.monotonic_ns()
        self._agent_lost = False
        self._outcome: str | None = None

    def start(self) -> None:
        """Start the agent, and the reaper that ends it if this process dies.

        Call it from a thread that lives until the end: the kernel ends the agent together with that thread.
        """
        self._began = time.monotonic()
        agent_log = self._output.folder / AGENT_LOG
        self._agent = Agent(self._command, self._environment.variables, agent_log, self._survives)
        # Only now: in its first second the agent is a single process, which the kernel ends together with this one.
        self._reaper = Reaper(self._heartbeat.path, self._attempt, self._output)
        self._relay = Relay(self._output.log)
        self._warnings = RankWarnings(self._record, self._host)
        self._failures = Failures(self._ranks, self._output.exits, self._events, self._attempt, self._node_rank)
        self._report = EnvironmentReport(
            self._attempt.report_file(self._node_rank),
            self._environment,
            self._ranks,
            node_rank=self._node_rank,
            command=self._command,
        )
        self._sign_of_life.give()
        self._record(events.NODE_STARTED, procs=self._procs, pid=os.getpid(), script=not self._trains_a_task)

    def watch(self) -> int:
        """Watch until the agent and all ranks have ended; return 0 if the ranks did what was asked, else 1."""
        try:
            while not self._tick():
                time.sleep(TICK_SECONDS)
        finally:
            self._kill_all()
            self._pass_on_output(rest=True)
            self._reaper.dismiss()
        return self._finish()

    def _tick(self) -> bool:
        """Check everything once; return True when everything has ended."""
        self._note_a_standstill()
        agent_status = self._agent.poll()  # before the ranks: any that are alive now have outlived it
        gone = self._ranks.poll(self._output.exits.unended())
        self._reaper.note_ranks(rank.pid for rank in self._ranks.living)
        self._forced_end.note(gone, agent_ended=agent_status is not None)
        self._sign_of_life.give()
        self._pass_on_output()
        if len(self._ranks.seen) >= self._procs:
            self._report.begin()
        # Ranks that this program ended did not fail.
        if self._outcome is None and not self._forced_end.has_stopped_script:
            self._failures.note(gone, agent_ended=agent_status is not None)
        self._stopping.poll()
        self._forced_end.kill_failed_ranks()
        if self._outcome is None:
            self._end_if_due()
        if agent_status is None:
            return False
        if not self._ranks.living:
            if self._outcome is None and self._stopping.reason is None and agent_status != 0:
                self._note_a_lost_connection()
            return True
        if self._outcome is None:
            self._stop_without_agent()
        return False

    def _pass_on_output(self, *, rest: bool = False) -> None:
        for line in self._output.rest() if rest else self._output.gather():
            self._relay.show(line)
            self._warnings.take(line)

    def _end_if_due(self) -> None:
        """End what does not end by itself after a hang, a stop request or completion, in this order.

        A hang comes first, no matter which node noticed it: ranks that hang cannot save.
        """
        stop_asked = self._stopping.reason is not None
        if self._superseded():
            say("cluster-ddp: a newer attempt has begun: ending without a save")
            self._end(SUPERSEDED)
        elif (what := self._run_watch.why_nothing_is_saved()) is not None:
            self._last_words = f"{what}: ending, as nothing can be saved there"
            self._end(FAILED)
        elif self._stopping.reason == HANG:
            self._end_hung()
        elif stop_asked and (outcome := self._forced_end.after_stop()) is not None:
            self._end(outcome)
        elif (outcome := self._forced_end.of_lingering_ranks()) is not None:
            self._end_lingering(outcome)
        elif time.monotonic() >= self._next_watch:
            self._next_watch = time.monotonic() + _WATCHDOG_SECONDS
            hang = self._find_hang()
            if hang is not None:
                self._record_hang(hang)
                self._stopping.ask(HANG, step=hang.step)
                self._end_hung()
            elif not stop_asked and (outcome := self._forced_end.of_idle_agent()) is not None:
                self._end(outcome)

    def _note_a_standstill(self) -> None:
        """Do not count time for which this process stood still: if Slurm suspends the job, the ranks do not hang."""
        now, before = time.monotonic_ns(), self._ticked
        self._ticked = now
        if now - before > _STANDSTILL_SECONDS * 1e9:
            self._watchdog.forgive(before, now)

    def _superseded(self) -> bool:
        """Whether the job was started elsewhere: a node that is cut off from Slurm's controller is not told to end."""
        if time.monotonic() < self._next_look_for_newer:
            return False
        self._next_look_for_newer = time.monotonic() + _NEWER_SECONDS
        return is_superseded(self._attempt)

    def _find_hang(self) -> Hang | None:
        stopping_for = None if self._stopping.reason is None else self._stopping.waited()
        hang = self._watchdog.check(self._ranks.slots(), time.monotonic_ns(), stopping_for=stopping_for)
        if hang is None and self._trains_a_task:
            hang = self._watchdog.check_unregistered(self._ranks.unregistered(), time.monotonic())
        return hang

    def _record_hang(self, hang: Hang) -> None:
        reason = hang.describe(self._host)
        say(f"cluster-ddp: {reason}")
        self._record(
            events.HANG,
            step=hang.step,
            rank=hang.rank,
            phase=hang.phase.word,
            seconds=round(hang.silent, 1),
            timeout=round(hang.timeout, 1),
            reason=reason,
        )

    def _end_hung(self) -> None:
        request = hang_dump.request_dump(self._ranks.living, self._heartbeat.path)
        self._heartbeat.post_stop(self._stopping.level, HANG)  # only now: on it, ranks that do not hang may end
        if is_stopped(self._agent.pid):  # the ranks wait for it: the store through which they meet lives in it
            self._record_stopped(f"torchrun on {self._host} hangs: a signal (SIGSTOP) has stopped it")
        slots = {str(slot.rank): slot for slot in self._ranks.slots()}
        for process in marked_processes(self._heartbeat.path):
            slot = slots.get(process.environment.get("RANK", ""))
            if slot is None or not is_stopped(process.pid):
                continue
            # All ranks are silent in a hang; this is the one that the others wait for, itself or for its worker.
            its = "its process" if process.pid == slot.pid else f"its worker {process.pid} ({name_of(process.pid)})"
            what = f"rank {slot.rank} on {self._host} hangs: a signal (SIGSTOP) has stopped {its}"
            self._record_stopped(what, step=slot.step, rank=slot.rank)
        self._collect(request)
        self._end(HUNG)

    def _record_stopped(self, what: str, **whose: int) -> None:
        reason = f"{what}, and nobody has continued it (SIGCONT)"
        say(f"cluster-ddp: {reason}")
        self._record(events.HANG, stopped=True, reason=reason, **whose)

    def _end_lingering(self, outcome: str) -> None:
        who = ", ".join(map(str, sorted(rank.rank for rank in self._ranks.living)))
        script = "" if self._trains_a_task else ", or what the script does after the block of join_run() may hang"
        self._warn(
            f"the work of rank {who} on {self._host} was done, but it did not exit and was killed: a non-daemon thread "
            f"may still be running, or a function registered with atexit{script} (see its stacks in "
            f"{self._attempt.path})"
        )
        self._collect(hang_dump.request_dump(self._ranks.living, self._heartbeat.path))
        self._end(outcome)

    def _collect(self, request: hang_dump.DumpRequest) -> None:
        collected = hang_dump.collect(request, self._heartbeat.path, self._attempt)
        say(f"cluster-ddp: kept in {self._attempt.path}: {', '.join(collected) or 'nothing'}")

    def _stop_without_agent(self) -> None:
        """Stop all ranks, here and on the other nodes, once the agent is gone: they can still save without it."""
        if not self._agent_lost:
            self._agent_lost = True
            self._stopping.ask(AGENT_LOST, grace=self._agent_lost_grace)

    def _note_a_lost_connection(self) -> None:
        """Stop the other nodes, too, if the agent gave up although nothing had failed."""

        def is_asked_to_stop() -> bool:
            self._stopping.poll()
            return self._stopping.reason is not None

        if self._node_failures.record_lost_connection(unless=is_asked_to_stop):
            self._stopping.ask(AGENT_LOST, grace=self._agent_lost_grace)

    def _end(self, outcome: str) -> None:
        self._outcome = outcome
        self._kill_all()

    def _kill_all(self) -> None:
        kill_all(self._heartbeat.path, self._agent.pid, ranks=[rank.pid for rank in self._ranks.living])

    def _finish(self) -> int:
        agent_status = self._agent.poll()
        if self._outcome is None:
            # The outcome comes from the heartbeat: torchrun turns everything into 0 or 1, and a rank that has done its
            # work may still abort while Python shuts down.
            clean = agent_status == 0 or self._ranks.all_done() or self._forced_end.has_stopped_script
            self._outcome = FAILED if not clean else DONE if self._stopping.reason is None else STOPPED
        if self._outcome == FAILED and not self._ranks.seen:
            self._node_failures.record_agent_failure(agent_status)
        for failure in self._failures.after_work():
            self._warn(f"{failure}; its training was over then, so only what the script does after it is missing")
        status = 0 if self._outcome in (DONE, STOPPED) else 1
        self._record(
            events.NODE_FINISHED,
            outcome=self._outcome,
            reason=self._stopping.reason,
            status=status,
            agent_status=agent_status,
            seconds=round(time.monotonic() - self._began, 1),
            step=max(filter(None, map(self._ranks.step, self._ranks.seen.values())), default=None),
        )
        self._sign_of_life.end()
        self._report.finish()
        hang_dump.remove_pipes(self._heartbeat.path)
        hang_dump.keep_stacks(self._heartbeat.path, self._attempt)
        self._heartbeat.unlink()
        self._output.remove()
        if self._last_words:
            say(f"cluster-ddp: {self._last_words}")  # the keeper reports the last line
        return status

    def _warn(self, message: str) -> None:
        say(f"cluster-ddp: warning: {message}")
        self._record(events.WARNING, message=message)

    def _record(self, event: str, **fields: object) -> None:
        self._events.write(event, attempt=self._attempt.number, node=self._node_rank, host=self._host, **fields)


def _own_address(spec: JobSpec, command: Sequence[str]) -> str:
    known = os.environ.get(ADDRESS_VARIABLE)
    if known:
        return known
    master = option(command, "--rdzv-endpoint").rpartition(":")[0].strip("[]") or LOOPBACK
    nodes = int(option(command, "--nnodes").rpartition(":")[2])
    interface = os.environ.get("NCCL_SOCKET_IFNAME") or spec.network.socket_ifname
    if nodes > 1:  # do not use up join_timeout, for which the others wait for this node
        wait_for_name(master, min(_NAME_SECONDS, spec.launch.join_timeout / 2))
    return local_address(master, nodes=nodes, interface=interface)
