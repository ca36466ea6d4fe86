"""What would train something else, or fail later, is refused before or in the first steps, with what to do."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import LBFGS, SGD, Optimizer
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler
from train_ranks import run_ranks
from train_tasks import CLASSES, FEATURES, SAMPLES, Plain, job, samples, train

from cluster_ddp.job import JobSpec
from cluster_ddp.run.runs import create_run
from cluster_ddp.train import Task, TaskError
from cluster_ddp.train.errors import DataError


class ByClosure(Plain):
    def optimizer(self, model: nn.Module, lr: float) -> Optimizer:
        return LBFGS(model.parameters(), lr=lr)


class RunsBackward(Plain):
    """Runs the backward pass itself, or keeps what the last step has computed."""

    def __init__(self, keeps: bool) -> None:
        self.keeps, self.kept = keeps, torch.zeros(())

    def eval_data(self) -> None:
        return None

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        loss = super().loss(model, batch)
        if self.keeps:
            self.kept = loss = loss + self.kept
        else:
            loss.backward()
        return loss


def refusal_of_backward(keeps: bool) -> str:
    try:
        train(RunsBackward(keeps), job(train={"steps": 6, "global_batch": 24}))
    except TaskError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("keeps", [False, True])
def test_a_loss_whose_backward_pass_has_been_run_is_refused(keeps: bool) -> None:
    for message in (refusal_of_backward(keeps), *run_ranks(refusal_of_backward, 2, keeps)):
        assert "has already been through a backward pass" in message


class Sharpness(SGD):
    """The SAM family: its step() takes no closure by its signature, and needs one."""

    def first_step(self) -> None:
        pass

    def second_step(self) -> None:
        pass


class Asserts(SGD):
    """Needs the closure that its signature leaves out."""

    def step(self, closure: Any = None) -> Any:
        assert closure is not None
        return super().step(closure)


class Calls(SGD):
    """The same, but it finds out only as it calls it."""

    def step(self, closure: Any = None) -> Any:
        loss = closure()
        super().step()
        return loss


class Mistaken(SGD):
    """Has an error of its own, in a line with a closure."""

    def step(self, closure: Any = None) -> Any:
        return self.change(closure, 1)  # type: ignore[call-arg]

    def change(self, closure: Any) -> None:
        super().step(closure)


class OfSecondOrder(SGD):
    """As AdaHessian and SophiaH of pytorch_optimizer: it takes second derivatives, in some steps only."""

    def step(self, closure: Any = None, hessian: list[Tensor] | None = None) -> None:  # type: ignore[override]
        pass


class SaysSo(SGD):
    """As AdaHessian of timm, which takes them without being given any."""

    is_second_order = True


class Gap(SGD):
    """As GSAM, which computes the loss by what set_closure() was given."""

    def set_closure(self, loss: Any, inputs: Tensor, targets: Tensor) -> None:
        pass


class Divided(SGD):
    """As ZeroRedundancyOptimizer of torch."""

    def consolidate_state_dict(self, to: int = 0) -> None:
        pass


def divided_by_torch(parameters: Any, lr: float) -> Optimizer:
    from torch.distributed.optim import ZeroRedundancyOptimizer  # not above: it imports the compiler and FSDP

    return ZeroRedundancyOptimizer(parameters, SGD, lr=lr)


class Pickles(SGD):
    """As those of heavyball, whose state has a function that is pickled."""

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "schedule": pickle.dumps(len)}


class InBackward(SGD):
    """As LOMO and AdaLOMO, which change weights while the backward pass runs."""

    def fused_backward(self, loss: Tensor, lr: float) -> None:
        pass


class Gathers(SGD):
    """As DistributedMuon and DeMo: each rank updates some of the parameters, and the others ask it for them."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        torch.distributed.all_reduce(self.param_groups[0]["params"][0].detach())


