"""Decides which checkpoints an attempt sets aside or removes in ``<run>/checkpoints``, and when it must not.

An attempt may not know yet that a newer one has begun, and may be delayed between any two operations. So removal takes
two steps: a checkpoint is first renamed, then this attempt checks whether a newer one has begun, and if so renames it
back. A newer attempt registers before it looks for a checkpoint to resume from, so any checkpoint that it finds stays.
After each rename, what was renamed is checked.
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
    """The parts of a checkpoint's manifest that decide whether it stays."""

    run_id: str
    attempt: int | None
    metrics: dict[str, float]


class Retention:
    """Sets aside or removes existing checkpoints on behalf of one attempt. Used by rank 0.

    Parameters
    ----------
    directory, run_id, attempt
        ``<run>/checkpoints``, and the run and attempt that this is for.
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
        """Raise `AttemptSuperseded` if a newer attempt has begun."""
        if self._is_superseded():
            raise AttemptSuperseded(self._attempt.number)

    def make_room(self, step: int) -> None:
        """Free the name of this step, which an earlier save may have, from before a crash or a fall-back.

        Raises
        ------
        CheckpointOfAnotherRun
            The existing checkpoint belongs to another run and is not touched.
        AttemptSuperseded
            A newer attempt saved the existing checkpoint; it keeps its name.
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
        """Note that a checkpoint of this attempt was given its final name.

        Raises
        ------
        AttemptSuperseded
            A newer attempt has resumed from an earlier checkpoint; this one was set aside again.
        """
        if self._is_superseded() and not self._lineage().counts(self._attempt.number, step):
            self._set_aside(step, self._attempt.number)
            raise AttemptSuperseded(self._attempt.number)
        self._known[step] = _Saved(self._run_id, self._attempt.number, metrics)

    def tidy_up(self, newest: int) -> dict[str, str]:
        """Remove what is no longer kept, now that the checkpoint of step `newest` is durable.

        Returns
        -------
        The names that the storage refused to remove, and why.
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

        One that cannot be read counts: only a restore determines whether it is damaged.
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
                with contextlib.suppress(OSError):  # the newer attempt has already restored it
                    self._storage.rename(target, self._directory / step_name(step))
            raise

    def _remove_abandoned(self, newest: int, refused: dict[str, str]) -> None:
        """Remove abandoned checkpoints of earlier attempts, up to the step that this attempt has reached."""
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
        """Rename the checkpoint of a step; undo that if it turns out to be a newer attempt's."""
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
    """What a checkpoint's manifest says; None if it cannot be read or is damaged."""
    try:
        manifest = read_manifest(read_file(folder / MANIFEST, MAX_MANIFEST))
    except (OSError, ManifestDamaged, UnknownFormat):
        return None
    return _Saved(manifest.run_id, manifest.attempt, manifest.metrics)
