"""bf16 on a GPU: what this Trainer reaches of a hand-written loop's throughput, and what a save costs there.

The same network (six layers, 4,096 wide), data (32,768 samples in memory), batch (2,048) and optimizer (fused AdamW) go
through both in turn, in one process, and through the Trainer once more with three saves of its 1 GiB of state in the
steps that are timed. A round is timed from the first step that counts to the last, the GPU idle at both ends. To reach:
a ratio of at least 0.98, and saves hidden behind the steps: a save waits until the previous one is written, so the disk
of `--folder` should be fast. `--profile` prints instead what takes the time on the GPU and on the host.
`step_overhead.py` prints the figures too; by itself:

    python -m benchmarks.gpu_throughput [--rounds 5] [--steps 600] [--folder DIR] [--profile]
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import statistics
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset, TensorDataset

from cluster_ddp.job import JobSpec
from cluster_ddp.run.attempt import begin_attempt
from cluster_ddp.run.runs import create_run
from cluster_ddp.train import Task, Trainer

WIDTH = 4096
LAYERS = 6
BATCH = 2048
FEATURES = 256
SAMPLES = 32768
SETTLING_STEPS = 30
"""Steps at the start of a round that are not counted."""
SAVES = 3
"""Saves in the steps that count."""


class Clock:
    """Takes the time at the first step that counts and at the last; between them `profile`, if any, is on.

    `ahead` is how many seconds of work the GPU still had to do when the host began the last step. If that is less than
    a step or so, the GPU waits for the host, not the host for the GPU.
    """

    def __init__(self, steps: int, profile: torch.profiler.profile | None = None) -> None:
        self._at = (SETTLING_STEPS, SETTLING_STEPS + steps)
        self._steps = steps
        self._profile = profile
        self._begun = 0
        self._times: list[float] = []
        self.ahead = 0.0

    def tick(self) -> None:
        """Call at the begin of each step."""
        if self._begun in self._at:
            if self._begun == SETTLING_STEPS:
                _await_preparations()
            begun = time.perf_counter()
            torch.cuda.synchronize()
            self._times.append(time.perf_counter())
            self.ahead = self._times[-1] - begun
            if self._profile is not None:
                self._profile.start() if len(self._times) == 1 else self._profile.stop()
        self._begun += 1

    @property
    def samples_per_second(self) -> float:
        """The throughput of the steps that count."""
        begin, end = self._times
        return self._steps * BATCH / (end - begin)


def _await_preparations() -> None:
    """Wait for the thread that gets the memory for checkpoints, once in a training: it holds the driver's lock."""
    for thread in threading.enumerate():
        if thread.name == "checkpoint":
            thread.join()


class Wide(Task):
    """The training, as the Trainer is given it."""

    def __init__(self, data: TensorDataset, clock: Clock) -> None:
        self.data, self.clock = data, clock

    def model(self) -> nn.Module:
        return network()

    def train_data(self) -> Dataset[Any]:
        return self.data

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        self.clock.tick()
        return F.cross_entropy(model(batch[0]), batch[1])

    def optimizer(self, model: nn.Module, lr: float) -> torch.optim.Optimizer:
        return adamw(model)


def network() -> nn.Module:
    """Build the network."""
    torch.manual_seed(0)
    widths = [FEATURES, *[WIDTH] * LAYERS]
    layers = [layer for sizes in itertools.pairwise(widths) for layer in (nn.Linear(*sizes), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(WIDTH, 10))


def adamw(module: nn.Module) -> torch.optim.Optimizer:
    """Make the optimizer of both."""
    return torch.optim.AdamW(module.parameters(), lr=1e-4, fused=True)


def bare_loop(data: TensorDataset, steps: int, profile: torch.profiler.profile | None = None) -> Clock:
    """Write the loop by hand, with pinned batches."""
    clock = Clock(steps, profile)
    features, classes = data.tensors
    model = network().cuda()
    optimizer = adamw(model)
    order = torch.empty(0, dtype=torch.int64)
    for _ in range(SETTLING_STEPS + steps + 1):
        if not len(order):
            order = torch.randperm(SAMPLES)
        rows, order = order[:BATCH], order[BATCH:]
        clock.tick()
        inputs = features[rows].pin_memory().to("cuda", non_blocking=True)
        wanted = classes[rows].pin_memory().to("cuda", non_blocking=True)
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.bfloat16):
            loss = F.cross_entropy(model(inputs), wanted)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return clock


