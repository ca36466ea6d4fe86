"""Choosing the checkpoint that all ranks go on from: the newest that every rank finds sound."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from cluster_ddp.run import events
from cluster_ddp.run.storage import Storage
from cluster_ddp.train.checkpoint.errors import (
    CheckpointDamaged,
    CheckpointError,
    CheckpointMismatch,
    CheckpointOfAnotherRun,
    CheckpointUnreadable,
)
from cluster_ddp.train.checkpoint.folders import (
    damaged_in,
    put_back_replaced,
    remove_left_overs,
    set_aside_damaged,
    step_name,
    steps_in,
)
from cluster_ddp.train.checkpoint.reading import Restored, load
from cluster_ddp.train.checkpoint.receipts import Receipts
from cluster_ddp.train.checkpoint.writer import Report


@dataclass(frozen=True)
class _Finding:
    """What one rank found when it read a checkpoint."""

    restored: Restored | None = None
    damage: tuple[str, ...] = ()  # by file
    unreadable: str = ""  # or another run's: it is passed over and stays as it is
    mismatch: CheckpointMismatch | None = None


@dataclass
class Restoring:
    """One restore, on one rank; all ranks go through it together.

    Parameters
    ----------
    step
        Only the checkpoint of this step will do; None: the newest sound one.
    fit
        Load what fits instead of refusing a checkpoint of another model.
    """

    directory: Path
    run_id: str
    receipts: Receipts
    storage: Storage
    report: Report
    step: int | None
    fit: bool
    _refused: dict[int, str] = field(default_factory=dict)

    def into(self, tensors: Mapping[str, Tensor]) -> Restored | None:
        """Fill the tensors; see `Checkpointer.restore`."""
        main = self.receipts.rank == 0
        if main:
            with contextlib.suppress(OSError):  # storage that cannot be written can still be read
                put_back_replaced(self.storage, self.directory, own=self.receipts.owner)
                remove_left_overs(self.storage, self.directory, own=self.receipts.owner)
        while True:
            step, failure = self.receipts.from_rank_0(self._choose() if main else None)
            if failure:
                raise CheckpointError(failure)
            if step is None:
                return None
            finding = self._read(step, tensors)
            if self._accepted(step, finding):
                return finding.restored

    def _choose(self) -> tuple[int | None, str]:
        """The next checkpoint to try, or why there is none; neither when there never was one."""
        try:
            there = steps_in(self.directory)
            damaged = damaged_in(self.directory)
        except OSError as error:
            return None, f"cannot read {self.directory}: {error.strerror}"
        wanted = [step for step in there if step not in self._refused and self.step in (None, step)]
        if wanted:
            return max(wanted), ""
        if self.step is not None:
            why = self._refused.get(self.step) or f"there are {', '.join(map(str, there)) or 'none'}"
            return None, f"no sound checkpoint of step {self.step} in {self.directory}: {why}"
        if self._refused or damaged:
            found = [f"{step_name(step)}: {why}" for step, why in self._refused.items()] or damaged
            return None, (
                f"no sound checkpoint is left in {self.directory}; nothing was deleted:\n  "
                + "\n  ".join(found)
                + "\nPut a sound copy back under its step- name, or, to start from the beginning, move the folder away."
            )
        return None, ""

    def _read(self, step: int, tensors: Mapping[str, Tensor]) -> _Finding:
        try:
            return _Finding(load(self.directory / step_name(step), self.run_id, tensors, fit=self.fit))
        except CheckpointDamaged as error:
            return _Finding(damage=tuple(error.problems))
        except CheckpointOfAnotherRun as error:
            return _Finding(unreadable=error.problem)
        except (OSError, CheckpointUnreadable) as error:
            return _Finding(unreadable=f"cannot be read: {getattr(error, 'strerror', None) or error}")
        except CheckpointMismatch as error:
            return _Finding(mismatch=error)

    def _accepted(self, step: int, finding: _Finding) -> bool:
        """Whether all ranks may go on from what they read; rank 0 sets a damaged checkpoint aside."""
        told = {
            "damage": finding.damage,
            "unreadable": finding.unreadable,
            "mismatch": str(finding.mismatch or ""),
        }
        all_told = self.receipts.to_rank_0(told)
        verdict = self.receipts.from_rank_0(self._judge(step, all_told) if self.receipts.rank == 0 else None)
        if verdict["mismatch"]:
            raise finding.mismatch or CheckpointError(verdict["mismatch"])
        if verdict["refused"]:
            self._refused[step] = verdict["refused"]
            return False
        return True

    def _judge(self, step: int, told: list[dict[str, Any]]) -> dict[str, str]:
        """Rank 0: what is to become of a checkpoint, from what all ranks found. Proof of damage by one is enough."""
        damage = list(dict.fromkeys(problem for finding in told for problem in finding["damage"]))
        unreadable = next((finding["unreadable"] for finding in told if finding["unreadable"]), "")
        mismatch = next((finding["mismatch"] for finding in told if finding["mismatch"]), "")
        if not damage and not unreadable:
            return {"refused": "", "mismatch": mismatch}
        moved = self._set_aside(step) if damage else None
        problems = damage or [unreadable]
        self.report(events.CHECKPOINT_DAMAGED, {"step": step, "problems": problems, "set_aside": moved})
        return {"refused": "; ".join(damage) or unreadable, "mismatch": ""}

    def _set_aside(self, step: int) -> str | None:
        try:
            return set_aside_damaged(self.storage, self.directory, step).name
        except OSError:
            return None  # it stays where it is; this process does not try it again
