"""Reading a job file with everything that it extends merged beneath it, and its relative paths made absolute."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path

from cluster_ddp.job.document import Node, Place, fault, is_file, mapping, read_document
from cluster_ddp.job.errors import JobFileError
from cluster_ddp.job.merge import merge
from cluster_ddp.job.templates import is_path, template_file


def read_extended(chain: tuple[Path, ...]) -> Node:
    """Read the last file of `chain` and everything it extends. `name:` is not inherited."""
    own = read_document(chain[-1])
    entries = mapping(own)
    extends = entries.pop("extends", None)
    own = replace(own, value=entries)
    if extends is None or extends.value is None:
        return own
    base_file = _extended_file(extends)
    if any(base_file.samefile(file) for file in chain):
        circle = " -> ".join(map(str, (*chain, base_file)))
        raise fault(extends.place, f"extends: is circular: {circle}", "a job that does not lead back here")
    base = read_extended((*chain, base_file))
    inherited = {key: node for key, node in mapping(base).items() if key != "name"}
    return merge(replace(base, value=inherited), own)


def absolute(text: str, place: Place) -> str:
    """Return a path with ``~`` and ``$NAME`` filled in, made absolute from the folder of the file that names it."""
    filled = os.path.expandvars(os.path.expanduser(text))  # noqa: PTH111 - Path.expanduser raises for an unknown user
    unset = re.search(r"\$(?:\w+|\{\w+\})", filled)
    if unset:
        raise fault(place, f"{text}: the variable {unset[0]} is not set here", "a path, or a variable that is set")
    folder = place.file.parent if place.file is not None else Path()
    return os.path.abspath(folder / filled)  # noqa: PTH100 - Path.absolute keeps ".."


def _extended_file(extends: Node) -> Path:
    if not isinstance(extends.value, str):
        raise fault(extends.place, "extends: is not a string", "a template's name, or the path of a job file")
    if is_path(extends.value):
        base = Path(absolute(extends.value, extends.place))
        if not is_file(base):
            raise fault(extends.place, f"extends: {base}: no such file")
        return base
    try:
        return template_file(extends.value)
    except JobFileError as error:
        raise fault(extends.place, f"extends: {error}") from error
