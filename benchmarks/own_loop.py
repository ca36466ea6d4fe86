"""What do run.resumable and run.steps cost per step, on top of the same loop without?

    python benchmarks/own_loop.py            # one process, then two ranks; about ten minutes
    python benchmarks/own_loop.py --quick    # few rounds, to see that it works

In one process both loops train a model each, in turn: an epoch of the one, an epoch of the other, each time in another
order, so that the machine's moods hit both alike. Each case is measured in several processes, as the place of a model
in memory may favour one loop for the whole life of a process. The allocator returns no memory to the system: whether
it does so in every step or never, up to a third of a step's time, is otherwise a matter of luck and not of the loop.

The table shows the median over all rounds of a step's time in the loop without, of the difference in the same round,
and of the ratio, in seconds and in the processor time of a process and its workers, which other processes disturb
least. The bare loop is timed twice in each round; what these two differ is noise. Memory is the most that a process
which runs only the loop with us has had, minus that of one which runs only the bare loop.

Images have 64 x 64 pixels, photos 224 x 224. To reach: a ratio of at most 1.02 with images and workers, and 1.05 with
a tiny MLP on tensors without workers.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset

from cluster_ddp.train import join_run

BATCH = 32
PROCESSES = 3
KEEP_MEMORY = {"MALLOC_TRIM_THRESHOLD_": str(1 << 32), "MALLOC_MMAP_THRESHOLD_": str(1 << 32)}
CASES = (
    "tensors, no workers",
    "images, no workers",
    "images, 4 workers",
    "photos, 4 workers",
    "plain samples",
    "steps",
)
SIDES = {"images": 64, "photos": 224}


class Round(NamedTuple):
    """What one round took."""

    seconds: float
    cpu: float


class Figures(NamedTuple):
    """What one process measured: the rounds of each loop, and the most memory that it has had."""

    rounds: dict[str, list[Round]]
    peak_mib: float


class Pictures(Dataset[tuple[torch.Tensor, int]]):
    """Square pictures that are cropped to this side, flipped and made noisy."""

    def __init__(self, length: int, side: int) -> None:
        self.side, self.margin = side, side // 8
        stored = side + self.margin
        self.pictures = torch.randint(0, 256, (length, 3, stored, stored), dtype=torch.uint8)

    def __len__(self) -> int:
        return len(self.pictures)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        top, left = torch.randint(self.margin, (2,)).tolist()
        picture = self.pictures[index, :, top : top + self.side, left : left + self.side].float() / 255
        if torch.rand(()) < 0.5:
            picture = picture.flip(2)
        return picture + 0.05 * torch.randn_like(picture), index % 10


class Rows(Dataset[tuple[torch.Tensor, int]]):
    """Samples that draw nothing."""

    def __init__(self, length: int) -> None:
        self.rows = torch.randn(length, 64)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.rows[index], index % 10


def kind_of(case: str) -> str:
    """What is trained on."""
    return case.split()[0].strip(",")


def model_for(case: str) -> nn.Module:
    """A tiny MLP, or a small network for pictures."""
    if kind_of(case) not in SIDES:
        return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
    layers = nn.Conv2d(3, 16, 3, 2), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 32, 3, 2), nn.ReLU()
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(512, 10))


def loader_for(case: str, steps: int, world: int) -> DataLoader[Any]:
    """A DataLoader of so many batches on each rank."""
    length = steps * BATCH * world
    data: Dataset[Any] = TensorDataset(torch.randn(length, 64), torch.arange(length) % 10)
    if kind_of(case) in SIDES:
        data = Pictures(length, SIDES[kind_of(case)])
    elif kind_of(case) == "plain":
        data = Rows(length)
    sampler: DistributedSampler[Any] | None = DistributedSampler(data) if world > 1 else None
    workers = 4 if "4 workers" in case else 0
    return DataLoader(data, BATCH, sampler=sampler, shuffle=sampler is None, num_workers=workers,
                      persistent_workers=workers > 0)  # fmt: skip


def make(case: str, world: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model and its optimizer."""
    model = model_for(case)
    if world > 1:
        model = DistributedDataParallel(model)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)


def update(model: nn.Module, optimizer: torch.optim.Optimizer, inputs: torch.Tensor, labels: torch.Tensor) -> None:
    """One step."""
    optimizer.zero_grad()
    F.cross_entropy(model(inputs), labels).backward()  # type: ignore[no-untyped-call]
    optimizer.step()


