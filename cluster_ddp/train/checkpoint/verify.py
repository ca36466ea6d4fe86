"""Reading a checkpoint's files with their checksums, and finding what is wrong with them. No torch here."""

from __future__ import annotations

import io
import os
import stat
from collections.abc import Callable, Mapping
from pathlib import Path

import xxhash

from cluster_ddp.train.checkpoint.errors import CheckpointDamaged, CheckpointOfAnotherRun, CheckpointUnreadable
from cluster_ddp.train.checkpoint.folders import MANIFEST, step_of
from cluster_ddp.train.checkpoint.manifest import Manifest, ManifestDamaged, Shard, UnknownFormat, read_manifest
from cluster_ddp.train.checkpoint.shards import Entry, ShardDamaged, header_length, read_header

PIECE = 4 << 20  # bytes read and hashed at a time

# Where the bytes of a tensor go: memory of their size, or a function that takes each piece and its offset.
Sink = Callable[[memoryview, int], None]
Place = memoryview | Sink


def open_checkpoint(folder: Path, run_id: str | None = None) -> Manifest:
    """The manifest of a complete checkpoint, after checking that its files are there and have their sizes.

    Parameters
    ----------
    folder
        ``step-NNNNNNNN``.
    run_id
        The run that it must belong to; None takes any.

    Raises
    ------
    CheckpointDamaged
        Names every file that is missing, too much, or of another size.
    CheckpointOfAnotherRun
        Its manifest is whole and names another run; its other files are not looked at.
    CheckpointUnreadable
        Another version of cluster_ddp wrote it.
    OSError
        The storage cannot be read.
    """
    present = {path.name for path in folder.iterdir() if not path.name.startswith(".nfs")}  # NFS: removed, still open
    odd = [name for name in sorted(present) if not stat.S_ISREG((folder / name).lstat().st_mode)]
    if odd:
        raise CheckpointDamaged(folder.name, [f"{name}: is not a plain file" for name in odd])
    try:
        with _open_plain(folder / MANIFEST) as file:
            manifest = read_manifest(file.readall())
    except FileNotFoundError:
        raise CheckpointDamaged(folder.name, [f"{MANIFEST}: missing"]) from None
    except ManifestDamaged as error:
        raise CheckpointDamaged(folder.name, [f"{MANIFEST}: {error}"]) from error
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
    """Read all of a checkpoint and compare it with its checksums; the manifest when it is sound.

    Raises as `open_checkpoint`.
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
    """Read a shard once from its beginning to its end, hash it, and put each tensor's bytes in their place.

    Parameters
    ----------
    places
        By stored name; tensors without a place are read and hashed only.
    scratch
        Memory for what is not read straight into its place.

    Raises
    ------
    CheckpointDamaged
        The file is not the one in the manifest. What is in the places by then is worth nothing.
    OSError
        The storage cannot be read.
    """
    name = path.name
    with _open_plain(path) as file:
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
            _agree(name, entries, manifest)
            for entry in entries:
                _take(entry, places.get(entry.item.name), fill, scratch)
            if file.read(1):
                raise ShardDamaged("it is longer than it was")
        except ShardDamaged as error:
            raise CheckpointDamaged(path.parent.name, [f"{name}: {error}"]) from error
        if hashed.hexdigest() != shard.xxh3:
            raise CheckpointDamaged(path.parent.name, [f"{name}: its checksum is not that of the manifest"])


def _take(entry: Entry, place: Place | None, fill: Callable[[memoryview], None], scratch: memoryview) -> None:
    size = entry.end - entry.begin
    if isinstance(place, memoryview):
        fill(place)
        return
    for offset in range(0, size, len(scratch)):
        piece = scratch[: min(len(scratch), size - offset)]
        fill(piece)
        if place is not None:
            place(piece, offset)


def _agree(name: str, entries: tuple[Entry, ...], manifest: Manifest) -> None:
    """The header and the manifest tell the same of each tensor, else one of them was made up."""
    told = {tensor: (s.dtype, s.shape) for tensor, s in manifest.tensors.items() if s.shard == name}
    if told != {entry.item.name: (entry.item.dtype, entry.item.shape) for entry in entries}:
        raise ShardDamaged("its tensors are not those of the manifest")


def _open_plain(path: Path) -> io.FileIO:
    """Open a file for reading; never through a link, which a stranger may have put there."""
    return io.FileIO(os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)), "r")
