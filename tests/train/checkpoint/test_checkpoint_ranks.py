"""Saving and restoring with several ranks: real processes, a real process group."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_cases import restore, same, state

PROGRAM = Path(__file__).with_name("rank_program.py")
LIMIT = 120  # seconds


def run(scenario: str, folder: Path, ranks: int) -> list[dict[str, Any] | None]:
    """What each rank printed; None for one that died."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    paths = [str(Path(__file__).parent), *sys.path]
    processes = [
        subprocess.Popen(
            [sys.executable, str(PROGRAM), scenario, str(folder)],
            env={
                **os.environ,
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(ranks),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "OMP_NUM_THREADS": "1",
                "PYTHONPATH": os.pathsep.join(paths),
            },
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]
    try:
        printed = [process.communicate(timeout=LIMIT)[0].strip() for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return [json.loads(text.splitlines()[-1]) if text else None for text in printed]


def of(seen: list[Any], event: str) -> list[dict[str, Any]]:
    return [fields for name, fields in seen if name == event]


def test_who_writes(tmp_path: Path) -> None:
    """Three ranks, two on the first node: all have the same state afterwards, and one process alone too."""
    seen = run("writing", tmp_path, 3)
    assert seen == [{"all": [True, 1, True], "node": [True, 2, True], "one": [True, 3, True]}] * 3
    for step, (which, writers) in enumerate({"all": (0, 1, 2), "node": (0, 2), "one": (0,)}.items(), start=1):
        folder = tmp_path / which / f"step-{step:08d}"
        shards = sorted(path.name for path in folder.glob("shard-*"))
        assert shards == [f"shard-{rank:04d}.safetensors" for rank in writers]
        sizes = [(folder / name).stat().st_size for name in shards]
        assert max(sizes) < 2 * min(sizes), "the shares are far from equal"
        wanted = {**state(step, 100), "model.norm.running_mean": torch.zeros(3)}
        wanted.update({f"model.more.{number}": torch.full((50,), float(step)) for number in range(4)})
        restored, live = restore(tmp_path / which, wanted)
        assert restored is not None and restored.world_size == 3 and same(live, wanted)


def test_a_rank_that_cannot_write(tmp_path: Path) -> None:
    seen = run("failing", tmp_path, 2)
    for rank, found in enumerate(seen):
        assert found is not None and found["durable"] == [True, False, True], rank
        assert found["kept"] and found["last"] == 3
    assert seen[0] is not None and seen[1] is not None and seen[1]["events"] == []
    (failed,) = of(seen[0]["events"], "checkpoint-failed")
    assert (failed["step"], failed["rank"], failed["file"]) == (2, 1, "shard-0001.safetensors")
    assert failed["error"] == "No space left on device" and failed["host"] == socket.gethostname()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000001", "step-00000003"]


def test_a_slow_rank_holds_nothing_up(tmp_path: Path) -> None:
    seen = run("busy", tmp_path, 3)
    for found in seen:
        assert found is not None and found["finished"] and found["last"] == 3
        assert found["free"] < 1.2 < 1.4 < found["slow"]
    assert seen[0] is not None
    assert [fields["step"] for fields in of(seen[0]["events"], "checkpoint")] == [1, 3]
    assert [fields["step"] for fields in of(seen[0]["events"], "checkpoint-skipped")] == [2]


def test_all_ranks_fall_back_together(tmp_path: Path) -> None:
    seen = run("damage", tmp_path, 3)
    for found in seen:
        assert found is not None and found["fell_back"]
        assert "model.new" in found["refused"] and "no sound checkpoint is left" in found["failure"]
    assert seen[0] is not None
    told = {fields["step"]: fields["problems"] for fields in of(seen[0]["events"], "checkpoint-damaged")}
    assert told == {
        3: ["shard-0002.safetensors: missing"],
        2: ["shard-0001.safetensors: its checksum is not that of the manifest"],
        1: ["manifest.json: missing"],
    }
    assert all(path.name.startswith("damaged-step-") for path in tmp_path.iterdir())


def test_ranks_that_do_not_belong_together(tmp_path: Path) -> None:
    seen = run("unlike", tmp_path, 2)
    assert all(found is not None and found["durable"] == [False, False] for found in seen)
    assert seen[0] is not None
    first, second = of(seen[0]["events"], "checkpoint-failed")
    assert first["rank"] == 1 and "other tensors than rank 0" in first["error"]
    assert second["rank"] == 1 and "is the run directory on shared storage?" in second["error"]


def test_a_rank_that_dies_in_the_middle(tmp_path: Path) -> None:
    seen = run("dying", tmp_path, 3)
    assert seen[1] is None and seen[0] == {"finished": False}
    seen = run("continued", tmp_path, 2)
    assert seen == [{"loaded": True, "names": ["step-00000001"]}] * 2


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="only Linux tells a process's peak of memory")
def test_memory_is_one_copy_of_the_share_and_does_not_grow(tmp_path: Path) -> None:
    shared = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=shared if shared.is_dir() else tmp_path) as folder:
        seen = run("memory", Path(folder), 2)
    share = 48 << 10  # KiB
    for found in seen:
        assert found is not None and found["last"] == 51
        assert share * 0.9 < found["peak"] < share + (12 << 10), "more than one copy of the share"
        assert found["resident"][-1] - found["resident"][1] < 2 << 10, "it grows"
