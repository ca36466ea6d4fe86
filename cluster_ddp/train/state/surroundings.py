"""The variables of the classes and modules that a user's code consists of, which are attributes of no object."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from types import FunctionType, ModuleType
from typing import Any

from cluster_ddp.train.randomness import GENERATORS
from cluster_ddp.train.state.attributes import is_library


def variables_around(objects: Iterable[object]) -> dict[str, Any]:
    """By name, without those of what is installed, and without functions, classes and modules."""
    kinds = (kind for one in objects for kind in ((one,) if isinstance(one, FunctionType) else type(one).__mro__))
    found: dict[str, Any] = {}
    for kind in dict.fromkeys(kinds):
        module = sys.modules.get(str(kind.__module__))
        if module is None or _is_installed(module):
            continue
        for place, name in ((kind, kind.__name__), (module, module.__name__)):
            found |= {f"{name}.{key}": value for key, value in _variables(vars(place)).items()}
    return found


def generators_around(objects: Iterable[object]) -> dict[str, Any]:
    """The random generators among them, each once: a script often has one at its top."""
    found = sorted(variables_around(objects).items(), reverse=True)
    names = {id(value): name for name, value in found if isinstance(value, GENERATORS)}
    return {name: value for name, value in found if names.get(id(value)) == name}


def _variables(names: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: value
        for name, value in list(names.items())
        if not name.startswith("__")
        and not isinstance(value, (ModuleType, type))
        and not hasattr(type(value), "__get__")
    }


def _is_installed(module: ModuleType) -> bool:
    return is_library(module.__name__) or "site-packages" in str(getattr(module, "__file__", None))
