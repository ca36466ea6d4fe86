"""Storage that hangs as an attempt is to begin: it is told, and no requeue is lost."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from simulated_job import Killed, SimulatedAllocation, SimulatedHost, live
from simulated_world import Life, World
from story import SPEC

from cluster_ddp.errors import ClusterDDPError
from cluster_ddp.launch.keeper import keeper
from cluster_ddp.launch.keeper.patience import ROOM_SECONDS
from cluster_ddp.run.attempt import begin_attempt
from cluster_ddp.run.errors import RunAlive, RunError
from cluster_ddp.run.events import read_events
from cluster_ddp.run.record import add_slurm_job
from cluster_ddp.run.runs import create_run
from cluster_ddp.run.status.report import describe


def _hang(monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    """Let storage take up nothing of an attempt that begins: it is not called, and would not come back."""

    def block(*arguments: object, **named: object) -> None:
        raise Killed

    def within(host: SimulatedHost, seconds: float, do: Callable[[], Any], *, unless: Any = lambda: False) -> object:
        try:
            return do()
        except Killed:
            until = host.now() + seconds
        while host.now() < until and not unless():
            host.sleep(1)
        return None

    monkeypatch.setattr(keeper, where, block)
    monkeypatch.setattr(SimulatedHost, "within", within)


@pytest.mark.parametrize("where", ["begin", "hosts_to_avoid"])
def test_storage_that_hangs_as_an_attempt_begins_is_told_and_left(
    fast_disk: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], where: str
) -> None:
    """The keeper waited for it until the time limit, without a word, and the run was LOST."""
    left = list[str]()
    _hang(monkeypatch, where)
    monkeypatch.setattr(SimulatedAllocation, "has_enough_others", lambda allocation, bad: True)
    monkeypatch.setattr(SimulatedAllocation, "exclude", lambda allocation, bad, link: bool(left.extend(bad) or left))
    world = World(create_run(SPEC, runs_dir=fast_disk, via="sbatch", script=None), 0, Life())
    kept = live(world)
    assert kept is not None and kept.job_action == "requeue" and world.queued
    assert left == [socket.gethostname()]
    assert ROOM_SECONDS <= world.now < ROOM_SECONDS + 120
    words = capsys.readouterr().err
    assert "the attempt cannot begin yet: storage" in words and "waiting for up to 15 min" in words
    assert "the attempt could not begin: storage does not respond" in words


def test_the_next_job_of_a_chain_leaves_a_host_whose_storage_hangs(
    fast_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of them waited there for 15 minutes."""
    left = list[object]()
    _hang(monkeypatch, "begin")
    monkeypatch.setattr(SimulatedAllocation, "has_enough_others", lambda allocation, bad: True)
    monkeypatch.setattr(SimulatedAllocation, "exclude", lambda allocation, bad, link: bool(left.append((bad, link))))
    run = create_run(SPEC, runs_dir=fast_disk, via="sbatch", script=None)
    for job in ("77", "78", "79"):
        add_slurm_job(run, job)
    with pytest.raises(ClusterDDPError):
        live(World(run, 0, Life(requeues=("refused",) * 3)))
    assert left == [([socket.gethostname()], "78")]


@pytest.mark.parametrize(
    ("word", "queued"),
    [("preemption", True), ("time limit", True), ("warning", True), ("kill -TERM", True), ("scancel", False)],
)
def test_a_job_that_is_ended_while_storage_hangs_as_it_begins_loses_no_requeue(
    fast_disk: Path, monkeypatch: pytest.MonkeyPatch, word: str, queued: bool
) -> None:
    _hang(monkeypatch, "begin")
    world = World(create_run(SPEC, runs_dir=fast_disk, via="sbatch", script=None), 0, Life(((80, word),)))
    live(world)
    assert world.queued is queued and not world.faults
    assert world.now < 140


def test_an_attempt_that_was_given_up_does_not_begin_later(fast_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As soon as storage answered, it began in the background, beside or after the one of the requeued job."""
    abandoned = list[Callable[[], object]]()

    def within(host: SimulatedHost, seconds: float, do: Callable[[], object], *, unless: Any = None) -> object:
        abandoned.append(do)
        return [] if len(abandoned) == 1 else None  # no bad hosts

    monkeypatch.setattr(SimulatedHost, "within", within)
    run = create_run(SPEC, runs_dir=fast_disk, via="sbatch", script=None)
    world = World(run, 0, Life())
    live(world)
    assert world.queued
    _, begin, *_ = abandoned
    with pytest.raises(RunError, match="was abandoned before it began"):
        begin()
    assert list(run.attempts.iterdir()) == []


def test_a_job_of_a_chain_that_is_started_too_early_says_so(fast_disk: Path) -> None:
    """It ended with status 75, without a word in `status`; the run had been left to it."""
    run = create_run(SPEC, runs_dir=fast_disk, via="sbatch", script=None)
    for job in ("76", "77"):
        add_slurm_job(run, job)
    begin_attempt(run, slurm_job_id="76", host="n0", pid=os.getpid(), nodes=1, procs=1)
    with pytest.raises(RunAlive):
        live(World(run, 0, Life()))
    assert [event["slurm_job_id"] for event in read_events(run) if event["event"] == "start-refused"] == ["77"]
    (warned,) = describe(run, None).warnings
    assert warned.startswith("Slurm job 77 was started while attempt 0 was alive")
