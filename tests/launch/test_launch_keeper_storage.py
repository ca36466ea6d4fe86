"""The keeper while storage is full, fails for a while or does not respond on the batch host."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from simulated_job import Killed, SimulatedAllocation, SimulatedHost, SimulatedStep, live
from simulated_world import Life, World
from story import SPEC, play

from cluster_ddp.errors import ClusterDDPError
from cluster_ddp.job import JobSpec, load_resolved
from cluster_ddp.job.errors import JobFileError
from cluster_ddp.launch.keeper import end_of_job, keeper, stop_requests
from cluster_ddp.launch.keeper import records as keeper_records
from cluster_ddp.launch.keeper.running_job_step import START_SECONDS
from cluster_ddp.run import events
from cluster_ddp.run.errors import RunError
from cluster_ddp.run.reading import read_on
from cluster_ddp.run.requeue import decision
from cluster_ddp.run.runs import create_run
from cluster_ddp.run.status.report import describe
from cluster_ddp.run.storage import Storage

pytestmark = pytest.mark.usefixtures("no_slurm")


@pytest.mark.parametrize(
    ("number", "lasts", "queued", "tried_for"),
    [(errno.ESTALE, 20, True, 20), (errno.ESTALE, 1000, False, 45), (errno.EACCES, 20, False, 0)],
)
def test_an_error_of_storage_that_passes_as_the_attempt_ends_loses_no_requeue(
    fast_disk: Path, monkeypatch: pytest.MonkeyPatch, number: int, lasts: float, queued: bool, tried_for: float
) -> None:
    """As while an NFS server fails over. One that lasts would let the job fail in the same way again and again."""
    world = World(create_run(SPEC, runs_dir=fast_disk, via="sbatch", script=None), 0, Life(training="is killed"))

    def job_file(path: Path) -> JobSpec:
        if world.now < 100 + lasts:
            raise JobFileError("job.yaml cannot be read") from OSError(number, os.strerror(number))
        return load_resolved(path)

    monkeypatch.setattr(decision, "job_file_reader", lambda: job_file)
    live(world)
    assert world.queued is queued and not world.faults
    assert tried_for <= world.now - 100 <= tried_for + 5
    assert queued or describe(world.run, {}).state.value == "FAILED"


@pytest.mark.parametrize(
    ("word", "queued"),
    [("preemption", True), ("time limit", True), ("warning", True), ("kill -TERM", True), ("scancel", False)],
)
def test_a_job_that_is_ended_while_it_waits_for_room_to_begin_loses_no_requeue(
    fast_disk: Path, monkeypatch: pytest.MonkeyPatch, word: str, queued: bool
) -> None:
    """The keeper looked only for room, until Slurm killed it: LOST."""

    def full(*arguments: object, **named: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    run = create_run(SPEC, runs_dir=fast_disk, via="sbatch", script=None)
    monkeypatch.setattr(Storage, "mkdir", full)
    world = World(run, 0, Life(((40, word),)))
    kept = live(world)
    assert kept is not None and world.queued is queued and not world.faults
    assert world.now < 100


@pytest.mark.parametrize("what", ["record_failed_nodes", "record_decision", "give_notice"])
def test_an_error_in_what_is_only_recorded_loses_no_requeue(
    fast_disk: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], what: str
) -> None:
    def fail(*arguments: object, **named: object) -> None:
        raise RunError("x.jsonl cannot be read")

    monkeypatch.setattr(keeper_records if what == "record_decision" else keeper, what, fail)
    life = Life(training="completes" if what == "give_notice" else "is killed")
    world = World(create_run(SPEC, runs_dir=fast_disk, via="sbatch", script=None), 0, life)
    kept = live(world)
    assert kept is not None and world.queued is (what != "give_notice")
    assert "RunError: x.jsonl cannot be read" in capsys.readouterr().err


def test_storage_that_does_not_answer_as_the_attempt_ends_loses_no_requeue(
    fast_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def within(host: SimulatedHost, seconds: float, do: Callable[[], object], **_: object) -> object:
        return None if seconds == 60 else do()  # what is waited for longest is the decision

    monkeypatch.setattr(SimulatedHost, "within", within)
    world = World(create_run(SPEC, runs_dir=fast_disk, via="sbatch", script=None), 0, Life(training="is killed"))
    live(world)
    assert world.queued


@pytest.mark.parametrize(("word", "queued"), [("preemption", True), ("time limit", True), ("scancel", False)])
def test_a_job_that_is_ended_while_storage_holds_up_the_decision_loses_no_requeue(
    fast_disk: Path, monkeypatch: pytest.MonkeyPatch, word: str, queued: bool
) -> None:
    """The keeper heard of it only when it had been killed."""

    def within(host: SimulatedHost, seconds: float, do: Callable[[], object], *, unless: Any = None) -> object:
        if host.now() < 10:
            return do()
        until = host.now() + seconds
        while host.now() < until and not (unless and unless()):
            host.sleep(1)
        return None

    monkeypatch.setattr(SimulatedHost, "within", within)
    monkeypatch.setattr(SimulatedHost, "glance", lambda host, do: None if host.now() > 12 else do())
    run = create_run(SPEC, runs_dir=fast_disk, via="sbatch", script=None)
    world = World(run, 0, Life(((40, word),), training="is killed", lasts=10))
    with contextlib.suppress(ClusterDDPError):
        live(world)
    assert world.queued is queued and not world.faults


@pytest.mark.parametrize(("word", "queued"), [("preemption", True), ("time limit", True), ("scancel", False)])
def test_storage_that_blocks_before_the_job_is_ended_loses_no_requeue(
    fast_disk: Path, monkeypatch: pytest.MonkeyPatch, word: str, queued: bool
) -> None:
    """The keeper waited for it until Slurm killed it: LOST."""

    def given_up(host: SimulatedHost, do: Callable[[], object]) -> object:
        return None if host.now() >= 10 else do()

    def block(*arguments: object, **named: object) -> None:
        raise Killed

    monkeypatch.setattr(SimulatedHost, "glance", given_up)
    monkeypatch.setattr(SimulatedHost, "within", lambda host, seconds, do, **_: given_up(host, do))
    for module, name in ((stop_requests, "request_stop"), (end_of_job, "read_stop"), (keeper, "is_superseded")):
        monkeypatch.setattr(module, name, block)
    run = create_run(SPEC, runs_dir=fast_disk, via="sbatch", script=None)
    world = World(run, 0, Life(((10, "TERM to the step"), (10, word)), lasts=1000, saves_in=3.0))
    live(world)
    assert world.queued is queued and not world.faults


@pytest.mark.parametrize("training", ["is killed", "crashes"])
def test_a_step_that_has_ended_is_not_waited_for_until_the_time_limit_if_storage_hides_how(
    fast_disk: Path, monkeypatch: pytest.MonkeyPatch, training: str
) -> None:
    """Its nodes idled for as long as storage did not answer on the batch host."""

    def within(host: SimulatedHost, seconds: float, do: Callable[[], object], **_: object) -> object:
        if host.now() < 5:
            return do()
        host.sleep(seconds)
        return None

    monkeypatch.setattr(SimulatedHost, "within", within)
    monkeypatch.setattr(SimulatedHost, "glance", lambda host, do: within(host, 0.0, do))
    run = create_run(SPEC, runs_dir=fast_disk, via="sbatch", script=None)
    world = World(run, 0, Life(training=training, lasts=10))
    live(world)
    assert world.queued and not world.faults
    assert world.now < 120


def test_a_step_that_never_begins_is_not_waited_for_until_the_time_limit_if_storage_hangs(
    fast_disk: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The limit was reached only where storage answered."""
    ended, life = list[float](), Life(training="is killed", lasts=100_000)

    def within(host: SimulatedHost, seconds: float, do: Callable[[], object], **_: object) -> object:
        if host.now() < 5:
            return do()
        host.sleep(seconds)
        return None

    def end_unbegun(step: SimulatedStep) -> bool:
        if ended or world.now < START_SECONDS:
            return False
        ended.append(world.now)
        return True

    monkeypatch.setattr(SimulatedHost, "within", within)
    monkeypatch.setattr(SimulatedHost, "glance", lambda host, do: within(host, 0.0, do))
    monkeypatch.setattr(SimulatedStep, "end_unbegun", end_unbegun)
    monkeypatch.setattr(SimulatedStep, "has_exited", property(lambda step: bool(ended)))
    world = World(create_run(SPEC, runs_dir=fast_disk, via="sbatch", script=None), 0, life)
    live(world)
    assert world.queued and not world.faults
    assert world.now < START_SECONDS + 120
    words = capsys.readouterr().err
    assert "no node program has started for 60 min, and storage does not respond on" in words


