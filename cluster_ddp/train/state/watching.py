"""Finds what steps change in attributes, and no checkpoint contains, by comparing them at several moments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from cluster_ddp.train.objects.attributes import Attributes, last_part
from cluster_ddp.train.objects.comparing import other_forms
from cluster_ddp.train.objects.kinds import is_value
from cluster_ddp.train.objects.only_written import is_asked_for
from cluster_ddp.train.objects.packing import sets_out_of_order
from cluster_ddp.train.objects.snapshot import GRADIENT
from cluster_ddp.train.state.claims import Claims
from cluster_ddp.train.state.coming_back import ComingBack
from cluster_ddp.train.state.holders import Holders
from cluster_ddp.train.state.left_gradients import LeftGradients, gradients_in
from cluster_ddp.train.state.lookup import Lookup
from cluster_ddp.train.state.position_tables import without_tables
from cluster_ddp.train.state.set_before_read import is_caught, is_length_of, is_within, set_before_read
from cluster_ddp.train.task import Task

_COPIED = 1 << 30  # bytes of state that are copied at most to find out what loading makes


@dataclass(frozen=True)
class _Look:
    """What there was at a moment, and what the state held then."""

    found: Attributes
    saved: Attributes


@dataclass(frozen=True)
class _Comparison:
    """What `Watch.unsaved` compares each of the earlier looks with."""

    now: _Look
    states: dict[str, Any]
    comes_back: set[str]
    parts: set[str]  # attributes of the task that are nothing but parts of the model
    is_taken: Callable[[str, str, int | None], bool]  # see `Claims.taken`
    may_load: bool


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
    coming_back
        What has been found to come back after a resume.
    """

    def __init__(
        self,
        task: object,
        model: object,
        attributes: Callable[[], Attributes],
        states: Callable[[], dict[str, Any]],
    ) -> None:
        self._task = task
        self._holders = Holders(task, model)
        self.coming_back = ComingBack(task, self._holders)
        self._attributes, self._states = attributes, states
        self._looks: list[_Look] = []
        self._noted: Attributes | None = None
        self._changes: list[list[str]] = []  # from each of the looks to what was noted
        self._told: set[str] = set()  # what was found to be unsaved so far
        self._tried: set[str] = set()  # of what the state has, what was tried to be loaded, or is called the same there
        self._set_before_read: set[str] = set()  # what each step sets before it reads it
        self._gradients = LeftGradients()
        self._claims = Claims()

    @property
    def latest(self) -> Attributes | None:
        """The attributes at the latest look; None before the first."""
        return self._looks[-1].found if self._looks else None

    def look(self) -> None:
        """Remember what there is now, to be compared with in the next `unsaved`."""
        self.coming_back.note_before_loading()
        self._gradients.stop()
        self._looks.append(_Look(self._attributes(), Attributes(self._states())))

    def watch_gradients(self) -> None:
        """Note, until the next look, which optimizers use gradients that were there at the latest one."""
        if self.latest is not None:
            self._gradients.watch(self.latest.gradients())

    def note(self) -> None:
        """Take what there is now for what the next `unsaved` compares, whatever changes before it is called."""
        self._gradients.stop()
        if self._looks:
            self._noted = self._attributes()
            self._changes = [was.found.changed(self._noted) for was in self._looks]

    def compare(self, other: Task, again: Attributes, *, is_another_model: bool) -> None:
        """Find out what comes back, by what another task has after loading the state of this one.

        Parameters
        ----------
        again
            What there is with that task, its model included.
        """
        if self._looks:
            changed = self._changes[0] if self._changes else []
            was = self._looks[0].found
            self.coming_back.compare(other, again, was, self._noted, changed, is_another_model=is_another_model)

    def unsaved(self, *, may_load: bool = False) -> set[str]:
        """What has changed since one of the looks, and is not saved; this call is the next look.

        Parameters
        ----------
        may_load
            Whether load_state_dict() of the task may be called to find out what it makes.
        """
        self._gradients.stop()
        states = self._states()
        looks, now = self._looks, _Look(self._noted or self._attributes(), Attributes(states))
        self._looks = [_Look(self._attributes(), now.saved) if self._noted else now]
        changes = self._changes or [was.found.changed(now.found) for was in looks]
        self._noted, self._changes = None, []
        is_first = len(looks) > 1
        parts = self._parts_of_model(now.found, changes[-1]) if is_first else set[str]()
        found = self._found_otherwise(now.found, states, parts)
        if len(looks) == 2:  # before the first step, and after it
            places = set_before_read(changes[1], looks[0].found, looks[1].found, now.found)
            found = {name for name in found if not is_within(name, places)}
            changes = [[name for name in changed if not is_length_of(name, places)] for changed in changes]
            self._set_before_read = places
        changes = self._without_what_is_set_again(changes, looks, now.found)
        back = self.coming_back
        comes_back = {name for name, does in (back.comes_back | back.inner_comes_back).items() if does}
        rivals = set[str]() if is_first else set().union(*changes)  # at first, loading shows what comes back
        is_taken = self._claims.taken(now.found, now.saved, rivals, looks[-1].saved)
        may_load = may_load and not is_first and _bytes_of(now.saved) <= _COPIED
        comparison = _Comparison(now, states, comes_back, parts, is_taken, may_load)
        kept: set[str] = set()  # of all that has changed, what the state has under any name
        for was, changed in zip(looks, changes, strict=True):
            lost, held = self._unsaved_since(was, changed, comparison)
            found |= lost
            kept |= held
        # From now on these have to be there whenever they have changed: the state may have a copy that is not always
        # renewed. What is only restored from something else cannot be told from its values.
        self._claims.note(kept, now.found, now.saved)
        first = looks[0].saved
        back.expect_in_state({name for name in kept & comes_back if now.found.has_a_place_in(now.saved, name, first)})
        self._gradients.cleared = set()
        self._told |= found
        if isinstance(self._task, Task):
            self._gradients.watch_clearing(self._looks[-1].found.gradients())
        return found

    def _found_otherwise(self, now: Attributes, states: dict[str, Any], parts: set[str]) -> set[str]:
        """What is known to be lost without comparing the looks."""
        lost = {name for name, does in self.coming_back.comes_back.items() if not does and name not in parts}
        lost -= self._holders.unread(lost, now)
        lost |= self._gradients.take_used()
        lost.update(f"the order of {name}" for name in sets_out_of_order(states["task"], "task"))
        lost.update(now.holders[name] for name in now.doubled if name.startswith("task."))  # the one was loaded
        return lost

    def _without_what_is_set_again(
        self, changes: list[list[str]], looks: list[_Look], now: Attributes
    ) -> list[list[str]]:
        """Leave out what each step sets before it reads it, and what is new and has the default of its class."""
        defaults = {name for name in set().union(*changes) if self._holders.is_default(name, now)}
        return [
            [
                name
                for name in changed
                if not is_within(name, self._set_before_read) and (name in was.found.leaves or name not in defaults)
            ]
            for was, changed in zip(looks, changes, strict=True)
        ]

    def _unsaved_since(self, was: _Look, changed: Sequence[str], compared: _Comparison) -> tuple[set[str], set[str]]:
        """What holds what has changed since a look and is not saved; and which of the changed names the state has."""
        back, now, comes_back = self.coming_back, compared.now.found, compared.comes_back
        changed = without_tables(changed, was.found.leaves, now.leaves)
        holders = {name: now.holders.get(name) or was.found.holders[name] for name in changed}
        lost = {name for name in changed if back.inner_comes_back.get(name) is False}
        lost -= self._holders.unread(lost, now)
        skipped = {name for name in changed if holders[name] in back.comes_back} - comes_back
        skipped |= lost | back.made_again | self._gradients.cleared
        tested = [name for name in changed if name not in skipped and holders[name] not in compared.parts]
        fresh = set(was.saved.changed(compared.now.saved)) if tested else set[str]()

        def absent(names: Sequence[str], state: Attributes) -> list[str]:
            return Lookup(now, state, fresh, (was.found, was.saved), compared.is_taken).unsaved(names)

        changed = absent(tested, compared.now.saved)
        kept = set(tested).difference(changed)
        by_chance = self._in_state_by_chance(kept - comes_back, was, compared) if compared.may_load else set[str]()
        derived = self._derived(comes_back.intersection(changed), was, now) if compared.may_load else set[str]()
        changed = [name for name in changed if name not in comes_back or name in derived]
        if changed:  # rarely, as tensors are copied from the GPU for it
            forms = Attributes(dict(other_forms(compared.states)))
            fresh |= {
                name for name in forms.leaves if any(is_within(place, [name.partition(", ")[0]]) for place in fresh)
            }
            changed = absent(changed, forms)
        unread = self._holders.unread(changed, now)
        changed = [name for name in changed if name not in unread]
        told = {name: gradients_in(at) if name.endswith(GRADIENT) else at for name, at in holders.items()}
        if compared.may_load and (new := {name for name in changed if told[name] not in self._told}):
            made = self._made_by_loading(new, was, compared)
            changed = [name for name in changed if name not in made]
        return {holders[name] for name in lost | by_chance} | {told[name] for name in changed}, kept

    def _in_state_by_chance(self, kept: set[str], was: _Look, compared: _Comparison) -> set[str]:
        """Of what the state has under another name only, what load_state_dict() does not put back; it is tried once."""
        now, tried = compared.now.found, kept - self._tried
        self._tried |= tried & was.found.leaves.keys()
        other = {name for name in tried if self._is_called_otherwise(name, compared.now)} & was.found.leaves.keys()
        other -= self._holders.unread(other, now)
        return other - self._made_by_loading(other, was, compared) if other else set[str]()

    def _is_called_otherwise(self, name: str, now: _Look) -> bool:
        """Whether the state has an attribute's value, a number or a string, only under another name."""
        if not is_value(now.found.leaves.get(name)) or self._holders.is_of_extra_state(name):
            return False
        names = map(last_part, now.saved.by_mark.get(now.found.mark(name), ()))
        return last_part(name) not in names and self._holders.place(name) is not None

    def _made_by_loading(self, names: set[str], was: _Look, compared: _Comparison) -> set[str]:
        made = self.coming_back.made_by_loading(names, was.found, compared.now.found, self._states)
        # Loading may have left something in objects of libraries, such as a GradScaler's first scale.
        self._looks = [_Look(self._attributes(), compared.now.saved)]
        return made

    def _derived(self, names: set[str], was: _Look, now: Attributes) -> set[str]:
        """What loading has derived from other values, and may later no longer be what it would derive."""
        values = {name for name in names if is_value(now.leaves.get(name)) and name in was.found.leaves}
        placed = {name for name in values if self._holders.place(name) is not None}
        return {name for name in placed if not self._holders.is_of_extra_state(name)}

    def _parts_of_model(self, now: Attributes, changed: Sequence[str]) -> set[str]:
        """Attributes that the first step has given the task, and that are nothing but parts of the model.

        A resume gives it the same, unless they are others now, or steps ask whether they are there.
        """
        new = {holder for holder in now.holders.values() if holder.startswith("task.")}
        new -= {now.holders.get(name) for name in changed}
        new -= {f"task.{key}" for key in self.coming_back.first_names}
        found = {holder for holder in new if now.refers_to_known(holder)}
        keys = {name: name.removeprefix("task.") for name in found}
        return {name for name, key in keys.items() if not (is_asked_for(type(self._task), key) or is_caught(key))}


def _bytes_of(saved: Attributes) -> int:
    return sum(leaf.nbytes for leaf in saved.leaves.values() if isinstance(leaf, Tensor) and not leaf.is_nested)
