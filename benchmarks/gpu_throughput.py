"""bf16 on a GPU: what this Trainer reaches of a hand-written loop's throughput, and what a save costs there.

The same network, data in memory, batch and optimizer (fused AdamW) go through both in turn, in one process:

- `transformer`: 12 layers, 768 wide, 124 million parameters, batches of 16 sequences of 1,024 tokens;
- `wide`: six layers, 4,096 wide, 84 million parameters, batches of 2,048 rows. Its step of 3 ms is short for its
  memory traffic: reading all gradients once more, by which they are checked, takes 5 % of it;
- `wide, clipped`: the same with gradients clipped by their norm in both, which reads them in both.

A round is timed from the first step that counts to the last, the GPU idle at both ends. To reach: a step at most 1.02
times as long, and saves hidden behind the steps. A save's cost is the time by which a round with saves is longer, each
started when the previous one has been written; beside it, `torch.save` of the same state in the hand-written loop.
As the launcher does it, one CPU is left for the writing. `--profile` prints instead what takes the time of the wide
network's steps. `step_overhead.py` prints the figures too; by itself:

    python -m benchmarks.gpu_throughput [--rounds 4] [--folder DIR] [--profile]
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
from collections.abc import Callable
from dataclasses import dataclass
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

SETTLING_STEPS = 30
"""Steps at the start of a round that are not counted."""
SAVES = 2
"""Saves in a round with saves; the last has as much time as the first."""
WIDTH, LAYERS, FEATURES, CLASSES = 4096, 6, 256, 10
WORDS, LENGTH = 50304, 1024


@dataclass(frozen=True)
class Training:
    """What both loops train."""

    name: str
    network: Callable[[], nn.Module]
    data: TensorDataset
    loss: Callable[[nn.Module, Any], Tensor]
    batch: int
    steps: int  # that are timed
    clip_norm: float | None = None


class Transformer(nn.Module):
    """A language model of the size of the smallest GPT-2."""

    def __init__(self, width: int = 768, heads: int = 12, layers: int = 12) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, width)
        self.places = nn.Embedding(LENGTH, width)
        layer = nn.TransformerEncoderLayer(
            width, heads, 4 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, layers, nn.LayerNorm(width), enable_nested_tensor=False)
        self.logits = nn.Linear(width, WORDS, bias=False)
        self.logits.weight = self.words.weight
        self.mask: Tensor
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(LENGTH), persistent=False)
        self.register_buffer("numbers", torch.arange(LENGTH), persistent=False)

    def forward(self, words: Tensor) -> Tensor:
        """Logits of the next words, shape (batch, length, words)."""
        embedded = self.words(words) + self.places(self.numbers)
        return self.logits(self.layers(embedded, mask=self.mask, is_causal=True))  # type: ignore[no-any-return]


def wide_network() -> nn.Module:
    """Build the network of linear layers."""
    widths = [FEATURES, *[WIDTH] * LAYERS]
    layers = [layer for sizes in itertools.pairwise(widths) for layer in (nn.Linear(*sizes), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(WIDTH, CLASSES))


def loss_of_classes(model: nn.Module, batch: Any) -> Tensor:
    """The loss of the wide network."""
    return F.cross_entropy(model(batch[0]), batch[1])


def loss_of_words(model: nn.Module, batch: Any) -> Tensor:
    """The loss of the language model."""
    (words,) = batch
    return F.cross_entropy(model(words[:, :-1]).flatten(0, 1), words[:, 1:].flatten())


def trainings() -> list[Training]:
    """Make all, with their data."""
    random = torch.Generator().manual_seed(0)
    rows = TensorDataset(
        torch.randn(32768, FEATURES, generator=random), torch.randint(CLASSES, (32768,), generator=random)
    )
    texts = TensorDataset(torch.randint(WORDS, (2048, LENGTH + 1), generator=random))
    return [
        Training("transformer", Transformer, texts, loss_of_words, batch=16, steps=150),
        Training("wide", wide_network, rows, loss_of_classes, batch=2048, steps=1500),
        Training("wide, clipped", wide_network, rows, loss_of_classes, batch=2048, steps=1500, clip_norm=1.0),
    ]


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
    def seconds_per_step(self) -> float:
        """Of the steps that count."""
        begin, end = self._times
        return (end - begin) / self._steps


def _await_preparations() -> None:
    """Wait for the thread that gets the memory for checkpoints, once in a training: it holds the driver's lock."""
    for thread in threading.enumerate():
        if thread.name == "checkpoint":
            thread.join()


class Timed(Task):
    """A training, as the Trainer is given it."""

    def __init__(self, training: Training, clock: Clock) -> None:
        self.training, self.clock = training, clock

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        return self.training.network()

    def train_data(self) -> Dataset[Any]:
        return self.training.data

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        self.clock.tick()
        return self.training.loss(model, batch)

    def optimizer(self, model: nn.Module, lr: float) -> torch.optim.Optimizer:
        return adamw(model)


def adamw(module: nn.Module) -> torch.optim.Optimizer:
    """Make the optimizer of both."""
    return torch.optim.AdamW(module.parameters(), lr=1e-4, fused=True)


