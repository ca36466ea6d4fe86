"""Finds the attributes of an object that one of its methods reads."""

from __future__ import annotations

import dis
from types import CodeType, FunctionType


def attributes_read(kind: type, method: str) -> frozenset[str]:
    """The attributes of ``self`` that a method reads, and the methods that it calls by ``self``, by their code."""
    found: set[str] = set()
    left = [method]
    while left:
        function = getattr(kind, left.pop(), None)
        if isinstance(function, FunctionType) and function.__code__.co_argcount:
            names = set(_read_from(function.__code__, function.__code__.co_varnames[0]))
            left += names - found
            found |= names
    return frozenset(found)


def _read_from(code: CodeType, variable: str) -> list[str]:
    """The attributes of a variable that a function reads, and the functions inside it."""
    names, is_loaded = [], False
    for instruction in dis.get_instructions(code):
        if is_loaded and instruction.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            names.append(str(instruction.argval))
        loaded = instruction.argval[-1:] if isinstance(instruction.argval, tuple) else (instruction.argval,)
        is_loaded = instruction.opname.startswith(("LOAD_FAST", "LOAD_DEREF")) and variable in loaded
    inner = [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    return names + [name for constant in inner for name in _read_from(constant, variable)]
