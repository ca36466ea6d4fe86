"""Finds what steps change in attributes, and no checkpoint contains, by comparing them at several moments."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
from collections.abc import Callable, Collection, Iterable
from multiprocessing.sharedctypes import SynchronizedBase
from typing import Any

import numpy as np
from torch import Tensor, nn

from cluster_ddp.train.data.fingerprint import fingerprint
from cluster_ddp.train.randomness import keep_generators
from cluster_ddp.train.state.attributes import Attributes, last_part
from cluster_ddp.train.state.claims import Claims
from cluster_ddp.train.state.comparing import is_same, other_forms
from cluster_ddp.train.state.kinds import is_function, is_replaced, is_value, kind_of
from cluster_ddp.train.state.left_gradients import LeftGradients, gradients_in
from cluster_ddp.train.state.only_written import is_asked_for
from cluster_ddp.train.state.packing import sets_out_of_order
from cluster_ddp.train.state.position_tables import without_tables
from cluster_ddp.train.state.set_before_read import is_length_of, is_within, set_before_read
from cluster_ddp.train.state.snapshot import GRADIENT, LENGTH, TRAINED
from cluster_ddp.train.state.stateful import copied
from cluster_ddp.train.state.undoing import undone
from cluster_ddp.train.state.unread import is_unread
from cluster_ddp.train.task import Task

_NOTHING = object()
_FEW = 100  # of so many changed attributes at most the source is read
_COPIED = 1 << 30  # bytes of state that are copied at most to find out what loading makes


def of_task(task: Task) -> Attributes:
    """What a task holds."""
    return Attributes({f"task.{key}": part for key, part in vars(task).items()})


def _is_default(name: str, task: object, now: Attributes) -> bool:
    """Whether an attribute of the task, or of an object in it, has the value that its class gives it."""
    first, *path, key = name.split(".")
    if first != "task" or not now.is_value(name):
        return False
    try:
        holder = functools.reduce(lambda outer, part: vars(outer)[part], path, task)
    except Exception:  # it is an element, in a slot, or of something that answers by itself
        return False
    return is_same(inspect.getattr_static(type(holder), key, _NOTHING), now.leaves[name])


def _attributes_of(holder: Any) -> dict[str, Any]:
    return holder if type(holder) is dict else vars(holder)


def _emptied(container: Any) -> Any:
    empty = copy.copy(container)
    empty.clear()
    return empty


def _holds_any(place: str, names: Iterable[str]) -> bool:
    return any(is_within(name, [place]) for name in names)


class Watch:
    """Remembers attributes as they were before the first step and later.

    Parameters
    ----------
    task, model
        What else is saved: only for a task is it looked at which numbers and strings of both come back.
    attributes
        Finds all attributes as they are now.
    states
        Returns what the checkpoint would contain of the task and the modules' extra state.

    Attributes
    ----------
    before_loading
        What a task that was made for a check held before it was given the state of this one.
    """

    def __init__(
        self,
        task: object,
        model: object,
        attributes: Callable[[], Attributes],
        states: Callable[[], dict[str, Any]],
    ) -> None:
        self.before_loading: Attributes | None = None
        self._task, self._model = task, model
        self._attributes, self._states = attributes, states
        # What there was at earlier moments, with what the state held then.
        self._looks: list[tuple[Attributes, Attributes]] = []
        self._noted: Attributes | None = None
        self._changes: list[list[str]] = []  # from each of the looks to what was noted
        self._first_names: set[str] = set()  # of the attributes of the task, before it was given any state
        self._first_values: dict[str, Any] | None = None  # its numbers, strings and functions then
        self._made_again: set[str] = set()  # what loading has made as it was
        self._at_first: dict[str, Any] = {}  # what tells what loading has put into another task
        self._names_at_first: set[str] | None = None  # of all that it had then
        self._told: set[str] = set()  # what was found to be unsaved so far
        self._set_before_read: set[str] = set()  # what each step sets before it reads it
        self._gradients = LeftGradients()
        self._claims = Claims()
        self._comes_back: dict[str, bool] = {}  # of attributes of the task that had changed at a check
        self._inner_comes_back: dict[str, bool] = {}  # of numbers in the model, or in what the task makes in model()

    @property
    def latest(self) -> Attributes | None:
        """The attributes at the latest look; None before the first."""
        return self._looks[-1][0] if self._looks else None

    def note_before_loading(self) -> None:
        """Note what the task has before it is given a state, and another task before it is given the same."""
        if self._first_values is None and isinstance(self._task, Task):
            own = vars(self._task)
            self._first_names = set(own)
            self._first_values = {key: part for key, part in own.items() if is_value(part) or is_function(part)}

    def look(self) -> None:
        """Remember what there is now, to be compared with in the next `unsaved`."""
        self.note_before_loading()
        self._gradients.stop()
        self._looks.append((self._attributes(), Attributes(self._states())))

    def watch_gradients(self) -> None:
        """Note, until the next look, which optimizers use gradients that were there at the latest one."""
        if self.latest is not None:
            self._gradients.watch(self.latest.gradients())

    def note(self) -> None:
        """Take what there is now for what the next `unsaved` compares, whatever changes before it is called."""
        self._gradients.stop()
        if self._looks:
            self._noted = self._attributes()
            self._changes = [was.changed(self._noted) for was, _ in self._looks]

    def unsaved(self, *, may_load: bool = False) -> set[str]:
        """What has changed since one of the looks, and is not saved; this call is the next look.

        Parameters
        ----------
        may_load
            Whether load_state_dict() of the task may be called to find out what it makes.
        """
        self._gradients.stop()
        states = self._states()
        saved, looks, now = Attributes(states), self._looks, self._noted or self._attributes()
        self._looks, self._noted = [(self._attributes() if self._noted else now, saved)], None
        changes, self._changes = self._changes or [was.changed(now) for was, _ in looks], []
        is_first = len(looks) > 1
        sizes = (leaf.nbytes for leaf in saved.leaves.values() if isinstance(leaf, Tensor) and not leaf.is_nested)
        may_load = may_load and not is_first and sum(sizes) <= _COPIED
        parts = self._names_of_parts(now, {now.holders.get(name) for name in changes[-1]}) if is_first else set[str]()
        lost_of_task = {name for name, does in self._comes_back.items() if not does and name not in parts}
        found = lost_of_task - self._unread(lost_of_task, now) | self._gradients.take_used()
        found.update(f"the order of {name}" for name in sets_out_of_order(states["task"], "task"))
        found.update(now.holders[name] for name in now.doubled if name.startswith("task."))  # the one was loaded
        if len(looks) == 2:  # before the first step, and after it
            self._set_before_read = set_before_read(changes[1], looks[0][0], looks[1][0], now)
            places = self._set_before_read
            found = {name for name in found if not is_within(name, places)}
            changes = [[name for name in changed if not is_length_of(name, places)] for changed in changes]
        defaults = {name for name in set().union(*changes) if _is_default(name, self._task, now)}
        changes = [
            [
                name
                for name in changed
                if not is_within(name, self._set_before_read) and (name in was.leaves or name not in defaults)
            ]
            for (was, _), changed in zip(looks, changes, strict=True)
        ]
        comes_back = {name for name, does in (self._comes_back | self._inner_comes_back).items() if does}
        rivals = set[str]() if is_first else set().union(*changes)  # at first, loading shows what comes back
        is_taken = self._claims.taken(now, saved, rivals, looks[-1][1])
        kept: set[str] = set()  # of all that has changed, what the state has under any name
        for (was, saved_then), changed in zip(looks, changes, strict=True):
            changed = without_tables(changed, was.leaves, now.leaves)
            holders = {name: now.holders.get(name) or was.holders[name] for name in changed}
            lost = {name for name in changed if self._inner_comes_back.get(name) is False}
            lost -= self._unread(lost, now)
            found.update(holders[name] for name in lost)
            skipped = {name for name in changed if holders[name] in self._comes_back} - comes_back
            skipped |= lost | self._made_again | self._gradients.cleared
            changed = [name for name in changed if name not in skipped and holders[name] not in parts]
            fresh = set(saved_then.changed(saved)) if changed else set[str]()
            tested, changed = changed, now.unsaved(changed, saved, fresh, (was, saved_then), is_taken)
            kept.update(set(tested).difference(changed))
            # Later, what loading has derived from other values may no longer be what it would derive.
            derived = comes_back.intersection(changed) if may_load else set[str]()
            derived = {name for name in derived if is_value(now.leaves.get(name)) and name in was.leaves}
            derived = {name for name in derived if self._place(name) is not None and not self._is_of_extra_state(name)}
            changed = [name for name in changed if name not in comes_back or name in derived]
            if changed:  # rarely, as tensors are copied from the GPU for it
                forms = Attributes(dict(other_forms(states)))
                fresh |= {name for name in forms.leaves if _holds_any(name.partition(", ")[0], fresh)}
                changed = now.unsaved(changed, forms, fresh, (was, saved_then), is_taken)
            unread = self._unread(changed, now)
            changed = [name for name in changed if name not in unread]
            told = {name: gradients_in(at) if name.endswith(GRADIENT) else at for name, at in holders.items()}
            if may_load and (new := [name for name in changed if told[name] not in self._told]):
                made = self._made_by_loading(new, was, now)
                changed = [name for name in changed if name not in made]
                # Loading may have left something in objects of libraries, such as a GradScaler's first scale.
                self._looks = [(self._attributes(), saved)]
            found.update(told[name] for name in changed)
        # From now on these have to be there whenever they have changed: the state may have a copy that is not always
        # renewed. What is only restored from something else cannot be told from its values.
        self._claims.note(kept, now, saved)
        direct = {name for name in kept & comes_back if now.has_a_place_in(saved, name, looks[0][1])}
        self._comes_back = {name: True for name, does in self._comes_back.items() if does and name not in direct}
        self._inner_comes_back = {name: does for name, does in self._inner_comes_back.items() if name not in direct}
        self._made_again, self._gradients.cleared = set(), set()
        self._told |= found
        if isinstance(self._task, Task):
            self._gradients.watch_clearing(self._looks[-1][0].gradients())
        return found

    def _made_by_loading(self, names: list[str], was: Attributes, now: Attributes) -> set[str]:
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
        places = {name: place for name in values | lists if (place := self._place(name)) is not None}
        places = {name: vars(other) if place is own else place for name, place in places.items()}
        kept = {name: place[last_part(name)] for name, place in places.items() if last_part(name) in place}
        places = {name: place for name, place in places.items() if name in values or name in kept}
        with undone(self._task), keep_generators(), contextlib.suppress(Exception):
            state = copied(self._states()["task"])
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

    def _place(self, name: str) -> dict[str, Any] | None:
        """The attributes, of the task, the model or an object in them, in which a number or string was found."""
        with contextlib.suppress(Exception):  # it is an element, in a slot, or of something that answers by itself
            place = _attributes_of(self._holder(name))
            part = place.get(last_part(name), _NOTHING)
            return None if part is _NOTHING or isinstance(part, SynchronizedBase) else place
        return None

    def _is_of_extra_state(self, name: str) -> bool:
        """Whether set_extra_state() of a module may have made it, which is not called again."""
        with contextlib.suppress(Exception):  # as for `_place`
            holder = self._holder(name)
            return isinstance(holder, nn.Module) and type(holder).set_extra_state is not nn.Module.set_extra_state
        return False

    def _holder(self, name: str) -> Any:
        """The task, the model, or the object or dict in them, that has the attribute or element of this name."""
        first, *path, _ = name.split(".")
        holder = {"task": self._task, "model": self._model}[first]
        for part in path:
            place = _attributes_of(holder)
            holder = place[part] if part in place else place["_modules"][part]
        return holder

    def _unread(self, names: Collection[str], now: Attributes) -> set[str]:
        """Those of these numbers and words that no step reads as an earlier one has left them; none of very many."""
        found = set[str]()
        for name in filter(now.is_value, names if len(names) <= _FEW else ()):
            with contextlib.suppress(Exception):  # as for `_place`
                if is_unread(self._holder(name), last_part(name)):
                    found.add(name)
        return found

    def put_back_values(self, other: Task) -> None:
        """Take from another task what this one has only since the first step, so that loading has to make it.

        Its numbers, strings and functions are put back.
        """
        if not self._looks or self._first_values is None:
            return
        values = vars(other)
        for key in values.keys() - self._first_names:
            del values[key]
        values.update(self._first_values)

    def note_first(self, other: Task) -> None:
        """Note what another task holds that has been given the state from before training.

        It is a copy, so what its loading does not put back is as it is now.
        """
        found = of_task(other)
        self._names_at_first = set(found.leaves)
        self._at_first = {name: found.mark(name) for name in found.leaves}

    def compare(self, other: Task, again: Attributes, *, is_another_model: bool) -> None:
        """Find out what comes back, by what another task has after loading the state of this one.

        Parameters
        ----------
        again
            What there is with that task, its model included.
        """
        if not self._looks:
            return
        self._compare_values(other)
        if self._noted is not None:
            self._compare_inner_values(self._noted, again, is_another_model)
            self._compare_attributes(self._noted, again, self._not_shared_with(other), self._functions_again(other))

    def _compare_values(self, other: Task) -> None:
        """Find out which numbers and strings the other task has, too, and which tensors it has made again."""
        mine, theirs = vars(self._task), vars(other)
        changed = set(self._changes[0]) if self._changes else set()
        for key, value in mine.items():
            if f"task.{key}" in changed and isinstance(value, (Tensor, np.ndarray)):
                again = theirs.get(key)
                if again is not value and fingerprint(again) == fingerprint(value):
                    self._comes_back[f"task.{key}"] = True
        for key, value in mine.items():
            first = self._first(key)
            if is_value(value) and (first is _NOTHING or is_value(first)) and not is_same(first, value):
                self._comes_back[f"task.{key}"] = is_same(theirs.get(key, _NOTHING), value)

    def _compare_inner_values(self, now: Attributes, again: Attributes, is_another_model: bool) -> None:
        """Find out which numbers in the model, or in what the task has made once more, come back."""
        for name in self._changes[0]:
            value = now.leaves.get(name, _NOTHING)
            if not is_value(value) or not name.startswith(("model.", "task.")):
                continue
            mine, theirs = now.owner(name), again.owner(name)
            of_model = mine is None and is_another_model and name.startswith("model.")
            if of_model or (mine is not None and theirs not in (None, mine)):
                self._inner_comes_back[name] = is_same(again.leaves.get(name, _NOTHING), value)

    def _compare_attributes(
        self, now: Attributes, again: Attributes, not_shared: set[str], functions: set[str]
    ) -> None:
        """Find out what else would come back otherwise.

        These are numbers and tensors, such as those of which the state has rounded copies, lists that would have
        another length, and names that would no longer refer to the same as another name. Data frames may come back from
        another form, and lists of parts that loading makes again from the same ones.
        """
        was = self._looks[0][0]
        changed = [name for name in self._changes[0] if name.startswith("task.")]
        lost = {name for name in changed if now.is_lost(name, was, again)}
        lost |= {name for name in now.keys_lost(again) if _holds_any(name, changed)}
        if self.before_loading is not None:
            lost |= was.by_both_names(now, self._changes[0]) & self.before_loading.aliases_lost(again)
            made = again.leaves.keys() - self.before_loading.leaves.keys()
            if self._names_at_first is not None:  # an object that both tasks share may have lost and got them back
                made |= again.leaves.keys() - self._names_at_first
            tensors = self.before_loading.leaves.items()
            made |= {name for name, leaf in tensors if again.has_another_tensor(name, leaf)} - self._comes_back.keys()
            made &= {name for name in self._changes[0] if name.startswith(("task.", "model."))}
            self._made_again = {name for name in made if now.has_alike(name, again)}
            referring = again.same_aliases(now) - self.before_loading.same_aliases(now)
            self._comes_back |= dict.fromkeys(referring, True)
        others = {name for name in not_shared if is_replaced(was.kind(name), now.kind(name))}
        self._made_again |= {name for name in changed if is_within(name, others) and now.are_alike(name, again)}
        self._made_again |= functions
        self._comes_back |= dict.fromkeys(not_shared & now.lists_alike(again), True)
        lengths = {name for name in changed if name.endswith(LENGTH) and name.removesuffix(LENGTH) in not_shared}
        self._comes_back |= {name: True for name in lengths & again.leaves.keys() if now.has_alike(name, again)}
        loaded = {
            name for name in self._at_first.keys() & changed if name in again.leaves and name + TRAINED not in changed
        }
        made = {name for name in loaded if again.mark(name) != self._at_first[name]}
        self._comes_back |= {name: True for name in made if now.has_alike(name, again)}
        self._comes_back |= {now.holders[name]: False for name in lost}

    def _names_of_parts(self, now: Attributes, changed: set[str | None]) -> set[str]:
        """Attributes that the first step has given the task, and that are nothing but parts of the model.

        A resume gives it the same, unless they are others now, or steps ask whether they are there.
        """
        new = {holder for holder in now.holders.values() if holder.startswith("task.")} - changed
        new -= {f"task.{key}" for key in self._first_names}
        found = {holder for holder in new if now.refers_to_known(holder)}
        return {name for name in found if not is_asked_for(type(self._task), name.removeprefix("task."))}

    def _first(self, key: str) -> Any:
        return self._looks[0][0].leaves.get(f"task.{key}", _NOTHING)
