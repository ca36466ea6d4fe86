from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster_ddp.launch.node.heartbeat import HeartbeatFile
from cluster_ddp.launch.node.ranks import Rank
from cluster_ddp.launch.node.watchdog import (
    SHORTEST_LEARNED,
    START_MARGIN,
    STOPPING_SAVE,
    STOPPING_WORK,
    UNLEARNED,
    Watchdog,
)
from cluster_ddp.run.phase import Phase

SECOND = 1_000_000_000
JOIN = 300.0


class Clock:
    """Makes ranks and watchdog live in a time of our own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000 * SECOND
        monkeypatch.setattr("cluster_ddp.launch.node.heartbeat.time.monotonic_ns", lambda: self.now)

    def sleep(self, seconds: float) -> None:
        self.now += int(seconds * SECOND)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


@pytest.fixture
def heartbeat(tmp_path: Path, clock: Clock) -> Iterator[HeartbeatFile]:
    made = HeartbeatFile.create(tmp_path / "heartbeat", slots=2)
    for index, slot in enumerate(made.slots):
        slot.claim(rank=index + 4, pid=100 + index)
        slot.set_phase(Phase.TRAINING)
    yield made
    made.close()


def train(
    heartbeat: HeartbeatFile, watchdog: Watchdog, clock: Clock, steps: int, seconds: float, start: int = 0
) -> None:
    for step in range(start, start + steps):
        clock.sleep(seconds)
        for slot in heartbeat.slots:
            slot.beat(step)
        assert watchdog.check(heartbeat.slots, clock.now) is None


def test_a_set_timeout_is_taken_as_set(heartbeat: HeartbeatFile, clock: Clock) -> None:
    watchdog = Watchdog(5, JOIN)
    train(heartbeat, watchdog, clock, 3, 1.0)
    clock.sleep(2)
    heartbeat.slots[0].beat(3)
    clock.sleep(4)
    hang = watchdog.check(heartbeat.slots, clock.now)
    assert hang is not None
    assert (hang.rank, hang.step, hang.phase, hang.silent) == (5, 2, Phase.TRAINING, 6.0)


def test_a_learned_timeout_is_never_under_a_minute(heartbeat: HeartbeatFile, clock: Clock) -> None:
    watchdog = Watchdog("auto", JOIN)
    train(heartbeat, watchdog, clock, 50, 0.01)
    assert watchdog.timeout(Phase.TRAINING) == SHORTEST_LEARNED == 60
    clock.sleep(59)
    assert watchdog.check(heartbeat.slots, clock.now) is None
    clock.sleep(2)
    assert watchdog.check(heartbeat.slots, clock.now) is not None


def test_slow_steps_and_rare_pauses_make_it_longer(heartbeat: HeartbeatFile, clock: Clock) -> None:
    watchdog = Watchdog("auto", JOIN)
    train(heartbeat, watchdog, clock, 30, 10.0)
    assert watchdog.timeout(Phase.TRAINING) == pytest.approx(300)
    clock.sleep(100)  # such as workers that start again with each epoch
    assert watchdog.check(heartbeat.slots, clock.now) is None
    train(heartbeat, watchdog, clock, 1, 20.0, start=30)
    assert watchdog.timeout(Phase.TRAINING) == pytest.approx(600)


def test_before_it_has_learned_and_outside_training_it_is_patient(heartbeat: HeartbeatFile, clock: Clock) -> None:
    watchdog = Watchdog("auto", JOIN)
    train(heartbeat, watchdog, clock, 3, 0.01)
    assert watchdog.timeout(Phase.TRAINING) == UNLEARNED
    train(heartbeat, watchdog, clock, 50, 0.01, start=3)
    for phase in (Phase.EVALUATING, Phase.SAVING):
        for slot in heartbeat.slots:
            slot.set_phase(phase)
        clock.sleep(600)
        assert watchdog.check(heartbeat.slots, clock.now) is None
        clock.sleep(1300)
        assert watchdog.check(heartbeat.slots, clock.now) is not None


def test_a_start_up_that_takes_long_is_no_hang_but_one_that_never_ends_is(
    heartbeat: HeartbeatFile, clock: Clock
) -> None:
    watchdog = Watchdog(5, JOIN)  # the timeout of steps does not count yet
    for phase in (Phase.STARTING, Phase.READY):
        heartbeat.slots[0].set_phase(phase)
        heartbeat.slots[1].set_phase(Phase.DONE)
        clock.sleep(JOIN + START_MARGIN - 1)
        assert watchdog.check(heartbeat.slots, clock.now) is None
        clock.sleep(2)
        hang = watchdog.check(heartbeat.slots, clock.now)
        assert hang is not None
        assert (hang.rank, hang.step, hang.phase) == (4, -1, phase)


def test_a_rank_that_never_comes_to_the_heartbeat_hangs() -> None:
    watchdog = Watchdog("auto", JOIN)
    now = 10_000.0
    came, stuck = (
        Rank(100, rank, 0, None, None, None, since=now - JOIN - START_MARGIN + left) for rank, left in ((4, 5), (5, -5))
    )
    assert watchdog.check_unregistered([came], now) is None
    hang = watchdog.check_unregistered([came, stuck], now)
    assert hang is not None
    assert (hang.rank, hang.phase) == (5, Phase.STARTING)


def test_a_time_in_which_the_watcher_stood_still_too_does_not_count(heartbeat: HeartbeatFile, clock: Clock) -> None:
    """Slurm had suspended the job; what hangs after it hangs as before."""
    watchdog = Watchdog(5, JOIN)
    train(heartbeat, watchdog, clock, 3, 1.0)
    since = clock.now
    clock.sleep(75)
    watchdog.forgive(since, clock.now)
    clock.sleep(4)
    assert watchdog.check(heartbeat.slots, clock.now) is None
    clock.sleep(2)
    hang = watchdog.check(heartbeat.slots, clock.now)
    assert hang is not None and hang.silent == 6.0


def test_ranks_that_are_done_do_not_hang(heartbeat: HeartbeatFile, clock: Clock) -> None:
    watchdog = Watchdog(5, JOIN)
    for slot in heartbeat.slots:
        slot.set_phase(Phase.DONE)
    clock.sleep(100_000)
    assert watchdog.check(heartbeat.slots, clock.now, stopping_for=100_000) is None


@pytest.mark.parametrize("phase", [Phase.STARTING, Phase.READY, Phase.TRAINING, Phase.EVALUATING])
def test_after_a_stop_request_a_stuck_rank_is_given_up_after_a_minute(
    heartbeat: HeartbeatFile, clock: Clock, phase: Phase
) -> None:
    watchdog = Watchdog("auto", JOIN)
    for slot in heartbeat.slots:
        slot.set_phase(phase)
    clock.sleep(300)
    assert watchdog.check(heartbeat.slots, clock.now) is None
    assert watchdog.check(heartbeat.slots, clock.now, stopping_for=STOPPING_WORK - 1) is None
    assert watchdog.check(heartbeat.slots, clock.now, stopping_for=STOPPING_WORK + 1) is not None
    heartbeat.slots[0].beat(1)
    heartbeat.slots[1].beat(1)
    assert watchdog.check(heartbeat.slots, clock.now, stopping_for=STOPPING_WORK + 1) is None


def test_after_a_stop_request_slow_steps_and_slow_saves_may_still_end(heartbeat: HeartbeatFile, clock: Clock) -> None:
    watchdog = Watchdog("auto", JOIN)
    train(heartbeat, watchdog, clock, 5, 100.0)
    clock.sleep(400)
    assert watchdog.check(heartbeat.slots, clock.now, stopping_for=400) is None
    clock.sleep(101)
    assert watchdog.check(heartbeat.slots, clock.now, stopping_for=501) is not None
    for slot in heartbeat.slots:
        slot.set_phase(Phase.STOPPING)
    clock.sleep(STOPPING_SAVE - 1)
    assert watchdog.check(heartbeat.slots, clock.now, stopping_for=3000) is None
    clock.sleep(2)
    assert watchdog.check(heartbeat.slots, clock.now, stopping_for=3000) is not None
