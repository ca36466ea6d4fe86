"""Whose code something is: the user's, that of an installed package, Python's, or this package's."""

from __future__ import annotations

import functools
import sys
import sysconfig
from pathlib import Path, PurePath

import cluster_ddp

# Modules of these are recognized by name, wherever they lie.
_LIBRARIES = {"torch", "numpy", "cluster_ddp", "lightning", "transformers", "accelerate", *sys.stdlib_module_names}
_INSTALLED = ("site-packages", "dist-packages")
_STANDARD = sysconfig.get_path("stdlib")
_OURS = cluster_ddp.__name__
_OUR_FOLDER = str(Path(cluster_ddp.__file__).parent)


def is_library(module: str | None) -> bool:
    """Whether a module is a library whose variables no user code changes."""
    return str(module).partition(".")[0] in _LIBRARIES


def is_of_user(module: str) -> bool:
    """Whether a module is imported and the user's own, not installed."""
    found = sys.modules.get(module)
    if found is None or is_library(module):
        return False
    file = getattr(found, "__file__", None)
    if file is None:
        return True
    return not _is_installed(file, module.count(".") + 1 + hasattr(found, "__path__"))


def is_own_class(kind: type) -> bool:
    """Whether a class is the user's."""
    return is_of_user(kind.__module__)


def is_ours(value: object) -> bool:
    """Whether an object is of this package."""
    return type(value).__module__.partition(".")[0] == _OURS


def is_library_file(file: str) -> bool:
    """Whether a file of source is of Python itself or installed, for this environment or another, as for a user."""
    return file.startswith(_STANDARD) or not set(_INSTALLED).isdisjoint(PurePath(file).parts)


def is_our_file(file: str) -> bool:
    """Whether a file of source is of this package."""
    return file.startswith(_OUR_FOLDER)


@functools.cache
def _is_installed(file: str, depth: int) -> bool:
    """Whether a file lies so deep in a folder of installed packages."""
    *_, folder = Path(file).parents[:depth]
    return _has_installed(folder)


@functools.cache
def _has_installed(folder: Path) -> bool:
    """Whether pip has installed packages there: into site-packages, or by ``--target``."""
    return folder.name in _INSTALLED or any(folder.glob("*.dist-info"))
