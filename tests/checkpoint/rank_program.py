"""What one rank of test_checkpoint_ranks does: `rank_program.py FOLDER SCENARIO...`, in the environment of torchrun.

Prints what it saw as one JSON object, on the last line.
"""

from __future__ import annotations

import datetime
import errno
import gc
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from checkpoint_cases import RUN_ID, Recorder, blank, same, save, state

from cluster_ddp.checkpoint.checkpointer import Checkpointer
from cluster_ddp.checkpoint.errors import CheckpointError, CheckpointMismatch
from cluster_ddp.job import CheckpointSpec
from cluster_ddp.run.storage import Storage

RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
EVENTS = Recorder()


def make(
    folder: Path,
    storage: Storage | None = None,
    local_world: int = WORLD,
    store: dist.Store | None = None,
    **settings: Any,
) -> Checkpointer:
    return Checkpointer(
        folder,
        run_id=RUN_ID,
        job_digest="digest",
        settings=CheckpointSpec(**settings),
        rank=RANK,
        world_size=WORLD,
        local_rank=RANK % local_world,
        store=store or dist.distributed_c10d._get_default_store(),
        report=EVENTS,
        storage=storage,
    )


def own_state(step: int) -> dict[str, torch.Tensor]:
    """The same on all ranks but for the buffers of BatchNorm."""
    tensors = state(step, 100)
    tensors["model.norm.running_mean"] = torch.full((3,), float(RANK))
    tensors.update({f"model.more.{number}": torch.nn.Parameter(torch.full((50,), float(step))) for number in range(4)})
    return tensors


def expected(step: int) -> dict[str, torch.Tensor]:
    return {**{name: t.detach() for name, t in own_state(step).items()}, "model.norm.running_mean": torch.zeros(3)}


def loads(target: Checkpointer, step: int) -> bool:
    live = blank(expected(step))
    restored = target.restore(live)
    return restored is not None and restored.step == step and same(live, expected(step))


def writing(folder: Path) -> dict[str, Any]:
    """All, node and one."""
    seen: dict[str, Any] = {}
    for step, which in enumerate(("all", "node", "one"), start=1):
        target = make(folder / which, local_world=2, ranks_writing=which)
        save(target, step, own_state(step))
        seen[which] = [target.finish(), target.last_saved, loads(target, step)]
        target.close()
    return seen


def storeless(folder: Path) -> dict[str, Any]:
    """The store is lost, as with the agent that hosts it, and the last step is saved without it."""
    hosted = dist.TCPStore("127.0.0.1", 0, None, True) if RANK == 0 else None
    (port,) = together(hosted.port if hosted else 0)[:1]
    store = hosted or dist.TCPStore("127.0.0.1", port, None, False)
    target = make(folder, store=store)
    save(target, 1, own_state(1))
    seen = {"before": target.finish()}
    dist.barrier()
    del store, hosted
    gc.collect()
    dist.barrier()
    save(target, 2, own_state(2))
    seen["lost"] = target.finish()
    dist.barrier()  # the trainer's ranks agree on how the save ended: rank 0 has removed what there was of it
    target.use_collectives(together)
    save(target, 2, own_state(2))
    return {**seen, "without": target.finish(), "why": target.why_failed, "loads": loads(make(folder), 2)}


def together(value: Any) -> list[Any]:
    values = [None] * WORLD
    dist.all_gather_object(values, value)
    return values


class Failing(Storage):
    """Cannot write shards on one rank for a while."""

    broken = RANK == 1

    def write(self, fd: int, data: bytes | bytearray | memoryview) -> None:
        if self.broken:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        super().write(fd, data)


def failing(folder: Path) -> dict[str, Any]:
    """One rank cannot write: the save is given up everywhere, the next one works. Then rank 0 can write nothing."""
    storage = Failing()
    target = make(folder, storage, local_world=1)
    storage.broken, broken = False, storage.broken
    save(target, 1, own_state(1))
    first = target.finish()
    storage.broken = broken
    save(target, 2, own_state(2))
    second = target.finish()
    storage.broken = False
    kept = loads(target, 1)
    save(target, 3, own_state(3))
    third, seen = target.finish(), Recorder(EVENTS)
    storage.broken = EVENTS.refuses = RANK == 0
    save(target, 4, own_state(4))
    assert not target.finish()
    return {
        "durable": [first, second, third], "kept": kept, "last": target.last_saved, "events": seen,
        "afterwards": EVENTS[len(seen):], "why": target.why_failed,
    }  # fmt: skip


