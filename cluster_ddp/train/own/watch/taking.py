"""Detects ways of taking batches that do not resume exactly: reading ahead, counting them, endless generators."""

from __future__ import annotations

import ast
import contextlib
import gc
import itertools
import threading
from collections.abc import Callable, Sequence
from types import FrameType, GeneratorType
from typing import Any

import torch
from torch.optim import Optimizer

from cluster_ddp.train.errors import TrainError
from cluster_ddp.train.objects.syntax import name_of, nodes_around
from cluster_ddp.train.objects.whose_code import is_ours
from cluster_ddp.train.optimizer import parameters_of
from cluster_ddp.train.own.watch.bodies import text_of, value_or_none
from cluster_ddp.train.own.watch.rounds import begins_at_place

_COUNTING = (enumerate, itertools.islice, itertools.cycle, zip)
_TAKING = {GeneratorType, *_COUNTING}
_BETWEEN = (*_COUNTING, GeneratorType, tuple, map, filter)  # what may be between a loop and its loader
_DEPTH = 4
_REMEDIES: dict[type, str] = {
    enumerate: "starts at 0 again when an epoch is resumed in the middle: if the number matters, use "
    "loader.enumerate(), which counts from the current position",
    itertools.islice: "counts from where the run was resumed, which is not exact: leave the epoch by the number "
    "from loader.enumerate()",
    itertools.cycle: "repeats batches that it holds, which no checkpoint contains, so no resume is exact: let the "
    "DataLoader's sampler repeat the samples within an epoch",
    zip: "combines it with something that starts over when an epoch is resumed in the middle, such as a range: use "
    "the number from loader.enumerate() instead, and end the epoch by it",
}
_BEGIN_AGAIN: tuple[type, ...] = (type(iter(range(0))), type(iter([])), type(iter(())), itertools.count)


class Taking:
    """Warns, once each, about a loop that takes batches ahead of training on them, and one that counts them.

    Parameters
    ----------
    optimizers, scalers
        Show whether a batch has been trained on.
    step
        Returns the number of finished steps.
    warn
        Called with the message.
    """

    def __init__(
        self,
        optimizers: Sequence[Optimizer],
        scalers: Sequence[torch.amp.GradScaler],
        step: Callable[[], int],
        warn: Callable[[str], None],
    ) -> None:
        self._optimizers, self._scalers, self._step, self._warn = optimizers, scalers, step, warn
        self._is_asked = self._is_updated = self._is_counting = self._is_from_place = False
        self._made_in = self._taken_in = threading.get_ident()

    def begin(self) -> None:
        """Call when the first batch of an epoch is requested."""
        self._taken_in = threading.get_ident()

    def ask(self) -> None:
        """Call when the next batch is requested; only the first time, checks that the previous one was trained on."""
        if not self._is_asked and not self._is_trained():
            self._warn(
                "the loop asks for its second batch before it has computed gradients of the first, for example "
                "because a prefetcher or a list is between it and the loader: a save would count batches that are not "
                "yet trained on, and a resume would leave them out. Take each batch when it is trained on; workers, "
                "collate_fn and pin_memory of the DataLoader read ahead exactly. (If the loop has only skipped its "
                "first batch, nothing is wrong.)"
            )
        self._is_asked = True

    def tell_of_counting(self) -> None:
        """Call when the loop took exactly the batches of an epoch without asking for more; warns."""
        if not self._is_counting and not self._is_from_place:
            self._is_counting = True
            self._warn(
                "the loop takes a fixed number of batches in each epoch, as with next(batches): when an epoch is "
                "resumed in the middle, fewer are left, and next() fails. Take them with `for batch in loader`"
            )

    def update(self, batches: Any) -> None:
        """Call after an update, with the iterator over the batches; only the first update is checked.

        Raises
        ------
        TrainError
            A generator iterates over the loader endlessly, or a thread other than the training one takes the batches.
        """
        if self._is_updated:
            return
        if self._taken_in not in (self._made_in, threading.get_ident()):  # autograd may update in its own thread
            raise TrainError(
                "a thread of the program's own takes the batches from the resumable loader, ahead of the loop that "
                "trains on them: a save would count batches that are not yet trained on, and a stop would end that "
                "thread and not the loop. Let the loop take them itself; the DataLoader's workers, collate_fn and "
                "pin_memory read ahead exactly"
            )
        self._is_updated, self._is_from_place = True, begins_at_place(self._step())
        around = [held for held in gc.get_objects() if type(held) in _TAKING]
        for held in around:
            if type(held) is GeneratorType and _is_endless(held, batches):
                raise TrainError(
                    f"the generator {held.__name__}() goes over the resumable loader again and again, which gives the "
                    "batches of an epoch once, and after a resume those that are left: put `for epoch in "
                    "loader.epochs():` around `for batch in loader:` there instead of `while True:`, and ask it for "
                    "batches until it ends"
                )
        for counting in (held for held in around if type(held) in _COUNTING):
            if _leads_to(counting, batches, _DEPTH) and (type(counting) is not zip or _begins_again(counting)):
                self._warn(f"{type(counting).__name__}() over the resumable loader {_REMEDIES[type(counting)]}")

    def _is_trained(self) -> bool:
        return (
            self._is_updated
            # scale() has been called; one that is not enabled has no scale
            or any(getattr(scaler, "_scale", None) is not None for scaler in self._scalers)
            or any(weight.grad is not None for weight in parameters_of(*self._optimizers))
        )


def _begins_again(pairs: Any) -> bool:
    """Whether something zipped with the batches starts over after a resume and is not reported elsewhere."""
    return any(isinstance(part, _BEGIN_AGAIN) for held in gc.get_referents(pairs) for part in gc.get_referents(held))


def _is_endless(held: GeneratorType[Any, Any, Any], batches: Any) -> bool:
    """Whether a generator takes these batches in a loop that is not one over ``epochs()``."""
    inner = gc.get_referents(held)
    if held.gi_frame is None or not any(part is batches for part in inner):
        return False
    if any(isinstance(part, GeneratorType) and part.__name__ == "epochs" for part in inner):
        return False
    with contextlib.suppress(Exception):  # there is no source
        return _is_in_loop(held.gi_frame, batches)
    return False


def _is_in_loop(frame: FrameType, batches: Any) -> bool:
    """Whether there is a loop around that over the batches, or around ``yield from`` them, where a generator stands."""
    text = text_of(frame)

    def is_over(part: ast.expr) -> bool:
        values = (value_or_none(name, frame) for node in ast.walk(part) if (name := name_of(node)) is not None)
        return any(value is batches or is_ours(value) for value in values)

    going: list[ast.AST] = [loop for loop in text.loops if isinstance(loop, ast.For) and is_over(loop.iter)]
    delegating = (node for node in text.parents if isinstance(node, ast.YieldFrom) and is_over(node.value))
    going += [node for node in delegating if node.lineno <= frame.f_lineno <= (node.end_lineno or 0)]
    around = (outer for node in going for outer in nodes_around(node, text.parents))
    return any(isinstance(outer, (ast.For, ast.While)) for outer in around)


def _leads_to(held: Any, wanted: Any, depth: int) -> bool:
    inner = gc.get_referents(held)
    return any(part is wanted for part in inner) or (
        depth > 0 and any(_leads_to(part, wanted, depth - 1) for part in inner if isinstance(part, _BETWEEN))
    )
