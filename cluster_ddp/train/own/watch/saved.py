"""What the checkpoints of a loop contain besides what it trains, and how to have them contain more."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from cluster_ddp.train.own.kept import KeptValues


@dataclass(frozen=True)
class Saved:
    """What is saved, so that the watches do not look at it.

    Parameters
    ----------
    things
        Objects that were passed in; their attributes may be saved as well.
    kept
        What the loop keeps with `ScriptRun.keep`.
    """

    things: Sequence[Any] = ()
    kept: KeptValues = field(default_factory=KeptValues)

    def keeps(self, value: Any) -> bool:
        """Whether the loop keeps this very object."""
        return self.kept.keeps(value)


def how_to_keep(*names: str, initial: str = "...") -> str:
    """The end of a warning: how the loop keeps values under these names."""
    keep = ", ".join(f"{name}={initial}" for name in names)
    values = "values" if len(names) > 1 else "value"
    given = f" with the initial {values}" if initial == "..." else ""
    return f"kept = run.keep({keep}){given}, and read and set kept.{names[0]} in the loop"