class Around(Optimizer):
    """As the Lookahead of torch_optimizer and the SafeFP16Optimizer of pytorch_optimizer: it is not set up by torch."""

    def __init__(self, parameters: Any, lr: float, has_groups: bool) -> None:
        inner = SGD(parameters, lr=lr)
        if has_groups:
            self.param_groups, self.state, self.defaults = inner.param_groups, inner.state, inner.defaults


class With(Plain):
    def __init__(self, kind: Callable[..., Optimizer]) -> None:
        self.kind = kind

    def optimizer(self, model: nn.Module, lr: float) -> Optimizer:
        return self.kind(model.parameters(), lr=lr)


class Sparse(Plain):
    def model(self) -> nn.Module:
        return nn.ModuleDict({"table": nn.Embedding(5, CLASSES, sparse=True)})

    def optimizer(self, model: nn.Module, lr: float) -> Optimizer:
        return SGD(model.parameters(), lr=lr)

    def loss(self, model: Any, batch: Any) -> Tensor:
        return F.cross_entropy(model["table"](batch[1]), batch[1])


class Half(Plain):
    def model(self) -> nn.Module:
        return super().model().half()


class Normed(Plain):
    def __init__(self, images: bool) -> None:
        self.images = images

    def model(self) -> nn.Module:
        if self.images:
            shaped = nn.Unflatten(1, (3, 2, 2))
            return nn.Sequential(shaped, nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(FEATURES, CLASSES))
        return nn.Sequential(nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.Linear(8, CLASSES))

    def eval_data(self) -> None:
        return None


@pytest.mark.parametrize(
    ("task", "settings", "words"),
    [
        (ByClosure(), {}, "LBFGS, whose step() needs a closure"),
        (With(Sharpness), {}, "Sharpness, whose step() needs a closure"),
        (With(Gap), {}, "Gap, whose step() needs a closure"),
        (With(Asserts), {}, "Asserts, whose step() needs a closure"),
        (With(Calls), {}, "Calls, whose step() needs a closure"),
        (With(Divided), {}, "Divided, which divides its state among the ranks"),
        (With(SaysSo), {}, "SaysSo, whose step() needs second derivatives"),
        (With(OfSecondOrder), {}, "OfSecondOrder, whose step() needs second derivatives"),
        (With(partial(SGD, differentiable=True)), {}, "SGD with differentiable=True"),
        (With(Pickles), {}, "optimizer.own.schedule is a bytes object"),
        (With(InBackward), {}, "InBackward, which changes weights while its fused_backward() runs"),
        (With(Gathers), {}, "a single rank has no process group"),
        (With(Gathers), {"precision": "fp16"}, "a single rank has no process group"),
        (With(divided_by_torch), {}, "a single rank has no process group"),
        (With(partial(Around, has_groups=True)), {}, "Around, which this torch cannot save"),
        (With(partial(Around, has_groups=False)), {}, "Around, which this torch cannot save"),
        (Sparse(), {"clip_norm": 1.0}, "train.clip_norm: torch cannot limit the norm of sparse gradients"),
        (Half(), {"precision": "fp16"}, "model() gives parameters in fp16"),
        (Normed(images=False), {"global_batch": 49, "drop_last": False}, "leaves 1 sample for the last batch"),
    ],
)
def test_what_cannot_be_trained_is_refused_before_the_first_update(
    task: Task, settings: dict[str, Any], words: str
) -> None:
    with pytest.raises(TaskError) as raised:
        train(task, job(train={"steps": 6, "global_batch": 24, **settings}))
    assert words in str(raised.value)


def test_an_error_of_the_optimizer_itself_keeps_its_words() -> None:
    with pytest.raises(TypeError, match="takes 2 positional arguments but 3 were given"):
        train(With(Mistaken), job(train={"steps": 6, "global_batch": 24}))


class OfLoaders(Plain):
    """As in a custom loop: DataLoaders in the place of data sets."""

    def __init__(self, method: str) -> None:
        self.method = method

    def train_data(self) -> Any:
        data = TensorDataset(*samples())
        sampler = WeightedRandomSampler(torch.ones(SAMPLES), SAMPLES)
        return DataLoader(data, batch_size=4, sampler=sampler) if self.method == "train_data()" else data

    def eval_data(self) -> Any:
        data = TensorDataset(*samples())
        return DataLoader(data, batch_size=4) if self.method == "eval_data()" else data


