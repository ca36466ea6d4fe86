"""What would leave the ranks of a run with different weights is refused in the first steps, or before a save."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Optimizer
from torch.utils.data import Subset
from train_ranks import run_ranks
from train_tasks import CLASSES, FEATURES, Plain, job, train

from cluster_ddp.checkpoint.errors import RanksDiverged
from cluster_ddp.job import ClusterDDPError
from cluster_ddp.run.runs import create_run
from cluster_ddp.train import TaskError, barrier, broadcast_object, is_main_process


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(FEATURES, 8), nn.ReLU(), nn.Linear(8, CLASSES))
        self.side = nn.Linear(FEATURES, CLASSES)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.layers(inputs)

    def encode(self, inputs: Tensor) -> Tensor:
        return self.layers(inputs)


class Around(Plain):
    """Calls the model by some other way than the wrapper that it is given."""

    def __init__(self, way: str) -> None:
        self.way = way

    def model(self) -> nn.Module:
        self.net = Net()
        if self.way != "partly":
            self.net.side.requires_grad_(False)
        return self.net

    def eval_data(self) -> None:
        return None

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        inputs, labels = batch
        scores = {
            "module.encode": lambda: getattr(model, "module", model).encode(inputs),
            "self.net": lambda: self.net(inputs),
            "encode": lambda: model.encode(inputs),
            "without gradient": lambda: self.net(inputs) + model(inputs).detach(),
            "later": lambda: model(inputs) + self._pulled(model, inputs),
            "partly": lambda: model(inputs) + self.net.side(inputs),
        }[self.way]
        return F.cross_entropy(scores(), labels)

    def _pulled(self, model: nn.Module, inputs: Tensor) -> Tensor:
        with torch.no_grad():
            self.net.layers[0].weight += 1e-3 * inputs.mean()
        return torch.zeros(())


def trained(way: str) -> str:
    try:
        train(Around(way), job(train={"steps": 6, "global_batch": 24}))
    except ClusterDDPError as error:
        return str(error)
    return ""


def all_ways(ways: list[str]) -> list[str]:
    return [trained(way) for way in ways]


def test_a_loss_that_goes_around_the_wrapper_is_refused() -> None:
    ways = ["module.encode", "self.net", "encode", "later"]
    for messages in run_ranks(all_ways, 2, ways):
        for way, message in zip(ways, messages, strict=True):
            assert "loss()" in message and "model(" in message, (way, message)
        assert "weights or optimizer differ" in messages[-1] and "must do the same on every rank" in messages[-1]


def test_a_part_of_the_model_may_be_called_beside_it() -> None:
    """Its gradients are summed with the others when the wrapper was called as well."""
    assert run_ranks(all_ways, 2, ["partly", "without gradient"]) == [["", ""]] * 2


class SometimesWeighed(Plain):
    """Returns a scalar for a batch without labels, which only one rank has, in the third step."""

    calls = 0

    def loss(self, model: nn.Module, batch: Any) -> Any:
        self.calls += 1
        inputs, labels = batch
        scores = model(inputs)
        if self.calls == 3 and not is_main_process():
            return scores.sum() * 0.0
        return F.cross_entropy(scores, labels, reduction="sum"), len(labels)


def weighed() -> str:
    try:
        train(SometimesWeighed(), job(train={"steps": 6, "global_batch": 24}))
    except Exception as error:  # the other rank's connection ends
        return str(error)
    return ""


def test_a_loss_that_is_a_pair_on_some_ranks_only_is_refused() -> None:
    assert "return the pair (sum, 0) for a batch that has nothing to weigh" in run_ranks(weighed, 2)[1]


class Diverging(Plain):
    """From its fifth step on each rank changes a weight in a way of its own."""

    def __init__(self, what: str) -> None:
        self.what, self.calls = what, 0

    def model(self) -> nn.Module:
        model = Net()
        model.teacher = nn.Linear(2, 2).requires_grad_(self.what == "not in the optimizer")
        return model

    def eval_data(self) -> None:
        return None

    def optimizer(self, model: nn.Module, lr: float) -> Optimizer:
        return SGD([weight for name, weight in model.named_parameters() if "teacher" not in name], lr=lr)

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        self.calls += 1
        bare = getattr(model, "module", model)
        changed = bare.layers[0].weight if self.what == "weights" else bare.teacher.weight
        if self.calls >= 5:
            with torch.no_grad():
                changed += 1e-3 * torch.distributed.get_rank()
        return F.cross_entropy(model(batch[0]), batch[1])


def diverged(what: str, folder: Path) -> tuple[str, list[str]]:
    spec = job(
        train={"steps": 9, "global_batch": 24, "find_unused_parameters": True, "ema_decay": 0.9},
        checkpoint={"every_steps": 3, "background": False},
    )
    run = broadcast_object(create_run(spec, runs_dir=folder, via="local", script=None) if is_main_process() else None)
    assert run is not None
    try:
        message = str(train(Diverging(what), spec, run)[1].completed)
    except (RanksDiverged, TaskError) as error:
        message = str(error)
    barrier()
    return message, sorted(path.name for path in run.checkpoints.glob("step-*"))


@pytest.mark.parametrize(
    ("what", "expected"),
    [
        ("weights", "at step 6 ranks 1, 2 of 3 did not hold what rank 0 held: the average and the weights"),
        ("frozen", "after step 6 the state differs between the ranks: model.teacher.weight (different on rank 1 than"),
        (
            "not in the optimizer",
            "after step 6 the state differs between the ranks: model.teacher.weight (different on rank",
        ),
    ],
)
def test_ranks_that_drift_apart_make_no_checkpoint(what: str, expected: str, tmp_path: Path) -> None:
    """Also where only what the optimizer does not hold differs, such as a codebook: rank 0's would be saved."""
    for message, kept in run_ranks(diverged, 3, what, tmp_path):
        assert expected in message
        assert kept == ["step-00000003"]


