"""Detects code around an epoch's batches that changes the data set or its sampler, which no checkpoint contains."""

from __future__ import annotations

import ast
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import torch.utils.data as torch_data
from torch import Tensor

from cluster_ddp.train.data.fingerprint import drawn_to
from cluster_ddp.train.objects.syntax import name_of
from cluster_ddp.train.objects.whose_code import is_ours, is_own_class
from cluster_ddp.train.own.data.order import samplers_in
from cluster_ddp.train.own.program import living
from cluster_ddp.train.own.values import differing, fingerprint_of
from cluster_ddp.train.own.watch.bodies import tree_of_object
from cluster_ddp.train.ranks.distributed import broadcast_object

_DEPTH = 6  # how deep to search data sets in data sets
_NUMBERS = (int, float)
_ARRAYS = (Tensor, np.ndarray)
_LABELS = (*_NUMBERS, *_ARRAYS)
_DIMENSIONS = 2  # of labels and weights; whatever has more may be a cache
_WIDTH = 64  # a longer list is not searched for data sets
# What torch counts in each of its data pipes, and where MosaicML Streaming found room in the shared memory.
_OF_LIBRARIES = {"_valid_iterator_id", "_number_of_samples_yielded", "_shm_prefix_int"}


class ChangedData:
    """Warns, once, if code after the batches changes numbers or labels in the data set, or what the samplers hold.

    The transforms that the data set holds count as parts of it, and switches, such as ``augment = False``, as numbers.

    Labels are tensors and arrays of at most two dimensions; larger ones may be a cache, and so is what the data set
    itself fills, and the switches that it sets, when it is read. It also warns if steps change such labels, for example
    the weights of a sampler.

    In the first epoch it also warns if that code uses another DataLoader that is shuffled by its own generator.

    Unlike code before the batches, this code does not run again on a resume within the next epoch. Objects with
    `set_epoch` are skipped, because they get the epoch before each pass.

    Parameters
    ----------
    data, samplers
        The objects to inspect.
    has_copies
        Whether the workers live as long as the loader, each with the data set as it was in the first epoch.
    warn
        Called with the message.
    """

    def __init__(
        self, data: Any, samplers: list[Any], warn: Callable[[str], None], *, has_copies: bool = False
    ) -> None:
        self._data, self._samplers, self._warn, self._has_copies = data, samplers, warn, has_copies
        self._before: dict[str, Any] = {}
        self._begun: dict[str, Any] = {}
        self._copied: dict[str, Any] | None = None
        self._others: list[Any] | None = None
        self._has_warned = False
        self._has_begun = False

    def begin(self) -> None:
        """Call after the batches of an epoch."""
        if self._others is None:
            self._others = living(torch_data.DataLoader)
        begun, self._begun = self._begun, {}
        if self._has_warned:
            return
        self._before = self._now(_LABELS)
        now = self._now(_ARRAYS) if begun else {}
        if changed := differing(begun, now):
            self._has_warned = True
            self._warn(
                f"steps change {', '.join(changed)}, which no checkpoint contains: a resume is exact only if no sample "
                "depends on it. Collect such values in a tensor that run.keep() keeps; after the batches, copy them to "
                "another one that it keeps, and before the batches set what the samples depend on from that copy"
            )

    def end(self) -> None:
        """Call after the code that follows the batches."""
        before, self._before = self._before, {}
        now = self._now(_LABELS) if before else {}
        self._others = []
        if changed := differing(before, now):
            self._has_warned = True
            self._warn(
                f"the code after the batches of an epoch changes {', '.join(changed)}, which no checkpoint contains: a "
                "resume in the next epoch does not run that code again, and is exact only if no sample depends on it. "
                "Set it before the batches, from the number of the epoch or from what run.keep() keeps"
            )

    def compare(
        self, was: dict[str, Any] | None, at_first: dict[str, Any] | None, *, is_within: bool
    ) -> dict[str, Any]:
        """Call when the batches of an epoch begin, on all ranks; returns rank 0's current values.

        Parameters
        ----------
        was
            The values when the last batches began, before a resume or in this attempt; None if none have begun.
        at_first
            The values when the first batches of the run began.
        is_within
            Whether `was` is of this epoch, which is resumed in the middle. If not, values may have changed since, but
            in the first epoch of a resume they should not be those of the run's first epoch again.
        """
        now: dict[str, Any] = broadcast_object(self._now())
        has_begun, self._has_begun = self._has_begun, True
        again = at_first if at_first is not None and not has_begun else {}
        if self._has_copies:
            self._tell_copies()
        self._begun = {} if self._has_warned else self._now(_ARRAYS)
        if changed := [name for name in differing(was or {}, now) if is_within or again.get(name) == now[name]]:
            which = "this" if is_within else "the previous"
            self._warn(
                f"{', '.join(changed)} is not what it was when the batches of {which} epoch began before this resume, "
                "which is exact only if no sample depends on it: the code before the batches runs again for this "
                "epoch, but not for the earlier ones. Set it there, from the number of the epoch or from what "
                "run.keep() keeps"
            )
        return now

    def _tell_copies(self) -> None:
        now = {
            name: value for part in _data_sets(self._data, _DEPTH) for name, value in _marks_of(part, _NUMBERS).items()
        }
        if self._copied is None:
            self._copied = now
        elif changed := differing(self._copied, now):
            self._has_copies = False
            self._warn(
                f"{', '.join(changed)} has changed since the persistent workers began, which have a copy of the data "
                "set and do not see the change; after a resume, new workers do. Use persistent_workers=False"
            )

    def _now(self, kinds: tuple[type, ...] = _NUMBERS) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for part in _data_sets(self._data, _DEPTH):
            found |= _marks_of(part, kinds)
        for part in self._samplers:
            found |= _marks_of(part, _LABELS)
        for other in self._others or []:
            *_, last = [None, *samplers_in(other.sampler if other.batch_sampler is None else other.batch_sampler)]
            if last in self._samplers:
                continue
            generator = getattr(last, "generator", None)
            passes = getattr(last, "epoch", 0) if hasattr(last, "initial_seed") else 0  # Accelerate's sampler
            name = f"the generator that shuffles another DataLoader (of {type(other.dataset).__name__})"
            drawn = drawn_to(generator) if isinstance(generator, torch.Generator) else 0
            found[name] = (*found.get(name, ()), passes, drawn)
        return found


