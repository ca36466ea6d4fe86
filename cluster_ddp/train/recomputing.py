"""Activation checkpointing: blocks that are computed again in the backward pass, as they were computed at first.

Torch gives the recomputation the same random numbers of its own generators. All else that a block reads and changes,
such as the statistics of a norm, the vectors of a spectral norm, a codebook or a counter, and other generators, would
be as later blocks have left it, and would be changed twice.
"""

from __future__ import annotations

import collections
import copy
import functools
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from cluster_ddp.train.errors import TaskError
from cluster_ddp.train.objects.whose_code import is_library
from cluster_ddp.train.randomness import GENERATORS, as_now, parts_of

_OF_MODULES = frozenset(vars(nn.Module()))  # such as the dicts of parameters and buffers
_CHANGEABLE = (Tensor, np.ndarray, list, dict, set, collections.deque)
_MANY = 1_000  # longer lists and dicts are copied without what is in them
_SMALL = 1 << 20  # bytes of a frozen weight up to which a block may change it
_Attributes = list[tuple[dict[str, Any], dict[str, Any]]]
"""The attributes, buffers or weights of modules, and what they hold at a moment."""


def checkpoint_blocks(model: nn.Module) -> int:
    """Make the blocks of a model discard their activations and recompute them in the backward pass.

    The blocks are the members of the outermost ModuleLists and Sequentials, or of ModuleLists in these.

    Raises
    ------
    TaskError
        The model has no such blocks.
    """
    blocks = list(dict.fromkeys(_blocks(model)))  # a layer may be in several lists
    if not blocks:
        raise TaskError(
            "train.grad_checkpointing: the model has no nn.ModuleList or nn.Sequential whose members could be "
            "checkpointed; put its blocks into one, or turn it off"
        )
    for block in blocks:
        block.forward = functools.partial(_recomputed, block, _Held(block), block.forward)
    return len(blocks)


def _blocks(module: nn.Module) -> Iterator[nn.Module]:
    if isinstance(module, (nn.ModuleList, nn.Sequential)):
        yield from _members(module)
        return
    for child in module.children():
        yield from _blocks(child)


def _members(container: nn.Module) -> Iterator[nn.Module]:
    """The members with parameters; in place of lists and dicts of modules, which nobody calls, theirs."""
    for child in container.children():
        if isinstance(child, (nn.ModuleList, nn.ModuleDict)):
            yield from _members(child)
        elif any(True for _ in child.parameters()):
            yield child


def _recomputed(block: nn.Module, held: _Held, forward: Any, *args: Any, **kwargs: Any) -> Any:
    if not (block.training and torch.is_grad_enabled()):
        return forward(*args, **kwargs)
    used = {key: _unless_empty_cache(value) for key, value in kwargs.items()}
    return checkpoint(forward, *map(_unless_empty_cache, args), use_reentrant=False, context_fn=held.contexts, **used)


def _unless_empty_cache(value: Any) -> Any:
    """None for a cache of transformers that is only to be filled: the recomputation would add to it once more."""
    is_cache = type(value).__module__ == "transformers.cache_utils" and hasattr(value, "get_seq_length")
    return None if is_cache and not value.get_seq_length() else value


class _Held:
    """What a block holds besides its weights, and what it may draw random numbers from."""

    def __init__(self, block: nn.Module) -> None:
        self._modules = list(block.modules())
        self._own = [module for module in self._modules if not is_library(type(module).__module__)]
        generators = [part for part in parts_of(block) if isinstance(part, GENERATORS)]
        self._generators = [part for part in generators if not isinstance(part, random.SystemRandom)]

    def contexts(self) -> tuple[_Nothing, _AsBefore]:
        """The contexts of a computation that begins now, and of its recomputation."""
        return _Nothing(), _AsBefore(self, _copied(self.attributes()), self.states())

    def attributes(self) -> _Attributes:
        """What attributes, buffers and weights are now."""
        places = [held for module in self._modules for held in (module._buffers, module._parameters) if held]
        places += [vars(module) for module in self._own]
        return [(place, dict(place)) for place in places]

    def states(self) -> list[Callable[[], Any]]:
        """Functions that bring the generators back to where they are now; that of torch is not among them."""
        own = [as_now(generator) for generator in self._generators]
        if not self._own:  # modules of torch draw from no others
            return own
        python, numpy_ = random.getstate(), np.random.get_state()
        return [lambda: random.setstate(python), lambda: np.random.set_state(numpy_), *own]


class _Nothing:
    """A context that does nothing."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass


class _AsBefore:
    """A context in which a block holds and draws what it did at a moment, and after which nothing has changed.

    It may be entered several times, as a backward pass with ``create_graph=True`` makes it.
    """

    def __init__(self, held: _Held, attributes: _Attributes, states: list[Callable[[], Any]]) -> None:
        self._held, self._attributes, self._states = held, attributes, states
        self._now: list[tuple[_Attributes, list[Callable[[], Any]]]] = []

    def __enter__(self) -> None:
        self._now.append((self._held.attributes(), self._held.states()))
        _put(_copied(self._attributes), self._states)

    def __exit__(self, *_: object) -> None:
        _put(*self._now.pop())


def _copied(attributes: _Attributes) -> _Attributes:
    """The same with copies of tensors, arrays and lists, which the block may change; one with two names stays one."""
    copies: dict[int, Any] = {}
    return [
        (place, {name: value if name in _OF_MODULES else _copy(value, copies) for name, value in values.items()})
        for place, values in attributes
    ]


def _copy(value: Any, copies: dict[int, Any]) -> Any:
    """A copy of something that can change, with copies of what is in a list or dict; anything else itself."""
    if not isinstance(value, _CHANGEABLE) or (isinstance(value, Tensor) and value.requires_grad):
        return value
    if isinstance(value, nn.Parameter) and (type(value) is not nn.Parameter or value.nbytes > _SMALL):
        return value  # that of a library, such as a quantized one, may hold more
    if id(value) in copies:
        return copies[id(value)]
    if isinstance(value, Tensor):
        found: Any = value.detach().clone()
        if isinstance(value, nn.Parameter):
            found = nn.Parameter(found, requires_grad=False)
            vars(found).update(vars(value))
    else:
        found = copy.copy(value)
    copies[id(value)] = found
    if isinstance(value, (list, dict, collections.deque)) and len(value) <= _MANY:
        for key, part in value.items() if isinstance(value, dict) else enumerate(value):
            if isinstance(part, _CHANGEABLE):
                found[key] = _copy(part, copies)
    return found


def _put(attributes: _Attributes, states: list[Callable[[], Any]]) -> None:
    for place, values in attributes:
        for name in [name for name in place if name not in values]:
            del place[name]
        place.update(values)
    for restore in states:
        restore()