class Divides(SGD):
    """As DistributedMuon: each rank keeps the momentum of some parameters, and all get the same weights."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        mine = self.param_groups[0]["params"][torch.distributed.get_rank() :: 2]
        for parameter in mine:
            self.state[parameter]["momentum"] = torch.ones(3)


class Dividing(Plain):
    def __init__(self, layers: int) -> None:
        self.layers = layers

    def eval_data(self) -> None:
        return None

    def model(self) -> nn.Module:
        layers = [nn.Linear(FEATURES, FEATURES, bias=False) for _ in range(self.layers - 1)]
        return nn.Sequential(*layers, nn.Linear(FEATURES, CLASSES, bias=False))

    def optimizer(self, model: nn.Module, lr: float) -> Optimizer:
        return Divides(model.parameters(), lr=lr)


def refusal_of_dividing(layers: int) -> str:
    try:
        train(Dividing(layers), job(train={"steps": 6, "global_batch": 24}))
    except TaskError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("layers", [2, 3])  # as many parameters for each rank, or one more for the first
def test_an_optimizer_with_a_state_of_each_rank_is_refused(layers: int) -> None:
    for message in run_ranks(refusal_of_dividing, 2, layers):
        assert "optimizer.0.weight.momentum, optimizer.1.weight.momentum" in message
        assert "the optimizer's state is not the same on every rank" in message


class Switching(Plain):
    """Freezes or unfreezes its first layer in the third step."""

    def __init__(self, frozen_at_first: bool) -> None:
        self.frozen_at_first = frozen_at_first

    def model(self) -> nn.Module:
        model = super().model()
        model[0].requires_grad_(not self.frozen_at_first)
        model.register_buffer("passes", torch.zeros((), dtype=torch.int64))
        return model

    def eval_data(self) -> None:
        return None

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        bare = getattr(model, "module", model)
        if bare.passes == 2:
            bare[0].requires_grad_(self.frozen_at_first)
        bare.passes += 1
        return super().loss(model, batch)


def switched(frozen_at_first: bool, settings: dict[str, Any]) -> str:
    try:
        train(Switching(frozen_at_first), job(train={"steps": 6, "global_batch": 24, **settings}))
    except TaskError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("frozen_at_first", "settings", "words"),
    [
        (True, {"find_unused_parameters": True}, "0.weight was frozen when training began and is trained now"),
        (False, {}, "0.weight was trained when training began and is frozen now"),
        (False, {"find_unused_parameters": True}, ""),
    ],
)
def test_layers_are_frozen_on_several_ranks_only_where_ddp_follows(
    frozen_at_first: bool, settings: dict[str, Any], words: str
) -> None:
    assert switched(frozen_at_first, {}) == ""
    for message in run_ranks(switched, 2, frozen_at_first, settings):
        assert (words in message) if words else not message


class Compresses(Plain):
    """Gives DDP a hook that keeps what it has not sent."""

    is_hooked = False

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        if not self.is_hooked:
            self.is_hooked = True
            assert isinstance(model, DistributedDataParallel)
            self.register(model)
        return super().loss(model, batch)

    def register(self, model: DistributedDataParallel) -> None:
        model.register_comm_hook(PowerSGDState(None, start_powerSGD_iter=2), powerSGD_hook)


def sends_in_16_bits(rest: dict[int, Tensor], bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    whole = bucket.buffer() + rest.get(bucket.index(), 0.0)
    sent = whole.half()
    rest[bucket.index()] = whole - sent.float()
    return fp16_compress_hook(None, bucket)


class CompressesByItself(Compresses):
    def register(self, model: DistributedDataParallel) -> None:
        model.register_comm_hook({}, lambda rest, bucket: sends_in_16_bits(rest, bucket))  # DDP reads annotations


class CompressesApart(Plain):
    """Has another network in DDP, whose hook is one of torch's."""

    def model(self) -> nn.Module:
        self.critic = DistributedDataParallel(nn.Linear(4, 4))
        self.critic.register_comm_hook(PowerSGDState(None, start_powerSGD_iter=2), powerSGD_hook)
        return super().model()

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        self.critic.zero_grad()
        self.critic(torch.ones(4, 4)).square().sum().backward()
        return super().loss(model, batch)


