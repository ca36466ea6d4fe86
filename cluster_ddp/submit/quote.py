"""The only way for a value from the job file into the batch script: as a string in which nothing is expanded."""

from __future__ import annotations

import re
from collections.abc import Mapping

from cluster_ddp.errors import ClusterDDPError

_PLAIN = re.compile(r"[A-Za-z0-9@%+=:,./_-]+")
# What single quotes cannot contain (', NUL), what sbatch reads differently between them (\), and what looks like an
# error ($, `).
_MARKED = re.compile(r"['\0\\$`]")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")


class UnquotableError(ClusterDDPError):
    """A value that cannot be quoted for its destination."""


def quote(value: str) -> str:
    """Return `value` as one word of bash; nothing in it is expanded, split or run.

    sbatch, which has its own rules for ``#SBATCH`` lines, reads the word the same way.

    Raises
    ------
    UnquotableError
        It contains a NUL, which no argument and no variable can.
    """
    if _PLAIN.fullmatch(value):
        return value
    return f'"{inside(value)}"' if _MARKED.search(value) else f"'{value}'"


def inside(value: str) -> str:
    """Return `value` as written between double quotes; see `quote`."""
    if "\0" in value:
        raise UnquotableError(f"{value!r} contains a NUL character, which cannot be passed to a process")
    return re.sub(r'([\\"$`])', r"\\\1", value)


def quote_around(value: str, variables: Mapping[str, str]) -> str:
    """Return `value` as one word of bash in which the keys of `variables`, called marks, become shell expansions.

    Everything between the marks is quoted. With ``{"\\0a": "$MASTER_ADDR"}``, ``"--endpoint=\\0a:1"`` becomes
    ``--endpoint="$MASTER_ADDR":1``. Marks contain a NUL, so that no external value can look like one.
    """
    pieces = re.split(f"({'|'.join(map(re.escape, variables))})", value)
    words = [f'"{variables[piece]}"' if piece in variables else quote(piece) for piece in pieces if piece]
    return "".join(words) or "''"


def directive(option: str, value: str | None) -> str:
    """One ``#SBATCH`` line.

    Raises
    ------
    UnquotableError
        The value holds a line break or another control character; sbatch would read the rest as something else.
    """
    if value is None:
        return f"#SBATCH --{option}"
    if _CONTROL.search(value):
        raise UnquotableError(f"the sbatch option --{option} cannot contain control characters: {value!r}")
    return f"#SBATCH --{option}={quote(value)}"


def comment(text: str) -> str:
    """Return `text` on one line, fit to follow a ``#``."""
    return _CONTROL.sub(" ", text)
