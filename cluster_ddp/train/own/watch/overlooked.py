"""Detects modules and random generators that steps change but that were not passed in."""

from __future__ import annotations

import contextlib
import random
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
from torch import Tensor, nn

from cluster_ddp.train.data.fingerprint import drawn_to
from cluster_ddp.train.own.program import found_or_nothing, living, running_frames, variables_of
from cluster_ddp.train.own.twins import COPIES
from cluster_ddp.train.own.values import has_values, sampled
from cluster_ddp.train.randomness import OwnGenerators

HAND_OVER = "Pass it in under its own name (ema=ema)"
_DEPTH = 3  # variables of a frame, their attributes, and parts of lists and dicts


class Overlooked:
    """Warns, after the second step, about modules and generators that steps change and no checkpoint contains.

    Examples are a weight average, a teacher, or the loop's own ``np.random.default_rng()``. Modules are found anywhere
    in the process, generators in the variables of the running functions and what these hold.

    Parameters
    ----------
    kept
        Returns the tensors that are in the checkpoint.
    seeded
        Returns the generators that are seeded for each step or sample.
    warn
        Called with the message.
    remedy
        How to get a module into the checkpoint, for the message.
    """

    def __init__(
        self,
        kept: Callable[[], Iterable[Tensor]],
        seeded: Callable[[], Iterable[Any]],
        warn: Callable[[str], None],
        remedy: str = HAND_OVER,
    ) -> None:
        self._kept, self._seeded, self._warn, self._remedy = kept, seeded, warn, remedy
        self._modules: dict[int, tuple[weakref.ref[nn.Module], int]] = {}
        self._generators: dict[int, tuple[Any, int]] = {}

    def first(self) -> None:
        """Call after the first step."""
        self._modules = {id(module): (weakref.ref(module), sampled(held)) for module, held in self._strangers()}
        self._generators = {id(found): (found, drawn_to(found)) for found in self._of_the_loop()}

    def second(self) -> None:
        """Call after the second step."""
        self._tell_modules([module for module, held in self._strangers() if self._has_changed(module, held)])
        before, self._generators = self._generators, {}
        same = {key for key, (found, place) in before.items() if drawn_to(found) == place}
        self._tell_generators([found for found in self._of_the_loop() if id(found) in before.keys() - same])

    def _has_changed(self, module: nn.Module, held: list[Tensor]) -> bool:
        before, state = self._modules.get(id(module), (None, 0))
        return before is not None and before() is module and sampled(held) != state

    def _strangers(self) -> Iterator[tuple[nn.Module, list[Tensor]]]:
        """All live modules with tensors that no checkpoint contains, and these tensors."""
        kept = {tensor.data_ptr() for tensor in self._kept() if has_values(tensor)}
        for held in living(nn.Module):
            found = _tensors_of(held) if held not in COPIES else []
            if strange := [tensor for tensor in found if tensor.data_ptr() not in kept]:
                yield held, strange

    def _of_the_loop(self) -> list[Any]:
        """The generators that the running functions can draw from, except those that are seeded."""
        seeded = {id(random.seed.__self__), id(np.random.mtrand._rand)}  # type: ignore[attr-defined]
        seeded.update(map(id, self._seeded()))
        holders: list[Any] = []
        for frame in running_frames():
            holders += [*variables_of(frame).values(), *frame.f_globals.values()]
        return [found for found in found_or_nothing(_generators_in(holders)) if id(found) not in seeded]

    def _tell_modules(self, changed: list[nn.Module]) -> None:
        inner = {id(part) for module in changed for part in module.modules() if part is not module}
        if names := sorted({type(module).__name__ for module in changed if id(module) not in inner}):
            self._warn(
                f"steps change a module that was not passed in ({', '.join(names)}), which no checkpoint contains: a "
                f"resume is exact only if no step, and nothing after them, depends on it. {self._remedy}"
            )

    def _tell_generators(self, drawn: list[Any]) -> None:
        if names := sorted({f"{type(found).__module__}.{type(found).__name__}" for found in drawn}):
            self._warn(
                f"the steps draw from the loop's own generator ({', '.join(names)}), whose state no checkpoint "
                "contains: a resume is exact only if no step depends on it. Draw from the global generators of torch, "
                "random and NumPy, which are seeded for each step, or create one in each step, seeded by run.step"
            )


def _generators_in(holders: list[Any]) -> Iterator[Any]:
    yield from OwnGenerators(*holders, depth=_DEPTH)


def _tensors_of(module: nn.Module) -> list[Tensor]:
    """A module's plain tensors; none if it is only partly constructed, or its class overrides access to them."""
    with contextlib.suppress(Exception):
        found = (*module.parameters(), *module.buffers())
        return [tensor for tensor in found if type(tensor) in (Tensor, nn.Parameter) and has_values(tensor)]
    return []
