"""Defers the import of ``torch._dynamo``, which every rank would otherwise wait for, until something compiles.

DDP and all optimizers import it for four functions that do nothing unless code is being compiled; and the import takes
as long as that of torch itself, at each start of each rank. So until another part of it is needed, a module with these
four stands in its place; then the real one is loaded into the same object. A torch that needs more than the four loads
it sooner, which costs only time; a test notices.
"""

from __future__ import annotations

import importlib.util
import sys
import threading
from types import ModuleType
from typing import Any

import torch

_NAME = "torch._dynamo"
_MAX_SECONDS = 60.0  # that a thread waits while another loads it; it then goes on with what there is, as in an import


def defer_dynamo() -> None:
    """Defer the import, unless it has already happened."""
    if _NAME in sys.modules:
        return
    deferred = _Deferred(_NAME)
    deferred.__spec__ = importlib.util.find_spec(_NAME)
    assert deferred.__spec__ is not None
    deferred.__loader__, deferred.__file__ = deferred.__spec__.loader, deferred.__spec__.origin
    sys.modules[_NAME] = deferred
    torch._dynamo = deferred


class _Deferred(ModuleType):
    """``torch._dynamo`` before it is loaded. It has no ``__path__``, so the import of a part of it loads it, too."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._lock = threading.RLock()
        self._disabled: list[tuple[Any, bool]] = []
        self.utils = _Part(self, "utils", get_optimize_ddp_mode=lambda: "ddp_optimizer")
        self.trace_rules = _Part(self, "trace_rules", clear_lru_cache=lambda: None)

    def graph_break(self, *_: Any, **__: Any) -> None:
        """Do nothing, as the real one does in code that is not being compiled."""

    def disable(self, fn: Any = None, recursive: bool = True, **options: Any) -> Any:
        """Return a function of torch as it is; once the real module is loaded, it is disabled."""
        if fn is None or options != {"wrapping": False}:  # not from torch's decorator, which keeps the result in `fn`
            return self._load().disable(fn, recursive, **options)
        self._disabled.append((fn, recursive))
        return fn

    def __getattr__(self, name: str) -> Any:
        """Load the real module for any other name, except for those that Python and tools ask all modules for."""
        if name.startswith("__") and name not in ("__path__", "__all__"):
            raise AttributeError(f"module {_NAME!r} has no attribute {name!r}")
        return getattr(self._load(), name)

    def _load(self) -> Any:
        return _loaded(self)


class _Loading(ModuleType):
    """``torch._dynamo`` while it is being loaded: other threads, such as one that takes a step, wait for the rest."""

    def __getattr__(self, name: str) -> Any:
        own = vars(self)
        if threading.get_ident() != own["_thread"] and own["_lock"].acquire(timeout=_MAX_SECONDS):
            own["_lock"].release()
            return getattr(self, name)  # of a plain module now
        raise AttributeError(f"module {_NAME!r} has no attribute {name!r}")


class _Part:
    """A module in ``torch._dynamo`` that has one function so far."""

    def __init__(self, whole: _Deferred, name: str, **function: Any) -> None:
        self._whole, self._name = whole, name
        vars(self).update(function)

    def __getattr__(self, name: str) -> Any:
        return getattr(getattr(_loaded(self._whole), self._name), name)


def _loaded(module: ModuleType) -> Any:
    """The module itself, once the real one has been loaded into it."""
    with vars(module)["_lock"]:
        if isinstance(module, _Deferred):  # no other thread was first
            _load_into(module)
    return module


def _load_into(module: ModuleType) -> None:
    """Load the real module; then disable what was to be disabled in code that is compiled."""
    spec, own = module.__spec__, vars(module)
    assert spec is not None and spec.loader is not None
    own["_thread"] = threading.get_ident()
    module.__path__ = list(spec.submodule_search_locations or [])
    module.__class__ = _Loading
    del own["utils"], own["trace_rules"]
    try:
        spec.loader.exec_module(module)
    finally:
        module.__class__ = ModuleType
    for fn, recursive in own["_disabled"]:
        fn.__dynamo_disable = own["disable"](fn, recursive, wrapping=False)
