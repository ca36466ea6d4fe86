"""Which attributes the code of a class sets and never looks at: what it keeps there changes nothing it does."""

from __future__ import annotations

import dis
from collections.abc import Iterator
from types import CodeType
from typing import Any


def is_only_written(kind: type, name: str) -> bool:
    """Whether methods of a class set an attribute, and none of them reads it or knows its name as a string.

    Of compiled methods nothing is seen; what they set is not said to be only written.
    """
    codes = [code for base in kind.__mro__ for value in vars(base).values() for code in _codes_of(value)]
    uses = [
        instruction.opname
        for code in codes
        for instruction in dis.get_instructions(code)
        if instruction.argval == name and isinstance(instruction.argval, str)
    ]
    return bool(uses) and set(uses) == {"STORE_ATTR"}


def _codes_of(value: Any) -> Iterator[CodeType]:
    """The code of a method, of what decorators have wrapped, and of functions inside it."""
    if isinstance(value, property):
        for function in (value.fget, value.fset, value.fdel):
            yield from _codes_of(function)
        return
    value = getattr(value, "__func__", value)
    while value is not None:
        if isinstance(code := getattr(value, "__code__", None), CodeType):
            yield from _nested(code)
        value = getattr(value, "__wrapped__", None)


def _nested(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _nested(constant)
