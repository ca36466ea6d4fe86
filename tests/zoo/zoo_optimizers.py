"""The zoo's optimizers: each makes one for a model, at a learning rate that moves its small nets."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from torch.optim import (
    ASGD,
    SGD,
    Adadelta,
    Adagrad,
    Adam,
    Adamax,
    AdamW,
    NAdam,
    Optimizer,
    RAdam,
    RMSprop,
    Rprop,
    SparseAdam,
)
from zoo_remembering import Around, Caches, Holds, OnlyWrites, Remembers, RemembersLate

from cluster_ddp.train import Task

MakeOptimizer = Callable[[nn.Module, float], Optimizer]


def trainable(model: nn.Module) -> list[nn.Parameter]:
    """The parameters that an optimizer gets."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def plain(kind: type[Optimizer] | str, **settings: Any) -> MakeOptimizer:
    """One group with all trainable parameters; one that older torch does not have, by its name."""
    return partial(_plain, kind, settings)


def _plain(kind: type[Optimizer] | str, settings: dict[str, Any], model: nn.Module, lr: float) -> Optimizer:
    made_by: Any = getattr(optim, kind, None) if isinstance(kind, str) else kind
    if made_by is None or not settings.keys() <= inspect.signature(made_by).parameters.keys():
        pytest.skip(f"this torch has no such optimizer: {kind} {settings}")
    return made_by(trainable(model), **{"lr": lr, **settings})


def _fused_adagrad(model: nn.Module, lr: float) -> Optimizer:
    parameters = trainable(model)
    return Adagrad(parameters, lr, fused=parameters[0].is_cpu)  # it has no kernel for CUDA


def _two_groups(model: nn.Module, lr: float) -> Optimizer:
    first, *others = trainable(model)
    return Adam([{"params": others}, {"params": [first], "lr": lr / 10, "betas": (0.8, 0.99)}], lr=lr)


def _named(model: nn.Module, lr: float) -> Optimizer:
    try:
        return Adam([(name, weight) for name, weight in model.named_parameters() if weight.requires_grad], lr=lr)
    except TypeError:
        pytest.skip("this torch's optimizers take no names")


def _part(model: nn.Module, lr: float) -> Optimizer:
    """The first parameter gets gradients, but no updates."""
    return SGD(trainable(model)[1:], lr=lr, momentum=0.9)


def _tensor_lr(model: nn.Module, lr: float) -> Optimizer:
    return Adam(trainable(model), lr=torch.tensor(lr), foreach=False)


def _muon(model: nn.Module, lr: float) -> Optimizer:
    if not hasattr(optim, "Muon"):
        pytest.skip("this torch has no Muon")
    return optim.Muon([weight for weight in trainable(model) if weight.ndim == 2], lr=lr)


