"""The job file's keys, as the models define them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, get_args, get_origin

from pydantic.fields import FieldInfo

from cluster_ddp import __version__
from cluster_ddp.job.document import Node, fault, plain
from cluster_ddp.job.fields import NO_NUMBER
from cluster_ddp.job.models import JobSpec, Section

_OFF: tuple[Any, ...] = (None, False, 0, "", "none", "off", "auto", [], {})


def section_at(path: tuple[str | int, ...]) -> type[Section] | None:
    """Return the model of the section at `path`, or `None` if it is not a section."""
    model: type[Section] | None = JobSpec
    for key in path:
        field = model.model_fields.get(str(key)) if model is not None else None
        model = _section(field.annotation) if field is not None else None
    return model


def keys(model: type[Section] = JobSpec, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yield the path of every key, including sections."""
    for name, field in model.model_fields.items():
        yield (*path, name)
        below = _section(field.annotation)
        if below is not None:
            yield from keys(below, (*path, name))


def as_written(node: Node, model: type[Section] = JobSpec) -> Node:
    """Return the job with numbers in place of strings restored to the text that was written.

    ``account: 0123`` is the account "0123" and ``env: {X: 1e-3}`` the value "1e-3", not 123 and "0.001". In a list or
    mapping of strings the same holds for true and false. Where a number makes no sense (`fields.Text`), it stays a
    number.
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
            entries[key] = _as_strings(below) if field is not None and _takes_numbers(field) else below
    return replace(node, value=entries)


def known_part(root: Node) -> tuple[Node, tuple[str, ...]]:
    """Return a run's job without the keys that this version does not know, and a remark on each.

    A run may have been made by a newer or older version, and should continue nevertheless. What is omitted may change
    how it runs, but must not change what is trained, so an unknown setting of training has to be one that is off.

    Raises
    ------
    JobFileError
        An unknown setting of training is in use.
    """
    remarks: list[str] = []
    return _known(root, JobSpec, (), remarks), tuple(remarks)


def _known(node: Node, model: type[Section], path: tuple[str, ...], remarks: list[str]) -> Node:
    if not isinstance(node.value, dict):
        return node
    kept = {}
    for key, below in node.value.items():
        field = model.model_fields.get(key)
        if field is not None:
            section = _section(field.annotation)
            kept[key] = below if section is None else _known(below, section, (*path, key), remarks)
            continue
        name = ".".join((*path, key))
        if name == "extends":  # no version writes that: a person has added it, and a resolved job does not support it
            kept[key] = below
            continue
        if path[:1] == ("train",) and plain(below) not in _OFF:
            raise fault(
                below.place,
                f"{name}: cluster_ddp {__version__} does not know this setting, and without it the training would "
                "differ.\n    Use the version that created the run (see run.json), or remove the "
                "line",
            )
        remarks.append(f"{below.place}: {name}: cluster_ddp {__version__} does not know this key and ignores it")
    return replace(node, value=kept)


def _section(annotation: Any) -> type[Section] | None:
    # In Python 3.10 dict[str, str] counts as a type, but issubclass refuses it.
    classes = [kind for kind in (annotation, *get_args(annotation)) if isinstance(kind, type) and not get_origin(kind)]
    return next((kind for kind in classes if issubclass(kind, Section)), None)


def _takes_numbers(field: FieldInfo) -> bool:
    """Whether a key takes strings, including those written as a number."""
    kinds = get_args(field.annotation)
    marks = [*field.metadata, *(mark for kind in kinds for mark in getattr(kind, "__metadata__", ()))]
    return _takes_strings(field.annotation) and NO_NUMBER not in marks


def _takes_strings(annotation: Any) -> bool:
    """Whether all scalars below an annotation are strings: str, str | None, tuple[str, ...], dict[str, str]."""
    if hasattr(annotation, "__metadata__"):  # Annotated
        return _takes_strings(get_args(annotation)[0])
    inner = [kind for kind in get_args(annotation) if kind not in (type(None), Ellipsis)]
    return annotation is str or (bool(inner) and all(map(_takes_strings, inner)))


def _as_strings(node: Node, kinds: tuple[type, ...] = (int, float)) -> Node:
    inside = (int, float, bool)  # `true` may be a command-line argument, or the value of a variable
    if isinstance(node.value, dict):
        return replace(node, value={key: _as_strings(below, inside) for key, below in node.value.items()})
    if isinstance(node.value, list):
        return replace(node, value=[_as_strings(below, inside) for below in node.value])
    return replace(node, value=node.text) if node.text is not None and type(node.value) in kinds else node
