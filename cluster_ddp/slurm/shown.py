"""Parses the lines of ``scontrol show -o``, each of which shows one job or partition."""

from __future__ import annotations

import re


def shown_fields(line: str) -> dict[str, str]:
    """Return the ``KEY=VALUE`` pairs of a line. The first of a key counts: a comment may say anything."""
    return dict(reversed(re.findall(r"(?<!\S)(\w+)=(\S*)", line)))
