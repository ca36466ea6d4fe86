"""How long an agent is left to wait for the others when its own ranks have ended."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from waiting import wait_for

from cluster_ddp.errors import Cause
from cluster_ddp.launch.node import forced_end
from cluster_ddp.launch.node.forced_end import ForcedEnd
from cluster_ddp.launch.node.heartbeat import HeartbeatFile
from cluster_ddp.launch.node.ranks import LocalRanks, Rank
from cluster_ddp.launch.node.stopping import Stopping
from cluster_ddp.run.directory import RunDirectory
from cluster_ddp.run.events import COMPLETED, EventWriter
from cluster_ddp.run.phase import Phase
from cluster_ddp.run.stopfile import read_stop

pytestmark = pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="needs /proc (Linux)")


class LonelyAgent:
    """A node whose one rank has ended at second 0 of its clock while its agent goes on; `alive`: nobody saw it end."""

    def __init__(self, folder: Path, *, done: bool, alive: bool = False, task: bool = True) -> None:
        self.now = time.monotonic()
        run = RunDirectory(folder)
        run.events.mkdir()
        self.attempt = run.attempt(0)
        self.attempt.path.mkdir(parents=True)
        self.heartbeat = HeartbeatFile.create(folder / "heartbeat", slots=1)
        ranks = LocalRanks(self.heartbeat, 1, clock=lambda: self.now)
        self.events = EventWriter(run, "node-0")
        self.stopping = Stopping(
            self.attempt,
            self.heartbeat,
            self.events,
            node_rank=0,
            warning=signal.SIGUSR1,
            share=False,
            clock=lambda: self.now,
        )
        self.ending = ForcedEnd(
            ranks,
            self.stopping,
            self.attempt,
            trains_a_task=task,
            join_timeout=500.0,
            warn=str,
            clock=lambda: self.now,
        )
        variables = {"RANK": "0", "LOCAL_RANK": "0", "CLUSTER_DDP_HEARTBEAT": str(self.heartbeat.path)}
        with subprocess.Popen(["sleep", "60"], env={**os.environ, **variables}, start_new_session=True) as process:
            self.heartbeat.slots[0].claim(rank=0, pid=process.pid)
            self.heartbeat.slots[0].set_phase(Phase.DONE if done else Phase.TRAINING)
            wait_for(lambda: ranks.poll() == [] and ranks.living, "the rank is seen")
            process.kill()
        self.now = self.start = time.monotonic()
        if not alive:
            assert [rank.pid for rank in ranks.poll()] == [process.pid]

    def after_stop(self, seconds: float) -> str | None:
        self.now = self.start + seconds
        return self.ending.after_stop()

    def idle_for(self, seconds: float) -> str | None:
        self.now = self.start + seconds
        return self.ending.of_idle_agent()

    def lingering_for(self, seconds: float) -> str | None:
        self.now = self.start + seconds
        return self.ending.of_lingering_ranks()


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., LonelyAgent]]:
    made: list[LonelyAgent] = []

    def build(*, done: bool) -> LonelyAgent:
        made.append(LonelyAgent(tmp_path, done=done))
        return made[-1]

    yield build
    for agent in made:
        agent.heartbeat.close()


@pytest.mark.parametrize(
    ("reason", "done", "patience"),
    [
        ("preemption", True, 10.0),
        ("agent-lost", True, 1.0),
        ("agent-lost", False, 10.0),
        ("person", False, 10.0),  # ranks were killed, and the agent waits for the others to restart them
    ],
)
def test_an_agent_waits_for_others_but_not_for_ever(
    make: Callable[..., LonelyAgent], reason: str, done: bool, patience: float
) -> None:
    agent = make(done=done)
    agent.stopping.ask(reason)
    agent.attempt.stop_file.unlink()
    assert agent.after_stop(patience - 0.1) is None
    assert read_stop(agent.attempt) is None
    assert agent.after_stop(patience + 0.1) == "stopped"
    request = read_stop(agent.attempt)  # or the other nodes would wait for the ranks of this one
    assert request is not None and request.reason == reason


@pytest.mark.parametrize("done", [True, False])
def test_a_run_that_is_complete_does_not_hold_its_machines(make: Callable[..., LonelyAgent], done: bool) -> None:
    """A rank may be killed after all is saved: its agent then waits to restart it, the others for that one to end."""
    agent = make(done=done)
    if not done:
        assert agent.idle_for(1000.0) is None  # it may be restarted
        agent.events.write(COMPLETED, attempt=0, step=5)
    else:
        assert agent.idle_for(59.0) is None
    assert agent.idle_for(1001.0) == "done"


@pytest.mark.parametrize(
    ("task", "stop", "patience", "outcome"),
    [
        (True, None, 600.0, "done"),
        (True, "person", 60.0, "stopped"),
        (False, "person", 60.0, "stopped"),
    ],
)
def test_ranks_that_have_done_their_work_but_do_not_exit_are_ended(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], task: bool, stop: str | None, patience: float, outcome: str
) -> None:
    agent = LonelyAgent(tmp_path, done=True, alive=True, task=task)
    if stop is not None:
        agent.stopping.ask(stop)
    assert agent.lingering_for(59.0) is None and not capsys.readouterr().err
    assert agent.lingering_for(patience - 1.0) is None
    assert ("rank 0 has not exited yet" in capsys.readouterr().err) is (stop is None), "else it seems to do nothing"
    assert agent.lingering_for(patience + 1.0) == outcome
    agent.heartbeat.slots[0].set_phase(Phase.STOPPING)
    assert agent.lingering_for(10_000.0) is None
    agent.heartbeat.close()


def test_a_rank_that_has_failed_but_does_not_exit_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that is not a daemon kept it, and so the attempt, for half an hour."""
    killed: list[int] = []
    monkeypatch.setattr(forced_end, "send", lambda pid, number: killed.append(pid))
    agent = LonelyAgent(tmp_path, done=False, alive=True)
    slot = agent.heartbeat.slots[0]
    for seconds in (0.0, 100.0):
        agent.now = agent.start + seconds
        agent.ending.kill_failed_ranks()
    slot.set_cause(Cause.PROGRAM)
    for seconds, expected in ((200.0, []), (259.0, []), (261.0, [slot.pid]), (400.0, [slot.pid])):
        agent.now = agent.start + seconds
        agent.ending.kill_failed_ranks()
        assert killed == expected
    agent.heartbeat.close()