class CountsForItself(Optimizer):
    """Keeps numbers, not tensors, per parameter, one in the group, and one for all."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr, "updates": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["updates"] += 1
            self.state["steps"] = self.state.get("steps", 0) + 1  # type: ignore[index, call-overload, operator]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                state["count"] = state.get("count", 0) + 1
                parameter -= group["lr"] / (state["count"] + group["updates"]) * parameter.grad / self.state["steps"]  # type: ignore[index, operator]


class Keeps(Optimizer):
    """SGD with momentum whose state is kept as the case says."""

    def __init__(self, parameters: Any, lr: float, kept: str) -> None:
        super().__init__(parameters, {"lr": lr})
        self.kept = kept
        self.extra = 0
        if kept == "tensor in the group":
            self.param_groups[0]["energy"] = torch.zeros(())

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), **({"extra": self.extra} if self.kept == "own extras" else {})}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.extra = state.pop("extra", 0)
        super().load_state_dict(state)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.extra += self.kept in ("own extras", "a number in itself")
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter -= group["lr"] * self._direction(parameter, parameter.grad, group)

    def _direction(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> Tensor:
        state = self.state[parameter]
        if self.kept == "fp32 master":
            master = state.setdefault("master", torch.zeros_like(parameter, dtype=torch.float32))
            return master.mul_(0.9).add_(gradient.float()).to(parameter.dtype)
        if self.kept == "uint8":
            code = state.setdefault("code", torch.zeros_like(parameter, dtype=torch.uint8))
            return gradient + code.copy_((code + gradient.sign().add(1).to(torch.uint8)) % 251).to(gradient.dtype) / 99
        if self.kept == "list of tensors":
            history = state.setdefault("history", [])
            history.append(gradient.clone())
            del history[:-2]
            return sum(history, torch.zeros_like(gradient))
        if self.kept == "one tensor twice":
            momentum = state.setdefault("momentum", torch.zeros_like(parameter))
            return state.setdefault("both", [momentum, momentum])[1].mul_(0.9).add_(gradient)
        if self.kept == "dict of tensors":
            inner = state.setdefault("inner", {"momentum": torch.zeros_like(parameter)})
            return inner["momentum"].mul_(0.9).add_(gradient)
        if self.kept == "key with a dot":
            return state.setdefault("exp.avg", torch.zeros_like(parameter)).mul_(0.9).add_(gradient)
        if self.kept == "global state":
            count = self.state["global"].setdefault("count", torch.zeros(()))  # type: ignore[index]
            return gradient / count.add_(1)
        if self.kept == "tensor in the group":
            return gradient / group["energy"].add_(1)
        if self.kept == "None":  # such as what torch-optimi would compensate 16-bit weights by
            state["compensation"] = None
            return gradient
        return gradient / self.extra


def keeps(kept: str, model: nn.Module, lr: float) -> Optimizer:
    return Keeps(trainable(model), lr, kept)


class WithTensorRate(SGD):
    """Makes a tensor of its rate and needs it to stay one, as the optimizers of torchao do."""

    def __init__(self, parameters: list[nn.Parameter], lr: float) -> None:
        super().__init__(parameters, lr=lr, momentum=0.9)
        self.param_groups[0]["lr"] = torch.tensor(lr)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert isinstance(self.param_groups[0]["lr"], Tensor)
        super().step(closure)


class ClearsMore(SGD):
    """Needs its own zero_grad() after each update, as that of Opacus does, which keeps the gradients of each sample."""

    is_cleared = True

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert self.is_cleared
        super().step(closure)
        self.is_cleared = False

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        self.is_cleared = True


class ChangesGroups(SGD):
    """Moves a parameter to its other group, or out of both, before its second update."""

    def __init__(self, parameters: list[nn.Parameter], lr: float, kept: bool) -> None:
        first, *others = parameters
        super().__init__([{"params": [first], "weight_decay": 0.1}, {"params": others}], lr=lr, momentum=0.9)
        self.kept = kept

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        mine, others = (group["params"] for group in self.param_groups)
        if self.state and mine:
            moved = mine.pop()
            if self.kept:
                others.append(moved)
        super().step(closure)


class ChoosesItsRate(SGD):
    """Has no learning rate."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__(parameters, lr=0.0)
        self.param_groups[0]["lr"] = None


class GroupLater(SGD):
    """Takes its last parameter in after four updates."""

    def __init__(self, parameters: list[nn.Parameter], lr: float) -> None:
        *now, self.later = parameters
        self.updates = 0
        super().__init__(now, lr=lr, momentum=0.9)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.updates += 1
        if self.updates == 2:
            self.add_param_group({"params": [self.later], "lr": 0.05})
        super().step(closure)


