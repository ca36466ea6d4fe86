"""The elements of a sweep: which settings each of them has, and its name.

An element is a job with settings laid over it, as with ``--set``: strings of the form ``KEY=VALUE``.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from cluster_ddp.job.document import Node, Place, fault, parse, plain, read_text
from cluster_ddp.job.elements import MAX_ELEMENTS
from cluster_ddp.job.errors import JobFileError

Settings = tuple[str, ...]

_MAY_DIFFER = ("params", "args", "train", "checkpoint", "log")
_MAX_VALUE = 40  # characters of a value in a name
_ESCAPED = re.compile(r"[\x7f-\x9f\ufeff\ufffe\uffff]")  # what JSON allows between quotes, but YAML does not
_OPENING = {"[": "]", "{": "}"}


def elements_of(grid: Sequence[str], listed: Sequence[Settings] = ()) -> list[Settings]:
    """Return every combination of the grid's values, with each of the listed elements if there are any.

    Parameters
    ----------
    grid
        Options of the form ``KEY=VALUE,VALUE,...``. A comma inside brackets, braces or quotes belongs to a value.
    listed
        The result of `read_list`.

    Raises
    ------
    JobFileError
        One is malformed, a key is given twice or may not differ between elements, two elements are the same, or there
        are none, or too many.
    """
    axes = [_axis(option) for option in grid]
    _refuse_keys([key_of(axis[0]) for axis in axes], listed)
    count = math.prod(map(len, axes)) * max(1, len(listed))
    if not axes and not listed:
        raise JobFileError("a sweep needs settings that vary: --grid KEY=VALUE,VALUE,... or --list FILE")
    if count > MAX_ELEMENTS:
        raise JobFileError(f"{count:,} elements are too many for one sweep\n    allowed: {MAX_ELEMENTS:,}")
    found = [(*entry, *values) for entry in (listed or ((),)) for values in itertools.product(*axes)]
    seen: dict[Settings, int] = {}
    for number, settings in enumerate(found):
        first = seen.setdefault(identity(settings), number)
        if first != number:
            raise JobFileError(f"elements {first} and {number} are the same: {' '.join(settings)}")
    return found


def identity(settings: Settings) -> Settings:
    """Return what identifies an element; the order of its settings does not matter."""
    return tuple(sorted(settings))


def key_of(setting: str) -> str:
    """Return the key of a setting."""
    return setting.partition("=")[0]


def read_list(file: Path) -> list[Settings]:
    """Read the elements from a YAML file, a list of mappings such as ``- {train.lr: 1e-3, params.width: 8}``.

    Keys may also be nested as in a job file.
    """
    top = parse(read_text(file), Place(file))
    if not isinstance(top.value, list) or not top.value:
        raise fault(top.place, "is not a list of elements", "such as - {train.lr: 1e-3, params.width: 8}")
    return [tuple(_flat(entry)) for entry in top.value]


def labels(elements: Sequence[Settings]) -> list[str]:
    """Return a name for each element that shows what differs, fit for a folder: ``lr=1e-3-width=64``."""
    values = [dict(setting.split("=", 1) for setting in settings) for settings in elements]
    known = list(dict.fromkeys(key for entry in values for key in entry))
    differing = [key for key in known if len({entry.get(key) for entry in values}) > 1] or known
    last = [key.rpartition(".")[2] for key in differing]
    short = {key: name if last.count(name) == 1 else key for key, name in zip(differing, last, strict=True)}
    return [
        "-".join(f"{_plain_text(short[key])}={_plain_text(entry[key])}" for key in differing if key in entry)
        for entry in values
    ]


def _axis(option: str) -> list[str]:
    key, equals, text = option.partition("=")
    place = Place(None, override=option, option="--grid")
    if not equals or not key.strip():
        raise fault(place, "is not of the form KEY=VALUE,VALUE,...", "such as train.lr=1e-3,1e-4")
    values = [value.strip() for value in _split(text)]
    if not all(values):
        raise fault(place, "has an empty value", "values separated by single commas; null for a key's default")
    return [f"{key.strip()}={value}" for value in values]


def _split(text: str) -> Iterator[str]:
    """Split at the commas outside brackets, braces and quotes."""
    closing: list[str] = []
    quoted, begin = "", 0
    for position, character in enumerate(text):
        if quoted:
            quoted = "" if character == quoted else quoted
        elif character in "\"'" and (closing or not text[begin:position].strip()):
            quoted = character
        elif character in _OPENING:
            closing.append(_OPENING[character])
        elif closing and character == closing[-1]:
            closing.pop()
        elif character == "," and not closing:
            yield text[begin:position]
            begin = position + 1
    yield text[begin:]


def _refuse_keys(keys: Sequence[str], listed: Sequence[Settings]) -> None:
    in_list = {key_of(setting) for settings in listed for setting in settings}
    for number, key in enumerate(keys):
        if key in keys[:number] or key in in_list:
            raise JobFileError(f"--grid {key} is given twice\n    allowed: each key once, in --grid or in --list")
    for key in (*keys, *sorted(in_list)):
        if key.partition(".")[0] not in _MAY_DIFFER:
            raise JobFileError(
                f"{key} cannot vary within a sweep: all elements share one batch script and one Slurm "
                f"request\n    allowed: keys of {', '.join(_MAY_DIFFER)}; --set {key}=... changes it for all elements"
            )


def _flat(node: Node, path: tuple[str, ...] = ()) -> Iterator[str]:
    if not isinstance(node.value, dict) or (path and not node.value):
        if not path:
            raise fault(node.place, "is not a mapping of keys to values", "such as {train.lr: 1e-3, params.width: 8}")
        value = (
            node.text if node.text is not None else _ESCAPED.sub(_escape, json.dumps(plain(node), ensure_ascii=False))
        )
        yield f"{'.'.join(path)}={value}"
        return
    for key, below in node.value.items():
        yield from _flat(below, (*path, key))


def _escape(found: re.Match[str]) -> str:
    return f"\\u{ord(found[0]):04x}"


def _plain_text(text: str) -> str:
    """Return the text reduced to characters that are safe in a folder name."""
    return re.sub(r"[^A-Za-z0-9._+-]+", "_", text).strip("_")[:_MAX_VALUE]
