from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster_ddp.launch.watchdog import SHORTEST_LEARNED, UNLEARNED, Watchdog
from cluster_ddp.run.board import Board, Phase

SECOND = 1_000_000_000


class Clock:
    """Makes ranks and watchdog live in a time of our own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000 * SECOND
        monkeypatch.setattr("cluster_ddp.run.board.time.monotonic_ns", lambda: self.now)

    def sleep(self, seconds: float) -> None:
        self.now += int(seconds * SECOND)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


@pytest.fixture
def board(tmp_path: Path, clock: Clock) -> Iterator[Board]:
    made = Board.create(tmp_path / "board", slots=2)
    for index, slot in enumerate(made.slots):
        slot.claim(rank=index + 4, pid=100 + index)
        slot.set_phase(Phase.TRAINING)
    yield made
    made.close()


def train(board: Board, watchdog: Watchdog, clock: Clock, steps: int, seconds: float, start: int = 0) -> None:
    for step in range(start, start + steps):
        clock.sleep(seconds)
        for slot in board.slots:
            slot.beat(step)
        assert watchdog.look(board.slots, clock.now) is None


def test_a_set_timeout_is_taken_as_set(board: Board, clock: Clock) -> None:
    watchdog = Watchdog(5)
    train(board, watchdog, clock, 3, 1.0)
    clock.sleep(2)
    board.slots[0].beat(3)
    clock.sleep(4)
    hang = watchdog.look(board.slots, clock.now)
    assert hang is not None
    assert (hang.rank, hang.step, hang.phase, hang.silent) == (5, 2, Phase.TRAINING, 6.0)


def test_a_learned_timeout_is_never_under_a_minute(board: Board, clock: Clock) -> None:
    watchdog = Watchdog("auto")
    train(board, watchdog, clock, 50, 0.01)
    assert watchdog.timeout(Phase.TRAINING) == SHORTEST_LEARNED == 60
    clock.sleep(59)
    assert watchdog.look(board.slots, clock.now) is None
    clock.sleep(2)
    assert watchdog.look(board.slots, clock.now) is not None


def test_slow_steps_and_rare_pauses_make_it_longer(board: Board, clock: Clock) -> None:
    watchdog = Watchdog("auto")
    train(board, watchdog, clock, 30, 10.0)
    assert watchdog.timeout(Phase.TRAINING) == pytest.approx(300)
    clock.sleep(100)  # such as workers that start anew with each epoch
    assert watchdog.look(board.slots, clock.now) is None
    train(board, watchdog, clock, 1, 20.0, start=30)
    assert watchdog.timeout(Phase.TRAINING) == pytest.approx(600)


def test_before_it_has_learned_and_outside_training_it_is_patient(board: Board, clock: Clock) -> None:
    watchdog = Watchdog("auto")
    train(board, watchdog, clock, 3, 0.01)
    assert watchdog.timeout(Phase.TRAINING) == UNLEARNED
    train(board, watchdog, clock, 50, 0.01, start=3)
    for phase in (Phase.EVALUATING, Phase.SAVING):
        for slot in board.slots:
            slot.set_phase(phase)
        clock.sleep(600)
        assert watchdog.look(board.slots, clock.now) is None
        clock.sleep(1300)
        assert watchdog.look(board.slots, clock.now) is not None


def test_ranks_that_start_or_are_done_do_not_hang(board: Board, clock: Clock) -> None:
    watchdog = Watchdog(5)
    board.slots[0].set_phase(Phase.STARTING)
    board.slots[1].set_phase(Phase.DONE)
    clock.sleep(100_000)
    assert watchdog.look(board.slots, clock.now) is None
