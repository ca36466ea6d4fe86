"""Remembers which attributes the values in the state of a task belong to.

An attribute that comes to have the same value as another one later, such as a copy that is made every few steps, is not
saved by that: a resume gives the value to the other one only.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable

from cluster_ddp.train.state.attributes import Attributes, is_element
from cluster_ddp.train.state.kinds import is_common


class Claims:
    """By the place of each value in the state, the attributes that have been found to have it."""

    def __init__(self) -> None:
        self._owners = collections.defaultdict[str, set[str]](set)

    def note(self, names: Iterable[str], now: Attributes, saved: Attributes) -> None:
        """Note where the state holds the values of attributes that have changed."""
        places = _by_mark((place for place, leaf in saved.leaves.items() if not is_common(leaf)), saved)
        for name in names:
            for place in places.get(now.mark(name), ()):
                self._owners[place].add(name)

    def taken(
        self, now: Attributes, saved: Attributes, changed: Iterable[str]
    ) -> Callable[[str, str, int | None], bool]:
        """A function of a place, a name, and how often the state has its value: whether that belongs to other names.

        To those that have had it before, and still do; or else, if the state has it less often than it is among what
        has changed, to the one that is called like the place.
        """
        names, places = _by_mark(changed, now), _by_mark(saved.leaves, saved)

        def is_taken(place: str, name: str, number: int | None) -> bool:
            place = place.partition(", ")[0]  # it may be in another form
            mark, owners = saved.mark(place), self._owners.get(place, set[str]())
            if name in owners or mark is None:
                return False
            if any(now.mark(owner) == mark for owner in owners):
                return True
            rivals = [rival for rival in names.get(mark, ()) if rival != name]
            if len(rivals) < (number or len(places[mark])) or is_element(place):  # a list may be logged besides
                return False
            return any(_likeness(rival, place) >= _likeness(name, place) for rival in rivals)

        return is_taken


def _by_mark(names: Iterable[str], at: Attributes) -> dict[object, list[str]]:
    found = collections.defaultdict[object, list[str]](list)
    for name in names:
        if (mark := at.mark(name)) is not None:
            found[mark].append(name)
    return found


def _likeness(name: str, place: str) -> int:
    """How many parts of two names are the same, from the last one on."""
    parts = zip(reversed(name.split(".")), reversed(place.split(".")), strict=False)
    return next((number for number, (one, other) in enumerate(parts) if one != other), len(place))
