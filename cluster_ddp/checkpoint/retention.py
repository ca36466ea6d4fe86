"""Which checkpoints stay: what an attempt sets aside or removes in ``<run>/checkpoints``, and when it may not.

An attempt may not know yet that a newer one has begun, and may be held up between any two operations. So nothing is
removed at once: a checkpoint first loses its name, then this attempt looks whether a newer one has begun, and gives the
name back if so. A newer attempt begins before it looks for a checkpoint to go on from; so it either finds one that
stays, or none. After each renaming, what was renamed is checked.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from cluster_ddp.checkpoint.errors import AttemptSuperseded, CheckpointOfAnotherRun
from cluster_ddp.checkpoint.folders import (
    abandoned_in,
    abandoned_path,
    put_back_interrupted,
    remove_checkpoint,
    remove_leftovers,
    removed_name,
    replaced_name,
    surplus,
)
from cluster_ddp.checkpoint.format import MAX_MANIFEST, ManifestDamaged, UnknownFormat, read_manifest
from cluster_ddp.run.attempt_record import attempt_numbers
from cluster_ddp.run.directory import MANIFEST, AttemptDirectory, step_name, steps_in
from cluster_ddp.run.lineage import Lineage, read_lineage
from cluster_ddp.run.reading import read_file
from cluster_ddp.run.storage import Storage

if TYPE_CHECKING:
    from cluster_ddp.job import CheckpointSpec


class _Saved(NamedTuple):
    """What decides whether a checkpoint stays, from its manifest."""

    run_id: str
    attempt: int | None
    metrics: dict[str, float]


class Retention:
    """What one attempt does with the checkpoints that exist already. Rank 0 uses it.

    Parameters
    ----------
    directory, run_id, attempt
        ``<run>/checkpoints``, and whose saves these are.
    owner
        This process, in the names of unfinished folders.
    """

    def __init__(
        self,
        directory: Path,
        run_id: str,
        attempt: AttemptDirectory,
        *,
        settings: CheckpointSpec,
        owner: str,
        storage: Storage,
    ) -> None:
        self._directory, self._run_id, self._attempt = directory, run_id, attempt
        self._settings, self._owner, self._storage = settings, owner, storage
        self._known: dict[int, _Saved] = {}

    def refuse_superseded(self) -> None:
        """Raise `AttemptSuperseded` when a newer attempt has begun."""
        if self._is_superseded():
            raise AttemptSuperseded(self._attempt.number)

    def make_room(self, step: int) -> None:
        """Free the name of this step: an earlier save of it, from before a crash or a fall-back, may have it.

        Raises
        ------
        CheckpointOfAnotherRun
            The checkpoint there is of another run and is not touched.
        AttemptSuperseded
            A newer attempt has saved it; it keeps its name.
        """
        final = self._directory / step_name(step)
        if not final.exists():
            return
        there = _read(final)
        if there is not None and there.run_id != self._run_id:
            raise CheckpointOfAnotherRun(final.name, there.run_id, self._run_id)
        if there is not None and not self._lineage().counts(there.attempt, step):
            self._set_aside(step, there.attempt)
        else:
            self._move(step, self._directory / replaced_name(step, self._owner))

    def published(self, step: int, metrics: dict[str, float]) -> None:
        """Note that a checkpoint of this attempt has got its name.

        Raises
        ------
        AttemptSuperseded
            A newer attempt had gone on from a place before it; it has lost its name again.
        """
        if self._is_superseded() and not self._lineage().counts(self._attempt.number, step):
            self._set_aside(step, self._attempt.number)
            raise AttemptSuperseded(self._attempt.number)
        self._known[step] = _Saved(self._run_id, self._attempt.number, metrics)

    def tidy_up(self, newest: int) -> dict[str, str]:
        """Remove what is no longer kept, now that the checkpoint of step `newest` is durable.

        Returns
        -------
        What the storage refused to remove, by name, and why.
        """
        refused: dict[str, str] = {}
        with contextlib.suppress(OSError, AttemptSuperseded):
            self.refuse_superseded()
            put_back_interrupted(self._storage, self._directory, own=self._owner)
            counted, left = self._sorted_out()
            for step in left:
                self._set_aside(step, self._known[step].attempt)
            self._remove(self._surplus(counted, newest), refused)
            refused |= remove_leftovers(self._storage, self._directory, own=self._owner)
            self._remove_abandoned(newest, refused)
        return refused

    def _sorted_out(self) -> tuple[list[int], list[int]]:
        """The steps of this run's checkpoints that count, and of those that do not.

        One that cannot be read counts: whether it is damaged is for a restore to find.
        """
        lineage = self._lineage()
        counted, left = [], []
        for step in steps_in(self._directory):
            if step not in self._known and (found := _read(self._directory / step_name(step))) is not None:
                self._known[step] = found
            known = self._known.get(step)
            if known is None or (known.run_id == self._run_id and lineage.counts(known.attempt, step)):
                counted.append(step)
            elif known.run_id == self._run_id:
                left.append(step)
        return counted, left

    def _surplus(self, steps: list[int], newest: int) -> list[int]:
        best = self._settings.keep_best
        return surplus(
            steps,
            {step: self._known[step].metrics for step in steps if step in self._known} if best else {},
            newest_proven=newest,
            keep_last=self._settings.keep_last,
            keep_every=self._settings.keep_every,
            best=(best.metric, best.mode) if best else None,
        )

    def _remove(self, steps: list[int], refused: dict[str, str]) -> None:
        renamed = {}
        for step in steps:
            target = self._directory / removed_name(step, self._owner)
            try:
                self._storage.rename(self._directory / step_name(step), target)
                renamed[step] = target
            except OSError as error:
                refused[step_name(step)] = error.strerror or str(error)
        try:
            self._storage.fsync_dir(self._directory)
            self.refuse_superseded()
        except (AttemptSuperseded, OSError):
            for step, target in renamed.items():
                with contextlib.suppress(OSError):  # the newer attempt has put it back already
                    self._storage.rename(target, self._directory / step_name(step))
            raise

    def _remove_abandoned(self, newest: int, refused: dict[str, str]) -> None:
        """Remove what earlier attempts saved beyond their place, up to the step that this one has reached."""
        lineage = self._lineage()
        for name, step in abandoned_in(self._directory).items():
            found = _read(self._directory / name) if step <= newest else None
            if found is not None and found.run_id == self._run_id and not lineage.counts(found.attempt, step):
                try:
                    remove_checkpoint(self._storage, self._directory / name)
                except OSError as error:
                    refused[name] = error.strerror or str(error)

    def _set_aside(self, step: int, attempt: int | None) -> None:
        self._known.pop(step, None)
        self._move(step, abandoned_path(self._directory, step, attempt))

    def _move(self, step: int, target: Path) -> None:
        """Rename the checkpoint of a step, unless it proves to be a newer attempt's."""
        final = self._directory / step_name(step)
        self._storage.rename(final, target)
        self._storage.fsync_dir(self._directory)
        moved = _read(target)
        if moved is not None and (moved.attempt or 0) > self._attempt.number:
            with contextlib.suppress(OSError):
                self._storage.rename(target, final)
            raise AttemptSuperseded(self._attempt.number)

    def _is_superseded(self) -> bool:
        return max(attempt_numbers(self._attempt.run), default=-1) > self._attempt.number

    def _lineage(self) -> Lineage:
        return read_lineage(self._attempt.run)


def _read(folder: Path) -> _Saved | None:
    """Whose a checkpoint is; None when its manifest cannot be read, or is damaged."""
    try:
        manifest = read_manifest(read_file(folder / MANIFEST, MAX_MANIFEST))
    except (OSError, ManifestDamaged, UnknownFormat):
        return None
    return _Saved(manifest.run_id, manifest.attempt, manifest.metrics)
