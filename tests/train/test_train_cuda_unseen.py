"""What would go wrong on a GPU only, where it can be seen without one; `meta` stands for a device beside the CPU."""

from __future__ import annotations

import contextlib
import math
from collections import OrderedDict, UserDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_sequence
from torch.optim import NAdam

from cluster_ddp.checkpoint.plan import describe, make_plan
from cluster_ddp.checkpoint.replicas import sum_of, sum_on_host, tensor_digests
from cluster_ddp.train.data.loader import to_device
from cluster_ddp.train.data.order import MicroBatch
from cluster_ddp.train.metrics.log import copies_for_log
from cluster_ddp.train.objects.packing import Packer, Unpacker, comparable
from cluster_ddp.train.randomness import keep_generators
from cluster_ddp.train.state.selfcheck import check_comes_back
from cluster_ddp.train.state.training import State
from cluster_ddp.train.step import Gradients
from cluster_ddp.train.update import Tally, Update, any_not_finite_on_device


def test_ranks_compare_tensors_of_which_some_are_on_the_cpu() -> None:
    """As the counts of steps of torch's Adam."""
    on_device, on_cpu = torch.empty(3, device="meta"), torch.tensor(1.0)
    assert tensor_digests([on_device, on_cpu, on_device, on_cpu]).shape == (4,)


def made_by_a_resume() -> tuple[State, NAdam]:
    torch.manual_seed(1)
    model = nn.Linear(3, 2)
    optimizer = NAdam(model.parameters())
    return State(model, optimizer), optimizer


def test_a_state_that_is_partly_on_the_cpu_comes_back() -> None:
    """NAdam has one of its numbers on the CPU, which is worth a note for a GPU's parameter, and not for the CPU's."""
    state, optimizer = made_by_a_resume()
    for weight in optimizer.param_groups[0]["params"]:
        weight.grad = torch.ones_like(weight)
    optimizer.step()
    tensors, scalars = state.collect()
    noted = [name for name in tensors if name.endswith(".mu_product")]
    assert len(noted) == 2
    scalars["optimizer_layouts"] = {name: {"strides": [], "device": False} for name in noted}
    check_comes_back(state, 1, (tensors, scalars), make_plan(*describe(tensors), (0,)), lambda: made_by_a_resume()[0])


def test_what_is_kept_is_compared_without_its_device() -> None:
    packed = [
        Packer({}).pack({"recent": [torch.ones(2, 3, device=device).t()], "device": "mine", (1,): 2}, "task")
        for device in ("meta", "cpu")
    ]
    assert packed[0] != packed[1]
    assert comparable(packed[0]) == packed[1]


def test_the_order_of_sets_does_not_count_at_any_depth() -> None:
    def packed(*elements: str) -> Any:
        inner = {"!": "frozenset", "of": list(elements)}
        return {"!": "set", "of": [inner, "c"] if elements[0] == "a" else ["c", inner]}

    assert comparable(packed("a", "b")) == comparable(packed("b", "a"))
    assert comparable(packed("a", "b")) != comparable(packed("a", "d"))


@pytest.mark.parametrize(
    ("last", "bad"), [(1.0, 0.0), (3e38, 0.0), (math.inf, 1.0), (-math.inf, 1.0), (math.nan, 1.0), (None, 0.0)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_empty_parameter_has_finite_gradients(last: float | None, bad: float, dtype: torch.dtype) -> None:
    others = [torch.empty(0, 3, dtype=dtype), torch.full((2,), -3e38, dtype=dtype)]
    found = any_not_finite_on_device([*others, *([] if last is None else [torch.tensor([0.0, last], dtype=dtype)])])
    assert found.item() == bad and found.dtype is torch.float32 and not found.shape


def test_a_loss_that_is_not_finite_spoils_the_smallest_gradient_that_can_show_it() -> None:
    """Of a loss whose backward pass hides it; and the gradients of any other loss keep their bits."""
    table, weight = nn.Embedding(9, 2, sparse=True).weight, nn.Parameter(torch.ones(3))
    small, empty = nn.Parameter(torch.tensor([-0.0, 1.0])), nn.Parameter(torch.ones(0))
    micro = MicroBatch(step=0, epoch=0, number=0, last=True, indices=np.arange(3), samples=3, global_batch=3)
    for parameters, spoilt in (([table, weight, small, empty], small), ([table, empty], table)):
        gradients = Gradients(parameters, None, world_size=1, device=torch.device("cuda"))
        for hidden, is_spoilt in ((0.0, False), (math.inf, True), (math.nan, True)):
            for parameter in (table, weight, small, empty):
                parameter.grad = None
            total = nn.functional.embedding(torch.tensor([1]), table, sparse=True).sum() + weight.sum() + empty.sum()
            gradients.backward(total + (small * torch.tensor([-0.0, 1.0])).sum() + hidden, micro, None)
            gradients.finish()
            for parameter in parameters:
                assert parameter.grad is not None
                assert bool(parameter.grad.to_dense().isnan().any()) == (is_spoilt and parameter is spoilt)
            assert is_spoilt or (small.grad is not None and small.grad.signbit().tolist() == [True, False])


def test_skipped_updates_are_counted_when_the_next_verdict_arrives() -> None:
    tally, counted = Tally(), list[tuple[int, int]]()
    for was_skipped in (0.0, 1.0, 1.0, 0.0, 1.0):
        tally.count_later(torch.tensor(was_skipped))
        counted.append((tally.skipped, tally.in_a_row))
    tally.read()
    tally.read()
    assert [*counted, (tally.skipped, tally.in_a_row)] == [(0, 0), (0, 0), (1, 1), (2, 2), (2, 0), (3, 1)]


def test_the_scale_of_fp16_is_logged_without_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.amp.GradScaler, "get_scale", None)
    scaler, weight = torch.amp.GradScaler("cpu", init_scale=8.0), nn.Parameter(torch.ones(2))
    update = Update(torch.optim.SGD([weight], lr=0.1), [weight], clip_norm=None, scaler=scaler)
    assert copies_for_log(update, torch.device("cpu"))["scale"].read() == [8.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int8, torch.complex64])