@pytest.mark.parametrize("method", ["train_data()", "eval_data()"])
def test_a_loader_in_the_place_of_a_data_set_is_refused(method: str) -> None:
    with pytest.raises(DataError) as raised:
        train(OfLoaders(method), job(train={"steps": 6, "global_batch": 24}))
    assert f"{method} returned a DataLoader; return its data set" in str(raised.value)


def test_a_batchnorm_that_has_enough_values_of_one_sample_is_trained() -> None:
    _, outcome = train(Normed(images=True), job(train={"steps": 6, "global_batch": 49, "drop_last": False}))
    assert outcome.completed


def test_a_run_that_is_resumed_before_that_last_batch_goes_on(tmp_path: Path) -> None:
    """The first forward pass of its attempt is the one of a single sample."""
    spec = job(train={"steps": 6, "global_batch": 49, "drop_last": False})
    run = create_run(spec, runs_dir=tmp_path, via="local", script=None)
    train(Normed(images=True), spec, run, stop_at=SAMPLES // 49)
    resumed, outcome = train(Normed(images=True), spec, run, attempt=1)
    assert outcome.completed and resumed.step == 6


def left_with_one() -> str:
    try:
        train(Normed(images=False), job(train={"steps": 6, "global_batch": 48, "drop_last": False}))
    except TaskError as error:
        return str(error)
    return ""


def test_a_rank_without_samples_computes_on_one_too() -> None:
    for message in run_ranks(left_with_one, 3):
        assert "train.drop_last: false leaves 2 samples" in message


def test_compiled_blocks_are_not_computed_again() -> None:
    with pytest.raises(ValidationError, match=r"train.compile: true, which cannot trace"):
        JobSpec.model_validate({"name": "t", "task": "t:T", "train": {"compile": True, "grad_checkpointing": True}})


class OfAnother(Plain):
    """Trains another model than it has returned, or its own by optimizers that work in the backward pass."""

    def __init__(self, *, in_backward: bool) -> None:
        self.in_backward = in_backward
        self.optimizers: dict[nn.Parameter, SGD] = {}

    def eval_data(self) -> None:
        return None

    def model(self) -> nn.Module:
        made = super().model()
        self.other = made if self.in_backward else copy.deepcopy(made)
        if self.in_backward:
            for weight in made.parameters():
                self.optimizers[weight] = SGD([weight], lr=0.01, fused=True)
                weight.register_post_accumulate_grad_hook(self.update)
        return made

    def update(self, weight: nn.Parameter) -> None:
        self.optimizers[weight].step()
        weight.grad = None

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return super().loss(self.other, batch)


class Critical(Plain):
    """Trains a critic by itself in four of five steps, and returns no loss of the model in these."""

    def __init__(self) -> None:
        self.steps, self.critic = 0, nn.Linear(CLASSES, 1)
        self.of_critic = SGD(self.critic.parameters(), lr=0.1)

    def eval_data(self) -> None:
        return None

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        self.steps += 1
        made = model(batch[0])
        if self.steps % 5 == 0:
            return self.critic(made).square().mean()
        self.of_critic.zero_grad()
        self.critic(made.detach()).mean().backward()
        self.of_critic.step()
        return torch.zeros((), requires_grad=True)


def test_a_loss_of_another_model_is_refused() -> None:
    spec = job(train={"steps": 4, "global_batch": 24})
    with pytest.raises(TaskError, match=r"given no parameter of model\(\) a gradient"):
        train(OfAnother(in_backward=False), spec)
    assert train(OfAnother(in_backward=True), spec)[1].completed


def test_steps_that_train_only_what_a_task_updates_itself_are_not_refused() -> None:
    trainer, outcome = train(Critical(), job(train={"steps": 6, "global_batch": 24}))
    assert outcome.completed
    assert list(trainer.optimizer.state)  # by the fifth step
