"""Verifies checkpoints against their checksums, and lists those of a run.

No torch here, because login nodes use it.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import stat
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import xxhash

from cluster_ddp.checkpoint.errors import (
    CheckpointDamaged,
    CheckpointError,
    CheckpointOfAnotherRun,
    CheckpointUnreadable,
    NoSuchCheckpoint,
)
from cluster_ddp.checkpoint.folders import abandoned_in, damaged_in, unknown_names_in
from cluster_ddp.checkpoint.format import (
    MAX_MANIFEST,
    Entry,
    Manifest,
    ManifestDamaged,
    Shard,
    ShardDamaged,
    UnknownFormat,
    header_length,
    read_header,
    read_manifest,
)
from cluster_ddp.run.directory import MANIFEST, RunDirectory, step_name, step_of, steps_in
from cluster_ddp.run.errors import RunError
from cluster_ddp.run.lineage import Lineage, attempt_in, read_lineage
from cluster_ddp.run.reading import open_regular, read_file
from cluster_ddp.run.record import read_record

_UNKNOWN = "not a checkpoint: being written or removed, left by a dead attempt, or not this package's"
PIECE = 4 << 20  # bytes read and hashed at a time

# Where the bytes of a tensor go: memory of their size, or a function called with each piece and its offset.
Sink = Callable[[memoryview, int], None]
Place = memoryview | Sink


def open_checkpoint(folder: Path, run_id: str | None = None) -> Manifest:
    """Return a checkpoint's manifest after checking that all files exist and have the right sizes.

    Raises
    ------
    CheckpointDamaged
        Names every file that is missing, does not belong there, or has the wrong size.
    CheckpointOfAnotherRun
        Its manifest is intact and names another run; its other files are not checked.
    CheckpointUnreadable
        A different version of cluster_ddp wrote it.
    OSError
        The storage cannot be read.
    """
    present = {path.name for path in folder.iterdir() if not path.name.startswith(".nfs")}  # NFS: removed, still open
    odd = [name for name in sorted(present) if not stat.S_ISREG((folder / name).lstat().st_mode)]
    if odd:
        raise CheckpointDamaged(folder.name, [f"{name}: is not a regular file" for name in odd])
    try:
        manifest = read_manifest(read_file(folder / MANIFEST, MAX_MANIFEST))
    except FileNotFoundError:
        raise CheckpointDamaged(folder.name, [f"{MANIFEST}: missing"]) from None
    except ManifestDamaged as error:
        raise CheckpointDamaged(folder.name, [f"{MANIFEST}: {error}"]) from error
    except OSError as error:
        if error.errno == errno.EFBIG:
            raise CheckpointDamaged(folder.name, [f"{MANIFEST}: {error.strerror}"]) from error
        raise
    except UnknownFormat as error:
        raise CheckpointUnreadable(f"{MANIFEST}: {error}") from error
    if run_id is not None and manifest.run_id != run_id:
        raise CheckpointOfAnotherRun(folder.name, manifest.run_id, run_id)
    problems = []
    if manifest.step != step_of(folder.name):
        problems.append(f"{MANIFEST}: belongs to step {manifest.step}")
    for name, shard in sorted(manifest.shards.items()):
        if name not in present:
            problems.append(f"{name}: missing")
        elif (size := (folder / name).lstat().st_size) != shard.bytes:
            problems.append(f"{name}: has {size} bytes, not {shard.bytes}")
    problems += [f"{name}: does not belong here" for name in sorted(present - manifest.shards.keys() - {MANIFEST})]
    if problems:
        raise CheckpointDamaged(folder.name, problems)
    return manifest


def verify(folder: Path, run_id: str | None = None) -> Manifest:
    """Read a whole checkpoint and compare it with its checksums; returns the manifest if it is intact.

    Raises what `open_checkpoint` raises.
    """
    manifest = open_checkpoint(folder, run_id)
    problems = []
    for name, shard in manifest.shards.items():
        try:
            read_shard(folder / name, shard, manifest, {}, memoryview(bytearray(PIECE)))
        except CheckpointDamaged as error:
            problems += error.problems
    if problems:
        raise CheckpointDamaged(folder.name, problems)
    return manifest


def read_shard(path: Path, shard: Shard, manifest: Manifest, places: Mapping[str, Place], scratch: memoryview) -> None:
    """Read a shard once from start to end, hash it, and put each tensor's bytes in their place.

    Parameters
    ----------
    places
        By stored name; tensors without a place are only read and hashed.
    scratch
        Buffer for what is not read directly into its place.

    Raises
    ------
    CheckpointDamaged
        The file is not the one in the manifest. What was put in the places by then must not be used.
    OSError
        The storage cannot be read.
    """
    name = path.name
    with io.FileIO(open_regular(path)[0], "r") as file:
        hashed = xxhash.xxh3_128()

        def fill(target: memoryview) -> None:
            at = 0
            while at < len(target):
                count = file.readinto(target[at : at + PIECE])
                if not count:
                    raise ShardDamaged("it ends too early")
                hashed.update(target[at : at + count])
                at += count

        try:
            prefix = bytearray(8)
            fill(memoryview(prefix))
            header = bytearray(header_length(prefix, shard.bytes))
            fill(memoryview(header))
            entries = read_header(header, shard.bytes)
            _check_agreement(name, entries, manifest)
            for entry in entries:
                _fill_place(entry, places.get(entry.item.name), fill, scratch)
            if file.read(1):
                raise ShardDamaged("it has grown since it was written")
        except ShardDamaged as error:
            raise CheckpointDamaged(path.parent.name, [f"{name}: {error}"]) from error
        if hashed.hexdigest() != shard.xxh3:
            raise CheckpointDamaged(path.parent.name, [f"{name}: its checksum does not match the manifest"])


@dataclass(frozen=True)
class CheckpointInfo:
    """One checkpoint of a run."""

    path: Path
    # ``complete`` (its files exist), ``verified`` (all bytes were read and are right), ``damaged``, ``unreadable`` (by
    # the storage or this version), ``other-run`` (another run saved it), ``abandoned`` (an attempt saved it beyond the
    # checkpoint that a newer one resumed from), ``set-aside`` (found damaged earlier, and renamed), or ``stray`` (takes
    # up space but is not a checkpoint)
    state: str
    step: int | None = None
    manifest: Manifest | None = None
    problems: tuple[str, ...] = ()  # one string per problem, usually beginning with the file's name
    attempt: int | None = None  # the attempt that saved it; None if unknown


def run_id_of(run: RunDirectory) -> str:
    """The run id in the checkpoints of a run: the one in its record, because the folder may have been renamed.

    Without a readable record it is the folder's name: a script under torchrun alone has none, and the weights of a run
    that lost its record can still be exported.
    """
    try:
        return read_record(run).id
    except RunError:
        return run.id


def list_checkpoints(directory: Path, run_id: str, *, read_all: bool) -> list[CheckpointInfo]:
    """The checkpoints in ``<run>/checkpoints``, oldest first, then those set aside, then anything else there."""
    lineage = _lineage(directory)
    inspected = (_inspect(directory / step_name(step), step, run_id, read_all, lineage) for step in steps_in(directory))
    return [info for info in inspected if info is not None] + [
        *(_abandoned(directory / name, step, lineage) for name, step in abandoned_in(directory).items()),
        *(CheckpointInfo(directory / name, "set-aside") for name in damaged_in(directory)),
        *(CheckpointInfo(directory / name, "stray", problems=(_UNKNOWN,)) for name in unknown_names_in(directory)),
    ]


def newest_intact(directory: Path, run_id: str, step: int | None = None) -> tuple[Path, Manifest, list[CheckpointInfo]]:
    """The newest intact checkpoint that counts, all of its bytes verified, and the newer ones that were skipped.

    Raises
    ------
    NoSuchCheckpoint
        None was saved, or none of `step`, if given.
    CheckpointError
        None of them is intact.
    """
    tried: set[int] = set()
    passed_over: list[CheckpointInfo] = []
    lineage = _lineage(directory)
    while (candidate := _newest(directory, step, tried)) is not None:
        tried.add(candidate)
        info = _inspect(directory / step_name(candidate), candidate, run_id, True, lineage)
        if info is None:
            continue  # training has since removed it
        if info.manifest is not None:
            return info.path, info.manifest, passed_over
        passed_over.append(info)
    wanted = "" if step is None else f" of step {step}"
    if not passed_over:
        there = ", ".join(map(str, steps_in(directory))) or "none"
        raise NoSuchCheckpoint(f"no checkpoint{wanted} in {directory} (there are: {there})")
    found = "".join(f"\n  {info.path.name}: {'; '.join(info.problems)}" for info in passed_over)
    raise CheckpointError(f"no intact checkpoint{wanted} in {directory}{found}")


def _newest(directory: Path, step: int | None, tried: set[int]) -> int | None:
    """The newest existing step that has not been tried; only `step`, if given."""
    return max((there for there in steps_in(directory) if there not in tried and step in (None, there)), default=None)


def _lineage(directory: Path) -> Lineage:
    """How the attempts of a run follow each other; raises a `RunError` if there is no folder of checkpoints."""
    if os.path.lexists(directory) and not directory.is_dir():
        raise RunError(
            f"{directory} is not a folder: a run's checkpoints are in a folder of that name. Put it back; if it is "
            "lost, remove the file that is there instead; a resume then starts at step 0"
        )
    return read_lineage(RunDirectory(directory.parent))


def _inspect(path: Path, step: int, run_id: str, read_all: bool, lineage: Lineage) -> CheckpointInfo | None:
    """Inspect one checkpoint; None if training has since removed it."""
    try:
        manifest = open_checkpoint(path, run_id)
        if why := lineage.why_abandoned(manifest.attempt, step):
            return CheckpointInfo(path, "abandoned", step, problems=(why,), attempt=manifest.attempt)
        if read_all:
            manifest = verify(path, run_id)
    except (OSError, CheckpointError) as error:
        return _bad(path, step, error) if os.path.lexists(path) else None
    return CheckpointInfo(path, "verified" if read_all else "complete", step, manifest, attempt=manifest.attempt)


def _abandoned(path: Path, step: int, lineage: Lineage) -> CheckpointInfo:
    """Describe a checkpoint that was set aside because it does not count; its bytes are not verified."""
    attempt = None
    with contextlib.suppress(OSError):
        attempt = attempt_in(path)
    why = lineage.why_abandoned(attempt, step) or "set aside by another attempt"
    return CheckpointInfo(path, "abandoned", step, problems=(why,), attempt=attempt)


def _bad(path: Path, step: int, error: Exception) -> CheckpointInfo:
    if isinstance(error, CheckpointDamaged):
        return CheckpointInfo(path, "damaged", step, problems=tuple(error.problems))
    if isinstance(error, CheckpointOfAnotherRun):
        return CheckpointInfo(path, "other-run", step, problems=(error.problem,))
    return CheckpointInfo(path, "unreadable", step, problems=(str(error),))


def _fill_place(entry: Entry, place: Place | None, fill: Callable[[memoryview], None], scratch: memoryview) -> None:
    size = entry.end - entry.begin
    if isinstance(place, memoryview):
        fill(place)
        return
    for offset in range(0, size, len(scratch)):
        piece = scratch[: min(len(scratch), size - offset)]
        fill(piece)
        if place is not None:
            place(piece, offset)


def _check_agreement(name: str, entries: tuple[Entry, ...], manifest: Manifest) -> None:
    """Check that the header and the manifest agree on each tensor; otherwise one of them was forged."""
    listed = {tensor: (s.dtype, s.shape) for tensor, s in manifest.tensors.items() if s.shard == name}
    if listed != {entry.item.name: (entry.item.dtype, entry.item.shape) for entry in entries}:
        raise ShardDamaged("its tensors do not match the manifest")
