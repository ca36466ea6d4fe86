"""Sees what the steps of a loop of one's own change and nobody has handed over: modules and random generators."""

from __future__ import annotations

import contextlib
import gc
import random
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from cluster_ddp.train.data.fingerprint import fingerprint
from cluster_ddp.train.own.carried import Carried
from cluster_ddp.train.own.copies import Copies
from cluster_ddp.train.own.handed import Handed
from cluster_ddp.train.own.loop import Loop
from cluster_ddp.train.own.other_loaders import OtherLoaders
from cluster_ddp.train.own.program import running_frames, variables_of
from cluster_ddp.train.own.schedulers import OtherSchedulers
from cluster_ddp.train.own.values import has_values, sampled
from cluster_ddp.train.randomness import OwnGenerators

_CHECKS = 2
_DEPTH = 3  # of the objects in a frame: its variables, their attributes, and those in lists and dicts


def watchers_of(
    loop: Loop, handed: Handed, tell: Callable[[str], None], loader: Any = None, data: Any = None
) -> list[Callable[[], None]]:
    """What is called after each step of a loop to see what is beside it; over this loader and data, if there are."""
    overlooked = Overlooked(handed.tensors(), lambda: (*loop.generators, *OwnGenerators(loader)), tell)
    return [
        OtherLoaders(data, tell).check,
        overlooked.check,
        Copies(handed, tell).check,
        OtherSchedulers(handed.optimizers, handed.others, tell).check,
        Carried(tell).check,
    ]


class Overlooked:
    """Tells, after the second step, of modules and generators that steps change and no checkpoint holds.

    Such as an average of the weights, a teacher, or a ``np.random.default_rng()`` of the loop's own. Modules are found
    wherever they are, generators in the variables of the functions that run and in what these hold.

    Parameters
    ----------
    kept
        The tensors that are in the checkpoint.
    seeded
        Gives the generators that are seeded for each step or sample.
    tell
        Takes the message.
    """

    def __init__(
        self, kept: Iterable[Tensor], seeded: Callable[[], Iterable[Any]], tell: Callable[[str], None]
    ) -> None:
        self._kept = {tensor.data_ptr() for tensor in kept if has_values(tensor)}
        self._seeded, self._tell = seeded, tell
        self._checks = 0
        self._modules: dict[int, int] = {}
        self._generators: dict[int, int] = {}

    def check(self) -> None:
        """Call after each step; what is alive is looked through only after the first two."""
        if self._checks == _CHECKS:
            return
        self._checks += 1
        modules = {id(module): (module, sampled(tensors)) for module, tensors in self._strangers()}
        generators = {id(found): (found, _drawn_to(found)) for found in self._of_the_loop()}
        if self._checks == _CHECKS:
            self._tell_modules([found for key, (found, now) in modules.items() if self._modules.get(key, now) != now])
            drawn = [found for key, (found, now) in generators.items() if self._generators.get(key, now) != now]
            self._tell_generators(drawn)
        self._modules = {key: state for key, (_, state) in modules.items()}
        self._generators = {key: state for key, (_, state) in generators.items()}

    def _strangers(self) -> Iterator[tuple[nn.Module, list[Tensor]]]:
        """The modules that are alive, with what they hold and no checkpoint does."""
        for held in gc.get_objects():
            found = _tensors_of(held) if issubclass(type(held), nn.Module) else []
            if strange := [tensor for tensor in found if tensor.data_ptr() not in self._kept]:
                yield held, strange

    def _of_the_loop(self) -> list[Any]:
        """The generators that the functions which run can draw from, without those that are seeded."""
        seeded = {id(random.seed.__self__), id(np.random.mtrand._rand)}  # type: ignore[attr-defined]
        seeded.update(map(id, self._seeded()))
        holders: list[Any] = []
        for frame in running_frames():
            holders += [*variables_of(frame).values(), *frame.f_globals.values()]
        with contextlib.suppress(Exception):  # of proxies, which do much when they are asked what they are
            return [found for found in OwnGenerators(*holders, depth=_DEPTH) if id(found) not in seeded]
        return []

    def _tell_modules(self, changed: list[nn.Module]) -> None:
        inner = {id(part) for module in changed for part in module.modules() if part is not module}
        if names := sorted({type(module).__name__ for module in changed if id(module) not in inner}):
            self._tell(
                f"steps change a module that is not handed over ({', '.join(names)}), which no checkpoint holds: a "
                "resume is exact only where no step depends on it. Hand it over by a name of its own (ema=ema)"
            )

    def _tell_generators(self, drawn: list[Any]) -> None:
        if names := sorted({f"{type(found).__module__}.{type(found).__name__}" for found in drawn}):
            self._tell(
                f"the steps draw from a generator of the loop's own ({', '.join(names)}), whose state no checkpoint "
                "holds: a resume is exact only where no step depends on it. Draw from the global generators of torch, "
                "random and NumPy, which are seeded for each step, or make one in each step, seeded by run.step"
            )


def _tensors_of(module: nn.Module) -> list[Tensor]:
    """Its ordinary tensors; none of a module that is only half made, or whose class tells them in another way."""
    with contextlib.suppress(Exception):
        found = (*module.parameters(), *module.buffers())
        return [tensor for tensor in found if type(tensor) in (Tensor, nn.Parameter) and has_values(tensor)]
    return []


def _drawn_to(generator: Any) -> int:
    if isinstance(generator, np.random.Generator):
        state: Any = repr(generator.bit_generator.state)
    elif isinstance(generator, torch.Generator):
        state = generator.get_state()
    elif isinstance(generator, random.Random):
        state = generator.getstate()
    else:
        state = generator.get_state()
    return fingerprint(state)
