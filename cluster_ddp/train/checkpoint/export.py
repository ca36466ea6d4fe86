"""Weights for others: a plain safetensors file with the model's own names. No torch here."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from cluster_ddp.run.storage import Storage
from cluster_ddp.train.checkpoint.errors import CheckpointError, NoSuchCheckpoint
from cluster_ddp.train.checkpoint.inspect import Listed, newest_sound
from cluster_ddp.train.checkpoint.manifest import Manifest
from cluster_ddp.train.checkpoint.shards import Entry, Item, header_length, lay_out, read_header

_PIECE = 16 << 20  # bytes copied at a time
_TRIES = 10  # training removes checkpoints as it saves newer ones


def export_newest(
    directory: Path, run_id: str, target: Path, *, step: int | None = None, ema: bool = False
) -> tuple[int, Manifest, list[Listed]]:
    """Write the model of the newest sound checkpoint of a run, which may be training, to `target`.

    Returns
    -------
    The number of tensors, the checkpoint's manifest, and the checkpoints passed over because they are not sound.

    Raises
    ------
    NoSuchCheckpoint, CheckpointError
        As `newest_sound` and `export_model` say.
    """
    for _ in range(_TRIES):
        folder, manifest, passed_over = newest_sound(directory, run_id, step)
        try:
            return export_model(folder, manifest, target, ema=ema), manifest, passed_over
        except (OSError, CheckpointError):
            if folder.exists():
                raise
    raise CheckpointError(f"training removes the checkpoints in {directory} faster than they can be read; try again")


def export_model(folder: Path, manifest: Manifest, target: Path, *, ema: bool, storage: Storage | None = None) -> int:
    """Write the model of a verified checkpoint to `target`; it appears under its name when it is complete.

    Tied weights appear under each of their names, so that the bare model's ``load_state_dict`` takes what
    ``safetensors.torch.load_file`` reads.

    Parameters
    ----------
    ema
        The averaged weights; what has no average (buffers) comes from the model.

    Returns
    -------
    int
        The number of tensors.

    Raises
    ------
    NoSuchCheckpoint
        The checkpoint holds no averages.
    CheckpointError
        The file cannot be written.
    """
    sources = _sources(manifest, ema)
    items = [
        Item(name, manifest.tensors[stored].dtype, manifest.tensors[stored].shape) for name, stored in sources.items()
    ]
    note = {"format": "pt", "run_id": manifest.run_id, "step": str(manifest.step), "weights": "ema" if ema else "model"}
    layout = lay_out(items, note)
    entries = {shard: _entries(folder / shard) for shard in manifest.shards}
    storage = storage or Storage()
    temporary = target.with_name(f".{target.name}.{os.urandom(4).hex()}.tmp")
    try:
        fd = storage.open_write(temporary)
        try:
            storage.write(fd, layout.head)
            for entry in layout.entries:
                stored = sources[entry.item.name]
                shard = manifest.tensors[stored].shard
                _copy(storage, folder / shard, entries[shard][stored], fd)
            storage.fsync(fd)
        finally:
            storage.close(fd)
        storage.rename(temporary, target)
        storage.fsync_dir(target.parent)
    except OSError as error:
        with contextlib.suppress(OSError):
            storage.unlink(temporary)
        raise CheckpointError(f"cannot write {target}: {error.strerror or error}") from error
    return len(items)


def _sources(manifest: Manifest, ema: bool) -> dict[str, str]:
    """By the model's own name, the name under which the bytes are stored."""
    names = manifest.names()
    model = {name.removeprefix("model."): stored for name, stored in names.items() if name.startswith("model.")}
    averages = {name.removeprefix("ema."): stored for name, stored in names.items() if name.startswith("ema.")}
    if not ema:
        return model
    if not averages:
        raise NoSuchCheckpoint(f"the checkpoint of step {manifest.step} holds no averages: train.ema_decay was not set")
    return {name: averages.get(name, stored) for name, stored in model.items()}


def _entries(shard: Path) -> dict[str, Entry]:
    size = shard.stat().st_size
    with shard.open("rb") as file:
        entries = read_header(file.read(header_length(file.read(8), size)), size)
    return {entry.item.name: entry for entry in entries}


def _copy(storage: Storage, shard: Path, entry: Entry, fd: int) -> None:
    with shard.open("rb", buffering=0) as file:
        file.seek(entry.begin)
        left = entry.end - entry.begin
        while left:
            piece = file.read(min(left, _PIECE))
            if not piece:
                raise OSError(f"{os.fspath(shard)} became shorter while it was read")
            storage.write(fd, piece)
            left -= len(piece)
