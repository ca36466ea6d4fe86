"""Finds which attributes of a task a resume restores: loads the task's state into another task and compares the two."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from cluster_ddp.train.data.fingerprint import fingerprint
from cluster_ddp.train.objects.attributes import Attributes, last_part
from cluster_ddp.train.objects.comparing import is_same
from cluster_ddp.train.objects.kinds import is_function, is_replaced, is_value, kind_of
from cluster_ddp.train.objects.snapshot import LENGTH, TRAINED
from cluster_ddp.train.randomness import keep_generators
from cluster_ddp.train.state.holders import Holders
from cluster_ddp.train.state.set_before_read import is_within
from cluster_ddp.train.state.stateful import copied
from cluster_ddp.train.state.undoing import undone
from cluster_ddp.train.task import Task

_NOTHING = object()


def of_task(task: Task) -> Attributes:
    """What a task holds."""
    return Attributes({f"task.{key}": part for key, part in vars(task).items()})


class ComingBack:
    """What comes back of a task and its model.

    Attributes
    ----------
    first_names
        The attributes that the task had before it was given any state.
    before_loading
        What a task that was made for a check held before it was given the state of this one.
    comes_back
        Of attributes of the task that had changed at a check, whether they come back.
    inner_comes_back
        The same of numbers in the model, or in what the task makes in model().
    made_again
        What loading has made as it was.
    """

    def __init__(self, task: object, holders: Holders) -> None:
        self._task, self._holders = task, holders
        self.first_names: set[str] = set()
        self.before_loading: Attributes | None = None
        self.comes_back: dict[str, bool] = {}
        self.inner_comes_back: dict[str, bool] = {}
        self.made_again: set[str] = set()
        self._first_values: dict[str, Any] | None = None  # numbers, strings and functions that it had with first_names
        self._at_first: dict[str, Any] = {}  # what tells what loading has put into another task
        self._names_at_first: set[str] | None = None  # of all that it had then

    def note_before_loading(self) -> None:
        """Note what the task has before it is given a state, and another task before it is given the same."""
        if self._first_values is None and isinstance(self._task, Task):
            own = vars(self._task)
            self.first_names = set(own)
            self._first_values = {key: part for key, part in own.items() if is_value(part) or is_function(part)}

    def put_back_values(self, other: Task) -> None:
        """Take from another task what this one has only since the first step, so that loading has to make it.

        Its numbers, strings and functions are put back.
        """
        if self._first_values is not None:
            values = vars(other)
            for key in values.keys() - self.first_names:
                del values[key]
            values.update(self._first_values)

    def note_first(self, other: Task) -> None:
        """Note what another task holds that has been given the state from before training.

        It is a copy, so what its loading does not put back is as it is now.
        """
        found = of_task(other)
        self._names_at_first = set(found.leaves)
        self._at_first = {name: found.mark(name) for name in found.leaves}

    def compare(
        self,
        other: Task,
        again: Attributes,
        was: Attributes,
        now: Attributes | None,
        changed: Sequence[str],
        *,
        is_another_model: bool,
    ) -> None:
        """Compare with what another task has after loading the state of this one.

        Parameters
        ----------
        again
            What there is with that task, its model included.
        was, now, changed
            What there was before the first step, what there is now, if that was noted, and what has changed.
        """
        self._compare_values(other, was, changed)
        if now is not None:
            self._compare_inner_values(now, again, changed, is_another_model)
            self._compare_attributes(other, again, was, now, changed)

    def made_by_loading(
        self, names: Collection[str], was: Attributes, now: Attributes, states: Callable[[], dict[str, Any]]
    ) -> set[str]:
        """Which of these load_state_dict() of the task makes as they are now.

        Such as a flag that it derives from a count, or a network that the task has only since a later step.
        """
        if not isinstance(self._task, Task):
            return set()
        both = ((name, was.leaves[name], now.leaves[name]) for name in names if name in was.leaves.keys() & now.leaves)
        values = {
            name for name, then, leaf in both if is_value(leaf) or (isinstance(leaf, Tensor) and leaf is not then)
        }
        lists = {name for name in map(now.outermost_list, names) if name and name.startswith(("task.", "model."))}
        other, own, made = copy.copy(self._task), vars(self._task), set[str]()
        self.put_back_values(other)
        places = {name: place for name in values | lists if (place := self._holders.place(name)) is not None}
        places = {name: vars(other) if place is own else place for name, place in places.items()}
        kept = {name: place[last_part(name)] for name, place in places.items() if last_part(name) in place}
        places = {name: place for name, place in places.items() if name in values or name in kept}
        with undone(self._task), keep_generators(), contextlib.suppress(Exception):
            state = copied(states()["task"])
            try:
                for name, place in places.items():
                    place[last_part(name)] = was.leaves[name] if name in values else _emptied(kept[name])
                other.load_state_dict(state)
                again = of_task(other)
                of_model = {name: place[last_part(name)] for name, place in places.items() if name.startswith("model.")}
                again.add(Attributes(of_model))
                loaded = (*self._not_shared_with(other), *places.keys() - values)
                found = {name for name in names if name in places or is_within(name, loaded)}
                made = {name for name in found if now.are_alike(name, again)} | self._functions_again(other)
            finally:
                for name, value in kept.items():
                    places[name][last_part(name)] = value
        return made

    def expect_in_state(self, direct: set[str]) -> None:
        """Call after each look.

        Parameters
        ----------
        direct
            Of what comes back, the names whose values the state has itself: from now on it has to have them.
        """
        self.comes_back = {name: True for name, does in self.comes_back.items() if does and name not in direct}
        self.inner_comes_back = {name: does for name, does in self.inner_comes_back.items() if name not in direct}
        self.made_again = set()

    def _compare_values(self, other: Task, was: Attributes, changed: Collection[str]) -> None:
        """Find out which numbers and strings the other task has, too, and which tensors it has made again."""
        mine, theirs = vars(self._task), vars(other)
        for key, value in mine.items():
            if f"task.{key}" in changed and isinstance(value, (Tensor, np.ndarray)):
                again = theirs.get(key)
                if again is not value and fingerprint(again) == fingerprint(value):
                    self.comes_back[f"task.{key}"] = True
        for key, value in mine.items():
            first = was.leaves.get(f"task.{key}", _NOTHING)
            if is_value(value) and (first is _NOTHING or is_value(first)) and not is_same(first, value):
                self.comes_back[f"task.{key}"] = is_same(theirs.get(key, _NOTHING), value)

    def _compare_inner_values(
        self, now: Attributes, again: Attributes, changed: Sequence[str], is_another_model: bool
    ) -> None:
        """Find out which numbers in the model, or in what the task has made once more, come back."""
        for name in changed:
            value = now.leaves.get(name, _NOTHING)
            if not is_value(value) or not name.startswith(("model.", "task.")):
                continue
            mine, theirs = now.owner(name), again.owner(name)
            of_model = mine is None and is_another_model and name.startswith("model.")
            if of_model or (mine is not None and theirs not in (None, mine)):
                self.inner_comes_back[name] = is_same(again.leaves.get(name, _NOTHING), value)

    def _compare_attributes(
        self, other: Task, again: Attributes, was: Attributes, now: Attributes, changed: Sequence[str]
    ) -> None:
        """Find out what else would come back otherwise.

        These are numbers and tensors, such as those of which the state has rounded copies, lists that would have
        another length, and names that would no longer refer to the same as another name. Data frames may come back from
        another form, and lists of parts that loading makes again from the same ones.
        """
        own, not_shared = [name for name in changed if name.startswith("task.")], self._not_shared_with(other)
        lost = {name for name in own if now.is_lost(name, was, again)}
        lost |= {name for name in now.keys_lost(again) if any(is_within(key, [name]) for key in own)}
        if self.before_loading is not None:
            lost |= was.by_both_names(now, changed) & self.before_loading.aliases_lost(again)
            self._compare_made(self.before_loading, again, now, changed)
        others = {name for name in not_shared if is_replaced(was.kind(name), now.kind(name))}
        self.made_again |= {name for name in own if is_within(name, others) and now.are_alike(name, again)}
        self.made_again |= self._functions_again(other)
        come_back = not_shared & now.lists_alike(again)
        lengths = {name for name in own if name.endswith(LENGTH) and name.removesuffix(LENGTH) in not_shared}
        come_back |= {name for name in lengths & again.leaves.keys() if now.has_alike(name, again)}
        loaded = {name for name in self._at_first.keys() & own if name in again.leaves and name + TRAINED not in own}
        made = {name for name in loaded if again.mark(name) != self._at_first[name]}
        come_back |= {name for name in made if now.has_alike(name, again)}
        self.comes_back |= dict.fromkeys(come_back, True)
        self.comes_back |= {now.holders[name]: False for name in lost}

    def _compare_made(self, before: Attributes, again: Attributes, now: Attributes, changed: Sequence[str]) -> None:
        """Find out what loading makes: what another task did not have before, or had as another tensor."""
        made = again.leaves.keys() - before.leaves.keys()
        if self._names_at_first is not None:  # an object that both tasks share may have lost and got them back
            made |= again.leaves.keys() - self._names_at_first
        tensors = before.leaves.items()
        made |= {name for name, leaf in tensors if again.has_another_tensor(name, leaf)} - self.comes_back.keys()
        made &= {name for name in changed if name.startswith(("task.", "model."))}
        self.made_again = {name for name in made if now.has_alike(name, again)}
        self.comes_back |= dict.fromkeys(again.same_aliases(now) - before.same_aliases(now), True)

    def _not_shared_with(self, other: Task) -> set[str]:
        """The attributes that another task has, too, but does not share with this one."""
        mine, theirs = vars(self._task), vars(other)
        return {f"task.{key}" for key in mine.keys() & theirs.keys() if theirs[key] is not mine[key]}

    def _functions_again(self, other: Task) -> set[str]:
        """Functions in the place of what was there at first, which loading has put into another task, too."""
        mine, theirs, first = vars(self._task), vars(other), self._first_values or {}
        functions = {key: part for key, part in mine.items() if is_function(part)}
        again = {key for key, part in functions.items() if kind_of(theirs.get(key)) == kind_of(part)}
        return {f"task.{key}" for key in again if first.get(key, mine[key]) is not mine[key]}


def _emptied(container: Any) -> Any:
    empty = copy.copy(container)
    empty.clear()
    return empty