def measure(case: str, folder: Path, rounds: int, names: list[str]) -> None:
    """Time these loops in turn; rank 0 writes the figures beside the run."""
    steps = steps_of(case)
    with join_run(folder) as run:
        world = run.world.world_size
        bare, bare_optimizer = make(case, world)
        ours, our_optimizer = make(case, world)
        loader = loader_for(case, steps, world)
        things: dict[str, Any] = {"model": ours, "optimizer": our_optimizer}
        rows = torch.randn(512, 64), torch.arange(512) % 10
        if case == "steps":
            numbers = run.steps(steps * (rounds + 1), **things)
        else:
            resumable = run.resumable(loader, epochs=rounds + 1, **things)
            epochs = resumable.epochs()

        def draw() -> tuple[torch.Tensor, torch.Tensor]:
            chosen = torch.randint(512, (BATCH,))
            return rows[0][chosen], rows[1][chosen]

        def without() -> None:
            if case == "steps":
                for _ in range(steps):
                    update(bare, bare_optimizer, *draw())
                return
            for inputs, labels in loader:
                update(bare, bare_optimizer, inputs, labels)

        def with_us() -> None:
            if case == "steps":
                for number in numbers:
                    update(ours, our_optimizer, *draw())
                    if (number + 1) % steps == 0:
                        return
                return
            next(epochs)
            for inputs, labels in resumable:
                update(ours, our_optimizer, inputs, labels)

        loops = {"bare": without, "again": without, "ours": with_us}
        found = Figures(compare({name: loops[name] for name in names}, rounds), peak_mib())
        if run.world.is_main:
            folder.with_name("figures.json").write_text(json.dumps(found))
        if "ours" not in names:
            loops["ours"]()  # else the block would end before its loop began
        if case != "steps":
            next(epochs, None)
        run.log(run.step, {"ratio": 1.0})


def compare(loops: dict[str, Callable[[], None]], rounds: int) -> dict[str, list[Round]]:
    """The figures of each round; a first one warms up."""
    found: dict[str, list[Round]] = {name: [] for name in loops}
    for number in range(rounds + 1):
        for name in random.Random(number).sample(list(loops), len(loops)):
            cpu, begun = processor_time(), time.perf_counter()
            loops[name]()
            found[name].append(Round(time.perf_counter() - begun, processor_time() - cpu))
    return found


def processor_time() -> float:
    """The processor time in seconds that this process and its workers have had."""
    workers = [Path(f"/proc/{worker.pid}/task") for worker in multiprocessing.active_children()]
    tasks = [task for worker in workers for task in worker.iterdir()]
    return time.process_time() + sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


def peak_mib() -> float:
    """The most memory that this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def show(case: str, world: int, rounds: int) -> None:
    """Measure a case and print its line of the table."""
    steps = steps_of(case)
    processes = [in_process(case, world, rounds, ["bare", "again", "ours"]).rounds for _ in range(PROCESSES)]
    found = {name: [row for process in processes for row in process[name][1:]] for name in processes[0]}
    peak = {name: in_process(case, world, 1, [name]).peak_mib for name in ("bare", "ours")}
    columns = [f"{world} x {case:20}"]
    for kind in ("seconds", "cpu"):
        bare, again, ours = ([getattr(row, kind) for row in found[name]] for name in ("bare", "again", "ours"))
        base = [(first + second) / 2 for first, second in zip(bare, again, strict=True)]
        over = statistics.median(mine - other for mine, other in zip(ours, base, strict=True)) / steps * 1e6
        ratio = statistics.median(mine / other for mine, other in zip(ours, base, strict=True))
        noise = statistics.median(second / first for first, second in zip(bare, again, strict=True))
        each = statistics.median(base) / steps * 1e6
        columns.append(f"{kind}: {each:8.1f} us {over:+8.1f} us, ratio {ratio:.3f} (noise {noise:.3f})")
    print(*columns, f"memory {peak['ours'] - peak['bare']:+.1f} MiB", sep="   ", flush=True)


def in_process(case: str, world: int, rounds: int, names: list[str]) -> Figures:
    """Measure these loops in a new process for each rank; the figures of rank 0."""
    start = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(world)]
    with tempfile.TemporaryDirectory() as folder:
        here = ["--here", str(Path(folder) / "run"), "--case", case, "--rounds", str(rounds), "--loops", *names]
        subprocess.run([*start, __file__, *here], check=True, env=os.environ | KEEP_MEMORY)
        found, peak = json.loads((Path(folder) / "figures.json").read_text())
    return Figures({name: [Round(*row) for row in rows] for name, rows in found.items()}, peak)


def steps_of(case: str) -> int:
    """Steps in a round."""
    return {"images": 60, "photos": 15}.get(kind_of(case), 300)


def main() -> None:
    """Measure every case, in processes of its own."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few rounds")
    parser.add_argument("--world", type=int, nargs="*", default=[1, 2], help="numbers of ranks (default: 1 2)")
    parser.add_argument("--case", choices=CASES, help="measure only this")
    parser.add_argument("--here", type=Path, help=argparse.SUPPRESS)  # in this process, with this run directory
    parser.add_argument("--rounds", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--loops", nargs="*", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.here:
        measure(options.case, options.here, options.rounds, options.loops)
        return
    for world in options.world:
        for case in [options.case] if options.case else CASES:
            show(case, world, 3 if options.quick else 9)


if __name__ == "__main__":
    main()
