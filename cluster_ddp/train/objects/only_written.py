"""Inspects the code of a class to find attributes whose values cannot affect what it does.

The value of an attribute that the class sets but never reads has no effect. Whether an attribute exists has no effect
if the class never asks for it, for example by hasattr().
"""

from __future__ import annotations

import dis
from collections.abc import Iterator
from types import CodeType
from typing import Any


def is_only_written(kind: type, name: str) -> bool:
    """Whether methods of a class set an attribute, and none reads it or contains its name as a string.

    Compiled methods cannot be inspected; what only they set does not count as only written.
    """
    codes = [code for base in kind.__mro__ for value in vars(base).values() for code in codes_of(value)]
    uses = [
        instruction.opname
        for code in codes
        for instruction in dis.get_instructions(code)
        if instruction.argval == name and isinstance(instruction.argval, str)
    ]
    return bool(uses) and set(uses) == {"STORE_ATTR"}


def is_asked_for(kind: type, name: str) -> bool:
    """Whether methods of a class contain the name of an attribute as a string, as for hasattr()."""
    codes = (code for base in kind.__mro__ for value in vars(base).values() for code in codes_of(value))
    return any(name in code.co_consts for code in codes)


def codes_of(value: Any) -> Iterator[CodeType]:
    """The code of a method, of what its decorators wrap, and of functions inside it."""
    if isinstance(value, property):
        for function in (value.fget, value.fset, value.fdel):
            yield from codes_of(function)
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
