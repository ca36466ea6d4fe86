"""Converts an optimizer's state to named tensors and JSON, and back: tensors keep their dtype, strides and device.

`Optimizer.load_state_dict` casts tensors to the dtype of their parameter and does not preserve strides, so the state is
restored here instead. A tensor ``state[parameter][key]`` is saved as ``optimizer.<parameter>.<key>``; everything else
(lists and dicts of tensors, tensors in the groups, state of no parameter) is packed.
"""

from __future__ import annotations

import copy
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from cluster_ddp.checkpoint.plan import Tensors, memory_of
from cluster_ddp.train.errors import TaskError
from cluster_ddp.train.objects.attributes import Attributes
from cluster_ddp.train.objects.comparing import difference
from cluster_ddp.train.objects.held import NOT_STATE_OF_OPTIMIZERS, are_hooks, enclosing_methods
from cluster_ddp.train.objects.inner_parts import inner_parts
from cluster_ddp.train.objects.only_written import is_only_written
from cluster_ddp.train.objects.packing import Packer, Unpacker, contiguous_strides
from cluster_ddp.train.objects.plain import PlainAttributes, is_plain, put, unpacked
from cluster_ddp.train.optimizer import parameters_of, refuse_broken, refuse_divided
from cluster_ddp.train.state.groups import FirstGroups
from cluster_ddp.train.state.lookup import Lookup
from cluster_ddp.words import listed

_PREFIX = "optimizer."
_NOT_STATE = frozenset({"params", "param_names", "lr"})  # the learning rate follows from the step
# How updates are computed: what new groups would use, and may have been chosen for the device of the parameters.
_COMPUTING = frozenset({"defaults.fused", "defaults.foreach", "defaults.capturable"})
_CPU = torch.device("cpu")


