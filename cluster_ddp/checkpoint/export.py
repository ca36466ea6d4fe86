"""Exports a run's weights to a plain safetensors file with the model's own names. No torch here."""

from __future__ import annotations

from pathlib import Path

from cluster_ddp.checkpoint.errors import CannotExport, CheckpointError, NoSuchCheckpoint
from cluster_ddp.checkpoint.format import Entry, Item, Manifest, header_length, lay_out, read_header
from cluster_ddp.checkpoint.verify import CheckpointInfo, newest_intact
from cluster_ddp.run.storage import Storage, replaced

_PIECE = 16 << 20  # bytes copied at a time
_TRIES = 10  # training may remove a checkpoint while it is read


def export_newest(
    directory: Path, run_id: str, target: Path, *, step: int | None = None, ema: bool = False
) -> tuple[int, Manifest, list[CheckpointInfo]]:
    """Write the model of the newest intact checkpoint of a run, which may be training, to `target`.

    Returns
    -------
    The number of tensors, the checkpoint's manifest, and the checkpoints skipped because they are not intact.

    Raises
    ------
    NoSuchCheckpoint
        There is none, or none of `step`, or it contains no averages.
    CannotExport
        The file cannot be written.
    CheckpointError
        None is intact.
    """
    for _ in range(_TRIES):
        folder, manifest, passed_over = newest_intact(directory, run_id, step)
        try:
            return export_model(folder, manifest, target, ema=ema), manifest, passed_over
        except (OSError, CheckpointError):
            if folder.exists():
                raise
    raise CheckpointError(f"training removes the checkpoints in {directory} faster than they can be read; try again")


def export_model(folder: Path, manifest: Manifest, target: Path, *, ema: bool) -> int:
    """Write the model of a verified checkpoint to `target`, which appears only once it is complete.

    Tied weights appear under each of their names, so that the bare model's ``load_state_dict`` takes what
    ``safetensors.torch.load_file`` reads.

    Parameters
    ----------
    ema
        Write the averaged weights; what has no average (buffers) comes from the model.
    """
    sources = _sources(manifest, ema)
    items = [
        Item(name, manifest.tensors[stored].dtype, manifest.tensors[stored].shape) for name, stored in sources.items()
    ]
    note = {"format": "pt", "run_id": manifest.run_id, "step": str(manifest.step), "weights": "ema" if ema else "model"}
    layout = lay_out(items, note)
    entries = {shard: _entries(folder / shard) for shard in manifest.shards}
    storage = Storage()
    try:
        with replaced(storage, target) as fd:
            storage.write(fd, layout.head)
            for entry in layout.entries:
                stored = sources[entry.item.name]
                shard = manifest.tensors[stored].shard
                _copy(storage, folder / shard, entries[shard][stored], fd)
    except OSError as error:
        raise CannotExport(f"cannot write {target}: {error.strerror or error}") from error
    return len(items)


def _sources(manifest: Manifest, ema: bool) -> dict[str, str]:
    """Map the model's own names to the names under which the bytes are stored."""
    names = manifest.names()
    model = {name.removeprefix("model."): stored for name, stored in names.items() if name.startswith("model.")}
    averages = {name.removeprefix("ema."): stored for name, stored in names.items() if name.startswith("ema.")}
    if not ema:
        return model
    if not manifest.has_averages:
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
                raise OSError(f"{shard} became shorter while it was read")
            storage.write(fd, piece)
            left -= len(piece)
