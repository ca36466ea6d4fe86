"""What counts of each attempt: a run is one line of training, however many of its attempts are alive at once.

An attempt may train on after a newer one has begun: on a node that is cut from Slurm's controller but not from the
storage, or on another machine. So every attempt records which checkpoint it goes on from before its ranks train, and
what the attempts before it did beyond that place does not count, whenever they did it. Nothing else decides it: no
clock, and not who happens to be alive.

What does not count never counts again: places are only added, and moved back.
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

_BEGINNING = -1  # the place of an attempt that goes on from no checkpoint: one of step 0 lies beyond it
_HEAD_BYTES = 4096  # of a manifest: the lines that say whose it is come before those that may be long
_ATTEMPT = re.compile(rb'^ "attempt": (\d{1,6}),$', re.MULTILINE)
_AFTER_ATTEMPT = re.compile(rb'^ "world_size": ', re.MULTILINE)


@dataclass(frozen=True)
class Origin:
    """The checkpoint that an attempt goes on from.

    Attributes
    ----------
    step
        Its step; None when the attempt began with none.
    digest
        That of its manifest.
    """

    step: int | None
    digest: str | None = None

    @property
    def place(self) -> int:
        """The last step of earlier attempts that counts."""
        return _BEGINNING if self.step is None else self.step


@dataclass(frozen=True)
class Lineage:
    """Where the attempts of a run go on from, as far as they have recorded it; by default all counts.

    Attributes
    ----------
    origins
        By the attempt's number. One that has not begun to train yet, or that an older version of this package has
        begun, has none.
    unsigned
        Whose a checkpoint is that does not name its attempt, as those of older versions do not: the latest that has
        recorded no origin.
    """

    origins: Mapping[int, Origin] = field(default_factory=dict)
    unsigned: int = -1

    def counts(self, attempt: int | None, step: int) -> bool:
        """Whether what an attempt did at a step belongs to the run; None stands for an unnamed attempt."""
        return self.left_by(attempt, step) is None

    def left_by(self, attempt: int | None, step: int) -> int | None:
        """The newest attempt that went on from a place before this step of an older one; None when it counts."""
        number = self.unsigned if attempt is None else attempt
        return max(
            (newer for newer, origin in self.origins.items() if newer > number and step > origin.place), default=None
        )

    def why_abandoned(self, attempt: int | None, step: int) -> str:
        """Why something does not count, in plain words; empty when it counts."""
        newer = self.left_by(attempt, step)
        if newer is None:
            return ""
        whose = "an earlier attempt" if attempt is None else f"attempt {attempt}"
        origin = self.origins[newer]
        place = "from the beginning" if origin.step is None else f"from step {origin.step}"
        return f"saved by {whose}, but attempt {newer} went on {place}"


def read_lineage(run: RunDirectory) -> Lineage:
    """The lineage of a run as it is recorded now."""
    numbers = [attempt.number for attempt in list_attempts(run)]
    found = {number: read_origin(run.attempt(number)) for number in numbers}
    origins = {number: origin for number, origin in found.items() if origin is not None}
    return Lineage(origins, max((number for number in numbers if number not in origins), default=-1))


def read_origin(attempt: AttemptDirectory) -> Origin | None:
    """What an attempt goes on from; None as long as it has not said so."""
    value = read_json_object(attempt.origin_file)
    if value is None or "step" not in value:
        return None
    step, digest = as_whole(value["step"]), value.get("digest")
    if step is None and value["step"] is not None:
        return None
    return Origin(step, digest if isinstance(digest, str) else None)


def record_origin(attempt: AttemptDirectory, origin: Origin, storage: Storage) -> None:
    """Record what an attempt goes on from, before it trains; durable when it returns.

    Ranks that are restarted within the attempt go on from what it has saved itself, and leave the record as it is; only
    when that was damaged, so that they go further back, does the place move back.

    Raises
    ------
    OSError
        It cannot be written.
    """
    there = read_origin(attempt)
    if there is None or origin.place < there.place:
        write_json(storage, attempt.origin_file, asdict(origin))


def steps_that_count(checkpoints: Path, lineage: Lineage) -> list[int]:
    """The steps of the complete checkpoints that belong to the run, ascending; empty when there is no such folder.

    One whose manifest cannot be read counts, until somebody reads all of it.
    """
    return [step for step in steps_in(checkpoints) if _may_count(checkpoints, step, lineage)]


def last_step_that_counts(checkpoints: Path, lineage: Lineage) -> int | None:
    """The last of `steps_that_count`, found without looking at those before it; None when there is none."""
    return next((step for step in reversed(steps_in(checkpoints)) if _may_count(checkpoints, step, lineage)), None)


def attempt_in(checkpoint: Path) -> int | None:
    """The attempt that a checkpoint's manifest names; None when it names none.

    Raises
    ------
    OSError
        The manifest cannot be read, or its beginning is not that of one.
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
    """Whether a checkpoint belongs to the run, by the first bytes of its manifest where its step does not tell."""
    try:
        return lineage.counts(-1, step) or lineage.counts(attempt_in(checkpoints / step_name(step)), step)
    except OSError:
        return True