def busy(folder: Path) -> dict[str, Any]:
    """While a save waits for a slow rank the process group and its store are free, and all skip the same save."""

    class Slow(Storage):
        def fsync(self, fd: int) -> None:
            end = time.monotonic() + 30
            while RANK == 1 and not go.exists() and time.monotonic() < end:
                time.sleep(0.01)
            super().fsync(fd)

    go = folder / "go"
    target = make(folder / "checkpoints", Slow(), when_busy="skip")
    store = dist.distributed_c10d._get_default_store()
    save(target, 1, own_state(1))
    for turn in range(20):
        dist.all_reduce(torch.ones(3))
        store.set(f"here/{RANK}/{turn}", "yes")
        store.get(f"here/{(RANK + 1) % WORLD}/{turn}")
    save(target, 2, own_state(2))
    in_flight = target.last_saved is None
    dist.barrier()
    go.touch()
    finished = target.finish()
    save(target, 3, own_state(3))
    target.finish()
    return {"in_flight": in_flight, "finished": finished, "last": target.last_saved, "events": EVENTS}


def damage(folder: Path) -> dict[str, Any]:
    """All ranks agree on the checkpoint before a damaged one, and on the failure when none is left."""
    target = make(folder)
    for step in (1, 2, 3):
        save(target, step, own_state(step))
    target.finish()
    dist.barrier()
    if RANK == 0:
        (folder / "step-00000003/shard-0002.safetensors").unlink()
        shard = folder / "step-00000002/shard-0001.safetensors"
        data = bytearray(shard.read_bytes())
        data[-1] ^= 1
        shard.write_bytes(data)
    dist.barrier()
    fell_back = loads(target, 1)
    refused = ""
    try:
        target.restore({**blank(expected(1)), "model.new": torch.ones(RANK + 1)})
    except CheckpointMismatch as error:
        refused = str(error)
    dist.barrier()
    if RANK == 0:
        (folder / "step-00000001/manifest.json").unlink()
    dist.barrier()
    try:
        target.restore(blank(expected(1)))
        failure = ""
    except CheckpointError as error:
        failure = str(error)
    return {"fell_back": fell_back, "refused": refused, "failure": failure, "events": EVENTS}


def unlike(folder: Path) -> dict[str, Any]:
    """Other tensors on one rank, then a folder that is not shared."""
    target = make(folder)
    tensors = own_state(1)
    if RANK == 1:
        tensors["model.extra"] = torch.nn.Parameter(torch.ones(500))
    save(target, 1, tensors)
    first = target.finish()
    own_disk = folder / f"disk-of-{RANK}"
    own_disk.mkdir()
    target = make(own_disk)
    save(target, 2, own_state(2))
    return {"durable": [first, target.finish()], "events": EVENTS}


def dying(folder: Path) -> dict[str, Any]:
    """A rank dies in the middle of a save; the others end in time, and the one before stays."""

    class Dying(Storage):
        deadly = False

        def fsync(self, fd: int) -> None:
            if self.deadly and RANK == 1:
                os._exit(9)
            super().fsync(fd)

    storage = Dying()
    target = make(folder, storage)
    save(target, 1, own_state(1))
    target.finish()
    dist.barrier()
    storage.deadly = True
    save(target, 2, own_state(2))
    if RANK == 1:
        target.finish()  # never returns: its own thread ends this process
    return {"finished": target.last_saved == 2}


def continued(folder: Path) -> dict[str, Any]:
    """A new attempt after `dying`."""
    folder = folder.with_name("dying")
    target = make(folder)
    loaded = loads(target, 1)
    dist.barrier()
    return {"loaded": loaded, "names": sorted(path.name for path in folder.iterdir())}


def _kilobytes(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith(name)))


def memory(folder: Path) -> dict[str, Any]:
    """Fifty saves of 96 MiB, half of it on each of two ranks, and a restore."""
    tensors = {f"model.{number}": torch.nn.Parameter(torch.ones(1 << 20)) for number in range(24)}
    target = make(folder, keep_last=1)
    save(target, 1, {"model.small": torch.ones(1)})
    target.finish()
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts here
    before, resident = _kilobytes("VmRSS"), []
    for step in range(2, 52):
        save(target, step, tensors)
        if step % 5 == 0:
            target.finish()
            resident.append(_kilobytes("VmRSS") - before)
    target.finish()
    target.restore(tensors)
    return {"peak": _kilobytes("VmHWM") - before, "resident": resident, "last": target.last_saved}


SCENARIOS: dict[str, Callable[[Path], dict[str, Any]]] = {
    scenario.__name__: scenario
    for scenario in (writing, storeless, failing, busy, damage, unlike, dying, continued, memory)
}

if __name__ == "__main__":
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
    found = {}
    for name in sys.argv[2:]:
        EVENTS = Recorder()
        own = Path(sys.argv[1]) / name
        own.mkdir(exist_ok=True)
        found[name] = SCENARIOS[name](own)
        if name != "dying":
            dist.barrier()
    print(json.dumps(found), flush=True)
    if "dying" not in found:
        dist.destroy_process_group()