def bare_loop(
    training: Training,
    profile: torch.profiler.profile | None = None,
    *,
    steps: int | None = None,
    save_every: int | None = None,
    folder: Path | None = None,
) -> Clock:
    """Write the loop by hand, with pinned batches."""
    steps = steps or training.steps
    clock = Clock(steps, profile)
    torch.manual_seed(0)
    model = training.network().cuda()
    optimizer = adamw(model)
    order = torch.empty(0, dtype=torch.int64)
    for step in range(SETTLING_STEPS + steps + 1):
        if len(order) < training.batch:
            order = torch.randperm(len(training.data))
        rows, order = order[: training.batch], order[training.batch :]
        clock.tick()
        batch = [tensor[rows].pin_memory().to("cuda", non_blocking=True) for tensor in training.data.tensors]
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.bfloat16):
            loss = training.loss(model, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        if training.clip_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), training.clip_norm)
        optimizer.step()
        if save_every and step and step % save_every == 0:
            with tempfile.NamedTemporaryFile(dir=folder) as file:
                torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
                file.flush()
                os.fsync(file.fileno())
    return clock


def this_trainer(
    training: Training,
    profile: torch.profiler.profile | None = None,
    *,
    steps: int | None = None,
    save_every: int | None = None,
    folder: Path | None = None,
) -> Clock:
    """Use this package's Trainer with its defaults, in a run directory."""
    steps = steps or training.steps
    clock = Clock(steps, profile)
    settings = {
        "steps": SETTLING_STEPS + steps + 1,
        "batch_size": training.batch,
        "precision": "bf16",
        "clip_norm": training.clip_norm,
    }
    sections = {"checkpoint": {"every_steps": save_every}} if save_every else {}
    job = JobSpec.model_validate({"name": "throughput", "task": "throughput:Timed", "train": settings, **sections})
    nowhere = Path(os.devnull).open("w")  # noqa: SIM115
    with tempfile.TemporaryDirectory(dir=folder) as runs, nowhere, contextlib.redirect_stdout(nowhere):
        run = create_run(job, runs_dir=Path(runs), via="local", script=None)
        begin_attempt(run, host="localhost", pid=os.getpid(), nodes=1, procs=1)
        with contextlib.redirect_stderr(nowhere):  # that no checkpoint contains the clock
            Trainer(job, Timed(training, clock), run).run()
    return clock


def show_profile(steps: int = 60) -> None:
    """Print for both loops, per step, what takes most of the time on the GPU and on the host."""
    wide = trainings()[1]
    for train in (bare_loop, this_trainer):
        train(wide, steps=steps)
        profile = torch.profiler.profile(acc_events=True)
        seconds = train(wide, profile, steps=steps).seconds_per_step
        rows = profile.key_averages()
        print(f"\n{train.__name__}: {1e6 * seconds:,.0f} us per step while profiled")
        for place, time_of in (("GPU", "self_device_time_total"), ("host", "self_cpu_time_total")):
            print(f"  {place}: us per step, and the calls per step")
            for row in sorted(rows, key=lambda row: -getattr(row, time_of))[:16]:
                print(f"    {getattr(row, time_of) / steps:9.1f} {row.count / steps:7.2f}  {row.key[:90]}")


def show(rounds: int, folder: Path | None = None) -> None:
    """Measure in turn and print; nothing where there is no GPU."""
    if not torch.cuda.is_available():
        return
    torch.set_num_threads(max(1, torch.get_num_threads() - 1))
    print(f"\nbf16 on one {torch.cuda.get_device_name()}, {rounds} rounds")
    for training in trainings():
        bare_loop(training)  # it warms up
        plain = show_steps(training, rounds)
        if training.clip_norm is None:
            show_saves(training, plain, (rounds + 1) // 2, folder)


def show_steps(training: Training, rounds: int) -> tuple[float, float]:
    """Print how long a step takes in both loops, and return the medians, in seconds."""
    pairs = [(bare_loop(training), this_trainer(training)) for _ in range(rounds)]
    by_hand, mine = ([clock.seconds_per_step for clock in column] for column in zip(*pairs, strict=True))
    ratios = [b / a for a, b in zip(by_hand, mine, strict=True)]
    ahead = [1000 * statistics.median(clock.ahead for clock in column) for column in zip(*pairs, strict=True)]
    print(
        f"{training.name}: ms per step, bare loop {1000 * statistics.median(by_hand):.2f}   this Trainer "
        f"{1000 * statistics.median(mine):.2f}   ratio {statistics.median(ratios):.3f} ({min(ratios):.3f} to "
        f"{max(ratios):.3f}); the host is ahead of the GPU by {ahead[0]:.1f} and {ahead[1]:.1f} ms"
    )
    return statistics.median(by_hand), statistics.median(mine)


def show_saves(training: Training, plain: tuple[float, float], rounds: int, folder: Path | None) -> None:
    """Print what a save costs in both loops, whose steps without saves take `plain` seconds."""
    every = (SETTLING_STEPS + training.steps) // (SAVES + 1) + 1  # none at the end
    costs: list[tuple[float, ...]] = []
    for _ in range(rounds):
        clocks = [train(training, save_every=every, folder=folder) for train in (bare_loop, this_trainer)]
        longer = [clock.seconds_per_step - without for clock, without in zip(clocks, plain, strict=True)]
        costs.append(tuple(1000 * training.steps * seconds / SAVES for seconds in longer))
    by_hand, mine = (
        f"{statistics.median(own):.0f} ({min(own):.0f} to {max(own):.0f})" for own in zip(*costs, strict=True)
    )
    print(f"{training.name}: ms that a save costs, torch.save in the bare loop {by_hand}   this Trainer {mine}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--folder", type=Path, help="where the checkpoints are written (default: the temporary folder)")
    parser.add_argument("--profile", action="store_true")
    options = parser.parse_args()
    if options.profile:
        show_profile()
    else:
        show(options.rounds, options.folder)
