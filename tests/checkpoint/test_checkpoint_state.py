"""What goes into a checkpoint comes out of it, bitwise, and only into a model that it fits."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_cases import RUN_ID, Recorder, at_step, checkpointer, equal_bits, restore, same, save, state
from safetensors.torch import load_file
from torch import Tensor, nn

from cluster_ddp.checkpoint.errors import CheckpointError, CheckpointMismatch
from cluster_ddp.checkpoint.folders import (
    remove_leftovers,
    replaced_name,
    temporary_name,
    this_process,
)
from cluster_ddp.checkpoint.plan import TORCH_DTYPES, describe, make_plan
from cluster_ddp.checkpoint.staging import Staging
from cluster_ddp.run.directory import step_name
from cluster_ddp.run.storage import Storage


def odd_state() -> dict[str, Tensor]:
    """One tensor of every dtype, and every awkward form."""
    bits = torch.randint(0, 256, (4, 24), dtype=torch.uint8, generator=torch.Generator().manual_seed(3))
    found = {f"model.dtype.{code}": bits.clone().view(dtype) for code, dtype in TORCH_DTYPES.items() if code != "BOOL"}
    base = torch.randn(6, 8)
    return {
        **found,
        "model.bool": torch.tensor([True, False, True]),
        "model.scalar": torch.tensor(3.5, dtype=torch.float64),
        "model.scalar_int": torch.tensor(-7),
        "model.empty": torch.empty(0, 5),
        "model.empty_half": torch.empty(3, 0, dtype=torch.bfloat16),
        "model.transposed": base.t(),
        "model.strided": torch.arange(40, dtype=torch.float16)[::3],
        "model.expanded": torch.tensor([1.0, 2.0]).expand(3, 2),
        "model.channels_last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "model.nan": torch.tensor([float("nan"), float("inf"), -0.0]),
        "model.naïve “name”": torch.ones(2),
    }


def test_every_dtype_and_form_comes_back_bitwise(tmp_path: Path) -> None:
    saved = odd_state()
    target = checkpointer(tmp_path)
    save(target, 7, saved)
    assert target.finish() and target.last_saved == 7
    live = {name: torch.zeros_like(tensor) for name, tensor in saved.items()}
    restored = checkpointer(tmp_path).restore(live)
    assert restored is not None and restored.step == 7
    assert (restored.manifest.samples, restored.manifest.epoch) == (56, 0)
    assert restored.scalars == {"counts": {}, "scaler": None, "task": {}, "schedule": {"at": 7}}
    assert same(live, saved)


def test_a_shard_is_a_plain_safetensors_file(tmp_path: Path) -> None:
    saved = odd_state()
    target = checkpointer(tmp_path)
    save(target, 7, saved)
    target.finish()
    read = load_file(tmp_path / "step-00000007/shard-0000.safetensors")
    assert read.keys() == saved.keys()
    assert all(equal_bits(read[name], tensor) for name, tensor in saved.items())


def test_the_manifest_has_what_the_contract_says(tmp_path: Path) -> None:
    target = checkpointer(tmp_path)
    save(target, 7, state(1), **{"val/accuracy": 0.5, "val/loss": float("nan")})
    target.finish()
    body = json.loads((tmp_path / "step-00000007/manifest.json").read_text())
    assert body.keys() >= {
        "format", "run_id", "step", "samples", "epoch", "world_size", "created", "job_digest", "versions", "shards",
        "tensors", "scalars", "digest",
    }  # fmt: skip
    assert (body["run_id"], body["step"], body["samples"], body["world_size"]) == (RUN_ID, 7, 56, 1)
    shard = tmp_path / "step-00000007/shard-0000.safetensors"
    assert body["shards"][shard.name]["bytes"] == shard.stat().st_size and body["shards"][shard.name]["xxh3"]
    weight = body["tensors"]["model.layer.weight"]
    assert weight == {"shard": shard.name, "dtype": "F32", "shape": [20, 3]}
    assert body["metrics"] == {"val/accuracy": 0.5}


def test_tied_weights_are_stored_once_and_come_back_tied(tmp_path: Path) -> None:
    weight = torch.randn(50, 50)
    saved = {"model.embedding.weight": weight, "model.head.weight": weight, "model.half": weight[:25]}
    target = checkpointer(tmp_path)
    save(target, 1, saved)
    target.finish()
    manifest = json.loads((tmp_path / "step-00000001/manifest.json").read_text())
    assert manifest["aliases"] == {"model.head.weight": "model.embedding.weight"}
    assert (tmp_path / "step-00000001/shard-0000.safetensors").stat().st_size < 2 * weight.nbytes
    together = torch.zeros(50, 50)
    live = {"model.embedding.weight": together, "model.head.weight": together, "model.half": together[:25]}
    checkpointer(tmp_path).restore(live)
    assert torch.equal(together, weight)
    _, apart = restore(tmp_path, {name: tensor.clone() for name, tensor in saved.items()})
    assert same(apart, saved)


def test_weights_stored_apart_do_not_load_into_tied_ones(tmp_path: Path) -> None:
    target = checkpointer(tmp_path)
    save(target, 1, {"model.a": torch.ones(3), "model.b": torch.zeros(3)})
    target.finish()
    together = torch.zeros(3)
    with pytest.raises(CheckpointMismatch, match=r"model\.a and model.b"):
        checkpointer(tmp_path).restore({"model.a": together, "model.b": together})


def test_optimizer_state_without_a_live_tensor_comes_back_extra(tmp_path: Path) -> None:
    saved = state(3)
    target = checkpointer(tmp_path)
    save(target, 1, saved)
    target.finish()
    restored, _ = restore(tmp_path, {name: t for name, t in saved.items() if not name.startswith("optimizer.")})
    assert restored is not None
    assert same(restored.extra, {name: t for name, t in saved.items() if name.startswith("optimizer.")})


def test_a_changed_model_is_told_and_left_alone(tmp_path: Path) -> None:
    saved = {**state(1), "model.same": torch.ones(2), "model.gone": torch.ones(2), "model.wide": torch.ones(2)}
    target = checkpointer(tmp_path)
    save(target, 1, saved)
    target.finish()
    now: dict[str, Tensor] = {
        "model.same": torch.zeros(2),
        "model.new": torch.zeros(2),
        "model.layer.weight": torch.zeros(21, 3),
        "model.wide": torch.zeros(2, dtype=torch.float64),
        "model.norm.running_mean": torch.zeros(3),
        "model.norm.num_batches_tracked": torch.tensor(0),
        "ema.layer.weight": torch.zeros(20, 3),
    }
    with pytest.raises(CheckpointMismatch) as caught:
        checkpointer(tmp_path).restore(now)
    differs = caught.value.differences
    assert differs.missing == ("model.new",) and differs.unexpected == ("model.gone",)
    assert differs.shape == ("model.layer.weight [20, 3], now [21, 3]",)
    assert differs.dtype == ("model.wide F32, now torch.float64",)
    assert all(name in str(caught.value) for name in ("model.new", "model.gone", "[21, 3]", "torch.float64"))
    assert all(torch.count_nonzero(tensor) == 0 for tensor in now.values()), "touched before it was refused"


def test_no_checkpoint_ever_is_none(tmp_path: Path) -> None:
    assert checkpointer(tmp_path / "checkpoints").restore({"model.a": torch.ones(1)}) is None


def test_save_takes_what_was_there_when_it_was_called(tmp_path: Path) -> None:
    class Slow(Storage):
        def open_write(self, path: Path, mode: int = 0o644) -> int:
            assert changed.wait(10)
            return super().open_write(path, mode)

    changed = threading.Event()
    live = state(1)
    scalars: dict[str, Any] = {"list": [1]}
    target = checkpointer(tmp_path, storage=Slow())
    target.save(step=1, samples=8, epoch=0, tensors=live, scalars=scalars, metrics={})
    target.wait_for_staging()
    for tensor in live.values():
        tensor.zero_()
    scalars["list"].append(2)
    assert target.last_saved is None, "still in flight"
    changed.set()
    assert target.finish()
    restored, loaded = restore(tmp_path, live)
    assert same(loaded, state(1)) and restored is not None and restored.scalars == {"list": [1]}


@pytest.mark.parametrize("when_busy", ["wait", "skip"])
def test_a_second_save_while_the_first_is_written(tmp_path: Path, when_busy: str) -> None:
    class Slow(Storage):
        def fsync(self, fd: int) -> None:
            go_on.wait(0.3)
            super().fsync(fd)

    go_on = threading.Event()
    events = Recorder()
    target = checkpointer(tmp_path, events, Slow(), when_busy=when_busy)
    save(target, 1, state(1))
    save(target, 2, state(2))
    go_on.set()
    assert target.finish()
    save(target, 3, state(3))
    assert target.finish()
    steps = [fields["step"] for fields in events.of("checkpoint")]
    assert steps == ([1, 2, 3] if when_busy == "wait" else [1, 3])
    assert [fields["step"] for fields in events.of("checkpoint-skipped")] == ([] if when_busy == "wait" else [2])
    assert same(at_step(tmp_path, state(0), 1), state(1)), (
        "the second copy went into the buffer that the first was written from"
    )


def test_what_the_loop_reports_beside_the_background_is_reported_once(tmp_path: Path) -> None:
    """Both wrote all that was not reported yet: an event came twice, or the training ended with an IndexError."""
    skipped = threading.Event()

    class Slow(Recorder):
        def __call__(self, event: str, fields: dict[str, Any]) -> bool:
            if threading.current_thread() is not threading.main_thread():
                under_way.set()
                skipped.wait(0.3)
            return super().__call__(event, fields)

    under_way, events = threading.Event(), Slow()
    target = checkpointer(tmp_path, events, when_busy="skip")
    save(target, 1, state(1))
    assert under_way.wait(10)
    save(target, 2, state(2))
    skipped.set()
    assert target.finish()
    assert [name for name, _ in events] == ["checkpoint", "checkpoint-skipped"]


def test_another_state_than_before_gets_a_buffer_of_its_own_size(tmp_path: Path) -> None:
    target = checkpointer(tmp_path, keep_last=5)
    for step, size in ((1, 10), (2, 500), (3, 20), (4, 500)):
        save(target, step, state(step, size))
    assert target.finish()
    for step, size in ((1, 10), (2, 500), (3, 20), (4, 500)):
        assert same(at_step(tmp_path, state(0, size), step), state(step, size))


@pytest.mark.parametrize("change", ["dtype", "tied", "transposed"])
def test_a_tensor_that_changes_its_memory_between_saves_is_planned_again(tmp_path: Path, change: str) -> None:
    """The plan of the save before serves only while nothing has changed that it goes by, in the same tensors too."""
    first, second = nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.randn(4, 4))
    live: dict[str, Tensor] = {"model.a": first, "model.b": second}
    target = checkpointer(tmp_path)
    save(target, 1, live)
    if change == "dtype":
        first.data = torch.randn(4, 4, dtype=torch.float64)
    elif change == "tied":
        first.data = second.data
    else:
        first.data = torch.randn(4, 4).T
    save(target, 2, live)
    target.finish()
    manifest = json.loads((tmp_path / "step-00000002/manifest.json").read_text())
    assert manifest["aliases"] == ({"model.b": "model.a"} if change == "tied" else {})
    stored = load_file(tmp_path / "step-00000002/shard-0000.safetensors")["model.a"]
    assert equal_bits(stored, first.detach().contiguous())


def test_prepared_beforehand(tmp_path: Path) -> None:
    target = checkpointer(tmp_path)
    target.prepare(state(0))
    for step in (1, 2):
        save(target, step, state(step))
        assert target.finish()
    _, live = restore(tmp_path, state(0))
    assert same(live, state(2))


def test_the_memory_for_saving_is_found_once() -> None:
    def address() -> int:
        return torch.frombuffer(staging.shard(), dtype=torch.uint8).data_ptr()

    staging = Staging()
    staging.prepare(make_plan(*describe(state(0)), [0]).layouts[0], pinned=False)
    memory = address()
    for step in (1, 2):
        staging.prepare(make_plan(*describe(state(step)), [0]).layouts[0], pinned=False)
        staging.copy(state(step), frozenset())
        assert address() == memory


def test_a_state_that_no_checkpoint_can_hold(tmp_path: Path) -> None:
    target = checkpointer(tmp_path)
    with pytest.raises(CheckpointError, match=r"model\.z has dtype torch\.complex128"):
        save(target, 1, {"model.z": torch.zeros(2, dtype=torch.complex128)})
    with pytest.raises(CheckpointError, match="'task' cannot be saved"):
        target.save(step=1, samples=0, epoch=0, tensors=state(1), scalars={"task": object()}, metrics={})
    save(target, 2, state(2))
    assert target.finish()


def test_left_overs_of_the_dead_go_and_those_of_the_living_stay(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", "from cluster_ddp.checkpoint.folders import *; print(this_process())"],
        capture_output=True, text=True, check=True, timeout=120,
    )  # fmt: skip
    dead = done.stdout.strip()
    with subprocess.Popen(
        [sys.executable, "-c", "from cluster_ddp.checkpoint.folders import *; print(this_process()); input()"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as other:  # fmt: skip
        assert other.stdout is not None
        living = other.stdout.readline().strip()
        _, pid, namespace, started, _ = this_process().split("~")
        far = "~".join(("far-away", pid, namespace, started, "another-boot"))
        names = {owner: tmp_path / temporary_name(5, owner) for owner in (dead, living, far)}
        for folder in names.values():
            folder.mkdir()
            (folder / "shard-0000.safetensors").write_bytes(b"half")
        checkpointer(tmp_path).restore(state(1))
        assert [names[owner].exists() for owner in (dead, living, far)] == [False, True, True]
        for path in (names[far], names[far] / "shard-0000.safetensors"):
            os.utime(path, (0, 0))
        checkpointer(tmp_path).restore(state(1))
        assert [names[owner].exists() for owner in (living, far)] == [True, False]
        other.communicate("\n", timeout=120)


def test_what_was_set_aside_stays_while_nothing_has_taken_its_place(tmp_path: Path) -> None:
    owner = this_process()
    (tmp_path / replaced_name(20, owner)).mkdir()
    remove_leftovers(Storage(), tmp_path, own=owner)
    assert (tmp_path / replaced_name(20, owner)).exists()
    (tmp_path / step_name(20)).mkdir()
    remove_leftovers(Storage(), tmp_path, own=owner)
    assert [path.name for path in tmp_path.iterdir()] == [step_name(20)]


def test_a_bare_model_and_optimizer_go_on_exactly(tmp_path: Path) -> None:
    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
        return model, torch.optim.AdamW(model.parameters(), lr=0.1)

    def tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
        named = {f"model.{name}": value for name, value in model.state_dict().items()}
        for name, parameter in model.named_parameters():
            for key, value in optimizer.state.get(parameter, {}).items():
                named[f"optimizer.{name}.{key}"] = value
        return named

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, at: int) -> None:
        batch = torch.randn(16, 4, generator=torch.Generator().manual_seed(at))
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()

    one = build()
    target = checkpointer(tmp_path)
    for at in range(6):
        step(*one, at)
        if at == 2:
            save(target, 3, tensors(*one))
    target.finish()
    model, optimizer = build()
    restored = checkpointer(tmp_path).restore(tensors(model, optimizer))
    assert restored is not None
    for name, parameter in model.named_parameters():
        optimizer.state[parameter] = {
            key: restored.extra[f"optimizer.{name}.{key}"] for key in ("step", "exp_avg", "exp_avg_sq")
        }
    for at in range(3, 6):
        step(model, optimizer, at)
    assert same(tensors(model, optimizer), tensors(*one))


def test_what_is_in_flight_is_finished_when_the_program_ends(tmp_path: Path) -> None:
    program = f"""
import time, torch
from pathlib import Path
from checkpoint_cases import *
class Slow(Storage):
    def fsync(self, fd):
        time.sleep(0.5)
        super().fsync(fd)
save(checkpointer(Path({str(tmp_path)!r}), storage=Slow()), 5, state(5))
"""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120, env=env)
    restored, live = restore(tmp_path, state(0))
    assert restored is not None and restored.step == 5 and same(live, state(5))
