"""How long a save blocks training, how fast it writes, and how fast it is read back: this package against torch's own.

Two ranks of one state of 1 GiB, all ways in turn in one run, medians over the rounds:

    python benchmarks/checkpoint_stall.py [--mib 1024] [--rounds 5] [--folder DIR]

"blocked" is the time until the training loop may go on; "durable" until the bytes are flushed to the disk. Each figure
is that of the slower rank. Files are read back from the page cache. Needs about 8 GiB of memory and 3 GiB of disk for
1 GiB of state.
"""

from __future__ import annotations

import argparse
import os
import shutil
import socket
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch._C._distributed_c10d import TCPStore
from torch.multiprocessing.spawn import spawn

from cluster_ddp.checkpoint.checkpointer import Checkpointer
from cluster_ddp.checkpoint.plan import describe, make_plan
from cluster_ddp.job import CheckpointSpec
from cluster_ddp.train.metrics.file import MetricsFile

RANKS = 2
LIMITS = {"blocked": 1.3, "write": 1.0, "load": 1.0}
Figures = dict[str, list[float]]


def make_state(mebibytes: int) -> dict[str, Tensor]:
    """A transformer's worth of names: weights of 4 MiB and small vectors, each with AdamW's two moments."""
    layers = max(1, mebibytes // 3 // 4)
    state: dict[str, Tensor] = {}
    for layer in range(layers):
        for name, shape in ((f"{layer}.weight", (1024, 1024)), (f"{layer}.bias", (1024,))):
            state[f"model.{name}"] = torch.randn(shape)
            state[f"optimizer.{name}.exp_avg"] = torch.randn(shape)
            state[f"optimizer.{name}.exp_avg_sq"] = torch.rand(shape)
    return state


def slowest(seconds: float) -> float:
    """The time of the slower rank."""
    worst = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    return float(worst)


def timed(action: Callable[[], object]) -> float:
    """Seconds of the slower rank, begun together."""
    dist.barrier()
    began = time.perf_counter()
    action()
    return slowest(time.perf_counter() - began)


class Contest:
    """All ways to save and load one state, on one rank."""

    def __init__(self, state: dict[str, Tensor], folder: Path) -> None:
        self.state, self.folder, self.rank = state, folder, dist.get_rank()
        self.figures: Figures = {}
        self.checkpointer = Checkpointer(
            folder / "ours",
            run_id="benchmark",
            job_digest="",
            settings=CheckpointSpec(keep_last=1),
            rank=self.rank,
            world_size=RANKS,
            local_rank=self.rank,
            store=dist.distributed_c10d._get_default_store(),
            report=self.heard,
        )
        mine = make_plan(*describe(state), range(RANKS)).layouts[self.rank].entries
        self.share = [(state[entry.item.name], torch.zeros(entry.item.shape)) for entry in mine]
        self.metrics = MetricsFile(folder / "metrics.jsonl", attempt=0) if self.rank == 0 else None
        self.step = 0
        self.durable_at = 0.0

    def note(self, name: str, seconds: float) -> None:
        self.figures.setdefault(name, []).append(seconds)

    def heard(self, event: str, fields: Mapping[str, object]) -> None:
        assert event == "checkpoint", fields
        self.durable_at = time.perf_counter()

    def turn(self) -> None:
        """One round; every other one backwards, so that none always finds the caches as the same other left them.

        The copy and our save, whose short times are compared, take turns several times before each of the others.
        """
        pairs = [self.copy, self.save] * 3
        ways = [*pairs, self.load, self.torch_save, *pairs, self.dcp_save, *pairs, self.dcp_async_save]
        for way in ways if len(self.figures.get("dcp.save durable", [])) % 2 == 0 else reversed(ways):
            way()
            if self.rank == 0:
                os.sync()  # what one way left to be flushed must not burden the next
            dist.barrier()

    def copy(self) -> None:
        def run() -> None:
            for source, target in self.share:
                target.copy_(source)

        self.note("copy blocked", timed(run))

    def save(self) -> None:
        self.step += 1
        dist.barrier()
        began = time.perf_counter()
        self.checkpointer.save(step=self.step, samples=0, epoch=0, tensors=self.state, scalars={}, metrics={})
        blocked = time.perf_counter() - began
        assert self.checkpointer.finish()
        self.note("ours blocked", slowest(blocked))
        # Rank 0 reports it when all of it is durable; then it removes the one before, which the others do not do.
        self.note("ours durable", slowest(self.durable_at - began if self.rank == 0 else 0.0))

    def load(self) -> None:
        live = {name: torch.zeros_like(tensor) for name, tensor in self.state.items()}
        self.note("ours load", timed(lambda: self.checkpointer.restore(live)))
        assert all(torch.equal(live[name], tensor) for name, tensor in self.state.items())

    def torch_save(self) -> None:
        path = self.folder / "torch.pt"

        def run() -> None:
            if self.rank == 0:
                torch.save(self.state, path)
            dist.barrier()

        self.note("torch.save on rank 0 blocked", timed(run))
        live = {name: torch.zeros_like(tensor) for name, tensor in self.state.items()}

        def load() -> None:
            for name, tensor in torch.load(path, weights_only=True).items():
                live[name].copy_(tensor)

        self.note("torch.load and copy load", timed(load))
        self.note("torch.load alone load", timed(lambda: torch.load(path, weights_only=True)))
        dist.barrier()
        if self.rank == 0:
            path.unlink()

    def dcp_save(self) -> None:
        path = self.folder / "dcp"
        seconds = timed(lambda: dcp.save(self.state, checkpoint_id=path))
        self.note("dcp.save blocked", seconds)
        self.note("dcp.save durable", seconds)
        live = {name: torch.zeros_like(tensor) for name, tensor in self.state.items()}
        self.note("dcp.load load", timed(lambda: dcp.load(live, checkpoint_id=path)))
        self.remove(path)

    def dcp_async_save(self) -> None:
        path = self.folder / "dcp-async"
        dist.barrier()
        began = time.perf_counter()
        future = dcp.async_save(self.state, checkpoint_id=path)
        blocked = time.perf_counter() - began
        assert isinstance(future, Future)
        future.result()
        total = time.perf_counter() - began
        self.note("dcp.async_save blocked", slowest(blocked))
        self.note("dcp.async_save durable", slowest(total))
        self.remove(path)

    def remove(self, path: Path) -> None:
        dist.barrier()
        if self.rank == 0:
            shutil.rmtree(path)


def report(figures: Mapping[str, list[float]], size: int) -> None:
    """The table and the ratios."""
    median = {name: statistics.median(values) for name, values in figures.items()}
    gibibytes = size / (1 << 30)
    print(
        f"\n{gibibytes:.2f} GiB of state, {RANKS} ranks, {len(figures['dcp.save durable'])} rounds after one to warm up"
    )
    print(f"{'':34}{'median s':>10}{'GiB/s':>8}{'least s':>10}{'most s':>9}")
    for name, value in median.items():
        values = figures[name]
        print(f"{name:34}{value:10.3f}{gibibytes / value:8.2f}{min(values):10.3f}{max(values):9.3f}")
    print("\nratios (below the limit is good)")
    for what, ours, other, limit in (
        ("time blocked / copy of the same bytes into warm memory", "ours blocked", "copy blocked", LIMITS["blocked"]),
        ("time to durable / dcp.save", "ours durable", "dcp.save durable", LIMITS["write"]),
        ("verified load / torch.load and copy", "ours load", "torch.load and copy load", LIMITS["load"]),
        ("verified load / torch.load alone", "ours load", "torch.load alone load", LIMITS["load"]),
    ):
        print(f"  {what:56}{median[ours] / median[other]:6.2f}   (limit {limit})")
    for other in ("torch.save on rank 0 blocked", "dcp.save blocked", "dcp.async_save blocked"):
        print(f"  time blocked / {other.removesuffix(' blocked'):41}{median['ours blocked'] / median[other]:6.2f}")


def rank_main(rank: int, folder: str, mebibytes: int, rounds: int, port: int) -> None:
    """What each rank does."""
    warnings.filterwarnings("ignore", module=r"torch\.distributed.*")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    store = TCPStore("127.0.0.1", port, RANKS, is_master=rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    state = make_state(mebibytes)
    contest = Contest(state, Path(folder))
    contest.checkpointer.prepare(state)
    contest.turn()
    contest.figures.clear()
    for _ in range(rounds):
        contest.turn()
    if rank == 0:
        report(contest.figures, sum(tensor.nbytes for tensor in state.values()))
    contest.checkpointer.close()
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    """Start the ranks."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--mib", type=int, default=1024, help="size of the state (default 1024)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="where to write (default: the system's temporary folder)")
    options = parser.parse_args()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory(dir=options.folder, prefix="checkpoint-stall-") as folder:
        spawn(rank_main, (folder, options.mib, options.rounds, port), nprocs=RANKS)  # type: ignore[no-untyped-call]


if __name__ == "__main__":
    main()
