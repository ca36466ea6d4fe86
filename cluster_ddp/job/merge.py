"""Merging jobs: `extends:` and ``--set``."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from cluster_ddp.job.document import (
    MAX_DEPTH,
    Node,
    Place,
    fault,
    is_file,
    mapping,
    parse,
    read_document,
    scalar,
    why_no_file,
)
from cluster_ddp.job.errors import JobFileError
from cluster_ddp.job.templates import is_path, template_file

# A key that is set replaces these, so that a job can extend one that made the other choice.
_INSTEAD_OF = {
    ("task",): ("script", "args", "args_on_resume"),
    ("script",): ("task", "params"),
    ("train", "epochs"): ("steps",),
    ("train", "steps"): ("epochs",),
}
# Where null is a value; anywhere else it means the default.
_NULL_COUNTS = (("params",), ("slurm", "extra"))


def merge(base: Node, over: Node, path: tuple[str, ...] = ()) -> Node:
    """Return `base` with `over` laid over it: mappings are merged, anything else is replaced."""
    if not isinstance(base.value, dict) or not isinstance(over.value, dict):
        return over
    merged = dict(base.value)
    for key, node in over.value.items():
        if node.value is not None:
            for other in _INSTEAD_OF.get((*path, key), ()):
                merged.pop(other, None)
    for key, node in over.value.items():
        merged[key] = merge(merged[key], node, (*path, key)) if key in merged else node
    return replace(over, value=merged)


def drop_nulls(node: Node, path: tuple[str, ...] = ()) -> Node:
    """Return the job without the keys that are set to null, which stands for their default."""
    if not isinstance(node.value, dict) or path in _NULL_COUNTS:
        return node
    kept = {key: drop_nulls(below, (*path, key)) for key, below in node.value.items() if below.value is not None}
    return replace(node, value=kept)


def apply_overrides(root: Node, overrides: Sequence[str]) -> Node:
    """Return the job with ``a.b=c`` settings laid over it; later ones override earlier ones."""
    for override in overrides:
        root = merge(root, _tree(override))
    return root


def _tree(override: str) -> Node:
    place = Place(None, override=override)
    name, equals, text = override.partition("=")
    keys = name.strip().split(".")
    if not equals or len(keys) > MAX_DEPTH or not all(re.fullmatch(r"[A-Za-z_][\w-]*", key) for key in keys):
        raise fault(place, "is not of the form KEY=VALUE", "the key's whole path and a value, as in train.lr=0.1")
    if keys == ["extends"]:
        raise fault(place, "extends: can only be set in the job file", "any other key")
    if not text.strip():  # such as --set train.lr=$LR where LR is not set
        raise fault(place, "has an empty value", "a value; null for the key's default, '' for an empty string")
    node = _value(text.strip(), place)
    for key in reversed(keys):
        node = Node({key: node}, place)
    return node


def _value(text: str, place: Place) -> Node:
    """Parse the value: a YAML 1.2 scalar, or a quoted string, a list or a mapping in YAML's flow form."""
    try:
        text.encode()
    except UnicodeEncodeError:
        shown = replace(place, override=ascii(place.override)[1:-1])
        raise fault(shown, "is not UTF-8 text") from None
    if text[:1] in ("[", "{", '"', "'"):
        return parse(text, place)
    return Node(scalar(text, place), place, text)


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
    """Return a path with ``~`` and ``$NAME`` expanded, made absolute from the folder of the file that contains it."""
    filled = os.path.expandvars(os.path.expanduser(text))
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
            raise fault(extends.place, f"extends: {base}: {why_no_file(base)}")
        return base
    try:
        return template_file(extends.value)
    except JobFileError as error:
        raise fault(extends.place, f"extends: {error}") from error
