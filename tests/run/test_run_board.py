from __future__ import annotations

import os
import subprocess
import sys
import timeit
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster_ddp.run.board import Board, Phase

RANK = """
import sys
from cluster_ddp.run.board import Board, Phase
board = Board.open(sys.argv[1])
slot = board.slots[1]
slot.claim(rank=5)
slot.set_phase(Phase.TRAINING)
step = 0
print("ready", flush=True)
while not board.stop_level:
    step += 1
    slot.beat(step)
slot.set_phase(Phase.STOPPING)
print(step, board.stop_level, board.stop_reason, flush=True)
"""


@pytest.fixture
def board() -> Iterator[Board]:
    made = Board.create(slots=2)
    yield made
    made.close()
    made.unlink()


def test_a_rank_posts_its_steps_and_sees_the_stop_request(board: Board) -> None:
    assert [slot.pid for slot in board.slots] == [0, 0]
    assert [slot.rank for slot in board.slots] == [-1, -1]
    with subprocess.Popen([sys.executable, "-c", RANK, str(board.path)], stdout=subprocess.PIPE, text=True) as rank:
        assert rank.stdout is not None
        assert rank.stdout.readline() == "ready\n"
        slot = board.slots[1]
        assert (slot.pid, slot.rank, slot.phase) == (rank.pid, 5, Phase.TRAINING)
        while slot.step < 1000:
            assert rank.poll() is None
        before = slot.beat_ns
        board.post_stop(1, "preemption")
        steps, level, reason = rank.stdout.readline().split()
        assert rank.wait(timeout=30) == 0
    assert (level, reason) == ("1", "preemption")
    assert slot.step == int(steps)
    assert slot.beat_ns > before
    assert slot.phase is Phase.STOPPING
    assert board.slots[0].pid == 0


def test_a_stop_request_never_softens(board: Board) -> None:
    assert (board.stop_level, board.stop_reason, board.stop_time) == (0, None, 0)
    board.post_stop(2, "time-limit")
    first = board.stop_time
    board.post_stop(1, "person")
    assert (board.stop_level, board.stop_reason, board.stop_time) == (2, "person", first)


def test_a_rank_that_is_started_again_claims_its_slot_anew(board: Board) -> None:
    slot = board.slots[0]
    slot.claim(rank=2, pid=11)
    slot.beat(70)
    slot.claim(rank=3, pid=12)
    assert (slot.pid, slot.rank, slot.step, slot.phase) == (12, 3, -1, Phase.STARTING)


def test_only_the_owner_can_read_it_and_nothing_stays(tmp_path: Path) -> None:
    board = Board.create(tmp_path / "board", slots=1)
    assert board.path.stat().st_mode & 0o777 == 0o600
    with pytest.raises(FileExistsError):
        Board.create(tmp_path / "board", slots=1)
    other = Board.open(board.path)
    board.unlink()
    board.unlink()
    other.slots[0].beat(3)
    assert board.slots[0].step == 3  # who has it open keeps it
    other.close()
    board.close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("content", [b"x", b"x" * 128, bytes(128), b"x" * 127])
def test_what_is_no_board_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "board"
    path.write_bytes(content)
    with pytest.raises(ValueError, match="not a board"):
        Board.open(path)


def test_a_board_cut_short_is_refused(board: Board) -> None:
    os.truncate(board.path, 128)
    with pytest.raises(ValueError, match="not a board"):
        Board.open(board.path)
    os.truncate(board.path, 192)


def test_reading_the_stop_level_costs_less_than_a_microsecond(board: Board) -> None:
    count = 20_000
    read = min(timeit.repeat("board.stop_level", globals={"board": board}, number=count, repeat=7)) / count
    beat = min(timeit.repeat("slot.beat(9)", globals={"slot": board.slots[0]}, number=count, repeat=7)) / count
    print(f"stop_level {read * 1e9:.0f} ns, beat {beat * 1e9:.0f} ns")
    assert read < 1e-6
    assert beat < 1e-6
