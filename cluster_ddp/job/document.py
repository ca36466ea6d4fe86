"""YAML as this project reads and writes it: the scalars of YAML 1.2's core schema, and the position of each value.

PyYAML's own resolver implements YAML 1.1, in which ``12:00:00`` is 43200, ``1e-3`` a string, ``0123`` 83 and ``no``
false. Here its parser only delivers events; this file determines what they mean. Aliases work and are bounded, tags and
merge keys are refused.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from cluster_ddp.job.errors import JobFileError

MAX_BYTES = 1 << 20
MAX_VALUES = 20_000
MAX_DEPTH = 40

_Parser: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_Emitter: Any = getattr(yaml, "CSafeDumper", yaml.SafeDumper)

Scalar = str | int | float | bool | None
_WORDS: dict[str, bool | None] = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL")),
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
}
_INT = r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+"
_FLOAT = r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)"


@dataclass(frozen=True)
class Place:
    """Where a value was written: a line of a file (0 for the whole file), or an override on the command line."""

    file: Path | None
    line: int = 1
    override: str | None = None
    option: str = "--set"  # the command-line option of the override

    def __str__(self) -> str:
        if self.override is not None:
            return f"{self.option} {self.override}"
        return f"{self.file}:{self.line}" if self.line else str(self.file)


def without_value(place: Place) -> Place:
    """Return the place without the value of an override, which may be a secret."""
    return place if place.override is None else replace(place, override=place.override.partition("=")[0] + "=...")


@dataclass(frozen=True)
class Node:
    """A value with its place.

    `value` is a scalar, a list of nodes or a mapping of strings to nodes. The place of a value in a mapping is that of
    its key. `text` is a plain (unquoted) scalar as it was written, else `None`.
    """

    value: Scalar | list[Node] | dict[str, Node]
    place: Place
    text: str | None = None


def fault(place: Place, message: str, allowed: str = "") -> JobFileError:
    """Return the error that names a place, what is wrong there, and what is allowed."""
    return JobFileError(f"{place}: {message}" + (f"\n    allowed: {allowed}" if allowed else ""))


def is_file(path: Path) -> bool:
    """Whether a path is a file; one that cannot even be looked up (too long, no permission) is not."""
    return os.path.isfile(path)  # noqa: PTH113 - Path.is_file raises for those


def why_no_file(path: Path) -> str:
    """Say what a path is that is not a file."""
    if os.path.isdir(path):  # noqa: PTH112 - as above
        return "is a folder"
    return "is not a regular file" if os.path.lexists(path) else "no such file"


def mapping(node: Node) -> dict[str, Node]:
    """Return a copy of the entries of a mapping; empty for any other value."""
    return dict(node.value) if isinstance(node.value, dict) else {}


def plain(node: Node) -> Any:
    """Return the value without its places: scalars, lists and dictionaries."""
    if isinstance(node.value, dict):
        return {key: plain(below) for key, below in node.value.items()}
    if isinstance(node.value, list):
        return [plain(below) for below in node.value]
    return node.value


def scalar(text: str, place: Place, key: str = "") -> Scalar:
    """Return what an unquoted scalar means in YAML 1.2's core schema; `key` is the path of its key, for an error."""
    if text in _WORDS:
        return _WORDS[text]
    if text[0] not in "+-.0123456789":
        return text
    if re.fullmatch(_INT, text):
        if len(text) > 1000:
            raise fault(place, f"a number of {len(text)} digits", "put it in quotes if it is a string")
        return int(text, 0) if text[:2] in ("0o", "0x") else int(text)
    if re.fullmatch(_FLOAT, text):
        number = math.inf if "n" in text.lower() else float(text)
        if not math.isfinite(number):
            named = f"{key}: {text}" if key else text
            raise fault(place, f"{named} is not a finite number", "put it in quotes if it is a string")
        return number
    return text


def read_document(file: Path) -> Node:
    """Read a YAML file whose top level is a mapping.

    Raises
    ------
    JobFileError
        The file cannot be read, is larger than `MAX_BYTES`, is not UTF-8 or not YAML, has duplicate keys, tags or
        several documents, or is not a mapping.
    """
    node = parse(read_text(file), Place(file))
    if node.value is None:
        raise fault(node.place, "the file is empty", "keys such as name:, task: and train:")
    if not isinstance(node.value, dict):
        kind = "list" if isinstance(node.value, list) else "single value"
        raise fault(node.place, f"a {kind}, not a mapping", "keys such as name:, task: and train:")
    return node


def read_text(file: Path) -> str:
    """Read the text of a YAML file that a person wrote; raises `JobFileError` as `read_document` does."""
    whole = Place(file, 0)
    if not is_file(file):
        raise fault(whole, why_no_file(file))
    try:
        with file.open("rb") as stream:
            data = stream.read(MAX_BYTES + 1)
    except OSError as error:
        raise fault(whole, f"cannot be read: {error.strerror}") from error
    if len(data) > MAX_BYTES:
        size = f"{file.stat().st_size / 2**20:.1f} MiB"
        allowed = f"{MAX_BYTES >> 20} MiB; is it the right file?"
        raise fault(whole, f"{size} is too large for a job file", allowed)
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        number = data.count(b"\n", 0, error.start) + 1
        raise fault(Place(file, number), f"not UTF-8 text (byte {data[error.start]:#04x})", "a YAML file") from error


