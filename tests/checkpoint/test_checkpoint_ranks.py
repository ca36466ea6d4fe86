"""Saving and restoring with several ranks: real processes, a real process group."""

from __future__ import annotations

import json
import os
import socket
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_cases import restore, same, state
from train_ranks import start_program

from cluster_ddp.launch.ports import free_port

PROGRAM = Path(__file__).with_name("rank_program.py")
LIMIT = 120  # seconds


def run(folder: Path, ranks: int, *scenarios: str) -> list[dict[str, Any]]:
    """What each rank saw, by scenario; nothing of one that died."""
    environment = {
        **os.environ,
        "WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "OMP_NUM_THREADS": "1",
    }
    logs = [folder / f"log-{'-'.join(scenarios)}-{rank}" for rank in range(ranks)]
    processes = [
        start_program(
            {**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)}, log, PROGRAM, str(folder), *scenarios
        )
        for rank, log in enumerate(logs)
    ]
    for process in processes:
        process.join(LIMIT)
        process.kill()
    printed = [log.read_text().splitlines() for log in logs]
    return [json.loads(text[-1]) if text and text[-1].startswith("{") else {} for text in printed]


Ran = tuple[Path, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    folder = tmp_path_factory.mktemp("three")
    return folder, run(folder, 3, "writing", "busy", "damage")


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    folder = tmp_path_factory.mktemp("two")
    return folder, run(folder, 2, "failing", "unlike", "storeless")


def of(seen: list[Any], event: str) -> list[dict[str, Any]]:
    return [fields for name, fields in seen if name == event]


def test_who_writes(three: Ran) -> None:
    """Three ranks, two on the first node: all have the same state afterwards, and one process alone too."""
    base, seen = three[0] / "writing", [found["writing"] for found in three[1]]
    assert seen == [{"all": [True, 1, True], "node": [True, 2, True], "one": [True, 3, True]}] * 3
    for step, (which, writers) in enumerate({"all": (0, 1, 2), "node": (0, 2), "one": (0,)}.items(), start=1):
        folder = base / which / f"step-{step:08d}"
        shards = sorted(path.name for path in folder.glob("shard-*"))
        assert shards == [f"shard-{rank:04d}.safetensors" for rank in writers]
        sizes = [(folder / name).stat().st_size for name in shards]
        assert max(sizes) < 2 * min(sizes), "the shares are far from equal"
        wanted = {**state(step, 100), "model.norm.running_mean": torch.zeros(3)}
        wanted.update({f"model.more.{number}": torch.full((50,), float(step)) for number in range(4)})
        restored, live = restore(base / which, wanted)
        assert restored is not None and restored.manifest.world_size == 3 and same(live, wanted)


def test_a_rank_that_cannot_write(two: Ran) -> None:
    base, seen = two[0] / "failing", [found["failing"] for found in two[1]]
    for found in seen:
        assert found["durable"] == [True, False, True] and found["kept"] and found["last"] == 3
    assert seen[1]["events"] == [], "only rank 0 reports"
    (failed,) = of(seen[0]["events"], "checkpoint-failed")
    assert (failed["step"], failed["rank"], failed["file"]) == (2, 1, "shard-0001.safetensors")
    assert failed["error"] == "No space left on device" and failed["host"] == socket.gethostname()
    assert not seen[0]["afterwards"], "nothing can be recorded on its node"
    (failed,) = of(seen[1]["afterwards"], "checkpoint-failed")
    assert (failed["step"], failed["rank"]) == (4, 0)
    why = f"shard-0000.safetensors, rank 0 on {socket.gethostname()}: No space left on device"
    assert [found["why"] for found in seen] == [why, why]
    assert sorted(path.name for path in base.iterdir()) == ["step-00000001", "step-00000003"]


def test_a_slow_rank_holds_nothing_up(three: Ran) -> None:
    seen = [found["busy"] for found in three[1]]
    for found in seen:
        assert found["in_flight"] and found["finished"] and found["last"] == 3
    assert [fields["step"] for fields in of(seen[0]["events"], "checkpoint")] == [1, 3]
    assert [fields["step"] for fields in of(seen[0]["events"], "checkpoint-skipped")] == [2]


def test_all_ranks_fall_back_together(three: Ran) -> None:
    base, seen = three[0] / "damage", [found["damage"] for found in three[1]]
    for found in seen:
        assert found["fell_back"] and "model.new" in found["refused"]
        assert "no intact checkpoint is left" in found["failure"]
    told = {fields["step"]: fields["problems"] for fields in of(seen[0]["events"], "checkpoint-damaged")}
    assert told == {
        3: ["shard-0002.safetensors: missing"],
        2: ["shard-0001.safetensors: its checksum does not match the manifest"],
        1: ["manifest.json: missing"],
    }
    assert all(path.name.startswith("damaged-step-") for path in base.iterdir())


def test_ranks_that_do_not_belong_together(two: Ran) -> None:
    seen = [found["unlike"] for found in two[1]]
    assert all(found["durable"] == [False, False] for found in seen)
    first, second = of(seen[0]["events"], "checkpoint-failed")
    assert first["rank"] == 1 and "different tensors from rank 0" in first["error"]
    assert second["rank"] == 1 and "is the run directory on shared storage?" in second["error"]


def test_a_rank_that_dies_in_the_middle(tmp_path: Path) -> None:
    """The others end in time; the next attempt finds the checkpoint before, and cleans up."""
    seen = run(tmp_path, 3, "dying")
    assert seen[1] == {} and seen[0]["dying"] == {"finished": False}
    seen = run(tmp_path, 2, "continued")
    assert seen == [{"continued": {"loaded": True, "names": ["step-00000001"]}}] * 2


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="only Linux tells a process's peak of memory")
def test_memory_is_one_copy_of_the_share_and_does_not_grow(tmp_path: Path) -> None:
    """Proof 5."""
    shared = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=shared if shared.is_dir() else tmp_path) as folder:
        seen = run(Path(folder), 2, "memory")
    share = 48 << 10  # KiB
    for found in (rank["memory"] for rank in seen):
        assert found["last"] == 51
        assert share * 0.9 < found["peak"] < share + (12 << 10), "more than one copy of the share"
        assert found["resident"][-1] - found["resident"][1] < 2 << 10, "it grows"


def test_the_last_step_is_saved_although_the_store_is_lost(two: Ran) -> None:
    assert [found["storeless"] for found in two[1]] == [
        {"before": True, "lost": False, "without": True, "why": None, "loads": True}
    ] * 2