def _marks_of(part: Any, kinds: tuple[type, ...]) -> dict[str, Any]:
    """The attributes of these types, by name; none if the object has `set_epoch`.

    None of a WebDataset either, which records when it was made; whether its order depends on that shows in its first
    batches.
    """
    if callable(getattr(part, "set_epoch", None)) or type(part).__module__.partition(".")[0] == "webdataset":
        return {}
    filled = _filled_when_read(type(part))  # type: ignore[arg-type]
    values = {
        name: value
        for name, value in _attributes_of(part).items()
        if isinstance(value, kinds)
        and name not in _OF_LIBRARIES
        and not (name in filled and (isinstance(value, (bool, *_ARRAYS)) or _is_transform(part)))
    }
    return {
        f"{type(part).__name__}.{name}": fingerprint_of(value) if isinstance(value, _ARRAYS) else repr(value)
        for name, value in values.items()
        if getattr(value, "ndim", 0) <= _DIMENSIONS
    }


def _attributes_of(part: Any) -> dict[str, Any]:
    """The attributes of an object, with the defaults that its own classes have for them."""
    kinds = [kind for kind in reversed(type(part).__mro__) if is_own_class(kind)]
    defaults = {name: value for kind in kinds for name, value in vars(kind).items() if not name.startswith("__")}
    return {**defaults, **getattr(part, "__dict__", {})}


@functools.cache
def _filled_when_read(kind: type) -> set[str]:
    """The attributes that reading a sample, or drawing an order, sets, as ``self.cache[index] = sample`` does.

    The methods that are called for it count as well.
    """
    found: set[str] = set()
    methods, seen = ["__getitem__", "__getitems__", "__iter__", "__call__", "forward"], set[str]()
    while methods:
        method = methods.pop()
        if method in seen:
            continue
        seen.add(method)
        for node in ast.walk(tree_of_object(getattr(kind, method, None))):
            if isinstance(node, ast.Call):
                methods += _of_self(node.func)
            elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store):
                found.update(_of_self(node.value))
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                found.update(_of_self(node))
    return found


def _of_self(node: ast.AST) -> list[str]:
    owner, _, name = (name_of(node) or "").rpartition(".")
    return [name] if owner == "self" else []


def _data_sets(value: Any, depth: int) -> Iterator[Any]:
    """A data set, and the data sets and transforms inside it."""
    if isinstance(value, (list, tuple)):
        if len(value) <= _WIDTH:
            for part in value:
                yield from _data_sets(part, depth)
    elif (isinstance(value, torch_data.Dataset) or _is_transform(value)) and depth:
        yield value
        for part in list(getattr(value, "__dict__", {}).values()):
            yield from _data_sets(part, depth - 1)


def _is_transform(value: Any) -> bool:
    """Whether this may be what a data set applies to its samples, such as an augmentation with a strength."""
    if inspect.isroutine(value) or isinstance(value, (type, torch_data.Dataset, Tensor)):
        return False
    return callable(value) and not is_ours(value)  # ours has a copy of the data set
