"""Copies a model together with its optimizer, even if they hold things that cannot be copied."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from cluster_ddp.train.errors import TaskError

COPIES: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # some outlive their use, until the garbage collector runs


def twins(model: nn.Module, optimizer: Optimizer) -> tuple[nn.Module, Optimizer]:
    """Copy a model, without its DDP wrapper, and its optimizer to the CPU.

    What cannot be copied and is neither a parameter, a buffer nor the optimizer's state (a lock, an open file, a
    process group) is shared with the copies.

    Raises
    ------
    TaskError
        They cannot be copied.
    """
    bare = model.module if isinstance(model, DistributedDataParallel) else model
    twin = object.__new__(type(optimizer))  # copy.deepcopy(optimizer) omits attributes of derived classes
    memo: dict[int, Any] = {id(optimizer): twin}
    for tensor in _tensors(bare):
        memo[id(tensor)] = _on_cpu(tensor)
    kept = list(memo)
    try:
        try:
            copied = copy.deepcopy(bare, memo)
            vars(twin).update(copy.deepcopy(vars(optimizer), memo))
        except Exception:
            memo = {key: memo[key] for key in kept}
            for value in _attributes(bare, optimizer):
                if not _can_be_copied(value, memo):
                    memo[id(value)] = value
            copied = copy.deepcopy(bare, memo)
            vars(twin).update(copy.deepcopy(vars(optimizer), memo))
    except Exception as error:
        raise TaskError(
            "model and optimizer are copied once, to check in the first steps that their state is restored, and that "
            f"failed with {type(error).__name__}: {error}\n    Pass in what copy.deepcopy() can copy: an average "
            "without the model that it may also hold (EMA of ema_pytorch: include_online_model=False)"
        ) from error
    if any(
        weight is not memo.get(id(own)) for own, weight in zip(bare.parameters(), copied.parameters(), strict=False)
    ):
        raise TaskError(
            f"the model ({type(bare).__name__}) copies itself with its own __deepcopy__(), as Keras models do, without "
            "its optimizer, so there is no way to check that the state of both is restored: pass in a model that "
            "copy.deepcopy() copies like any other torch.nn.Module"
        )
    if model is not bare:
        memo[id(model)] = copied
    COPIES.update(copied.modules())
    return copied, twin


def _tensors(model: nn.Module) -> Iterator[Tensor]:
    """The plain tensors of a model, including computed (non-leaf) ones, which copy.deepcopy refuses."""
    for module in model.modules():
        for value in (*module._parameters.values(), *module._buffers.values(), *vars(module).values()):
            if type(value) in (Tensor, nn.Parameter):
                yield value


def _on_cpu(tensor: Tensor) -> Tensor:
    values = torch.empty_like(tensor, device="cpu", requires_grad=False)
    values.copy_(tensor.detach())
    return nn.Parameter(values, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else values


def _attributes(model: nn.Module, optimizer: Optimizer) -> Iterator[Any]:
    for module in model.modules():
        yield from (value for name, value in vars(module).items() if name not in _OF_MODULES)
    yield from (value for name, value in vars(optimizer).items() if name not in _OF_OPTIMIZERS)


_OF_MODULES = frozenset({"_parameters", "_buffers", "_modules"})
_OF_OPTIMIZERS = frozenset({"param_groups", "state"})


def _can_be_copied(value: Any, memo: dict[int, Any]) -> bool:
    try:
        copy.deepcopy(value, dict(memo))
    except Exception:
        return False
    return True