class OptimizerState:
    """Saves and restores one optimizer.

    Parameters
    ----------
    optimizer
        The optimizer before the first step.
    names
        Names of the model's parameters, by their ids.

    Attributes
    ----------
    apart
        Attributes that are saved separately.

    Raises
    ------
    TaskError
        It holds a parameter that is not in the model, or is affected by a bug in torch.
    """

    apart: frozenset[str] = frozenset()

    def __init__(self, optimizer: Optimizer, names: Mapping[int, str]) -> None:
        self.optimizer, self._names = optimizer, names
        refuse_divided(optimizer)
        refuse_broken(optimizer)
        for group in optimizer.param_groups:
            if not all(id(parameter) in names for parameter in group["params"]):
                raise TaskError(
                    "optimizer() was given a parameter that does not belong to model(): make it a part of the model"
                )
        self._own_methods = (
            type(optimizer).state_dict is not Optimizer.state_dict
            or type(optimizer).load_state_dict is not Optimizer.load_state_dict
            or bool(optimizer.state_dict().keys() - {"state", "param_groups"})
        )
        # A scale that is a number is the optimizer's own: that of a GradScaler is a tensor.
        self._plain = PlainAttributes(optimizer, NOT_STATE_OF_OPTIMIZERS - {"grad_scale"})
        self._seen: Attributes | None = None
        self._unread: set[str] = set()
        self.groups = FirstGroups(optimizer)
        self._first: list[dict[str, tuple[Any, Any]]] = [
            {key: (value, _packed_or_none(value)) for key, value in group.items() if key not in _NOT_STATE}
            for group in optimizer.param_groups
        ]

    def collect(self, tensors: Tensors) -> dict[str, Any]:
        """Add the tensors, sharing memory with the live ones, and return the rest as JSON; raises `TaskError`."""
        layouts: dict[str, dict[str, Any]] = {}
        rest: dict[str, Any] = {}
        if not self._add_plain_states(tensors):
            layouts, rest = self._add_states(tensors)
        packer = Packer(tensors)
        return {
            "optimizer_class": type(self.optimizer).__qualname__,
            "optimizer_layouts": layouts,
            "optimizer_state": {fqn: packer.pack(state, f"{_PREFIX}{fqn}") for fqn, state in rest.items()},
            "optimizer_without": self._without(),
            "optimizer_groups": self._changed_settings(packer),
            "optimizer_shared": packer.pack(self._shared(), f"{_PREFIX}shared"),
            "optimizer_own": packer.pack(self._own(), f"{_PREFIX}own"),
            "optimizer_attributes": self._plain.changed(),
        }

    def _add_plain_states(self, tensors: Tensors) -> bool:
        """Fast path, three times as fast: add the tensors if there is nothing else to save; return False otherwise.

        It applies if all parameters have the same keys, and the tensors of each key have the strides and device of
        their parameters, or no dimensions. Key types are checked in one state only, because all are alike.
        """
        states = self.optimizer.state
        if not states or set(map(type, states.values())) != {dict} or not self._names.keys() >= set(map(id, states)):
            return False
        keys = next(iter(states.values())).keys()
        if not all(type(key) is str and "." not in key for key in keys):
            return False
        if any(state.keys() != keys for state in states.values()):
            return False
        by_key = {key: [state[key] for state in states.values()] for key in keys}
        if any(set(map(type, values)) != {Tensor} for values in by_key.values()):
            return False
        fqns = [self._names[id(parameter)] for parameter in states]
        known = len(tensors)
        for key, values in by_key.items():
            tensors.update(zip([f"{_PREFIX}{fqn}.{key}" for fqn in fqns], values, strict=True))
        looks = tensors.looks()
        device = next(iter(states)).device
        if looks is None or ("step" in keys and device != _CPU):
            return False
        strides = [parameter.stride() for parameter in states]
        for begin in range(known, len(tensors), len(fqns)):
            found = looks["stride"][begin : begin + len(fqns)]
            if found != strides and any(found):
                return False
        return set(looks["device"][known:]) <= {device} and {parameter.device for parameter in states} == {device}

    def _add_states(self, tensors: Tensors) -> tuple[dict[str, dict[str, Any]], dict[str, Any]]:
        """Add the tensors; return the layouts of those with an unusual one, and what has to be packed."""
        layouts: dict[str, dict[str, Any]] = {}
        rest: dict[str, Any] = {}
        for group, parameter in self._parameters():
            state = self.optimizer.state.get(parameter)
            if not state:
                continue
            fqn = self._names[id(parameter)]
            if type(state) is not dict:
                rest[fqn] = state
                continue
            steps_with = _device_of_steps(group, parameter)
            others = {}
            for key, value in state.items():
                if type(value) is not Tensor or type(key) is not str or "." in key:
                    others[key] = value
                    continue
                tensors[f"{_PREFIX}{fqn}.{key}"] = value
                usual = steps_with if key == "step" else parameter.device
                if value.device != usual or value.stride() != _usual_strides(value, parameter):
                    layouts[f"{_PREFIX}{fqn}.{key}"] = {
                        "strides": list(value.stride()) if value.layout is torch.strided else [],
                        "device": value.device.type != "cpu",
                    }
            if others:
                rest[fqn] = others
        return layouts, rest

    def restore(self, tensors: Mapping[str, Tensor], scalars: Mapping[str, Any], unpacker: Unpacker) -> None:
        """Restore what `collect` returned, with the tensors contiguous and on the CPU; raises `TaskError`."""
        now = type(self.optimizer).__qualname__
        if (was := scalars.get("optimizer_class", now)) != now:  # older versions did not write it
            raise TaskError(
                f"the checkpoint contains the state of {was}, which {now} cannot continue with: use {was} as "
                "before, or start a new run"
            )
        self._refuse_others(scalars.get("optimizer_without"))
        left = dict(tensors)

        def unpacked(key: str, default: Any) -> Any:
            return unpacker.unpack(scalars.get(key, default), left.pop)

        rest, settings = unpacked("optimizer_state", {}), unpacked("optimizer_groups", [])
        shared, own = unpacked("optimizer_shared", {}), unpacked("optimizer_own", {})
        by_name: dict[str, Any] = {}
        for full_name, tensor in left.items():
            fqn, _, key = full_name.removeprefix(_PREFIX).rpartition(".")
            by_name.setdefault(fqn, {})[key] = tensor
        for fqn, state in rest.items():
            by_name[fqn] = {**by_name.get(fqn, {}), **state} if type(state) is dict else state
        if any(settings) and len(settings) != len(self.optimizer.param_groups):
            raise TaskError(
                f"the checkpoint is of an optimizer with {len(settings)} parameter groups, and now there are "
                f"{len(self.optimizer.param_groups)}: divide the parameters as before, or start a new run"
            )
        if own or self._own_methods:
            self._load_by_itself(by_name, settings, shared, own)
        self._plain.restore(scalars.get("optimizer_attributes", {}))
        for group, changed in zip(self.optimizer.param_groups, settings, strict=False):
            for key, value in changed.items():
                put(group, key, value)
        uses = Counter(memory_of(tensor) for tensor in tensors.values())
        self._put_states(by_name, scalars.get("optimizer_layouts", {}), unpacker, uses)
        self.optimizer.state.update(shared)

    def put_first_settings(self, other: Optimizer) -> None:
        """Give a copy of the optimizer this one's initial attributes and settings, as a resume has them."""
        self._plain.put_first(other)
        for group, first in zip(other.param_groups, self._first, strict=True):
            for key in group.keys() - first.keys() - _NOT_STATE:
                del group[key]
            for key, (value, packed) in first.items():  # a list as it was: it may have changed in place
                put(group, key, unpacked(packed) if is_plain(value) else copy.deepcopy(value))

    def hidden_differences(self, other: OptimizerState) -> Iterator[tuple[str, str]]:
        """Numbers and tensors that this optimizer keeps elsewhere and that differ in the other, restored one.

        The other is on the CPU.
        """
        other.apart = self.apart
        mine, theirs = self._hidden().leaves, other._hidden().leaves
        for name in sorted((mine.keys() | theirs.keys()) - _COMPUTING):
            how = difference(name, mine, theirs)
            if how is not None and is_only_written(type(self.optimizer), name):
                self._unread.add(name)  # code elsewhere may read it
            elif how is not None:
                yield name, how

    def changed_later(self) -> set[str]:
        """Attributes that have changed since the last call and that no checkpoint contains.

        The first call returns those that `hidden_differences` ignored because the optimizer never reads them.
        """
        was, self._seen = self._seen, self._hidden()
        if was is None:
            return self._unread
        saved = Attributes(self.optimizer.state_dict() if self._own_methods else {})
        names = Lookup(self._seen, saved).unsaved(was.changed(self._seen))
        kept = self._plain.changed()
        return {
            holder
            for name in names
            if (holder := self._seen.holders.get(name) or was.holders[name]) not in kept["self"]
            if holder != "defaults" or re.split("[.,]", name)[1] not in kept["defaults"]
        }

    def hooks(self) -> dict[str, Any]:
        """The hooks that somebody gave it: they may keep something, such as for logging, or step another optimizer."""
        return {name: value for name, value in vars(self.optimizer).items() if are_hooks(value) and value}

    def _hidden(self) -> Attributes:
        """Attributes outside the groups, the hooks and the saved part of `state`, such as an inner optimizer."""
        optimizer, held = self.optimizer, set(map(id, parameters_of(self.optimizer)))
        # By name, because the task may let a parameter start over, with another dict.
        saved = {
            id(state): f"the state of {self._names.get(id(key), key)}"
            for key, state in optimizer.state.items()
            if id(key) in held or not isinstance(key, Tensor)
        }
        attributes = {
            name: value
            for name, value in inner_parts(optimizer)
            if name not in NOT_STATE_OF_OPTIMIZERS | self.apart and not are_hooks(value)
        }
        # Numbers among the saved states cannot be told from others by their ids.
        attributes["state"] = {key: state for key, state in optimizer.state.items() if id(state) not in saved}
        attributes |= {  # settings that no checkpoint can contain, such as a function or an object of the user's
            f"groups.{number}.{key}": value
            for number, first in enumerate(self._first)
            for key, (value, packed) in first.items()
            if value is not None and packed is None
        }
        groups = optimizer.param_groups
        known = {each: str(each) for each in (id(optimizer), id(groups), *map(id, groups), *self._names)} | saved
        found = Attributes(attributes, known, self._names)
        # Separately, because a copy of the optimizer shares the objects in its methods' closures, but not in
        # attributes.
        found.add(Attributes(enclosing_methods(optimizer), known, self._names))
        return found

    def _put_states(
        self,
        by_name: Mapping[str, Any],
        layouts: Mapping[str, Mapping[str, Any]],
        unpacker: Unpacker,
        uses: Mapping[tuple[object, ...] | None, int],  # how many parts of the state share each memory
    ) -> None:
        for group, parameter in self._parameters():
            fqn = self._names[id(parameter)]
            state = by_name.get(fqn)
            if state is None:
                continue
            before = self.optimizer.state.get(parameter)
            if type(state) is not dict:
                self.optimizer.state[parameter] = state
                continue
            placed: dict[Any, Any] = (
                {key: before[key] for key in before if key in state} if type(before) is dict else {}
            )
            for key, value in state.items():
                if type(value) is Tensor and type(key) is str and "." not in key:
                    strides, device = _usual_strides(value, parameter), parameter.device
                    if key == "step":
                        device = _device_of_steps(group, parameter)
                    if layout := layouts.get(f"{_PREFIX}{fqn}.{key}"):
                        strides = tuple(layout["strides"])
                        device = parameter.device if layout["device"] else _CPU
                    alone = uses[memory_of(value)] == 1
                    value = unpacker.laid_out(value, strides, device)
                    if not alone:  # the optimizer's own load_state_dict() may have split it into several
                        placed.pop(key, None)
                put(placed, key, value)
            self.optimizer.state[parameter] = placed

    def _load_by_itself(
        self, by_name: Mapping[str, Any], settings: list[dict[str, Any]], shared: dict[Any, Any], own: dict[str, Any]
    ) -> None:
        """Call the optimizer's own `load_state_dict`; what it casts is corrected afterwards."""
        whole = self.optimizer.state_dict()
        if "state" in whole:
            order = [self._names[id(parameter)] for parameter in parameters_of(self.optimizer)]
            states = {number: by_name[fqn] for number, fqn in enumerate(order) if fqn in by_name}
            whole["state"] = {**states, **shared}
        for group, changed in zip(whole.get("param_groups", []), settings, strict=False):
            group.update(changed)
        self.optimizer.load_state_dict({**whole, **own})

    def _parameters(self) -> Iterator[tuple[dict[str, Any], nn.Parameter]]:
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                yield group, parameter

    def _shared(self) -> dict[Any, Any]:
        """State under keys that are not parameters."""
        if self._names.keys() >= set(map(id, self.optimizer.state)):
            return {}
        for key in self.optimizer.state:
            if isinstance(key, Tensor) and id(key) not in self._names:
                raise TaskError(
                    f"the optimizer keeps state for a tensor of shape {tuple(key.shape)} that is no parameter of "
                    "model(), which a checkpoint cannot name: key it by a parameter or by a string"
                )
        return {key: value for key, value in self.optimizer.state.items() if not isinstance(key, Tensor)}

    def _without(self) -> list[str]:
        """The parameters of the model that the optimizer does not hold."""
        held = set(map(id, parameters_of(self.optimizer)))
        return [name for known, name in self._names.items() if known not in held]

    def _refuse_others(self, without: list[str] | None) -> None:
        if without is None:  # older checkpoints
            return
        now = set(self._without())
        if now != set(without):
            gone, added = sorted(now - set(without)), sorted(set(without) - now)
            changes = [f"without {listed(gone)}"] * bool(gone) + [f"with {listed(added)}"] * bool(added)
            raise TaskError(
                f"the optimizer is {' and '.join(changes)} now, unlike when the checkpoint was saved: give it the same "
                "parameters as before (with requires_grad=False those that are not to be trained), or start a new run"
            )

    def _own(self) -> dict[str, Any]:
        """Additional entries of the optimizer's own `state_dict`."""
        whole = self.optimizer.state_dict() if self._own_methods else {}
        return {key: value for key, value in whole.items() if key not in ("state", "param_groups")}

    def _changed_settings(self, packer: Packer) -> list[dict[str, Any]]:
        """The settings of each group that have changed since the start; the others are set by the job file."""
        self.groups.check()
        changed = []
        for number, (group, first) in enumerate(zip(self.optimizer.param_groups, self._first, strict=True)):
            found = {}
            for key, value in group.items():
                before, packed_before = first.get(key, (None, None))
                if key in _NOT_STATE or (value is before and (packed_before is None or not _can_change(value))):
                    continue
                known = len(packer.tensors)
                packed = packer.pack(value, f"{_PREFIX}groups.{number}.{key}")
                if key not in first or len(packer.tensors) > known or packed != packed_before:
                    found[key] = packed
            changed.append(found)
        return changed


def _packed_or_none(value: Any) -> Any:
    try:
        return Packer({}).pack(value, "")
    except TaskError:
        return None  # such as a function: it may stay, but not change


def _can_change(value: Any) -> bool:
    return not (value is None or isinstance(value, (bool, int, float, str)))


def _device_of_steps(group: Mapping[str, Any], parameter: Tensor) -> torch.device:
    """The device on which torch's optimizers keep a parameter's step count."""
    return parameter.device if group.get("fused") or group.get("capturable") else _CPU


def _usual_strides(value: Tensor, parameter: Tensor) -> tuple[int, ...]:
    return parameter.stride() if value.shape == parameter.shape else contiguous_strides(value.shape)