def this_trainer(
    data: TensorDataset,
    steps: int,
    profile: torch.profiler.profile | None = None,
    *,
    saves: int = 0,
    folder: Path | None = None,
) -> Clock:
    """Use this package's Trainer with its defaults, in a run directory."""
    clock = Clock(steps, profile)
    settings = {"steps": SETTLING_STEPS + steps + 1, "batch_size": BATCH, "precision": "bf16"}
    sections = {"checkpoint": {"every_steps": steps // saves}} if saves else {}
    job = JobSpec.model_validate({"name": "throughput", "task": "throughput:Wide", "train": settings, **sections})
    nowhere = Path(os.devnull).open("w")  # noqa: SIM115
    with tempfile.TemporaryDirectory(dir=folder) as runs, nowhere, contextlib.redirect_stdout(nowhere):
        run = create_run(job, runs_dir=Path(runs), via="local", script=None)
        begin_attempt(run, host="localhost", pid=os.getpid(), nodes=1, procs=1)
        with contextlib.redirect_stderr(nowhere):  # that no checkpoint contains the clock
            Trainer(job, Wide(data, clock), run).run()
    return clock


def made_data() -> TensorDataset:
    """Make the samples, in memory."""
    random = torch.Generator().manual_seed(0)
    features = torch.randn(SAMPLES, FEATURES, generator=random)
    return TensorDataset(features, torch.randint(10, (SAMPLES,), generator=random))


def show_profile(steps: int) -> None:
    """Print for both loops, per step, what takes most of the time on the GPU and on the host."""
    data = made_data()
    for train in (bare_loop, this_trainer):
        train(data, steps)
        profile = torch.profiler.profile()
        speed = train(data, steps, profile).samples_per_second
        rows = profile.key_averages()
        print(f"\n{train.__name__}: {1e6 * BATCH / speed:,.0f} us per step while profiled")
        for place, time_of in (("GPU", "self_device_time_total"), ("host", "self_cpu_time_total")):
            total = sum(getattr(row, time_of) for row in rows)
            print(f"  {place}: {total / steps:,.0f} us per step, and the calls per step")
            for row in sorted(rows, key=lambda row: -getattr(row, time_of))[:16]:
                print(f"    {getattr(row, time_of) / steps:9.1f} {row.count / steps:7.2f}  {row.key[:90]}")


def show(rounds: int, steps: int, folder: Path | None = None) -> None:
    """Measure in turn and print four lines; nothing where there is no GPU."""
    if not torch.cuda.is_available():
        return
    data = made_data()
    figures, aheads = list[tuple[float, ...]](), list[tuple[float, ...]]()
    for _ in range(rounds + 1):
        clocks = bare_loop(data, steps), this_trainer(data, steps)
        saving_clock = this_trainer(data, steps, saves=SAVES, folder=folder)
        figures.append(tuple(clock.samples_per_second for clock in (*clocks, saving_clock)))
        aheads.append(tuple(clock.ahead for clock in clocks))
    del figures[0], aheads[0]  # it warms up
    bare, trainer, saving = (statistics.median(column) for column in zip(*figures, strict=True))
    ahead = [f"{1000 * statistics.median(column):.1f} ms" for column in zip(*aheads, strict=True)]
    ratios = [mine / by_hand for by_hand, mine, _ in figures]
    costs = [steps * BATCH * (1 / saved - 1 / unsaved) / SAVES * 1000 for _, unsaved, saved in figures]
    print(f"\nbf16 on one {torch.cuda.get_device_name()}, {rounds} rounds of {steps} steps each, samples per second")
    print(
        f"bare loop {bare:,.0f}   this Trainer {trainer:,.0f}   "
        f"ratio {statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})"
    )
    print(f"the host is ahead of the GPU by {ahead[0]} in the bare loop, by {ahead[1]} in this Trainer")
    print(
        f"with {SAVES} saves {saving:,.0f}   a save costs {statistics.median(costs):+.1f} ms "
        f"({min(costs):+.1f} to {max(costs):+.1f}) where a step takes {1000 * BATCH / trainer:.2f} ms"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--folder", type=Path, help="where the checkpoints are written (default: the temporary folder)")
    parser.add_argument("--profile", action="store_true")
    options = parser.parse_args()
    if options.profile:
        show_profile(steps=60)
    else:
        show(options.rounds, options.steps, options.folder)