@pytest.mark.parametrize(("share", "outcome"), [(0.0, "done"), (0.005, "done"), (0.02, None)])
def test_a_script_that_does_not_compute_after_its_block_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, share: float, outcome: str | None
) -> None:
    """It held the job until the time limit. What it computes there may take long, in a process of its own, too."""
    agent = LonelyAgent(tmp_path, done=True, alive=True, task=False)
    monkeypatch.setattr(LocalRanks, "cpu_seconds", lambda _: {7: 90.0, 8: share * (agent.now - agent.start)})
    for seconds in range(30, 10_000, 30):
        found = agent.lingering_for(seconds)
        if found is not None:
            break
    assert found == outcome and (outcome is None or 1800 < seconds <= 1900)
    agent.heartbeat.close()


def test_the_cpu_time_of_the_ranks_and_what_they_start_is_seen(tmp_path: Path) -> None:
    heartbeat = HeartbeatFile.create(tmp_path / "heartbeat", slots=1)
    variables = {"RANK": "0", "LOCAL_RANK": "0", "CLUSTER_DDP_HEARTBEAT": str(heartbeat.path)}
    text = "sleep 60 & while :; do :; done"
    ranks = LocalRanks(heartbeat, 1)
    with subprocess.Popen(["bash", "-c", text], env={**os.environ, **variables}, start_new_session=True) as process:
        wait_for(lambda: ranks.cpu_seconds().get(process.pid, 0.0) > 0.1, "it computes")
        used = ranks.cpu_seconds()
        os.killpg(process.pid, signal.SIGKILL)
    assert len(used) == 2 and min(used.values()) < 0.1
    heartbeat.close()


def test_an_agent_that_does_nothing_after_its_ranks_have_failed_is_ended(make: Callable[..., LonelyAgent]) -> None:
    agent = make(done=False)
    assert agent.idle_for(1099.0) is None
    assert agent.idle_for(1101.0) == "failed"


