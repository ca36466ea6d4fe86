"""The job file's keys, as the models know them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, get_args, get_origin

from cluster_ddp.spec.document import Node
from cluster_ddp.spec.models import JobSpec, Section


def section_at(path: tuple[str | int, ...]) -> type[Section] | None:
    """Return the model of the section at `path`, or `None` when it is no section."""
    model: type[Section] | None = JobSpec
    for key in path:
        field = model.model_fields.get(str(key)) if model is not None else None
        model = _section(field.annotation) if field is not None else None
    return model


def keys(model: type[Section] = JobSpec, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yield the path of every key, sections included."""
    for name, field in model.model_fields.items():
        yield (*path, name)
        below = _section(field.annotation)
        if below is not None:
            yield from keys(below, (*path, name))


def as_written(node: Node, model: type[Section] = JobSpec) -> Node:
    """Return the job with the numbers that stand where a text is expected as they were written.

    ``account: 0123`` is the account "0123" and ``env: {X: 1e-3}`` the value "1e-3", not 123 and "0.001". In a list or
    mapping of texts the same holds for true and false.
    """
    if not isinstance(node.value, dict):
        return node
    entries = {}
    for key, below in node.value.items():
        field = model.model_fields.get(key)
        section = _section(field.annotation) if field is not None else None
        if section is not None:
            entries[key] = as_written(below, section)
        else:
            entries[key] = _texts(below) if field is not None and _takes_texts(field.annotation) else below
    return replace(node, value=entries)


def _section(annotation: Any) -> type[Section] | None:
    # In Python 3.10 dict[str, str] passes for a type, but issubclass refuses it.
    classes = [kind for kind in (annotation, *get_args(annotation)) if isinstance(kind, type) and not get_origin(kind)]
    return next((kind for kind in classes if issubclass(kind, Section)), None)


def _takes_texts(annotation: Any) -> bool:
    """Say whether all scalars below an annotation are texts: str, str | None, tuple[str, ...], dict[str, str]."""
    if hasattr(annotation, "__metadata__"):  # Annotated
        return _takes_texts(get_args(annotation)[0])
    inner = [kind for kind in get_args(annotation) if kind not in (type(None), Ellipsis)]
    return annotation is str or (bool(inner) and all(map(_takes_texts, inner)))


def _texts(node: Node, kinds: tuple[type, ...] = (int, float)) -> Node:
    inside = (int, float, bool)  # `true` is a word of a command line, or the value of a variable
    if isinstance(node.value, dict):
        return replace(node, value={key: _texts(below, inside) for key, below in node.value.items()})
    if isinstance(node.value, list):
        return replace(node, value=[_texts(below, inside) for below in node.value])
    return replace(node, value=node.text) if node.text is not None and type(node.value) in kinds else node
