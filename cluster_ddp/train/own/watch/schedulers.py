"""Detects learning rate schedulers that were not passed in, and functions of schedulers that count their own calls."""

from __future__ import annotations

import ast
import contextlib
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from cluster_ddp.train.objects.syntax import built_on_itself, taken_from
from cluster_ddp.train.objects.whose_code import is_library_file
from cluster_ddp.train.own.program import living, reachable
from cluster_ddp.train.own.watch.bodies import tree_of_object
from cluster_ddp.train.own.watch.saved import Saved

_DEPTH = 4  # a scheduler may be inside another, inside an object of the program's that was passed in


def watch_other_schedulers(
    optimizers: Iterable[Optimizer], others: Iterable[Any], warn: Callable[[str], None]
) -> Iterator[None]:
    """Warn, after the second step, about schedulers not passed in, such as one for the warm-up made in the epoch.

    Parameters
    ----------
    optimizers
        The optimizers passed in.
    others
        The other objects passed in; schedulers inside them are saved.
    warn
        Called with the message.
    """
    known = {id(part) for _, part in reachable((("", other) for other in others), _DEPTH)}
    strange = (held for held in living(LRScheduler) if id(held) not in known)
    ours = set(map(id, optimizers))
    before = [(held, held.last_epoch) for held in strange if id(getattr(held, "optimizer", None)) in ours]
    yield
    if names := {type(held).__name__ for held, was in before if held.last_epoch != was}:
        warn(
            f"the loop steps a learning rate scheduler that was not passed in ({', '.join(sorted(names))}), which "
            "starts over after a resume, so the resume is not exact: create it before resumable() and pass it in under "
            "its own name (warmup=warmup)"
        )


def watch_schedules(saved: Saved, warn: Callable[[str], None]) -> Iterator[None]:
    """Warn, after the second step, about functions from which schedulers get a rate and that count their own calls.

    An example is ``LambdaLR(optimizer, rate)``, where ``rate`` does ``calls[0] += 1``: a scheduler saves how often it
    was stepped, but not the variables of such a function. Only the source is looked at, because most schedulers are
    stepped after an epoch, when these steps are long over.

    Parameters
    ----------
    saved
        What is saved; the schedulers are among it.
    warn
        Called with the message.
    """
    yield
    inside = reachable((("", thing) for thing in saved.things), _DEPTH)
    schedulers = [part for _, part in inside if isinstance(part, LRScheduler)]
    for function in dict.fromkeys(part for scheduler in schedulers for part in _functions_of(scheduler)):
        with contextlib.suppress(Exception):  # it has no source, or a variable without a value
            if found := {name for name, owner in _changed_by(function) if not saved.has(owner)}:
                warn(
                    f"a scheduler takes the learning rate from {function.__name__}(), each call of which changes "
                    f"{', '.join(sorted(found))} from its previous value. No checkpoint contains that: it starts "
                    "over after a resume, and the rates differ. Compute the rate from the number that the function "
                    "is given, or count in an object of run.keep()"
                )


def _functions_of(scheduler: LRScheduler) -> Iterator[Any]:
    """The functions of the program that a scheduler holds."""
    for value in vars(scheduler).values():
        for part in value if isinstance(value, list) else [value]:
            part = part.func if isinstance(part, functools.partial) else part
            if (inspect.isfunction(part) or inspect.ismethod(part)) and not is_library_file(part.__code__.co_filename):
                yield part


def _changed_by(function: Any) -> Iterator[tuple[str, Any]]:
    """What a function changes by its previous value and has from outside, such as ``calls[0]``, with what holds it."""
    code, around = function.__code__, inspect.getclosurevars(function)
    outside = {name: value for name, value in around.globals.items() if name not in code.co_varnames}
    outside |= around.nonlocals
    if inspect.ismethod(function):
        outside[code.co_varnames[0]] = function.__self__
    for node in ast.walk(tree_of_object(function)):
        for name in taken_from(node) or built_on_itself(node):
            first = name.partition(".")[0].partition("[")[0]
            if first in outside:
                yield name, outside[first]
