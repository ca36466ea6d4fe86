"""Reading JSON that another node may be writing at this moment, or that somebody has edited."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """The objects in a file of JSON lines; empty when there is no such file.

    Torn lines, damaged lines and lines that are not objects are passed over: the writer may have died, or be in the
    middle of a line.
    """
    try:
        data = path.read_bytes()
    except OSError:
        return []
    return [value for line in data.split(b"\n") if (value := parse_object(line)) is not None]


def read_json_object(path: Path) -> dict[str, Any] | None:
    """The object in a JSON file; None when it is missing, damaged or something else."""
    try:
        return parse_object(path.read_bytes())
    except OSError:
        return None


def parse_object(data: bytes) -> dict[str, Any] | None:
    """The JSON object that `data` holds, or None."""
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):  # UnicodeDecodeError is a ValueError
        return None
    return value if isinstance(value, dict) else None


def is_number(value: Any) -> bool:
    """Whether a value is a number that can be reckoned with: finite, and no whole number beyond all floats."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= sys.float_info.max
