"""Remembers which attributes the values in the state of a task belong to.

An attribute that comes to have the same value as another one later, such as a copy that is made every few steps, is not
saved by that: a resume gives the value to the other one only.
"""

from __future__ import annotations

import collections
from collections.abc import Iterable

from cluster_ddp.train.state.attributes import Attributes


class Claims:
    """By the place of each value in the state, the attributes that have been found to have it."""

    def __init__(self) -> None:
        self._owners = collections.defaultdict[str, set[str]](set)

    def note(self, names: Iterable[str], now: Attributes, saved: Attributes) -> None:
        """Note where the state holds the values of attributes that have changed."""
        places = collections.defaultdict[object, list[str]](list)
        for place in saved.leaves:
            places[saved.mark(place)].append(place)
        for name in names:
            if (mark := now.mark(name)) is not None:
                for place in places.get(mark, ()):
                    self._owners[place].add(name)

    def is_taken(self, place: str, name: str, now: Attributes, saved: Attributes) -> bool:
        """Whether a value in the state, in whatever form, belongs to others than this name, which still have it."""
        place = place.partition(", ")[0]
        owners = self._owners.get(place, set[str]())
        mark = saved.mark(place)
        return name not in owners and mark is not None and any(now.mark(owner) == mark for owner in owners)
