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
from cluster_ddp.train.objects.surroundings import generators_around
from cluster_ddp.train.objects.whose_code import is_library_file
from cluster_ddp.train.own.program import found_or_nothing, living, running_frames, variables_of
from cluster_ddp.train.own.twins import COPIES
from cluster_ddp.train.own.values import addresses, has_values, sampled
from cluster_ddp.train.randomness import OwnGenerators

HAND_OVER = "Pass it in under its own name (ema=ema)"
_DEPTH = 6  # variables of a frame, their attributes, and parts of lists and dicts
_DEPTH_IN_LIBRARIES = 3


def watch_overlooked(
    kept: Callable[[], Iterable[Tensor]],
    seeded: Callable[[], Iterable[Any]],
    warn: Callable[[str], None],
    remedy: str = HAND_OVER,
) -> Iterator[None]:
    """Warn, after the second step, about modules and generators that steps change and no checkpoint contains.

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
    modules = {id(module): (weakref.ref(module), state) for module, state in _strange_modules(kept())}
    generators = {id(found): (found, drawn_to(found)) for found in _own_generators(seeded())}
    yield
    known = ((module, state, *modules.get(id(module), (None, 0))) for module, state in _strange_modules(kept()))
    changed = [module for module, state, ref, then in known if ref is not None and ref() is module and state != then]
    inner = {id(part) for module in changed for part in module.modules() if part is not module}
    if names := sorted({type(module).__name__ for module in changed if id(module) not in inner}):
        warn(
            f"steps change a module that was not passed in ({', '.join(names)}), which no checkpoint contains: a "
            f"resume is exact only if no step, and nothing after them, depends on it. {remedy}"
        )
    drawn = {key for key, (found, place) in generators.items() if drawn_to(found) != place}
    drawn_from = (type(found) for found in _own_generators(seeded()) if id(found) in drawn)
    if names := sorted({f"{kind.__module__}.{kind.__name__}" for kind in drawn_from}):
        warn(
            f"the steps draw from the loop's own generator ({', '.join(names)}), whose state no checkpoint "
            "contains: a resume is exact only if no step depends on it. Draw from the global generators of torch, "
            "random and NumPy, which are seeded for each step, or create one in each step, seeded by run.step"
        )


def _strange_modules(kept: Iterable[Tensor]) -> Iterator[tuple[nn.Module, int]]:
    """All live modules with tensors that no checkpoint contains, and a fingerprint of these."""
    known = addresses(kept)
    for held in living(nn.Module):
        found = _tensors_of(held) if held not in COPIES else []
        if strange := [tensor for tensor in found if tensor.data_ptr() not in known]:
            yield held, sampled(strange)


def _own_generators(seeded: Iterable[Any]) -> list[Any]:
    """The generators that the running functions can draw from, except those that are seeded."""
    known = {id(random.seed.__self__), id(np.random.mtrand._rand)}  # type: ignore[attr-defined]
    known.update(map(id, seeded))
    found: list[Any] = []
    for frame in running_frames():
        holders = [*variables_of(frame).values(), *frame.f_globals.values()]
        is_program_s = not is_library_file(frame.f_code.co_filename)
        found += found_or_nothing(_generators_in(holders, _DEPTH if is_program_s else _DEPTH_IN_LIBRARIES))
        if is_program_s:  # also those in classes, and at the top of other modules of the program
            found += generators_around(holders).values()
    return list({id(each): each for each in found if id(each) not in known}.values())


def _generators_in(holders: list[Any], depth: int) -> Iterator[Any]:
    yield from OwnGenerators(*holders, depth=depth)


def _tensors_of(module: nn.Module) -> list[Tensor]:
    """A module's plain tensors; none if it is only partly constructed, or its class overrides access to them."""
    with contextlib.suppress(Exception):
        found = (*module.parameters(), *module.buffers())
        return [tensor for tensor in found if type(tensor) in (Tensor, nn.Parameter) and has_values(tensor)]
    return []
