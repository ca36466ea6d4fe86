"""What the checkpoints of a loop contain, which all watches ask for, and how to have them contain more."""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

from torch import Tensor, nn
from torch.utils.data import Dataset

from cluster_ddp.train.own.kept import Kept, KeptValues
from cluster_ddp.train.own.program import reachable
from cluster_ddp.train.own.values import addresses
from cluster_ddp.train.own.watch.bodies import value_or_none

_DEPTH = 4  # a scheduler may be inside another, inside an object of the program's that was passed in
_RESTORED = re.compile(r"\b(param_groups|(\w*_)?run_?|kept|get_last_lr|keep)\b")


@dataclass(frozen=True)
class Saved:
    """What is saved, so that the watches do not look at it.

    Parameters
    ----------
    things
        Objects that were passed in; what they hold may be saved as well.
    kept
        What the loop keeps with `ScriptRun.keep`.
    """

    things: Sequence[Any] = ()
    kept: KeptValues = field(default_factory=KeptValues)

    def has(self, value: Any) -> bool:
        """Whether this object was passed in, by itself or as a part of a module, or is kept.

        A module around one that was passed in, such as DDP, counts as that, and a tensor in its memory as its own.
        Numbers and strings are no objects: equal ones may be one by chance.
        """
        if isinstance(value, Kept) or self.kept.keeps(value):
            return True
        modules = [thing for thing in self.things if isinstance(thing, nn.Module)]
        if isinstance(value, Tensor):
            tensors = (tensor for module in modules for tensor in (*module.parameters(), *module.buffers()))
            return not addresses((*tensors, *self.kept.tensors())).isdisjoint(addresses([value]))
        known = {id(part) for part in (*self.things, *(part for module in modules for part in module.modules()))}
        return any(id(part) in known for part in (value.modules() if isinstance(value, nn.Module) else [value]))

    def has_named(self, name: str, frame: FrameType) -> bool:
        """Whether it has what a running function has under this name, or what holds that.

        What a data set holds is compared at a resume.
        """
        parts = name.partition("[")[0].split(".")
        holders = (value_or_none(".".join(parts[: length + 1]), frame) for length in range(len(parts)))
        return any(isinstance(held, Dataset) or self.has(held) for held in (*holders, value_or_none(name, frame)))

    def ids(self) -> set[int]:
        """The ids of the objects that were passed in, of whatever they hold, and of those that are kept."""
        held = reachable([("", thing) for thing in self.things], _DEPTH)
        return {id(part) for part in (*(part for _, part in held), *self.kept.values.values())}


def how_to_keep(*names: str, initial: str = "...") -> str:
    """The end of a warning: how the loop keeps values under these names."""
    keep = ", ".join(f"{name}={initial}" for name in names)
    values = "values" if len(names) > 1 else "value"
    given = f" with the initial {values}" if initial == "..." else ""
    return f"kept = run.keep({keep}){given}, and read and set kept.{names[0]} in the loop"


def is_restored(node: ast.AST) -> bool:
    """Whether a statement sets something from run.step, run.keep or the optimizer's rate."""
    return _RESTORED.search(ast.unparse(node)) is not None
