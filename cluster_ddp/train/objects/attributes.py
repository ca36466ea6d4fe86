"""Compares what objects keep in plain attributes, to find what training changes and no checkpoint contains."""

from __future__ import annotations

import collections
import enum
import functools
from collections.abc import Iterable, Iterator
from itertools import accumulate
from typing import Any

import numpy as np
from torch import Tensor

from cluster_ddp.train.objects.comparing import Place, equal_bits, is_alike, is_nonzero, is_same, may_be_alike
from cluster_ddp.train.objects.contents import contents
from cluster_ddp.train.objects.kinds import is_common, is_replaced, is_value
from cluster_ddp.train.objects.snapshot import GRADIENT, GROUPS, LENGTH, Snapshot

_LISTS = (list, dict, collections.deque, collections.defaultdict, collections.OrderedDict, collections.Counter)
# Numbers with which NumPy computes in another precision than with those of Python.
OTHER_FLOATS = (np.float16, np.float32, np.longdouble)


class Attributes(Snapshot):
    """What objects hold at the moment, to be compared with what they hold at another."""

    def changed(self, now: Attributes) -> list[str]:
        """Names whose values or contents differ in a later snapshot, or that exist in only one of the two."""
        both = self.leaves.keys() & now.leaves.keys()
        same = {
            name
            for name in both
            if (
                is_same(self.leaves[name], now.leaves[name])
                and self._versions.get(name) == now._versions.get(name)
                and self._contents.get(name) == now._contents.get(name)
            )
            or self._is_made_again(name, now.leaves[name])
        }
        # What was found under another name before, because that has come to refer to something else since.
        same |= {name for name in now.leaves.keys() - both if self._has_same(name, now)}
        same |= {name for name in self.leaves.keys() - both if now._has_same(name, self)}
        filled = {  # what was None, or another value, and holds something now, which has names of its own
            name
            for name in self.leaves.keys() & now._kinds.keys() - now.leaves.keys()
            if is_value(self.leaves[name]) and any(leaf.startswith((f"{name}.", f"{name}, ")) for leaf in now.leaves)
        }
        found = (self.leaves.keys() | now.leaves.keys()) - same - filled
        return sorted(found | self._replaced(now) | self._left_gradients(now))

    def _replaced(self, now: Attributes) -> set[str]:
        """What is of another kind now, refers to something else, or has been frozen or unfrozen."""
        kinds = self._kinds.keys() | now._kinds.keys()
        replaced = {name for name in kinds if is_replaced(self._kinds.get(name), now._kinds.get(name))}
        replaced |= {name for name in self._aliases.keys() & now._aliases.keys() if self._refers_elsewhere(name, now)}
        replaced |= now._refers_newly(self) | self._refers_newly(now)
        return replaced | {name for name, flag in now._trained.items() if self._trained.get(name, flag) != flag}

    def _left_gradients(self, now: Attributes) -> set[str]:
        """Gradients that have been added to, of what an optimizer holds, or that are there, of what none does."""
        in_optimizers = {own for own, _ in now.in_optimizers()} if now._gradients else set()
        left = set[str]()
        for name in self._gradients.keys() & now._gradients.keys():
            (before, version_before), (found, version) = self._gradients[name], now._gradients[name]
            gradient = found()
            if gradient is None:
                continue
            if name.removesuffix(GRADIENT) in in_optimizers or GROUPS in name:
                if before() is gradient and version_before != version:
                    left.add(name)
            elif now._is_bare(name) and is_nonzero(gradient):  # who gave it none to step it reads its gradient
                left.add(name)
        return left

    def _is_made_again(self, name: str, leaf: Any) -> bool:
        """Whether a tensor was replaced by an equal one, such as a mask made in each step, or moved to a device."""
        was = self.leaves[name]
        return (
            isinstance(was, Tensor)
            and isinstance(leaf, Tensor)
            and was is not leaf
            and not was.is_inference()
            and was._version == self._versions[name]
            and contents([(name, was)]).get(name) == self._contents.get(name)  # it may be a view of an array
            and equal_bits(was, leaf)
        )

    def _has_same(self, name: str, other: Attributes) -> bool:
        """Whether a leaf of the other has another name here, and the same value."""
        first = self.first_name(name)
        return first is not None and is_same(self.leaves[first], other.leaves[name])

    def first_name(self, name: str) -> str | None:
        """By what other name a leaf was found first."""
        for end, letter in enumerate(name):
            if letter in ".," and (first := self._aliases.get(name[:end])) is not None:
                return other if (other := first + name[end:]) in self.leaves else None
        return None

    def _refers_elsewhere(self, name: str, now: Attributes) -> bool:
        was, first = self._aliases[name], now._aliases[name]
        return was != first and self._objects[was] is not now._objects[first]

    def gradients(self) -> dict[str, tuple[Tensor, str]]:
        """The tensors that have a gradient, by its name, with what holds them."""
        tensors = {name: self.leaves[name.removesuffix(GRADIENT)] for name in self._gradients}
        still = {name for name, (held, _) in self._gradients.items() if held() is not None}
        return {name: (tensors[name], self.holders[name]) for name in still if tensors[name].grad is not None}

    def gradient(self, name: str) -> Tensor | None:
        """The gradient of this name, if it is still there."""
        gradient: Tensor | None = self._gradients[name][0]()
        return gradient

    def first_alias(self, name: str) -> str | None:
        """The name under which what this name refers to was found first; None if it was under this one."""
        return self._aliases.get(name)

    def _is_bare(self, name: str) -> bool:
        return id(self.leaves[name.removesuffix(GRADIENT)]) not in self._of_modules

    def _refers_newly(self, other: Attributes) -> set[str]:
        """Names that the other has not, of what it has under another name; the length of a list shows its elements."""
        names = other._kinds.keys() | other.leaves.keys()
        return {
            name
            for name, first in self._aliases.items()
            if name not in names and (first in other._kinds or (first in other._known and "." in first))
            if name.rpartition(".")[0] + LENGTH not in self.leaves
        }

    def refers_to_known(self, holder: str) -> bool:
        """Whether it is nothing but a part of what is saved anyway, or a list or dict of such parts."""
        leaves = (name for name, held in self.holders.items() if held == holder and name in self.leaves)
        firsts = [first for name, first in self._aliases.items() if name == holder or name.startswith(f"{holder}.")]
        are_known = all(first in self._known and "." in first for first in firsts)
        return bool(firsts) and are_known and all(name.endswith(LENGTH) for name in leaves)

    def is_as_often(self, first: str, saved: Attributes) -> bool:
        """Whether the state has a tensor as often as it is held, such as each state of an episode and the next one."""
        if not isinstance(tensor := self._objects.get(first), Tensor):
            return False
        places = set(saved.places_of(tensor))
        held = sum(other == first for other in self._aliases.values())
        return bool(places) and len(places) + sum(other in places for other in saved._aliases.values()) > held

    def places_of(self, value: Any) -> Iterator[str]:
        """The names of the leaves that have a value; of the tensors, those that have the same bits."""
        if isinstance(value, Tensor):
            alike = (name for name in self._tensors if may_be_alike(value, self.leaves[name]))
            yield from (name for name in alike if is_alike(value, self.leaves[name]))
        elif not isinstance(value, Place):
            yield from (name for name in self.by_mark.get(repr(value), ()) if type(self.leaves[name]) is type(value))

    @functools.cached_property
    def _tensors(self) -> list[str]:
        return [name for name, leaf in self.leaves.items() if isinstance(leaf, Tensor)]

    @functools.cached_property
    def by_mark(self) -> dict[Any, list[str]]:
        """The names of the leaves, by what tells their values from others."""
        found = collections.defaultdict[Any, list[str]](list)
        for name in self.leaves:
            found[self.mark(name)].append(name)
        found.pop(None, None)
        return found

    def has_a_place_in(self, saved: Attributes, name: str, before: Attributes) -> bool:
        """Whether the state holds the value of a leaf where it held one before, too, other than in a list.

        A whole number or a string, or what many things have, counts only under the same last name.
        """
        return any(
            (isinstance(form, (float, Tensor)) and not is_common(form)) or last_part(place) == last_part(name)
            for form in forms_of(self.leaves.get(name))
            for place in saved.places_of(form)
            if place in before.leaves and not is_element(place)
        )

    def owner(self, name: str) -> int | None:
        """The id of the innermost object in the task or the model that a leaf belongs to; None: to these themselves."""
        *outer, _ = accumulate(name.split("."), "{}.{}".format)
        return next((self._owners[whole] for whole in reversed(outer[1:]) if whole in self._owners), None)

    @functools.cached_property
    def lists_of_parts(self) -> dict[str, set[str]]:
        """The lists whose elements have other names, too, with the last names of what has these under them."""
        found: dict[str, set[str]] = {}
        for name, first in self._aliases.items():
            if (whole := name.rpartition(".")[0]) + LENGTH in self.leaves:
                found.setdefault(whole, set()).add(last_part(first.rpartition(".")[0]))
        return found

    def lists_alike(self, again: Attributes) -> set[str]:
        """Lists of shared objects that a resume gives the same length and the same members."""
        others = {name.rpartition(".")[0] for name in self._aliases.keys() - self.same_aliases(again)}
        lists = self.lists_of_parts.keys() - others
        return {name for name in lists if again.leaves.get(name + LENGTH) == self.leaves[name + LENGTH]}

    @functools.cached_property
    def _owners(self) -> dict[str, int]:
        return {name: key for key, name in self._seen.items() if isinstance(key, int)}

    def mark(self, name: str) -> Any:
        """What tells the value that a leaf had from others; None if there is none."""
        name = name if name in self.leaves else self._aliases.get(name) or self.first_name(name) or name
        leaf = self.leaves.get(name)
        return self._contents.get(name) if leaf is None or isinstance(leaf, Tensor) else repr(leaf)

    def in_optimizers(self) -> set[tuple[str, str]]:
        """The names of tensors that optimizers hold and something else does, too: its name there, and theirs."""
        tensors = ((first, name) for name, first in self._aliases.items() if isinstance(self._objects[first], Tensor))
        pairs = {tuple(sorted(pair, key=lambda name: GROUPS in name)) for pair in tensors}
        return {(own, held) for own, held in pairs if GROUPS in held and GROUPS not in own}

    def by_both_names(self, now: Attributes, changed: Iterable[str]) -> set[str]:
        """Second names of what a later snapshot has under the same names, and what has changed in place."""
        return {
            name
            for name, first in now._aliases.items()
            if self._objects.get(self._aliases.get(name, "")) is now._objects[first]
            and any(other == first or other.startswith((f"{first}.", f"{first}, ")) for other in changed)
        }

    def is_lost(self, name: str, was: Attributes, again: Attributes) -> bool:
        """Whether a number or tensor would differ or be missing after a resume, or come back as another kind of number.

        Also whether a list would be missing.
        """
        if name not in self.leaves:  # the task has dropped it itself
            return False
        leaf, loaded = self.leaves.get(name), again.leaves.get(name)
        if name not in again.leaves and (isinstance(leaf, (float, Tensor)) or name.endswith(LENGTH)):
            first = again._aliases.get(name) or again.first_name(name)
            return first not in again.leaves or not is_alike(leaf, again.leaves[first])
        if isinstance(leaf, Tensor) and type(loaded) is float:
            return isinstance(was.leaves.get(name), Tensor)
        kind = self._kinds.get(name)
        if kind in OTHER_FLOATS and again._kinds.get(name) is not kind:
            return bool(was._kinds.get(name) is kind)
        are_numbers = type(leaf) is type(loaded) is float or (isinstance(leaf, Tensor) and isinstance(loaded, Tensor))
        return are_numbers and not self.has_alike(name, again)

    def keys_lost(self, again: Attributes) -> set[str]:
        """Dicts whose keys are no strings, and come back as such; names do not show that."""
        dicts = self.keys.keys() & again.keys.keys()
        return {name for name in dicts if again.keys[name] == {str} and str not in self.keys[name]}

    def is_value(self, name: str) -> bool:
        """Whether it is a number, a string or the like itself, and not only compared by one."""
        return name in self.leaves and name not in self._kinds

    def has(self, place: str) -> bool:
        """Whether something was found under this name, or under one that begins with it."""
        return place in self._wholes

    @functools.cached_property
    def _wholes(self) -> set[str]:
        """All names, and whatever they begin with up to a dot or a comma."""
        names = {*self.leaves, *self._kinds, *self._known}
        return names | {name[:end] for name in names for end, letter in enumerate(name) if letter in ".,"}

    def kind(self, name: str) -> Any:
        """The class of what was found under this name; of a function, its code."""
        return self._kinds.get(name)

    def outermost_list(self, name: str) -> str | None:
        """The name of the outermost list, dict or the like that a leaf belongs to."""
        wholes = accumulate(name.partition(", ")[0].split("."), "{}.{}".format)
        return next((whole for whole in wholes if self._kinds.get(whole) in _LISTS), None)

    def has_alike(self, name: str, again: Attributes) -> bool:
        """Whether a leaf has the same value, or a tensor the same bits, after a resume."""
        leaf, loaded = self.leaves.get(name), again.leaves[name]
        if isinstance(leaf, Tensor) and leaf is loaded:  # what both snapshots found in it: loading may have rounded it
            return self._contents.get(name) == again._contents.get(name)
        if isinstance(leaf, Tensor) and isinstance(loaded, Tensor):
            return equal_bits(leaf, loaded)
        kinds = {self._kinds.get(name), again._kinds.get(name)}
        return is_same(leaf, loaded) and (len(kinds) == 1 or kinds.isdisjoint(OTHER_FLOATS))

    def has_another_tensor(self, name: str, tensor: Any) -> bool:
        """Whether there is another tensor now in the place of one."""
        leaf = self.leaves.get(name)
        return isinstance(tensor, Tensor) and isinstance(leaf, Tensor) and leaf is not tensor

    def are_alike(self, name: str, again: Attributes) -> bool:
        """Whether the same comes back under a name, or nothing if there is nothing."""
        if name in self.leaves and name in again.leaves:
            return self.has_alike(name, again)
        return name not in {*self.leaves, *again.leaves} and self.kind(name) == again.kind(name)

    def aliases_lost(self, now: Attributes) -> set[str]:
        """Second names that refer to something else in a later snapshot."""
        return self._aliases.keys() - self.same_aliases(now)

    def same_aliases(self, now: Attributes) -> set[str]:
        """Second names that refer in a later snapshot to what has the same first name."""
        return {name for name, first in self._aliases.items() if now._aliases.get(name) == first}


def last_part(name: str) -> str:
    """The part of a name after its last dot."""
    return name.rpartition(".")[2]


def forms_of(value: Any) -> tuple[Any, ...]:
    """What the state may have for a value as it is."""
    if isinstance(value, enum.Enum):
        return value.name, value.value
    is_number = isinstance(value, Tensor) and not (value.is_nested or value.is_meta) and value.numel() == 1
    return (value, value.item()) if is_number else (value,)


def is_element(name: str) -> bool:
    """Whether it is in a list, or in a dict by a number."""
    return any(part.isdecimal() for part in name.split("."))
