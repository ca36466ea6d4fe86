"""Describes errors in a job file: place, key, value, what is allowed, what was probably meant."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from cluster_ddp.job import fields
from cluster_ddp.job.document import Node, Place, without_value
from cluster_ddp.job.errors import JobFileError
from cluster_ddp.job.nearest import nearest
from cluster_ddp.job.sections import keys, section_at

Key = tuple[str | int, ...]
Finding = tuple[Place, str]

_TYPES = {
    "int": ("is not a whole number", "a whole number"),
    "float": ("is not a number", "a number"),
    "bool": ("is neither true nor false", "true or false"),
    "tuple": ("is not a list", "a list, as in [a, b]"),
    "dict": ("is not a mapping", "a mapping, as in {a: 1}"),
    "finite_number": ("is not a finite number", "a number"),
}
_BOUNDS = {
    "greater_than_equal": ("is too small", "at least", "ge"),
    "greater_than": ("is too small", "more than", "gt"),
    "less_than_equal": ("is too large", "at most", "le"),
    "less_than": ("is too large", "less than", "lt"),
}


def job_file_error(error: ValidationError, root: Node) -> JobFileError:
    """Return everything that pydantic found, in the order of the file."""
    findings = {_finding(details, root) for details in error.errors(include_url=False)}
    lines = [f"{place}: {text}" for place, text in sorted(findings, key=_order)]
    return JobFileError("\n".join([f"{len(lines)} errors:", *lines] if len(lines) > 1 else lines))


def _order(finding: Finding) -> tuple[bool, str, int, str]:
    place, text = finding
    return place.override is not None, str(place.file), place.line, text


def find(root: Node, key: Iterable[str | int]) -> Node:
    """Return the value at `key`, or the nearest one above it that was written anywhere."""
    node = root
    for part in key:
        if isinstance(node.value, dict) and str(part) in node.value:
            node = node.value[str(part)]
        elif isinstance(node.value, list) and str(part).isdigit() and int(part) < len(node.value):
            node = node.value[int(part)]
        else:
            break
    return node


def _finding(details: ErrorDetails, root: Node) -> Finding:
    context = details.get("ctx", {})
    key: Key = (*details["loc"], *(part for part in context.get("at", ()) if part))
    place = find(root, key).place
    if not context.get("show", True):
        place = without_value(place)
    what, allowed = _describe(details, context, key)
    name = ".".join(map(str, key))
    text = f"{name}: {what}" if name else what
    return place, text + (f"\n    {allowed}" if allowed else "")


def _describe(details: ErrorDetails, context: dict[str, Any], key: Key) -> tuple[str, str]:
    """Return what is wrong, and what is allowed instead."""
    kind = details["type"]
    value = _shown(details["input"])
    if kind == fields.CONTRADICTION:
        return context["message"], f"allowed: {context['allowed']}"
    if kind == fields.REFUSED:
        shown = _shown(_below(details["input"], context["at"]))
        what = f"{shown} {context['message']}" if context["show"] else context["message"]
        return what, f"allowed: {context['allowed']}"
    if kind == "extra_forbidden":
        return f"is not a job file key (its value: {value})", _known_keys(key)
    if kind == "missing":
        return "is missing", ""
    if kind == "literal_error":
        return f"{value} is not one of the choices", _choices(details["input"], context["expected"].replace("'", ""))
    if kind in _BOUNDS:
        what, bound, limit = _BOUNDS[kind]
        return f"{value} {what}", f"allowed: {bound} {context[limit]}"
    if kind.startswith("model"):
        return f"{value} is not a mapping", _known_keys((*key, ""))
    family = next((name for name in _TYPES if kind.startswith(name)), None)
    if family is None:
        return f"{value}: {details['msg']}", ""
    what, allowed = _TYPES[family]
    if family == "int" and isinstance(details["input"], float) and details["input"] >= 2.0**63:
        what = "is too large"  # such as 1e30
    return f"{value} {what}", f"allowed: {allowed}"


def _choices(value: object, expected: str) -> str:
    meant = nearest(value, expected.replace(" or ", ", ").split(", ")) if isinstance(value, str) else None
    return (f"did you mean: {meant}\n    " if meant else "") + f"allowed: {expected}"


def _known_keys(key: Key) -> str:
    """Return the key that was probably meant, if any is similar, and all known keys of its section."""
    section, name = key[:-1], str(key[-1])
    model = section_at(section)
    known = list(model.model_fields) if model is not None else []
    if not section:
        known.append("extends")
    meant = nearest(name, known) if name else None
    if meant is None and name:
        elsewhere = [path for path in keys() if path[-1] == name.replace("-", "_")]
        meant = ".".join(elsewhere[0]) if elsewhere else None
    where = f" in {'.'.join(map(str, section))}" if section else ""
    return (f"did you mean: {meant}\n    " if meant else "") + f"allowed{where}: {', '.join(known)}"


def _below(value: Any, path: Iterable[str]) -> Any:
    for part in path:
        if isinstance(value, dict):
            value = value.get(part)
        elif isinstance(value, (list, tuple)):
            value = value[int(part)]
    return value


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, (list, tuple)):
        return "a list"
    if value is None:
        return "nothing"
    text = json.dumps(value, ensure_ascii=False) if isinstance(value, (str, int, float)) else repr(value)
    return text if len(text) <= 80 else f"{text[:60]}... ({len(text)} characters)"
