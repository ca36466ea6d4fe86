"""Remembers which attribute of a task each value in its state was saved from.

A value is restored to that attribute only. Another attribute that later has the same value by chance, such as a copy
made every few steps, is not saved.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable
from itertools import accumulate

from cluster_ddp.train.objects.attributes import Attributes, is_element
from cluster_ddp.train.objects.kinds import is_common
from cluster_ddp.train.objects.snapshot import LENGTH


class Claims:
    """By the place of each value in the state, the attributes that have been found to have it."""

    def __init__(self) -> None:
        self._owners = collections.defaultdict[str, set[str]](set)

    def note(self, names: Iterable[str], now: Attributes, saved: Attributes) -> None:
        """Note where the state holds the values of attributes that have changed."""
        for name in names:
            for place in saved.by_mark.get(now.mark(name), ()):
                if not is_common(saved.leaves[place]):
                    self._owners[place].add(name)

    def taken(
        self, now: Attributes, saved: Attributes, changed: Iterable[str], saved_then: Attributes
    ) -> Callable[[str, str, int | None], bool]:
        """A function of a place, a name, and how often the state has its value: whether that belongs to other names.

        To those that have had it before, and still do; or else, if the state has it less often than it is among what
        has changed, to the one that is called like the place. Not if the state has the same name there. A list that has
        grown since the last time, when the state was `saved_then`, may log what belongs to a name of its own besides.
        """
        names = collections.defaultdict[object, list[str]](list)
        for changed_name in changed:
            names[now.mark(changed_name)].append(changed_name)

        def is_taken(place: str, name: str, number: int | None) -> bool:
            place = place.partition(", ")[0]  # it may be in another form
            mark, owners = saved.mark(place), self._owners.get(place, set[str]())
            if name in owners or mark is None or place in (name, saved.first_name(name)):
                return False
            if any(now.mark(owner) == mark for owner in owners):
                return True
            rivals = [rival for rival in names.get(mark, ()) if rival != name]
            if len(rivals) < (number or len(saved.by_mark[mark])) or _is_in_a_log(place, saved, saved_then):
                return False
            return any(_likeness(rival, place) >= _likeness(name, place) for rival in rivals)

        return is_taken


def _is_in_a_log(place: str, saved: Attributes, saved_then: Attributes) -> bool:
    if is_element(place) and place not in saved_then.leaves:  # of a dict, whose length is not among the leaves
        return True
    lengths = [f"{whole}{LENGTH}" for whole in accumulate(place.split("."), "{}.{}".format)]
    return any(saved.leaves.get(length) != saved_then.leaves.get(length) for length in lengths)


def _likeness(name: str, place: str) -> int:
    """How many parts of two names are the same, from the last one on."""
    parts = zip(reversed(name.split(".")), reversed(place.split(".")), strict=False)
    return next((number for number, (mine, other) in enumerate(parts) if mine != other), len(place))
