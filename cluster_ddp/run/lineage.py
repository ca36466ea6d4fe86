"""Which work of each attempt counts: a run is one line of training, even if several attempts are alive at once.

An attempt may keep training after a newer one has begun: on a node that is cut off from Slurm's controller but not from
the storage, or on a different machine. So every attempt records which checkpoint it continues from before its ranks
train, and what earlier attempts did beyond that step does not count, whenever they did it. Nothing else decides this:
no clock, and not which attempt happens to be alive.

What does not count never counts again: origins are only added, or moved back.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from cluster_ddp.run.attempt_record import list_attempts
from cluster_ddp.run.directory import MANIFEST, AttemptDirectory, RunDirectory, step_name, steps_in
from cluster_ddp.run.reading import as_whole, open_regular, read_json_object
from cluster_ddp.run.storage import Storage, write_json

_BEGINNING = -1  # the place of an attempt that continues from no checkpoint; even step 0 is beyond it
_HEAD_BYTES = 4096  # of a manifest: the lines that name its attempt precede those that may be long
_ATTEMPT = re.compile(rb'^ "attempt": (\d{1,6}),$', re.MULTILINE)
_AFTER_ATTEMPT = re.compile(rb'^ "world_size": ', re.MULTILINE)


@dataclass(frozen=True)
class Origin:
    """The checkpoint that an attempt continues from.

    Attributes
    ----------
    step
        Its step; None if the attempt began without a checkpoint.
    digest
        The digest of its manifest.
    """

    step: int | None
    digest: str | None = None

    @property
    def place(self) -> int:
        """The last step of earlier attempts that counts."""
        return _BEGINNING if self.step is None else self.step


@dataclass(frozen=True)
class Lineage:
    """Where the attempts of a run continue from, as far as recorded; by default everything counts.

    Attributes
    ----------
    origins
        By attempt number. Missing for an attempt that has not begun to train yet, or that an older version of this
        package has begun.
    unsigned
        The attempt to which checkpoints that name none, as those of older versions, are attributed: the latest without
        a recorded origin.
    """

    origins: Mapping[int, Origin] = field(default_factory=dict)
    unsigned: int = -1

    def counts(self, attempt: int | None, step: int) -> bool:
        """Whether what an attempt did at a step belongs to the run; None stands for an unnamed attempt."""
        return self.abandoned_by(attempt, step) is None

    def abandoned_by(self, attempt: int | None, step: int) -> int | None:
        """Return the newest attempt that continues from before this step of an older one; None if the step counts."""
        number = self.unsigned if attempt is None else attempt
        return max(
            (newer for newer, origin in self.origins.items() if newer > number and step > origin.place), default=None
        )

    def why_abandoned(self, attempt: int | None, step: int) -> str:
        """Say in plain words why something does not count; empty if it counts."""
        newer = self.abandoned_by(attempt, step)
        if newer is None:
            return ""
        whose = "an earlier attempt" if attempt is None else f"attempt {attempt}"
        origin = self.origins[newer]
        went = "started from the beginning" if origin.step is None else f"went on from step {origin.step}"
        return f"saved by {whose}, but attempt {newer} {went}"


def read_lineage(run: RunDirectory) -> Lineage:
    """Read the lineage of a run as recorded now."""
    numbers = [attempt.number for attempt in list_attempts(run)]
    found = {number: read_origin(run.attempt(number)) for number in numbers}
    origins = {number: origin for number, origin in found.items() if origin is not None}
    return Lineage(origins, max((number for number in numbers if number not in origins), default=-1))


def read_origin(attempt: AttemptDirectory) -> Origin | None:
    """Read what an attempt continues from; None until it has recorded that."""
    value = read_json_object(attempt.origin_file)
    if value is None or "step" not in value:
        return None
    step, digest = as_whole(value["step"]), value.get("digest")
    if step is None and value["step"] is not None:
        return None
    return Origin(step, digest if isinstance(digest, str) else None)


def record_origin(attempt: AttemptDirectory, origin: Origin, storage: Storage) -> None:
    """Record what an attempt continues from, before it trains; durable on return.

    Ranks that are restarted within the attempt continue from its own checkpoints and leave the record as it is. The
    origin moves back only if those are damaged and the ranks have to go further back.

    Raises
    ------
    OSError
        It cannot be written.
    """
    there = read_origin(attempt)
    if there is None or origin.place < there.place:
        write_json(storage, attempt.origin_file, asdict(origin))


def steps_that_count(checkpoints: Path, lineage: Lineage) -> list[int]:
    """Return the steps of the complete checkpoints that belong to the run, ascending; empty if there is no such folder.

    A checkpoint whose manifest cannot be read counts until somebody reads all of it.
    """
    return [step for step in steps_in(checkpoints) if _may_count(checkpoints, step, lineage)]


def last_step_that_counts(checkpoints: Path, lineage: Lineage) -> int | None:
    """Return the last of `steps_that_count` without looking at earlier ones; None if there is none."""
    return next((step for step in reversed(steps_in(checkpoints)) if _may_count(checkpoints, step, lineage)), None)


def attempt_in(checkpoint: Path) -> int | None:
    """Return the attempt that a checkpoint's manifest names; None if it names none.

    Raises
    ------
    OSError
        The manifest cannot be read, or does not begin like one.
    """
    fd, _ = open_regular(checkpoint / MANIFEST)
    try:
        head = os.read(fd, _HEAD_BYTES)
    finally:
        os.close(fd)
    attempt = _ATTEMPT.search(head)
    if attempt is None and not _AFTER_ATTEMPT.search(head):
        raise OSError(errno.EINVAL, "is not a manifest", str(checkpoint / MANIFEST))
    return int(attempt[1]) if attempt else None


def _may_count(checkpoints: Path, step: int, lineage: Lineage) -> bool:
    """Whether a checkpoint belongs to the run, reading the start of its manifest if its step does not decide that."""
    try:
        return lineage.counts(-1, step) or lineage.counts(attempt_in(checkpoints / step_name(step)), step)
    except OSError:
        return True
