"""Finds the object, in the task or the model, whose attribute has a name such as ``task.encoder.count``."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Collection
from multiprocessing.sharedctypes import SynchronizedBase
from typing import Any

from torch import nn

from cluster_ddp.train.objects.attributes import Attributes, last_part
from cluster_ddp.train.objects.comparing import is_same
from cluster_ddp.train.state.unread import is_unread

_NOTHING = object()
_FEW = 100  # of so many attributes at most the source is read


class Holders:
    """What holds the attributes of a task and a model."""

    def __init__(self, task: object, model: object) -> None:
        self._task, self._model = task, model

    def place(self, name: str) -> dict[str, Any] | None:
        """The attributes, of the task, the model or an object in them, in which a number or string was found."""
        with contextlib.suppress(Exception):  # it is an element, in a slot, or of something that answers by itself
            place = _attributes_of(self._holder(name))
            part = place.get(last_part(name), _NOTHING)
            return None if part is _NOTHING or isinstance(part, SynchronizedBase) else place
        return None

    def is_of_extra_state(self, name: str) -> bool:
        """Whether set_extra_state() of a module may have made it, which is not called again."""
        with contextlib.suppress(Exception):  # as for `place`
            holder = self._holder(name)
            return isinstance(holder, nn.Module) and type(holder).set_extra_state is not nn.Module.set_extra_state
        return False

    def is_default(self, name: str, now: Attributes) -> bool:
        """Whether an attribute has the value that its class gives it."""
        if now.is_value(name):
            with contextlib.suppress(Exception):  # as for `place`
                default = inspect.getattr_static(type(self._holder(name)), last_part(name), _NOTHING)
                return is_same(default, now.leaves[name])
        return False

    def unread(self, names: Collection[str], now: Attributes) -> set[str]:
        """The numbers and strings that no step reads as an earlier one left them; empty if there are too many."""
        found = set[str]()
        for name in filter(now.is_value, names if len(names) <= _FEW else ()):
            with contextlib.suppress(Exception):  # as for `place`
                if is_unread(self._holder(name), last_part(name)):
                    found.add(name)
        return found

    def _holder(self, name: str) -> Any:
        """The task, the model, or the object, dict or list in them, that has the attribute or element of this name."""
        first, *path, _ = name.split(".")
        holder = {"task": self._task, "model": self._model}[first]
        for part in path:
            if isinstance(holder, list):
                holder = holder[int(part)]
                continue
            place = _attributes_of(holder)
            holder = place[part] if part in place else place["_modules"][part]
        return holder


def _attributes_of(holder: Any) -> dict[str, Any]:
    return holder if type(holder) is dict else vars(holder)