def _closes_over(model: nn.Module, lr: float) -> Optimizer:
    steps = [0]

    class Closes(SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            steps[0] += 1
            for parameter in self.param_groups[0]["params"]:
                parameter.grad *= steps[0]
            super().step()

    return Closes(trainable(model), lr=lr)


REMEMBERED = (
    "a generator in itself", "a word in itself", "words by parameters in itself", "a number that comes later",
    "a long list in itself",
)  # fmt: skip
NOT_REMEMBERED = (
    "a tensor that comes later", "an iterator in itself", "a number by the id of a parameter",
    "a very long list in itself",
)  # fmt: skip

KEPT = (
    "fp32 master", "uint8", "list of tensors", "one tensor twice", "dict of tensors", "key with a dot", "global state",
    "tensor in the group", "own extras", "None",
)  # fmt: skip

OPTIMIZERS: dict[str, MakeOptimizer] = {
    "the default": lambda model, lr: Task().optimizer(model, lr),
    "SGD": plain(SGD),
    "SGD momentum": plain(SGD, momentum=0.9),
    "SGD momentum dampening": plain(SGD, momentum=0.9, dampening=0.3),
    "SGD momentum foreach": plain(SGD, momentum=0.9, foreach=True),
    "SGD momentum maximize": plain(SGD, momentum=0.9, maximize=True),
    "SGD nesterov": plain(SGD, momentum=0.9, nesterov=True, weight_decay=0.1),
    "SGD fused": plain(SGD, fused=True),
    "Adam": plain(Adam),
    "Adam foreach": plain(Adam, foreach=True),
    "Adam fused": plain(Adam, fused=True),
    "Adam amsgrad": plain(Adam, amsgrad=True),
    "Adam amsgrad fused": plain(Adam, amsgrad=True, fused=True),
    "Adam maximize": plain(Adam, maximize=True),
    "Adam weight decay, decoupled": plain(Adam, weight_decay=0.1, decoupled_weight_decay=True),
    "Adam, lr a tensor": _tensor_lr,
    "Adam in two groups": _two_groups,
    "Adam with named parameters": _named,
    "AdamW": plain(AdamW),
    "AdamW foreach": plain(AdamW, foreach=True),
    "AdamW fused": plain(AdamW, fused=True),
    "AdamW amsgrad maximize": plain(AdamW, amsgrad=True, maximize=True),
    "Adadelta": plain(Adadelta),
    "Adadelta foreach maximize": plain(Adadelta, foreach=True, maximize=True),
    "Adafactor": plain("Adafactor"),
    "Adafactor foreach": plain("Adafactor", foreach=True),
    "Adamax": plain(Adamax),
    "Adamax foreach": plain(Adamax, foreach=True),
    "ASGD": plain(ASGD, t0=3.0),
    "ASGD foreach": plain(ASGD, t0=3.0, foreach=True),
    "Muon": _muon,
    "NAdam": plain(NAdam),
    "NAdam foreach, decoupled": plain(NAdam, foreach=True, weight_decay=0.1, decoupled_weight_decay=True),
    "RAdam": plain(RAdam),
    "RAdam foreach": plain(RAdam, foreach=True),
    "RMSprop": plain(RMSprop),
    "RMSprop centered momentum": plain(RMSprop, centered=True, momentum=0.9),
    "RMSprop foreach": plain(RMSprop, foreach=True),
    "Rprop": plain(Rprop),
    "Rprop foreach maximize": plain(Rprop, foreach=True, maximize=True),
    "SGD of all but one parameter": _part,
    "numbers instead of tensors": lambda model, lr: CountsForItself(trainable(model), lr),
    "SGD momentum fused": plain(SGD, momentum=0.9, fused=True),
    "SparseAdam": plain(SparseAdam),
    "Adagrad": plain(Adagrad),
    "Adagrad foreach": plain(Adagrad, foreach=True),
    "Adagrad fused": _fused_adagrad,
    "Adagrad from an initial value": plain(Adagrad, initial_accumulator_value=0.5, lr_decay=0.1),
    "a group added later": lambda model, lr: GroupLater(trainable(model), lr),
    "SGD with its own zero_grad()": lambda model, lr: ClearsMore(trainable(model), lr),
    "SGD whose lr stays a tensor": lambda model, lr: WithTensorRate(trainable(model), lr),
    "a parameter moved to another group": lambda model, lr: ChangesGroups(trainable(model), lr, kept=True),
    "a parameter taken out of its group": lambda model, lr: ChangesGroups(trainable(model), lr, kept=False),
    "no learning rate": lambda model, lr: ChoosesItsRate(trainable(model)),
    "a number in itself": lambda model, lr: keeps("a number in itself", model, lr),
    **{
        kept: partial(lambda model, lr, kept: Around(trainable(model), lr, kept), kept=kept)
        for kept in ("an optimizer in itself", "a dict in itself", "state of what it does not hold")
    },
    **{
        kind: partial(lambda model, lr, kind: Remembers(trainable(model), lr, kind), kind=kind)
        for kind in (*REMEMBERED, *NOT_REMEMBERED)
    },
    "a number in itself that it never reads": lambda model, lr: OnlyWrites(trainable(model), lr),
    "a number in itself that changes later": lambda model, lr: RemembersLate(trainable(model), lr),
    "a list that its groups share": lambda model, lr: Caches(trainable(model), lr),
    "a number that its step() has closed over": _closes_over,
    "iterators and NaN in itself, unchanged": lambda model, lr: Holds(trainable(model), lr),
    **{f"state: {kept}": partial(keeps, kept) for kept in KEPT},
}
