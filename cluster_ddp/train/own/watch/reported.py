"""What the watches have reported already, so that each variable is reported once."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Protocol


class Report(Protocol):
    """Shows a message; `names` are the variables that it is about, if another watch might report them too."""

    def __call__(self, message: str, names: Iterable[str] = ()) -> None: ...


class Reported:
    """Passes messages on, and remembers the variables that they are about."""

    def __init__(self, warn: Callable[[str], None]) -> None:
        self._warn = warn
        self._names: set[str] = set()

    def __call__(self, message: str, names: Iterable[str] = ()) -> None:
        self._names.update(names)
        self._warn(message)

    def has(self, name: str) -> bool:
        """Whether this variable, a part of it, or what it is a part of has been reported."""
        return any(_holds(name, other) or _holds(other, name) for other in self._names)

    def has_attribute(self, attribute: str) -> bool:
        """Whether this attribute or item of anything has been reported, under whatever name."""
        return any(re.split(r"[.\[]", name)[-1].strip("]'") == attribute for name in self._names)


def _holds(name: str, part: str) -> bool:
    return part == name or part.startswith((f"{name}.", f"{name}["))
