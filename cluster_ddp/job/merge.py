"""Laying one job over another: `extends:` and ``--set``."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from cluster_ddp.job.document import MAX_DEPTH, Node, Place, fault, parse, scalar

# A key that is set takes the place of these, so that a job can extend one that made the other choice.
_INSTEAD_OF = {
    ("task",): ("script", "args", "args_on_resume"),
    ("script",): ("task", "params"),
    ("train", "epochs"): ("steps",),
    ("train", "steps"): ("epochs",),
}
# Where "nothing" is a value; anywhere else it means the default.
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
    """Return the job without the keys that are set to nothing, which stands for their default."""
    if not isinstance(node.value, dict) or path in _NULL_COUNTS:
        return node
    kept = {key: drop_nulls(below, (*path, key)) for key, below in node.value.items() if below.value is not None}
    return replace(node, value=kept)


def apply_overrides(root: Node, overrides: Sequence[str]) -> Node:
    """Return the job with ``a.b=c`` settings laid over it, the last one on top."""
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
        raise fault(place, "what a job extends is chosen in its file", "any other key")
    node = _value(text.strip(), place)
    for key in reversed(keys):
        node = Node({key: node}, place)
    return node


def _value(text: str, place: Place) -> Node:
    """Return the value: a YAML 1.2 scalar, or a quoted string, a list or a mapping in YAML's flow form."""
    try:
        text.encode()
    except UnicodeEncodeError:
        shown = replace(place, override=ascii(place.override)[1:-1])
        raise fault(shown, "is not UTF-8 text") from None
    if text[:1] in ("[", "{", '"', "'"):
        return parse(text, place)
    return Node(scalar(text, place), place, text)
