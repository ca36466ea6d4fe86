"""Validates the values that a checkpoint contains besides its tensors, before any of them is used.

Its digest only proves that it is unmodified, not who wrote it: perhaps another version, or a stranger.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

from cluster_ddp.checkpoint.format import StoredTensor
from cluster_ddp.run.reading import as_number, as_whole
from cluster_ddp.train.objects.packing import are_strides, is_packed
from cluster_ddp.train.state.counts import Counts

_Check = Callable[[Any], bool]

_MAY_BE_NONE = ("data_length", "data_fingerprint", "samples_fingerprint", "threads")  # of the counts


def check_scalars(scalars: Mapping[str, Any], tensors: Mapping[str, StoredTensor]) -> None:
    """Raise a `ValueError` naming the first value that is not of the kind that `State.collect` returns."""
    shapes = {name: stored.shape for name, stored in tensors.items()}

    def packed(value: Any) -> bool:
        return is_packed(value, shapes)

    def packed_dict(value: Any) -> bool:
        return isinstance(value, dict) and packed(value)

    needed: dict[str, _Check] = {"counts": _is_counts, "scaler": _is_scaler, "task": packed_dict}
    # Not written by older versions.
    others: dict[str, _Check] = {
        "requires_grad": lambda value: _is_dict_of(value, lambda flag: type(flag) is bool),
        "strides": lambda value: (
            isinstance(value, dict)
            and all(name in shapes and are_strides(strides, shapes[name]) for name, strides in value.items())
        ),
        "evaluating": lambda value: _is_list_of(value, lambda name: type(name) is str),
        "modes_of_task": lambda value: _is_dict_of(value, lambda flag: type(flag) is bool),
        "extra_state": packed_dict,
        "optimizer_class": lambda value: type(value) is str,
        "optimizer_layouts": lambda value: _is_dict_of(value, _is_layout),
        "optimizer_state": packed_dict,
        "optimizer_without": lambda value: _is_list_of(value, lambda name: type(name) is str),
        "optimizer_groups": lambda value: _is_list_of(value, lambda group: type(group) is dict) and packed(value),
        "optimizer_shared": packed_dict,
        "optimizer_own": packed_dict,
        "optimizer_attributes": lambda value: _is_dict_of(
            value, lambda place: type(place) is dict and is_packed(place, {})
        ),
    }
    for name, check in needed.items():
        if name not in scalars:
            raise ValueError(f"it has no {name}")
        if not check(scalars[name]):
            raise ValueError(f"its {name} are not as a save writes them")
    for name in others.keys() & scalars.keys():
        if not others[name](scalars[name]):
            raise ValueError(f"its {name} are not as a save writes them")


def _is_dict_of(value: Any, check: _Check) -> bool:
    return isinstance(value, dict) and all(map(check, value.values()))


def _is_list_of(value: Any, check: _Check) -> bool:
    return isinstance(value, list) and all(map(check, value))


def _is_whole(value: Any) -> bool:
    return as_whole(value) is not None


def _is_counts(value: Any) -> bool:
    known = {field.name for field in dataclasses.fields(Counts)}
    if not isinstance(value, dict) or not value.keys() <= known:
        return False
    rest = dict(value)
    places = rest.pop("stream_places", None)
    if places is not None and not _is_list_of(places, lambda place: _is_list_of(place, _is_whole) and len(place) == 2):
        return False
    may_be_none = [rest.pop(name, None) for name in _MAY_BE_NONE]
    if rest.get("evaluated_step") == -1:
        del rest["evaluated_step"]
    return all(map(_is_whole, rest.values())) and all(number is None or _is_whole(number) for number in may_be_none)


def _is_scaler(value: Any) -> bool:
    if value is None or value == {}:
        return True
    scale = as_number(value.get("scale")) if isinstance(value, dict) else None
    return scale is not None and scale > 0 and math.isfinite(scale) and _is_whole(value.get("_growth_tracker"))


def _is_layout(value: Any) -> bool:
    return (
        isinstance(value, dict) and _is_list_of(value.get("strides"), _is_whole) and type(value.get("device")) is bool
    )