def test_a_copy_on_the_host_has_the_sum_of_the_bits_on_the_device(dtype: torch.dtype) -> None:
    for numbers in (torch.randn(5, 1000) * 100, torch.ones(()), torch.ones(0, 3), -torch.ones(70_000)):
        assert sum_on_host(numbers.to(dtype)) == int(sum_of(numbers.to(dtype)))


def test_generators_of_other_gpus_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[int]] = []

    @contextlib.contextmanager
    def fork_rng(devices: list[int]) -> Iterator[None]:
        asked.append(devices)
        yield

    monkeypatch.setattr(torch.random, "fork_rng", fork_rng)
    with keep_generators():
        pass
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    with keep_generators():
        pass
    assert asked == [[], [3]]


def test_gradients_are_divided_by_a_weight_of_their_own_type(monkeypatch: pytest.MonkeyPatch) -> None:
    """By one of another type a GPU would divide them one by one."""
    multiply, types = torch._foreach_mul_, list[torch.dtype]()

    def noted(tensors: list[Tensor], factor: Tensor) -> None:
        types.append(factor.dtype)
        multiply(tensors, factor)

    monkeypatch.setattr(torch, "_foreach_mul_", noted)
    weight = nn.Parameter(torch.ones(4))
    gradients = Gradients([weight], None, world_size=1, device=torch.device("cpu"))
    micro = MicroBatch(step=0, epoch=0, number=0, last=True, indices=np.arange(3), samples=3, global_batch=3)
    gradients.backward(((weight * 3.0).sum(), 7.0), micro, None)
    gradients.finish()
    assert types == [torch.float32]
    assert weight.grad is not None and torch.equal(weight.grad, torch.full((4,), 3.0) * (torch.ones(()) / 7.0))


def test_a_tensor_that_is_in_two_places_is_one_again_on_a_device() -> None:
    packed = Packer({}).pack({"momentum": [torch.ones(3, device="meta")], "both": (torch.ones(3, device="meta"),)}, "")
    stored, unpacker = torch.ones(3), Unpacker(torch.device("meta"))
    state = unpacker.unpack(packed, lambda name: stored.view(3))
    assert state["momentum"][0].is_meta and state["momentum"][0] is state["both"][0]
    assert unpacker.laid_out(stored, (1,), torch.device("meta")) is state["both"][0]


@dataclass(frozen=True)
class Scene:
    """A batch as detection models take it."""

    image: Tensor
    boxes: list[Tensor]
    name: str


class Tokens(UserDict[str, Any]):
    """What a tokenizer gives: a mapping that moves itself, and may be asked for attributes."""

    def to(self, device: torch.device) -> Tokens:
        return Tokens({name: part.to(device) for name, part in self.data.items()})


def test_whatever_holds_the_tensors_of_a_batch_is_moved_and_stays_of_its_kind() -> None:
    meta, packed = torch.device("meta"), pack_sequence([torch.ones(3, 2), torch.ones(1, 2)])
    batch = OrderedDict(
        packed=packed, scene=Scene(torch.ones(2), [torch.ones(3)], "a"), tokens=Tokens(ids=torch.ones(2)), pair=(int, 1)
    )
    moved = to_device(batch, meta)
    assert type(moved) is OrderedDict and moved["pair"] == (int, 1)
    assert moved["packed"].data.is_meta and moved["packed"].batch_sizes.is_cpu  # as recurrent layers need it
    assert moved["scene"].image.is_meta and moved["scene"].boxes[0].is_meta and moved["scene"].name == "a"
    assert type(moved["tokens"]) is Tokens and moved["tokens"]["ids"].is_meta
    assert batch["packed"] is packed and batch["scene"].image.is_cpu
