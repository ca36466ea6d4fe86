"""What a checkpoint says beside its tensors may be of any kind: it is then damaged, and the one before it is taken."""

from __future__ import annotations

import copy
import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from train_tasks import Plain, differences, final_state, job, new_run, train

from cluster_ddp.checkpoint.format import digest, encode
from cluster_ddp.checkpoint.memory import MemoryCheckpoint
from cluster_ddp.checkpoint.plan import describe, make_plan
from cluster_ddp.job import ClusterDDPError
from cluster_ddp.run.events import read_events
from cluster_ddp.train.objects.packing import Packer, Unpacker
from cluster_ddp.train.state.stored import check_scalars
from cluster_ddp.train.state.training import State

SECTIONS: dict[str, Any] = {"train": {"steps": 6, "global_batch": 24}, "checkpoint": {"every_steps": 2}}


@pytest.mark.parametrize(
    ("scalar", "value"),
    [
        ("counts", {"skipped": "0"}),
        ("counts", {"skipped": -1}),
        ("counts", {"evaluated_step": 10**300}),
        ("counts", [1]),
        ("scaler", {"scale": "1"}),
        ("task", 3),
        ("optimizer_layouts", {"optimizer.0.weight.exp_avg": {"strides": "12", "device": 0}}),
        ("optimizer_groups", [3]),
        ("optimizer_state", {"0.weight": {"!": "tensor", "of": "no such"}}),
        ("evaluating", 7),
        ("strides", {"model.0.weight": [1]}),
        ("optimizer_attributes", {"self": {"calls": {"!": "tensor", "of": "model.0.weight"}}}),
    ],
)
def test_scalars_of_another_kind_make_a_checkpoint_damaged(scalar: str, value: Any, tmp_path: Path) -> None:
    run = new_run(tmp_path, **SECTIONS)
    calm, _ = train(Plain(), job(**SECTIONS), run)
    path = run.checkpoints / "step-00000006" / "manifest.json"
    body = json.loads(path.read_bytes())
    before = body["scalars"][scalar]
    body["scalars"][scalar] = {**before, **value} if scalar == "counts" and isinstance(value, dict) else value
    path.write_bytes(encode({**body, "digest": digest(body)}))
    resumed, outcome = train(Plain(), job(**SECTIONS), run, attempt=1)
    assert outcome.completed and differences(final_state(calm), final_state(resumed)) == []
    (damaged,) = (event for event in read_events(run) if event["event"] == "checkpoint-damaged")
    assert damaged["step"] == 6 and scalar in damaged["problems"][0]


@pytest.mark.parametrize("value", [np.asfortranarray([[1.0, 2], [3, 4], [5, 6]]), torch.ones(3, 1).expand(3, 2)])
def test_a_value_lies_in_memory_as_before(value: Any) -> None:
    """Sums of it would otherwise have other last bits."""
    tensors = dict[str, torch.Tensor]()
    packed = Packer(tensors).pack([value], "")
    (again,) = Unpacker(torch.device("cpu")).unpack(packed, lambda name: tensors[name].contiguous())
    before, after = (torch.as_tensor(each) for each in (value, again))
    assert after.stride() == before.stride() and torch.equal(before, after)


def fresh(*, stepped: bool = False) -> State:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    state = State(model, optimizer, also=Keeps())
    if stepped:
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
    return state


class Keeps:
    def __init__(self) -> None:
        self.kept: Any = {"a": (1, {2: torch.ones(3)}), "b": [{"x", "y"}, torch.float16]}

    def state_dict(self) -> dict[str, Any]:
        return {"kept": self.kept}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.kept = state.get("kept")


@cache
def stored() -> tuple[Any, dict[str, Any]]:
    tensors, scalars = fresh(stepped=True).collect()
    plan = make_plan(*describe(tensors), (0,))
    return (tensors, plan), json.loads(json.dumps(scalars))


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.sampled_from(["tensor", "dict", "set", "dtype", "of"]),
    lambda below: st.lists(below, max_size=3) | st.dictionaries(st.sampled_from(["!", "of", "a"]), below, max_size=3),
    max_leaves=8,
)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [*([path] if path else []), *(place for key, part in inner for place in places(part, (*path, key)))]


@settings(max_examples=100, derandomize=True)
@given(data=st.data())
def test_any_scalars_are_damaged_or_can_be_loaded(data: st.DataObject) -> None:
    (tensors, plan), scalars = stored()
    scalars = copy.deepcopy(scalars)
    *path, last = data.draw(st.sampled_from(places(scalars)))
    holder = scalars
    for key in path:
        holder = holder[key]
    holder[last] = data.draw(VALUES)
    state = fresh()
    try:
        restored = MemoryCheckpoint(tensors, scalars, plan).restore(state.live(), check_scalars)
    except ValueError:
        return
    try:
        state.load(1, restored.scalars, restored.extra)
    except ClusterDDPError:
        return
    state.collect()


def test_a_checkpoint_without_what_older_versions_did_not_write_is_loaded() -> None:
    (tensors, plan), scalars = stored()
    needed = {name: scalars[name] for name in ("counts", "scaler", "task")}
    state = fresh()
    restored = MemoryCheckpoint(tensors, needed, plan).restore(state.live(), check_scalars)
    state.load(1, restored.scalars, restored.extra)
    now, _ = state.collect()
    assert all(torch.equal(tensors[name], now[name]) for name in tensors)
