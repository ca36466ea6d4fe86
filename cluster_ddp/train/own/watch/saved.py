"""What the checkpoints of a loop contain besides what it trains, and how to have them contain more."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

from torch import nn

from cluster_ddp.train.own.kept import Kept, KeptValues
from cluster_ddp.train.own.watch.bodies import value_of

_RESTORED = re.compile(r"\b(param_groups|_?run_?|kept|get_last_lr|keep)\b")


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


def is_saved(name: str, frame: FrameType, passed_in: Iterable[Any]) -> bool:
    """Whether this is an attribute of an object whose attributes are saved, or may be."""
    owner = name.rpartition(".")[0]
    found = value_of(owner, frame) if owner else None
    return isinstance(found, (Kept, nn.Module)) or (bool(owner) and any(found is thing for thing in passed_in))


def is_restored(node: ast.AST) -> bool:
    """Whether a statement sets something from run.step, run.keep or the optimizer's rate."""
    return _RESTORED.search(ast.unparse(node)) is not None
