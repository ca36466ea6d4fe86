"""What is saved beside the model and its optimizer, such as the state of a task, and whether that is put back."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from typing import Any, Protocol, TypeGuard

import torch
from torch import Tensor

from cluster_ddp.checkpoint.plan import memory_of
from cluster_ddp.train.errors import TaskError
from cluster_ddp.train.objects.comparing import equal_bits
from cluster_ddp.train.objects.contents import contents
from cluster_ddp.train.objects.packing import Packer, Unpacker, comparable, without_strides
from cluster_ddp.train.randomness import parts_of


class Stateful(Protocol):
    """Something with its own state, such as a task."""

    def state_dict(self) -> Mapping[str, Any]:
        """Return the state: tensors and JSON values."""

    def load_state_dict(self, state: dict[str, Any], /) -> Any:
        """Restore what `state_dict` returned."""


class Averages(Protocol):
    """Weights used for evaluation, in addition to those that are trained."""

    def tensors(self) -> dict[str, Tensor]:
        """Return them by their names in the model."""

    def restore(self, updates: int) -> None:
        """Continue from the restored tensors, which contain this many updates."""


def copied(state: Mapping[str, Any]) -> dict[str, Any]:
    """Copy a state: of what was computed, such as hidden states that the next step will detach, only the values."""
    computed = (part for part in parts_of(state) if isinstance(part, Tensor) and not part.is_leaf)
    return copy.deepcopy(dict(state), {id(part): part.detach().clone() for part in computed})


def refuse_not_put_back(also: Stateful, state: Mapping[str, Any]) -> None:
    """Raise a `TaskError` unless something has the state from before the first step, which it has been given.

    What it has besides may belong to an object that the task has filled since, and that a resume finds empty, and where
    its tensors lie in memory, to those into which it is copied.
    """
    first, taken = _as_texts(state), _as_texts(also.state_dict())
    if lost := sorted(key for key, value in first.items() if taken.get(key) != value):
        again = _as_texts(also.state_dict())
        if clocks := [key for key in lost if again.get(key) != taken.get(key)]:
            raise TaskError(
                f"state_dict() of the task returns different values each time it is called: {', '.join(clocks)}\n"
                "    leave out what changes by itself, such as the time of day, or note it in loss(): "
                "self.seconds = self.seconds_before + time.time() - self.start"
            )
        raise TaskError(
            "load_state_dict() of the task (in a script, of what is passed to also=) does not restore what its "
            f"state_dict() returned before the first step: {', '.join(lost)}\n"
            "    let it replace what is there, not add to it: self.seen = state['seen'], or clear() before update()"
        )


def load_into(also: Stateful, state: dict[str, Any], unpacker: Unpacker) -> None:
    """Have something load a state; what it copies into other tensors lies in memory as in the state afterwards."""
    strides = {name: tensor.stride() for name, tensor in _dense_tensors_in(state).items()}
    also.load_state_dict(state)
    wanted = {
        memory_of(tensor): strides[name]
        for name, tensor in _dense_tensors_in(also.state_dict()).items()
        if len(strides.get(name, ())) == tensor.dim() and strides[name] != tensor.stride()
    }
    for part in parts_of(also) if wanted else ():
        if _is_dense(part) and (found := wanted.get(memory_of(part))) is not None:
            part.data = unpacker.laid_out(part.detach(), found, part.device)


def _dense_tensors_in(state: Mapping[str, Any]) -> dict[str, Tensor]:
    tensors = dict[str, Tensor]()
    Packer(tensors).pack(dict(state), "task")
    return {name: tensor for name, tensor in tensors.items() if _is_dense(tensor)}


def _is_dense(part: object) -> TypeGuard[Tensor]:
    return isinstance(part, Tensor) and not part.is_nested and part.layout is torch.strided


def are_alike(state: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two states of a task hold the same, bit by bit."""
    tensors, others = dict[str, Tensor](), dict[str, Tensor]()
    packed, again = Packer(tensors).pack(dict(state), "task"), Packer(others).pack(dict(other), "task")
    is_same = packed == again and tensors.keys() == others.keys()
    return is_same and all(equal_bits(tensor, others[name]) for name, tensor in tensors.items())


def _as_texts(state: Mapping[str, Any]) -> dict[str, str]:
    return {str(key): _as_text(value) for key, value in state.items()}


def _as_text(value: Any) -> str:
    tensors = dict[str, Tensor]()
    packed = without_strides(comparable(Packer(tensors).pack(value, "task")))
    # On the CPU all of them: the state before the first step may be from there, and digests differ between devices.
    there = [(name, tensor.cpu()) for name, tensor in tensors.items()]
    return json.dumps([packed, contents(there)], sort_keys=True)