def parse(text: str, place: Place) -> Node:
    """Parse YAML; line numbers count from `place.line`."""
    try:
        return _Builder(text, place).document()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        # An error at the end of the text is reported on the line after the last one.
        where = replace(place, line=place.line + min(mark.line if mark else 0, text.rstrip("\n").count("\n")))
        context = f" ({error.context})" if error.context else ""
        raise fault(where, f"not YAML: {error.problem or 'it cannot be read'}{context}") from error
    except yaml.reader.ReaderError as error:
        where = replace(place, line=place.line + text.encode().count(b"\n", 0, error.position))
        raise fault(where, f"a character that YAML does not allow: {error.reason}") from error


class _Builder:
    """Builds nodes from the parser's events, with limits that composing them in C does not have."""

    def __init__(self, text: str, place: Place) -> None:
        self.events: Iterator[Any] = yaml.parse(text, Loader=_Parser)
        self.place = place
        self.anchors: dict[str, Node] = {}
        self.values = 0
        self.keys: list[str] = []  # of the mappings being read, outermost first

    def document(self) -> Node:
        event = next(self.events)
        while not isinstance(event, (yaml.ScalarEvent, yaml.CollectionStartEvent, yaml.AliasEvent)):
            if isinstance(event, yaml.StreamEndEvent):
                return Node(None, self.place)
            event = next(self.events)
        node = self.node(event, depth=0)
        for event in self.events:
            if isinstance(event, yaml.DocumentStartEvent):
                raise fault(self.at(event), "a second YAML document begins", "one job in a file")
        return node

    def at(self, event: Any) -> Place:
        return replace(self.place, line=self.place.line + event.start_mark.line)

    def node(self, event: Any, depth: int) -> Node:
        place = self.at(event)
        if isinstance(event, yaml.AliasEvent):
            return self.alias(event, place, depth)
        self.count(1, place)
        if event.tag is not None:
            raise fault(place, f"the tag {event.tag}", "no tags; put a string in quotes")
        self.check_depth(depth, place)
        if isinstance(event, yaml.ScalarEvent):
            is_plain = event.implicit[0]
            key = ".".join(self.keys)
            node = Node(scalar(event.value, place, key), place, event.value) if is_plain else Node(event.value, place)
        elif isinstance(event, yaml.SequenceStartEvent):
            node = Node([self.node(item, depth + 1) for item in self.until(yaml.SequenceEndEvent)], place)
        else:
            node = Node(self.mapping(depth), place)
        if event.anchor is not None:
            self.anchors[event.anchor] = node
        return node

    def until(self, end: type) -> Iterator[Any]:
        while not isinstance(event := next(self.events), end):
            yield event

    def mapping(self, depth: int) -> dict[str, Node]:
        entries: dict[str, Node] = {}
        for event in self.until(yaml.MappingEndEvent):
            place = self.at(event)
            if not isinstance(event, yaml.ScalarEvent):
                raise fault(place, "a key that is not a plain string", "keys such as name:")
            key = event.value
            if key == "<<" and event.implicit[0]:
                raise fault(place, "<< (YAML 1.1's merge key)", "extends: another-file.yaml")
            if key in entries:
                raise fault(place, f"{key}: given twice, first on line {entries[key].place.line}", "once")
            self.keys.append(key)
            entries[key] = replace(self.node(next(self.events), depth + 1), place=place)
            self.keys.pop()
        return entries

    def alias(self, event: Any, place: Place, depth: int) -> Node:
        if event.anchor not in self.anchors:
            raise fault(place, f"*{event.anchor} has no anchor &{event.anchor} that ends before it")
        node = self.anchors[event.anchor]
        values, depth_below = _extent(node)
        self.count(values, place)
        self.check_depth(depth + depth_below, place)
        return node

    def check_depth(self, depth: int, place: Place) -> None:
        if depth > MAX_DEPTH:
            raise fault(place, "nested too deep", f"{MAX_DEPTH} levels")

    def count(self, values: int, place: Place) -> None:
        self.values += values
        if self.values > MAX_VALUES:
            raise fault(place, f"more than {MAX_VALUES} values", "at most that many; is it the right file?")


def _extent(node: Node) -> tuple[int, int]:
    """Return the total number of values in a node, and how deep they are nested below it."""
    if not isinstance(node.value, (dict, list)):
        return 1, 0
    inside = [_extent(below) for below in (node.value.values() if isinstance(node.value, dict) else node.value)]
    return 1 + sum(values for values, _ in inside), 1 + max((depth for _, depth in inside), default=0)


class _Dumper(_Emitter):  # type: ignore[misc]
    """Writes a string without quotes only where `scalar` reads the same string back."""

    def resolve(self, kind: type, value: str, implicit: tuple[bool, bool]) -> str:
        if kind is not yaml.ScalarNode or not implicit[0]:
            return str(super().resolve(kind, value, implicit))
        try:
            meaning = scalar(value, Place(None))
        except JobFileError:
            meaning = math.inf
        return "tag:yaml.org,2002:merge" if value == "<<" else _TAGS[type(meaning)]

    def ignore_aliases(self, data: object) -> bool:
        return True


_TAGS = {
    kind: f"tag:yaml.org,2002:{name}"
    for kind, name in ((str, "str"), (int, "int"), (float, "float"), (bool, "bool"), (type(None), "null"))
}


def dump(value: Any) -> str:
    """Return YAML that `parse` reads back as `value`: mappings, lists, strings, finite numbers, booleans and `None`."""
    text: str = yaml.dump(value, Dumper=_Dumper, allow_unicode=True, sort_keys=False, width=110)
    return text
