from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import timeit
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster_ddp.launch.node import hang_dump
from cluster_ddp.launch.node.heartbeat import STACKS_SIGNALS, HeartbeatFile, stacks_beside
from cluster_ddp.launch.node.ranks import Rank
from cluster_ddp.run.directory import AttemptDirectory
from cluster_ddp.run.phase import Phase

RANK = """
import sys
from cluster_ddp.launch.node.heartbeat import HeartbeatFile, Phase
heartbeat = HeartbeatFile.open(sys.argv[1])
slot = heartbeat.slots[1]
slot.claim(rank=5)
slot.set_phase(Phase.TRAINING)
step = 0
print("ready", flush=True)
while not heartbeat.stop_level:
    step += 1
    slot.beat(step)
slot.set_phase(Phase.STOPPING)
print(step, heartbeat.stop_level, heartbeat.stop_reason, flush=True)
"""


@pytest.fixture
def heartbeat() -> Iterator[HeartbeatFile]:
    made = HeartbeatFile.create(slots=2)
    yield made
    made.close()
    made.unlink()


def test_a_rank_posts_its_steps_and_sees_the_stop_request(heartbeat: HeartbeatFile) -> None:
    assert [slot.pid for slot in heartbeat.slots] == [0, 0]
    assert [slot.rank for slot in heartbeat.slots] == [-1, -1]
    with subprocess.Popen([sys.executable, "-c", RANK, str(heartbeat.path)], stdout=subprocess.PIPE, text=True) as rank:
        assert rank.stdout is not None
        assert rank.stdout.readline() == "ready\n"
        slot = heartbeat.slots[1]
        assert (slot.pid, slot.rank, slot.phase) == (rank.pid, 5, Phase.TRAINING)
        while slot.step < 1000:
            assert rank.poll() is None
        before = slot.beat_ns
        heartbeat.post_stop(1, "preemption")
        steps, level, reason = rank.stdout.readline().split()
        assert rank.wait(timeout=120) == 0
    assert (level, reason) == ("1", "preemption")
    assert slot.step == int(steps)
    assert slot.beat_ns > before
    assert slot.phase is Phase.STOPPING
    assert heartbeat.slots[0].pid == 0


def test_a_stop_request_never_softens(heartbeat: HeartbeatFile) -> None:
    assert (heartbeat.stop_level, heartbeat.stop_reason) == (0, None)
    heartbeat.post_stop(2, "time-limit")
    heartbeat.post_stop(1, "person")
    assert (heartbeat.stop_level, heartbeat.stop_reason) == (2, "person")


def test_a_rank_that_is_started_again_claims_its_slot_again(heartbeat: HeartbeatFile) -> None:
    slot = heartbeat.slots[0]
    slot.claim(rank=2, pid=11)
    slot.beat(70)
    slot.claim(rank=3, pid=12)
    assert (slot.pid, slot.rank, slot.step, slot.phase) == (12, 3, -1, Phase.STARTING)


def test_only_the_owner_can_read_it_and_nothing_stays(tmp_path: Path) -> None:
    heartbeat = HeartbeatFile.create(tmp_path / "heartbeat", slots=1)
    assert heartbeat.path.stat().st_mode & 0o777 == 0o600
    with pytest.raises(FileExistsError):
        HeartbeatFile.create(tmp_path / "heartbeat", slots=1)
    other = HeartbeatFile.open(heartbeat.path)
    heartbeat.unlink()
    heartbeat.unlink()
    other.slots[0].beat(3)
    assert heartbeat.slots[0].step == 3  # who has it open keeps it
    other.close()
    heartbeat.close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("content", [b"x", b"x" * 128, bytes(128), b"x" * 127])
def test_what_is_no_heartbeat_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "heartbeat"
    path.write_bytes(content)
    with pytest.raises(ValueError, match="not a heartbeat file"):
        HeartbeatFile.open(path)


def test_a_heartbeat_cut_short_is_refused(heartbeat: HeartbeatFile) -> None:
    os.truncate(heartbeat.path, 128)
    with pytest.raises(ValueError, match="not a heartbeat file"):
        HeartbeatFile.open(heartbeat.path)
    os.truncate(heartbeat.path, 192)


def test_reading_the_stop_level_costs_less_than_a_microsecond(heartbeat: HeartbeatFile) -> None:
    count, tries = 1_000, 200  # short enough that some are not disturbed by what else the machine does
    names = {"heartbeat": heartbeat, "slot": heartbeat.slots[0]}
    read = min(timeit.repeat("heartbeat.stop_level", globals=names, number=count, repeat=tries)) / count
    beat = min(timeit.repeat("slot.beat(9)", globals=names, number=count, repeat=tries)) / count
    print(f"stop_level {read * 1e9:.0f} ns, beat {beat * 1e9:.0f} ns")
    assert read < 1e-6
    assert beat < 1e-6


def test_the_stacks_of_a_rank_that_its_busy_node_has_not_run_for_seconds_are_kept(
    heartbeat: HeartbeatFile, tmp_path: Path
) -> None:
    file = stacks_beside(heartbeat.path, 0)
    file.touch()
    late = threading.Timer(3, file.write_text, ["File ..."])
    before = signal.signal(STACKS_SIGNALS[0], lambda *_: late.start())
    try:
        rank = Rank(os.getpid(), rank=0, local_rank=0, stdout=None, stderr=None, error_file=None)
        request = hang_dump.request_dump([rank], heartbeat.path)
        assert hang_dump.collect(request, heartbeat.path, AttemptDirectory(tmp_path)) == ["stacks of rank 0"]
    finally:
        signal.signal(STACKS_SIGNALS[0], before)
        late.join()
    assert (tmp_path / "stacks-rank0.txt").read_text() == "File ..."
