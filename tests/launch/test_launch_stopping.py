from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cluster_ddp.launch.node.heartbeat import HeartbeatFile
from cluster_ddp.launch.node.stopping import Stopping
from cluster_ddp.launch.processes import ASK_TO_END
from cluster_ddp.run.directory import AttemptDirectory, RunDirectory
from cluster_ddp.run.events import EventWriter, read_events
from cluster_ddp.run.stopfile import read_stop, request_stop

Make = Callable[..., Stopping]


@pytest.fixture
def attempt(tmp_path: Path) -> AttemptDirectory:
    run = RunDirectory(tmp_path / "run")
    run.events.mkdir(parents=True)
    run.attempt(0).path.mkdir(parents=True)
    return run.attempt(0)


@pytest.fixture
def heartbeat(tmp_path: Path) -> Iterator[HeartbeatFile]:
    made = HeartbeatFile.create(tmp_path / "heartbeat", slots=1)
    yield made
    made.close()


@pytest.fixture
def make(attempt: AttemptDirectory, heartbeat: HeartbeatFile) -> Iterator[Make]:
    numbers = (signal.SIGTERM, signal.SIGINT, *ASK_TO_END)
    before = {number: signal.getsignal(number) for number in numbers}

    def build(share: bool = False, clock: Callable[[], float] = time.monotonic) -> Stopping:
        events = EventWriter(attempt.run, "node-0")
        made = Stopping(attempt, heartbeat, events, node_rank=0, warning=signal.SIGALRM, share=share, clock=clock)
        made.listen()
        return made

    yield build
    for number, handler in before.items():
        signal.signal(number, handler)


def send(stopping: Stopping, number: signal.Signals) -> None:
    os.kill(os.getpid(), number)
    stopping.poll()


@pytest.mark.parametrize(
    ("number", "reason"),
    [
        (signal.SIGTERM, "terminated"),
        (signal.SIGHUP, "terminated"),
        (signal.SIGQUIT, "terminated"),
        (signal.SIGXCPU, "terminated"),
        (signal.SIGUSR1, "time-limit"),
        (signal.SIGUSR2, "time-limit"),
        (signal.SIGALRM, "time-limit"),  # the warning signal of the job file
        (signal.SIGINT, "person"),
    ],
)
def test_each_signal_has_its_meaning(
    make: Make, heartbeat: HeartbeatFile, attempt: AttemptDirectory, number: signal.Signals, reason: str
) -> None:
    stopping = make()
    send(stopping, number)
    assert (heartbeat.stop_level, heartbeat.stop_reason, stopping.deadline) == (1, reason, None)
    assert [event["reason"] for event in read_events(attempt.run)] == [reason]
    assert read_stop(attempt) is None  # the batch script tells the other nodes


def test_of_signals_that_come_together_the_one_that_tells_why_counts(
    make: Make, heartbeat: HeartbeatFile, attempt: AttemptDirectory
) -> None:
    stopping = make()
    os.kill(os.getpid(), signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGUSR1)
    stopping.poll()
    assert (heartbeat.stop_level, heartbeat.stop_reason) == (1, "time-limit")
    assert [event["reason"] for event in read_events(attempt.run)] == ["time-limit"]


def test_the_same_event_signalled_twice_is_no_second_signal(make: Make, heartbeat: HeartbeatFile) -> None:
    clock = [100.0]
    stopping = make(clock=lambda: clock[0])
    for seconds, level in ((0, 1), (1, 1), (10, 2)):
        clock[0] += seconds
        send(stopping, signal.SIGTERM)
        assert heartbeat.stop_level == level


def test_a_person_need_not_wait_between_two_ctrl_c(make: Make, heartbeat: HeartbeatFile) -> None:
    stopping = make()
    for level in (1, 2):
        send(stopping, signal.SIGINT)
        assert heartbeat.stop_level == level
        assert not stopping.overdue
    send(stopping, signal.SIGINT)
    time.sleep(0.01)
    assert stopping.overdue


def test_a_short_grace_chooses_the_fast_path(make: Make, heartbeat: HeartbeatFile, attempt: AttemptDirectory) -> None:
    stopping = make()
    request_stop(attempt, reason="preemption", grace=10, by="job.sbatch")
    stopping.poll()
    assert (heartbeat.stop_level, heartbeat.stop_reason) == (2, "preemption")
    assert stopping.deadline == pytest.approx(time.monotonic() + 10, abs=2)


def test_what_a_signal_could_not_tell_the_stop_file_may(
    make: Make, heartbeat: HeartbeatFile, attempt: AttemptDirectory
) -> None:
    clock = [100.0]
    stopping = make(clock=lambda: clock[0])
    send(stopping, signal.SIGTERM)
    request_stop(attempt, reason="preemption", grace=60, by="job.sbatch")
    clock[0] += 1
    stopping.poll()
    assert (heartbeat.stop_level, heartbeat.stop_reason) == (1, "preemption")
    request_stop(attempt, reason="cancel", by="a person")
    clock[0] += 1
    stopping.poll()
    assert heartbeat.stop_reason == "cancel"
    send(stopping, signal.SIGUSR1)
    assert heartbeat.stop_reason == "cancel"
    assert [event["reason"] for event in read_events(attempt.run)][:3] == ["terminated", "preemption", "cancel"]


def test_without_a_batch_script_the_other_nodes_are_told(make: Make, attempt: AttemptDirectory) -> None:
    send(make(share=True), signal.SIGINT)
    request = read_stop(attempt)
    assert request is not None
    assert (request.reason, request.level) == ("person", 1)


def test_what_may_have_come_to_this_node_alone_the_others_are_told_in_the_end(
    make: Make, attempt: AttemptDirectory
) -> None:
    stopping = make()
    stopping.tell_others()  # there is nothing to tell
    assert read_stop(attempt) is None
    send(stopping, signal.SIGTERM)
    assert read_stop(attempt) is None  # the batch script, which can ask Slurm, does it
    stopping.tell_others()
    assert (request := read_stop(attempt)) is not None and request.reason == "terminated"
    request_stop(attempt, reason="preemption", grace=20.0, by="job.sbatch")
    stopping.tell_others()
    assert (request := read_stop(attempt)) is not None and request.reason == "preemption"


def test_full_storage_does_not_keep_this_node_from_stopping(
    make: Make, heartbeat: HeartbeatFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("cluster_ddp.launch.node.stopping.request_stop", full)
    send(make(share=True), signal.SIGTERM)
    assert heartbeat.stop_level == 1


def test_looking_for_the_stop_file_lists_no_folder(
    make: Make, attempt: AttemptDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    def listed(*_: object) -> None:
        raise AssertionError("thousands of nodes would each list the files of all, twice a second")

    monkeypatch.setattr(os, "listdir", listed)
    monkeypatch.setattr(os, "scandir", listed)
    stopping = make()
    stopping.poll()
    assert stopping.reason is None
    (attempt.path / "stop").touch()
    time.sleep(0.6)
    stopping.poll()
    assert stopping.reason == "person"
