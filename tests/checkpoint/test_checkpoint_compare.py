"""Two checkpoints are compared bit by bit, without what each run has of its own."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import xxhash

from cluster_ddp.checkpoint.compare import compare
from cluster_ddp.checkpoint.errors import CheckpointDamaged
from cluster_ddp.checkpoint.format import Item, Manifest, Shard, StoredTensor, lay_out, shard_name
from cluster_ddp.run.directory import MANIFEST

BITS = {"model.weight": b"\0\0\x80\x3f" * 2, "model.bias": b"\0\0\0\0"}  # 1, 1 and 0


def checkpoint(folder: Path, tensors: dict[str, bytes], scalars: dict[str, Any], *, dtype: str = "F32") -> Path:
    """A checkpoint of step 5 with these tensors, one row each; `model.tied` is another name of the weight."""
    width = {"F32": 4, "I32": 4}[dtype]
    items = [Item(name, dtype, (len(data) // width,)) for name, data in tensors.items()]
    layout = lay_out(items)
    data = layout.head + b"".join(tensors[entry.item.name] for entry in layout.entries)
    made = folder / "step-00000005"
    made.mkdir(parents=True)
    (made / shard_name(0)).write_bytes(data)
    manifest = Manifest(
        run_id=folder.name, step=5, samples=20, epoch=0, world_size=1, created=1.0, job_digest="", versions={},
        shards={shard_name(0): Shard(len(data), xxhash.xxh3_128_hexdigest(data))},
        tensors={item.name: StoredTensor(shard_name(0), item.dtype, item.shape) for item in items},
        scalars=scalars, aliases={"model.tied": "model.weight"}, metrics={"samples_per_second": 1.0},
    )  # fmt: skip
    (made / MANIFEST).write_bytes(manifest.to_bytes())
    return made


def test_runs_with_the_same_bits_and_files_of_their_own_are_alike(tmp_path: Path) -> None:
    scalars = {"steps": [1, 2.5, math.nan, None, True], "task": {"best": "runs/a/best.pt"}}
    one = checkpoint(tmp_path / "a", BITS, scalars)
    other = checkpoint(tmp_path / "b", dict(reversed(BITS.items())), scalars | {"task": {"best": "runs/b/best.pt"}})
    found = compare(one, other)
    assert found.different == ()
    assert (found.tensors, found.values) == (3, 5)


def test_each_tensor_of_other_bits_is_named_by_each_of_its_names(tmp_path: Path) -> None:
    one = checkpoint(tmp_path / "a", BITS, {})
    changed = BITS | {"model.weight": b"\0\0\x80\x3f\x01\0\x80\x3f"}
    assert compare(one, checkpoint(tmp_path / "b", changed, {})).different_tensors == ("model.weight", "model.tied")
    more = BITS | {"ema.bias": b"\0\0\0\0"}
    assert compare(one, checkpoint(tmp_path / "c", more, {})).different_tensors == ("ema.bias",)
    assert "model.bias" in compare(one, checkpoint(tmp_path / "d", BITS, {}, dtype="I32")).different_tensors
    negative = BITS | {"model.bias": b"\0\0\0\x80"}
    assert compare(one, checkpoint(tmp_path / "e", negative, {})).different_tensors == ("model.bias",)


def test_numbers_are_named_by_their_path(tmp_path: Path) -> None:
    one = checkpoint(tmp_path / "a", BITS, {"task": {"kept": [{"best": 0.5}, {"best": 0.5, "seen": [1, 2]}]}})
    other = checkpoint(tmp_path / "b", BITS, {"task": {"kept": [{"best": 0.5}, {"best": 0.25, "seen": [1]}]}})
    assert compare(one, other).different_values == ("task.kept.1.best", "task.kept.1.seen.1")


def test_which_buffers_a_loop_has_seen_to_differ_by_rank_decides_nothing(tmp_path: Path) -> None:
    one = checkpoint(tmp_path / "a", BITS, {"task": {"loop": {"buffers": {"sizes": {}, "sent": [True]}}}})
    other = {"task": {"loop": {"buffers": {"sizes": {"model.mean": 64}, "sent": [False]}}}}
    assert compare(one, checkpoint(tmp_path / "b", BITS, other)).different == ("task.loop.buffers.sent.0",)


def test_a_damaged_checkpoint_is_not_compared(tmp_path: Path) -> None:
    one, other = (checkpoint(tmp_path / name, BITS, {}) for name in "ab")
    shard = other / shard_name(0)
    shard.write_bytes(shard.read_bytes()[:-1] + b"\x01")
    with pytest.raises(CheckpointDamaged, match="checksum"):
        compare(one, other)
