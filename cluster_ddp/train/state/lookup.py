"""Looks up in the state of a run, by value, what has changed: a checkpoint may hold it under any name."""

from __future__ import annotations

import enum
from collections.abc import Callable, Container, Iterable, Iterator
from itertools import accumulate
from typing import Any

from cluster_ddp.train.objects.attributes import OTHER_FLOATS, Attributes, forms_of, is_element, last_part
from cluster_ddp.train.objects.kinds import is_common
from cluster_ddp.train.objects.snapshot import GRADIENT, LENGTH, TRAINED

_NOTHING = object()


class Lookup:
    """Tells which of the changed attributes the state does not hold, under any name.

    A value may be in the state by chance: one that many things have, such as True, counts only where the state has
    changed, too; that of a single attribute, such as the last loss, counts in a list or dict, such as that of all
    losses, only where it was before; and the length of a list whose elements another list has, too, only as that of a
    third.

    Parameters
    ----------
    now
        What there is now.
    saved, fresh
        What the state holds, and the names there of what has changed as well; None: all.
    then
        What these were compared with, and what the state held then.
    is_taken
        Whether what the state holds in a place belongs to other names than this one. The last argument is how many
        places may have it; None: all with the same value.
    """

    def __init__(
        self,
        now: Attributes,
        saved: Attributes,
        fresh: Container[str] | None = None,
        then: tuple[Attributes, Attributes] | None = None,
        is_taken: Callable[[str, str, int | None], bool] = lambda *_: False,
    ) -> None:
        self._now, self._saved, self._then, self._is_taken = now, saved, then, is_taken
        self._changed = {key: leaf for key, leaf in saved.leaves.items() if fresh is None or key in fresh}
        self._lists = {name.removesuffix(LENGTH) for name in now.leaves if name.endswith(LENGTH)}

    def unsaved(self, changed: Iterable[str]) -> list[str]:
        """Which of these names are not saved; not elements that have left a list, because its length shows that."""
        return [name for name in changed if not self._is_saved(name)]

    def _is_saved(self, name: str) -> bool:
        now = self._now
        if name.endswith(LENGTH) and (sources := now.lists_of_parts.get(name.removesuffix(LENGTH))):
            return self._has_length(now.leaves.get(name), sources)
        if name.endswith(GRADIENT):
            return self._has(now.gradient(name), name)
        if name.endswith(TRAINED):  # the state may say whether it is frozen
            return any(isinstance(leaf, bool) for leaf in self._changed.values())
        if (first := now.first_alias(name)) is not None:
            return self._has_reference(name, first)
        if (first := name if name in now.leaves else now.first_name(name)) is not None:
            return self._has(now.leaves[first], name)
        has_left = now.kind(name) is None
        return has_left and any(name[:end] in self._lists for end, letter in enumerate(name) if letter == ".")

    def _has_length(self, length: Any, sources: set[str]) -> bool:
        """Whether the state has a list of this length, other than those that have the elements under these names."""
        places = (place for place, leaf in self._changed.items() if place.endswith(LENGTH) and leaf == length)
        return any(last_part(place.removesuffix(LENGTH)) not in sources for place in places)

    def _has_reference(self, name: str, first: str) -> bool:
        """Whether the state has what a second name refers to, or its place in a list, or its key in a dict."""
        saved, key = self._saved, last_part(first)
        if name in saved.leaves or saved.first_alias(name) is not None or self._now.is_as_often(first, saved):
            return True
        return self._has(key, name) or (key.isdecimal() and self._has(int(key), name))

    def _has(self, value: Any, name: str) -> bool:
        if isinstance(value, enum.Enum):
            return any(self._has(form, name) for form in forms_of(value))
        places: Iterator[str]
        number: int | None
        if not is_common(value):
            found = (place for form in forms_of(value) for place in self._saved.places_of(form))
            found = (place for place in found if self._may_be_kept(name, place))
            places, number = (place for place in found if self._is_as_precise(name, place)), None
        else:
            alike = ((place, leaf) for place, leaf in self._changed.items() if is_common(leaf) and value == leaf)
            following = [place for place, leaf in alike if self._follows(name, place, leaf)]
            places, number = iter(following), len(following)
        return any(self._was_there(name, place) and not self._is_taken(place, name, number) for place in places)

    def _may_be_kept(self, name: str, place: str) -> bool:
        """By a place that has not changed only what has not either, or is new and an element or called the same."""
        if place in self._changed or self._then is None:
            return True
        before = self._then[0]
        if before.first_alias(name) is not None:
            return False
        if (mark := before.mark(name)) is None:
            return is_element(name) or last_part(place) == last_part(name)
        return bool(mark == self._now.mark(name))

    def _was_there(self, name: str, place: str) -> bool:
        if self._then is None or name not in self._then[0].leaves or is_element(name):
            return True
        before, saved = self._then
        whole, held = place.partition(", ")[0], saved.leaves
        if not held.keys().isdisjoint((place, whole, whole + LENGTH)):
            marks = before.mark(name), saved.mark(place)
            return not is_element(place) or marks[0] == marks[1] or type(marks[0]) is not type(marks[1])
        *outer, _ = accumulate(place.split("."), "{}.{}".format)
        return len(outer) == 1 or any(held.get(whole, place) is None for whole in outer)

    def _follows(self, name: str, place: str, leaf: Any) -> bool:
        """Whether this place in the state held the previous value of this name, too; a bool may be a number there."""
        are_flags = isinstance(leaf, bool) == isinstance(self._now.leaves.get(name), bool)
        if not (are_flags or last_part(place) == last_part(name)):
            return False
        if self._then is None or place not in self._then[1].leaves:
            return True
        before, there = self._then[0].leaves.get(name, _NOTHING), self._then[1].leaves[place]
        return not is_common(before) or (is_common(there) and bool(before == there))

    def _is_as_precise(self, name: str, place: str) -> bool:
        """Whether a number that has come to be one of another precision is one in the state, too."""
        kind = self._now.kind(name)
        is_new = self._then is not None and name in self._then[0].leaves and self._then[0].kind(name) is not kind
        return not (is_new and kind in OTHER_FLOATS) or self._saved.kind(place) is kind
