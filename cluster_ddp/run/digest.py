"""The digest of a run's events, `events/digest.json`: those events of ended attempts that matter, in one small file.

An attempt of many nodes leaves thousands of lines in hundreds of files, most of them repetitions. When it has ended,
the lines that matter are written to this file (`condense`), together with how far each file was read; readers of the
run's events read it and what has been appended since. Losing it costs only time: the event files stay as they are, and
a digest that does not match them is ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cluster_ddp.run.reading import MAX_LINES, as_whole, parse_object, read_file

FORMAT = 1


@dataclass(frozen=True)
class Digest:
    """The events of a run up to some position in each file."""

    events: tuple[dict[str, Any], ...] = ()
    places: Mapping[str, int] = field(default_factory=dict)  # by file name: the bytes of it that `events` covers

    def to_json(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {"format": FORMAT, "places": dict(self.places), "events": list(self.events)}


def read_digest(path: Path) -> Digest:
    """Read the digest of a run; empty if there is none that can be used."""
    try:
        value = parse_object(read_file(path, MAX_LINES))
    except OSError:
        return Digest()
    if value is None or value.get("format") != FORMAT:
        return Digest()
    events, places = value.get("events"), value.get("places")
    if not isinstance(events, list) or not all(isinstance(event, dict) for event in events):
        return Digest()
    if not isinstance(places, dict) or any(as_whole(place) is None for place in places.values()):
        return Digest()
    return Digest(tuple(events), places)
