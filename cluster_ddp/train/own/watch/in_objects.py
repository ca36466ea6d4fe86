"""Detects what the program's objects carry from step to step into the loss, in functions that the loop calls."""

from __future__ import annotations

import collections
from collections.abc import Iterator
from typing import Any

import numpy as np
from torch import Tensor

from cluster_ddp.train.data.fingerprint import fingerprint
from cluster_ddp.train.own.values import fingerprint_of, has_values
from cluster_ddp.train.own.watch.flow import Flow
from cluster_ddp.train.own.watch.reported import Reported
from cluster_ddp.train.own.watch.saved import Saved

_NUMBERS = (bool, int, float, np.number)
_FLAGS = (bool, int, float, str)
_LISTS = (list, tuple, collections.deque)
_MAX_PARTS = 1000  # parts of a list or dict that are compared
_MAX_ELEMENTS = 2**24  # of a tensor
_UNKNOWN = object()


def watch_in_objects(saved: Saved, report: Reported) -> Iterator[None]:
    """Warn, after the second step, about attributes that functions called by the loop set, and compute the loss from.

    An example is a trainer with ``loss = self.loss(batch)``, where that method divides by ``self.mean`` and then
    updates it, or a running mean in an object of its own. These count if the source shows that a step reads them before
    it sets them, and both steps have changed them. What the code after the batches sets, such as weights of the classes
    for the next epoch, counts as well, and is told long before it changes.

    Parameters
    ----------
    saved
        What need not be checked.
    report
        Called with the message; what it has reported before is not reported again.
    """
    before = {node: _seen(held.value) for node, (_, held) in Flow().of_loss().items()}
    yield
    flow = Flow()
    kept = [value for value in saved.kept.values.values() if type(value) in (int, float)]
    held_by_saved = saved.ids()
    names = set()
    for node, (name, held) in flow.of_loss().items():
        now = _seen(held.value)
        if id(held.owner) in held_by_saved or any(map(saved.has, held)) or _is_told(name, report):
            continue
        if now is _UNKNOWN and not (node in flow.late and callable(held.value)):  # as a criterion with other weights
            continue
        is_flag = type(now) in _FLAGS and before.get(node, now) == now  # set on a condition that was not met yet
        has_changed = before.get(node, now) != now and not _is_among(now, kept)
        is_sure = is_flag or has_changed or node in flow.shuffled
        if node in flow.late or (node in flow.carried and is_sure):
            names.add(name)
    if names:
        report(
            f"the loss or a learning rate is computed from {', '.join(sorted(names))}, which earlier batches or epochs "
            "set, and which no checkpoint contains: a resume starts with what the program puts there before the loop, "
            "and is not exact. Keep it in kept = run.keep(...), and read and set it there; or give its object "
            "state_dict() and load_state_dict(), and pass it in",
            names,
        )


def _is_told(name: str, report: Reported) -> bool:
    attribute = name.rpartition(".")[2]
    return report.has(name) or report.has_attribute(attribute)


def _is_among(value: Any, numbers: list[float]) -> bool:
    return type(value) in (int, float) and value in numbers


def _seen(value: Any) -> Any:
    """What shows whether a value changes; `_UNKNOWN` for objects, which have attributes of their own."""
    if value is None or isinstance(value, (*_NUMBERS, str)):
        return value
    if isinstance(value, Tensor):
        is_small = has_values(value) and value.numel() <= _MAX_ELEMENTS
        return fingerprint(value.detach()) if is_small else fingerprint_of(value)
    if isinstance(value, np.ndarray):
        return fingerprint(value) if value.size <= _MAX_ELEMENTS else fingerprint_of(value)
    parts = list(value.values()) if isinstance(value, dict) else value
    if not isinstance(parts, _LISTS):
        return _UNKNOWN
    seen = [_seen(part) for part in list(parts)[-_MAX_PARTS:]]
    return (len(parts), tuple(part for part in seen if part is not _UNKNOWN)) if _UNKNOWN not in seen[:1] else _UNKNOWN
