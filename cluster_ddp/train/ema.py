"""The exponential moving average of the weights."""

from __future__ import annotations

import copy
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from cluster_ddp.train.errors import TaskError
from cluster_ddp.train.objects.inner_parts import closed_over
from cluster_ddp.train.randomness import parts_of

EXTRA_STATE = "_extra_state"  # in state_dict(), after the module's name: what its get_extra_state() returned
_LOW = (torch.bfloat16, torch.float16)


class Ema:
    """Keeps ``average = decay * average + (1 - decay) * weights``, starting from the weights after the first update.

    Buffers, including BatchNorm's statistics, are those of the model. The average is used by evaluation and written by
    ``export --ema``. The average of 16-bit weights is kept in fp32: in 16 bits, what an update adds would be rounded
    away.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self._decay = decay
        self._begun: bool | Tensor = False
        self._model = _copy(model)
        self._weights = _averaged(model)  # not detached: the task's code may assign new data to them
        self._held = [weight.detach() for weight in _averaged(self._model)]
        self._modules = list(zip(model.modules(), self._model.modules(), strict=True))
        taken = set(map(id, self._weights))
        self._others = [  # parameters that are not averaged, by where they are registered
            (of_model._parameters, copied._parameters, name)
            for of_model, copied in self._modules
            for name, weight in of_model._parameters.items()
            if id(weight) not in taken
        ]
        self._with_extra_state = [
            pair for pair in self._modules if type(pair[0]).get_extra_state is not nn.Module.get_extra_state
        ]
        self._averages = [held.float() if held.dtype in _LOW else held for held in self._held]
        self._exact = {
            id(parameter): average
            for parameter, average in zip(_averaged(self._model), self._averages, strict=True)
            if average.dtype is not parameter.dtype
        }

    def remark(self) -> str | None:
        """What to tell the user if a function in the copy has closed over a module of the model, which it then uses."""
        own = set(map(id, self._model.modules()))
        others = {id(module) for module, _ in self._modules} - own
        for part in parts_of(self._model):
            if isinstance(part, FunctionType) and not others.isdisjoint(map(id, closed_over(part))):
                return (
                    f"train.ema_decay: {part.__qualname__}, a function in the model, has closed over the model or "
                    "a part of it: an evaluation of the averaged weights uses those of training there, and may change "
                    "its buffers. Make it a method, or use the module that a hook is given"
                )
        return None

    def update(self, was_skipped: bool | Tensor) -> None:
        """Average in the weights after an update, unless it was skipped (see `Update.step`)."""
        if isinstance(was_skipped, bool) and isinstance(self._begun, bool):
            if was_skipped:
                return
            share: float | Tensor = 1.0 - self._decay if self._begun else 1.0
            self._begun = True
        else:
            share = self._share_on_device(was_skipped)
        with torch.no_grad():
            weights = [
                weight.float() if average.dtype is not weight.dtype else weight
                for average, weight in zip(self._averages, self._weights, strict=True)
            ]
            if isinstance(share, Tensor):
                shares = {average.dtype: share.to(average.dtype) for average in self._averages}
                torch._foreach_lerp_(self._averages, weights, [shares[average.dtype] for average in self._averages])
            elif share == 1.0:
                torch._foreach_copy_(self._averages, weights)
            else:
                torch._foreach_lerp_(self._averages, weights, share)

    def model(self) -> nn.Module:
        """A separate model that contains the current average and the buffers."""
        with torch.no_grad():
            for theirs, mine, name in self._others:
                _take_over(mine, name, theirs[name])
            for of_model, copied in self._modules:
                if of_model._buffers:  # a module may replace or register them at any time
                    copied._non_persistent_buffers_set |= of_model._non_persistent_buffers_set
                    for name, buffer in of_model._buffers.items():
                        _take_over(copied._buffers, name, buffer)
            for held, average in zip(self._held, self._averages, strict=True):
                if held.dtype is not average.dtype:
                    held.copy_(average)
        for of_model, copied in self._with_extra_state:
            copied.set_extra_state(copy.deepcopy(of_model.get_extra_state()))
        return self._model

    def tensors(self) -> dict[str, Tensor]:
        """The averaged weights and the buffers, by their names in the model."""
        named = self.model().state_dict(keep_vars=True)
        return {
            name: self._exact.get(id(tensor), tensor).detach()
            for name, tensor in named.items()
            if name.rpartition(".")[2] != EXTRA_STATE
        }

    def restore(self, updates: int) -> None:
        """Set how many updates are in the restored average."""
        self._begun = updates > 0

    def _share_on_device(self, was_skipped: bool | Tensor) -> Tensor:
        device = self._averages[0].device
        out = torch.as_tensor(was_skipped, device=device).reshape(()) != 0
        begun = torch.as_tensor(self._begun, device=device)
        self._begun = begun | ~out
        return torch.where(out, 0.0, torch.where(begun, 1.0 - self._decay, 1.0))


def _copy(model: nn.Module) -> nn.Module:
    try:
        return copy.deepcopy(model)
    except TypeError as error:  # for example because of a lock
        raise TaskError(
            f"train.ema_decay: the model cannot be copied, because copy.deepcopy gives: {error}\n    Keep whatever it "
            "cannot copy out of the model, or remove ema_decay"
        ) from error
    except RuntimeError as error:
        raise TaskError(
            "train.ema_decay: the model cannot be copied, because it keeps a tensor that was computed from its "
            "parameters, as torch.nn.utils.weight_norm and prune do: use torch.nn.utils.parametrizations, or call "
            f"prune.remove, or omit ema_decay ({str(error).partition('.')[0]})"
        ) from error


def _take_over(place: dict[str, Any], name: str, theirs: Tensor | None) -> None:
    mine = place.get(name)
    if theirs is not None and mine is not None and mine.shape == theirs.shape:
        mine.copy_(theirs)
    elif theirs is not mine:
        place[name] = None if theirs is None else theirs.detach().clone()


def _averaged(model: nn.Module) -> list[nn.Parameter]:
    """All parameters but integers and 8-bit floats, which torch can neither average nor train, so they are frozen."""
    weights = [weight for weight in model.parameters() if weight.is_floating_point() or weight.is_complex()]
    return [weight for weight in weights if weight.element_size() > 1]
