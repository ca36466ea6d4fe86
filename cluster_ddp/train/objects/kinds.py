"""Classifies single values by kind, and decides whether steps may depend on them."""

from __future__ import annotations

import collections
import concurrent.futures
import enum
import functools
import queue
import threading
import types
from multiprocessing.sharedctypes import SynchronizedBase
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributions import Distribution
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import Dataset, Sampler
from torch.utils.data.dataloader import _BaseDataLoaderIter

from cluster_ddp.train.objects.inner_parts import HOLDERS, PLAIN, elements, is_bound, length
from cluster_ddp.train.objects.whose_code import is_library

_DEPTH, _WIDTH, _FAR = 10, 100, 1_000_000  # of what counts as small
# From libraries, but searched anyway: what changes by itself or has numbers of its own, and containers for arbitrary
# things.
SEEN_INTO = (
    Optimizer, LRScheduler, Sampler, _BaseDataLoaderIter, torch.amp.GradScaler, torch.quasirandom.SobolEngine,
    Distribution, np.poly1d, np.polynomial.Polynomial, queue.Queue, threading.local, *HOLDERS,
)  # fmt: skip
# Which one of several a name refers to matters, such as the network that is the teacher for now.
REFERRED_TO = (nn.Module, Optimizer, Tensor)
# Modules of libraries whose objects are searched as well: what a model may go on with in the next step, settings of a
# model, which it reads, and schedules of pruning.
_SEARCHED = (
    "transformers.cache_utils", "transformers.configuration_utils", "transformers.generation.configuration_utils",
    "torch.ao.pruning",
)  # fmt: skip
# Of these, which one a name refers to is all that can be seen.
_OPAQUE = (type, BuiltinFunctionType, concurrent.futures.Future)


def is_value(value: object) -> bool:
    """Whether it is a number, a string or the like, which has no parts."""
    return type(value) in PLAIN or isinstance(value, enum.Enum)


def is_function(value: object) -> bool:
    """Whether it is a function, and holds no object as a method does."""
    return isinstance(value, (FunctionType, BuiltinFunctionType)) and not is_bound(value)


def is_plain(value: Any) -> bool:
    """Whether it is a number, a string or the like, or a tuple of such."""
    seen, parts = set[int](), [value]
    while parts:  # each tuple once, however many others hold it
        if type(part := parts.pop()) is not tuple:
            if type(part) not in PLAIN:
                return False
        elif id(part) not in seen:
            seen.add(id(part))
            parts += part
    return True


def is_common(value: Any) -> bool:
    """Whether many things have this value, so that two that do may have nothing to do with each other."""
    return value is None or isinstance(value, bool) or (type(value) in (int, float) and value in range(-_WIDTH, _WIDTH))


def is_small(part: Any, depth: int = _DEPTH) -> bool:
    """Whether a part of a data set is something that a step may set in it, and not its samples."""
    if isinstance(part, (list, tuple)):
        return depth > 0 and length(part) <= _WIDTH and all(is_small(inner, depth - 1) for inner in elements(part))
    if isinstance(part, np.ndarray):
        return part.nbytes <= _FAR
    if isinstance(part, (str, bytes)):  # such as the whole text that a language model trains on
        return len(part) <= _FAR
    return isinstance(part, (Tensor, Dataset, SynchronizedBase)) or (part is not None and type(part) in PLAIN)


def may_take_turns(value: Any) -> bool:
    """Whether which one of several a name refers to matters, such as the level or the teacher for now."""
    if isinstance(value, tuple):  # equal plain tuples may be one object by chance
        return not all(map(is_plain, elements(value)))
    return isinstance(value, (*REFERRED_TO, *SEEN_INTO, np.ndarray, dict, list, set, collections.deque)) or not (
        isinstance(value, frozenset) or is_of_library(value)
    )


def kind_of(value: Any) -> Any:
    """What shows that a value was replaced: its class; for a function, its code; for a class, the class itself."""
    if isinstance(value, _OPAQUE):
        return value
    is_function = isinstance(value, (FunctionType, MethodType))
    return value.__code__ if is_function and not str(value.__module__).startswith("cluster_ddp.") else type(value)


def is_replaced(was: Any, now: Any) -> bool:
    """Whether a value was replaced. If it appeared or disappeared, its leaves show that, unless it is a function.

    A tuple comes back from the state as a list.
    """
    if was == now or {was, now} == {list, tuple}:
        return False
    return None not in (was, now) or isinstance(was or now, (types.CodeType, BuiltinFunctionType))


def is_of_library(value: Any) -> bool:
    if isinstance(value, functools.partial) or is_bound(value):
        return False  # their contents are searched separately
    if isinstance(value, (Dataset, type)):
        return True
    kinds = (value,) if isinstance(value, FunctionType) else type(value).__mro__
    return is_library(kinds[0].__module__) and not any(str(kind.__module__).startswith(_SEARCHED) for kind in kinds)