def test_a_script_that_slurms_signal_ends_before_it_is_seen_was_stopped(tmp_path: Path) -> None:
    """Under load a rank may print, be signalled and end between two looks, or during one."""
    attempt, heartbeat = RunDirectory(tmp_path).attempt(0), HeartbeatFile.create(tmp_path / "heartbeat", slots=1)
    now, stopping = [1000.0], SimpleNamespace(signalled_at=None)
    for seen in (False, True):
        ranks = LocalRanks(heartbeat, 1)
        rank = Rank(os.getpid(), 0, 0, None, None, None)
        ranks.seen |= {rank.pid: rank} if seen else {}
        ending = ForcedEnd(
            *(ranks, cast(Stopping, stopping), attempt),
            **{"trains_a_task": False, "join_timeout": 600.0, "warn": str, "clock": lambda: now[0]},
        )
        now[0] += 10.0
        ending.note([], agent_ended=False)
        stopping.signalled_at = now[0] - 0.01  # the look had begun, and had found it alive or not at all
        assert not ending.has_stopped_script
        now[0] += 0.2
        ending.note([rank] if seen else [], agent_ended=True)
        assert ending.has_stopped_script
    heartbeat.close()


HANDLES_ONCE = """
import signal, sys, time
def restore(*_):
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    print("heard", flush=True)
signal.signal(signal.SIGTERM, restore)
print("ready", flush=True)
time.sleep(60)
time.sleep(60)
"""


class StoppedScript:
    """A script that knows nothing of this package, for a minute when it is asked to stop."""

    def __init__(self, folder: Path, process: subprocess.Popen[bytes], heartbeat: HeartbeatFile) -> None:
        run, self._began, self.warnings = RunDirectory(folder), time.monotonic() + 60.0, list[str]()
        run.events.mkdir()
        attempt = run.attempt(0)
        attempt.path.mkdir(parents=True)
        self._now = self._began
        ranks = LocalRanks(heartbeat, 1)
        self.stopping = Stopping(
            *(attempt, heartbeat, EventWriter(run, "node-0")),
            **{"node_rank": 0, "warning": signal.SIGUSR1, "share": False, "clock": lambda: self._now},
        )
        self._ending = ForcedEnd(
            *(ranks, self.stopping, attempt),
            **{"trains_a_task": False, "join_timeout": 600.0, "warn": self.warnings.append, "clock": lambda: self._now},
        )
        wait_for(lambda: ranks.poll() == [] and ranks.living, "the rank is seen")
        self.process = process
        self.stopping.ask("person")

    def after(self, seconds: float) -> str | None:
        self._now = self._began + seconds
        return self._ending.after_stop()


@pytest.fixture
def stop_script(tmp_path: Path) -> Iterator[Callable[..., StoppedScript]]:
    heartbeat = HeartbeatFile.create(tmp_path / "heartbeat", slots=1)
    variables = {"RANK": "0", "LOCAL_RANK": "0", "CLUSTER_DDP_HEARTBEAT": str(heartbeat.path)}
    with contextlib.ExitStack() as stack:

        def start(*command: str) -> StoppedScript:
            process = stack.enter_context(
                subprocess.Popen(
                    command, env={**os.environ, **variables}, stdout=subprocess.PIPE, start_new_session=True
                )
            )
            stack.callback(process.kill)
            return StoppedScript(tmp_path, process, heartbeat)

        yield start
    heartbeat.close()


def test_a_script_that_handles_no_signal_has_the_time_that_is_promised(
    stop_script: Callable[..., StoppedScript],
) -> None:
    script = stop_script("sleep", "60")
    for seconds, outcome in ((0.0, None), (29.0, None), (31.0, "stopped")):
        assert script.after(seconds) == outcome
        assert bool(script.warnings) == (seconds > 0), "one that Slurm's own signal is ending handles none any more"
    (warning,) = script.warnings
    assert "handles neither SIGTERM nor SIGUSR1: it is killed 30 s after" in warning


def test_a_script_that_restores_a_signal_once_it_has_come_has_heard_it(
    stop_script: Callable[..., StoppedScript],
) -> None:
    """As transformers' Trainer does with `enable_jit_checkpoint`, and what a second Ctrl-C is to end."""
    script = stop_script(sys.executable, "-c", HANDLES_ONCE)
    output = script.process.stdout
    assert output is not None and output.readline() == b"ready\n"
    assert script.after(0.0) is None
    assert output.readline() == b"heard\n"
    assert script.after(29.0) is None
    script.stopping.end_within(600.0)
    assert script.after(60.0) is None, "it saves, and has until the deadline"
    assert script.warnings == []