@pytest.mark.parametrize("word", ["preemption", "time limit"])
def test_storage_that_blocks_once_training_has_saved_loses_no_requeue(
    fast_disk: Path, monkeypatch: pytest.MonkeyPatch, word: str
) -> None:
    """The keeper waited for it for longer than Slurm's grace."""

    seen: list[bool] = []

    def within(host: SimulatedHost, seconds: float, do: Callable[[], object], **_: object) -> object:
        if not any(seen):
            return do()
        host.sleep(seconds)
        return None

    has_ended = SimulatedStep.has_ended
    monkeypatch.setattr(SimulatedStep, "has_ended", lambda step: seen.append(has_ended(step)) or seen[-1])
    monkeypatch.setattr(SimulatedHost, "within", within)
    monkeypatch.setattr(SimulatedHost, "glance", lambda host, do: within(host, 0.0, do))
    run = create_run(SPEC, runs_dir=fast_disk, via="sbatch", script=None)
    world = World(run, 0, Life(((10, word),), lasts=1000, saves_in=3.0))
    live(world)
    assert world.queued and not world.faults


def test_what_came_while_storage_did_not_answer_is_heard_before_the_nodes_are_judged(
    fast_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node program that Slurm has ended with the job was blamed."""
    told: list[bool] = []
    monkeypatch.setattr(keeper, "record_failed_nodes", lambda *_, job_ends: told.append(job_ends))

    def has_ended(step: SimulatedStep) -> bool:
        hosts[0].sleep(max(0.0, 20.0 - hosts[0].now()))
        return True

    hosts: list[SimulatedHost] = []
    start = SimulatedHost.start_job_step

    def start_on(host: SimulatedHost, *of: Any, **named: Any) -> Any:
        hosts.append(host)
        return start(host, *of, **named)

    monkeypatch.setattr(SimulatedHost, "start_job_step", start_on)
    monkeypatch.setattr(SimulatedStep, "has_ended", has_ended)
    run = create_run(SPEC, runs_dir=fast_disk, via="sbatch", script=None)
    live(World(run, 0, Life(((10, "requeue by Slurm"),), lasts=1000)))
    assert told == [True]


def test_an_interrupt_is_a_persons_stop_even_if_storage_is_slow(
    fast_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The attempt ended before the keeper had asked for it again, and was requeued."""
    monkeypatch.setattr(SimulatedHost, "glance", lambda host, do: None if 5 < host.now() < 30 else do())
    life = Life(((10, "kill -INT"),), training="is killed", lasts=15, saves_in=None)
    _, worlds, status = play(fast_disk, [life])
    assert (status.state.value, len(worlds)) == ("STOPPED", 1)


def test_a_batch_host_that_loses_the_run_directory_is_left(fast_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It can judge nothing, and Slurm could not even open the job's output there."""
    run, left = create_run(SPEC, runs_dir=fast_disk, via="sbatch", script=None), list[str]()
    monkeypatch.setattr(SimulatedStep, "_end", lambda step: run.path.rename(fast_disk / "elsewhere"))
    monkeypatch.setattr(SimulatedAllocation, "has_enough_others", lambda allocation, bad: True)
    monkeypatch.setattr(SimulatedAllocation, "exclude", lambda allocation, bad, link: bool(left.extend(bad) or left))
    world = World(run, 0, Life(lasts=10))
    kept = live(world)
    assert kept is not None and kept.job_action == "requeue" and world.queued
    assert left == [socket.gethostname()]


@pytest.mark.parametrize(("word", "queued"), [("preemption", True), ("time limit", True), ("scancel", False)])
def test_a_full_disk_that_takes_no_stop_file_loses_no_requeue(
    fast_disk: Path, monkeypatch: pytest.MonkeyPatch, word: str, queued: bool
) -> None:
    """The ranks have had their SIGTERM, and say no more than that; the keeper knows what it meant."""

    def full(*arguments: object, **named: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(stop_requests, "request_stop", full)
    life = Life(((10, "TERM to the step"), (10, word)), lasts=1000, saves_in=3.0)
    world = World(create_run(SPEC, runs_dir=fast_disk, via="sbatch", script=None), 0, life)
    live(world)
    assert world.queued is queued and not world.faults


def test_a_stop_for_which_there_is_no_room_is_asked_for_again(fast_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the warning: nothing else would tell training of the end before Slurm's SIGTERM."""
    asked, ask = list[float](), stop_requests.request_stop

    def full_for_a_while(*arguments: Any, **named: Any) -> Any:
        if world.now < 20:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        asked.append(world.now)
        return ask(*arguments, **named)

    monkeypatch.setattr(stop_requests, "request_stop", full_for_a_while)
    life = Life(((10, "warning"), (100, "time limit")), lasts=1000, saves_in=60.0)
    world = World(create_run(SPEC, runs_dir=fast_disk, via="sbatch", script=None), 0, life)
    live(world)
    assert world.queued and not world.faults
    assert len(asked) == 1 and asked[0] <= 30 and world.now < 100


def test_a_decision_that_there_is_no_time_for_is_not_blamed_on_storage(
    fast_disk: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nor is the requeue lost, for which the keeper had waited to record what the nodes had said."""

    def within(host: SimulatedHost, seconds: float, do: Callable[[], object], *, unless: Any = lambda: False) -> object:
        if not (36 <= host.now() < 38):
            return do()
        while host.now() < 56 and not unless():
            host.sleep(1)
        return None

    monkeypatch.setattr(SimulatedHost, "within", within)
    run = create_run(SPEC, runs_dir=fast_disk, via="sbatch", script=None)
    world = World(run, 0, Life(((10, "preemption"),), lasts=1000, saves_in=26.0))
    live(world)
    assert world.queued
    words = capsys.readouterr().err
    assert "could not be decided before Slurm kills the job" in words and "does not respond" not in words


@pytest.mark.parametrize(("lasts", "state"), [(20.0, "COMPLETED"), (1000.0, "FAILED")])
def test_events_that_cannot_be_read_for_a_while_are_waited_for(
    fast_disk: Path, monkeypatch: pytest.MonkeyPatch, lasts: float, state: str
) -> None:
    """Without those of rank 0, a run that was complete was taken for one that had been killed, and began again."""
    world = World(create_run(SPEC, runs_dir=fast_disk, via="sbatch", script=None), 0, Life(lasts=100))

    def read(path: Path, *of: Any) -> Any:
        if path.name.startswith("rank-0") and 100 <= world.now < 100 + lasts:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(path))
        return read_on(path, *of)

    monkeypatch.setattr(events, "read_on", read)
    kept = live(world)
    assert not world.queued and kept is not None
    monkeypatch.undo()
    assert kept.job_action == ("end" if state == "COMPLETED" else "fail")
    assert state == "COMPLETED" or "rank-0.jsonl cannot be read: Stale file handle" in kept.why