def said_of_hooks(folder: Path) -> list[str]:
    said = []
    for task in (Compresses(), CompressesByItself(), CompressesApart()):
        with contextlib.redirect_stderr(io.StringIO()) as stream:
            spec = job(train={"steps": 2, "global_batch": 12})
            made = create_run(spec, runs_dir=folder, via="local", script=None) if is_main_process() else None
            train(task, spec, broadcast_object(made))
        said.append(stream.getvalue())
    return said


def test_a_communication_hook_with_a_state_is_told(tmp_path: Path) -> None:
    of_torch, of_user, apart = run_ranks(said_of_hooks, 2, tmp_path)[0]
    assert "a communication hook that keeps a state (PowerSGDState)" in of_torch
    assert "the model given to loss().communication hooks, which no checkpoint contains" in of_user
    assert "training changes task.critic, which no checkpoint contains" in apart


class ComparesRanks(Plain):
    """Gathers what all ranks found in a batch of the evaluation, as a metric that is synchronised in each step."""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def eval_data(self) -> Subset[Any]:
        return Subset(self.train_data(), range(self.samples))

    def evaluate(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        found = super().evaluate(model, batch)
        dist.all_reduce(torch.ones(()))
        return found


def evaluate(samples: int) -> str:
    try:
        train(ComparesRanks(samples), job(train={"steps": 1, "global_batch": 24}))
    except (TaskError, RuntimeError) as error:  # the other rank finds that the first has gone
        return str(error)
    return "evaluated"


@pytest.mark.parametrize(("samples", "expected"), [(24, "evaluated"), (36, "not all of them have a batch left")])
def test_ranks_communicate_in_an_evaluation_only_if_all_have_a_batch(samples: int, expected: str) -> None:
    first, _ = run_ranks(evaluate, 2, samples)
    assert expected in first
