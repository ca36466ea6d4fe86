"""Loops of one's own, as people write them, to be stopped in the middle and resumed."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import random
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    get_worker_info,
)

from cluster_ddp.job import CheckpointSpec, JobSpec
from cluster_ddp.run.directory import RunDirectory
from cluster_ddp.run.events import read_events
from cluster_ddp.run.runs import create_run
from cluster_ddp.train import join_run, session
from cluster_ddp.train.ranks.process import become_rank

SAMPLES, EPOCHS = 44, 3


AT_THE_TOP = np.random.default_rng(1)


class Images(Dataset[Any]):
    """Augmented by all three global generators, one at the top of this module and its own; notes what is read."""

    labels_are_indices = False

    def __init__(self, log: str | None = None) -> None:
        self._log, self.own = log, random.Random(1)

    def renew(self, worker: int) -> None:
        self.own = random.Random(worker)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        if self._log is not None:
            with Path(self._log).open("a") as file:
                file.write(f"{index}\n")
        noise = torch.randn(6) + float(np.random.rand()) + random.random() + AT_THE_TOP.random() + self.own.random()
        label = index if self.labels_are_indices else index % 3
        return torch.full((6,), index / SAMPLES) + 0.1 * noise, label


class InAThread(DataLoader[Any]):
    """Makes its batches in a thread, as monai's ThreadDataLoader does without workers."""

    def __iter__(self) -> Any:
        with ThreadPoolExecutor(1) as pool:
            batches = super().__iter__()
            for _ in range(len(self)):
                yield pool.submit(next, batches).result()


class Rows(IterableDataset[Any]):
    """Each worker gives its part."""

    def __iter__(self) -> Iterator[tuple[Tensor, int]]:
        info = get_worker_info()
        first, every = (info.id, info.num_workers) if info else (0, 1)
        for index in range(first, SAMPLES, every):
            yield torch.full((6,), index / SAMPLES) + 0.1 * torch.randn(6) + random.random(), index % 3


class Shuffled(Sampler[int]):
    """A sampler of one's own that draws from a global generator."""

    def __len__(self) -> int:
        return SAMPLES

    def __iter__(self) -> Iterator[int]:
        order = list(range(SAMPLES))
        random.shuffle(order)
        yield from order


class Buckets(Sampler[list[int]]):
    """A batch sampler of one's own, with set_epoch and batches of two sizes."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return 8

    def __iter__(self) -> Iterator[list[int]]:
        order = np.random.default_rng(self.epoch).permutation(SAMPLES).tolist()
        for number in range(8):
            yield order[number * 5 : number * 5 + 4 + number % 2]


class InTurn(BatchSampler):
    """Batches of two sets of one length, in turn, as sentence-transformers gives them: all draw from one generator."""

    def __init__(self, data: Any) -> None:
        super().__init__(data, 4, drop_last=True)
        self.generator = torch.Generator()
        halves = [RandomSampler(range(SAMPLES // 2), generator=self.generator) for _ in range(2)]
        self.batch_samplers = [BatchSampler(half, 4, drop_last=True) for half in halves]

    def __len__(self) -> int:
        return 8

    def __iter__(self) -> Iterator[list[int]]:
        first, second = map(iter, self.batch_samplers)
        for _ in range(4):
            yield from (next(first), [SAMPLES // 2 + index for index in next(second)])


def tensors() -> TensorDataset:
    """Rows of tensors."""
    return TensorDataset(torch.arange(SAMPLES * 6.0).reshape(SAMPLES, 6) / 100, torch.arange(SAMPLES) % 3)


def mixed(items: list[tuple[Tensor, int]]) -> tuple[Tensor, Tensor]:
    """A collate function that draws too."""
    inputs = torch.stack([item[0] for item in items])
    return inputs * (1 + 0.1 * torch.rand(())), torch.tensor([item[1] for item in items])


def renew(worker: int) -> None:
    """Gives the set of a worker another generator, as the workers of monai do."""
    info = get_worker_info()
    assert info is not None
    info.dataset.renew(worker)


class Endless(DataLoader[Any]):
    """Takes all epochs from one iterator, made with it, as ultralytics' does; timm's makes it in the first epoch."""

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        object.__setattr__(self, "batch_sampler", Repeated(self.batch_sampler))
        self.iterator = super().__iter__()

    def __len__(self) -> int:
        return len(self.batch_sampler.sampler)  # type: ignore[union-attr]

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        for _ in range(len(self)):
            yield next(self.iterator)


class Repeated:
    """Its sampler again and again: without a length."""

    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler

    def __iter__(self) -> Iterator[Any]:
        while True:
            yield from self.sampler


LOADERS: dict[str, Callable[[], DataLoader[Any]]] = {
    "shuffled": lambda: DataLoader(Images(), batch_size=6, shuffle=True),
    "workers": lambda: DataLoader(
        Images(), batch_size=6, shuffle=True, num_workers=2, collate_fn=mixed, worker_init_fn=renew, pin_memory=True
    ),
    "persistent": lambda: DataLoader(
        Images(), batch_size=6, shuffle=True, num_workers=1, persistent_workers=True, drop_last=True
    ),
    "tensors": lambda: DataLoader(tensors(), batch_size=6, shuffle=True, drop_last=True),
    "endless": lambda: Endless(Images(), batch_size=6, shuffle=True),
    "subset": lambda: DataLoader(Subset(Images(), range(3, 39)), batch_size=6, sampler=SubsetRandomSampler(range(36))),
    "weighted": lambda: DataLoader(Images(), batch_size=6, sampler=WeightedRandomSampler(torch.rand(SAMPLES) + 1, 40)),
    "own sampler": lambda: DataLoader(Images(), batch_size=6, sampler=Shuffled()),
    "batch samplers": lambda: DataLoader(tensors(), batch_sampler=InTurn(tensors())),
    "batch sampler": lambda: DataLoader(Images(), batch_sampler=Buckets()),
    "lists of indices": lambda: DataLoader(
        tensors(), batch_size=None, sampler=BatchSampler(SequentialSampler(range(SAMPLES)), 6, drop_last=True)
    ),
    "6 per rank": lambda: distributed(6)(),
    "12 per rank": lambda: distributed(12)(),
    "iterable": lambda: DataLoader(Rows(), batch_size=6),
    "iterable, workers": lambda: DataLoader(Rows(), batch_size=6, num_workers=2, persistent_workers=True),
}


def new_run(folder: Path, every: int = 3) -> RunDirectory:
    """A run before its first attempt."""
    checkpoint = CheckpointSpec(every_steps=every, background=False)
    job = JobSpec(name="own", script="own.py", checkpoint=checkpoint)
    return create_run(job, runs_dir=folder, via="local", script=None)


def begin_attempt(place: Path, attempt: int) -> None:
    """Let this process be a rank of this attempt, which takes the place of those before it."""
    RunDirectory(place).attempt(attempt).path.mkdir(parents=True, exist_ok=True)
    os.environ.update(CLUSTER_DDP_RUN=str(place), CLUSTER_DDP_ATTEMPT=str(attempt))
    # Ranks agree to stop in each step, and not about once a second, in which a test's loop would be over.
    session.become_rank = lambda *setup: dataclasses.replace(become_rank(*setup), consensus_seconds=0.0)


def digest(*models: nn.Module) -> str:
    """A hash of all weights and buffers."""
    hashed = hashlib.sha256()
    for model in models:
        for value in model.state_dict().values():
            hashed.update(value.numpy().tobytes())
    return hashed.hexdigest()


class Crash(Exception):
    """What a KILL would end."""


def interrupt(how: str) -> None:
    """Ask for a stop, or fail, or be killed."""
    if how.startswith("stop"):
        os.kill(os.getpid(), signal.SIGUSR1)
    elif how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    else:
        raise Crash


def model_of(width: int = 6) -> nn.Module:
    """Something with a buffer and dropout."""
    layers = nn.Linear(width, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 3)
    return nn.Sequential(*layers)


def loop(
    place: Path,
    attempt: int,
    kind: str = "shuffled",
    at: tuple[int, int] | None = None,
    how: str = "stop",
    *,
    accumulate: int = 1,
    told: bool = True,
    batches: int | None = None,
    epochs: int = EPOCHS,
    make: Callable[[], DataLoader[Any]] | None = None,
    first_input: bool = False,
) -> dict[str, Any]:
    """An ordinary loop; interrupted in batch `at` = (epoch, number). What it did, by step and after."""
    begin_attempt(place, attempt)
    done: dict[str, Any] = {"losses": [], "after epochs": [], "after the loop": 0, "indices": [], "status": None}
    try:
        with join_run() as run:
            torch.manual_seed(5)
            model: nn.Module = model_of()
            averaged = AveragedModel(model)
            several = run.world.world_size > 1
            wrapped = DistributedDataParallel(model) if several else model
            optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1, momentum=0.9)
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
            kept = run.keep(best=10.0, last=10.0, seen=0)
            loader: Any = (make or LOADERS[kind])()
            if first_input:
                loader.dataset.labels_are_indices = True
            loader = run.resumable(
                loader, model=wrapped, optimizer=optimizer, scheduler=scheduler, averaged=averaged, epochs=epochs,
                accumulate=accumulate if told else 1, batches=batches,
            )  # fmt: skip
            for epoch in loader.epochs():
                wrapped.train()
                for number, (inputs, labels) in loader.enumerate():
                    loss = F.cross_entropy(wrapped(inputs), labels % 3)
                    (loss / accumulate).backward()
                    if (number + 1) % accumulate == 0 or number + 1 == len(loader):
                        optimizer.step()
                        optimizer.zero_grad()
                    kept.seen, kept.last = kept.seen + len(labels), loss.item()
                    if first_input:
                        done["indices"] += [(epoch, number, int(label)) for label in labels]
                    done["losses"].append((epoch, number, loss.item()))
                    if at == (epoch, number):
                        interrupt(how)
                if (at, how) == ((epoch, len(loader) - 1), "stop, and crash after the epoch"):
                    raise Crash
                scheduler.step()
                averaged.update_parameters(model)
                kept.best = min(kept.best, kept.last)
                done["after epochs"].append((epoch, float(torch.rand(())), random.random()))
            with torch.no_grad():
                averaged.module[0].weight += 1.0  # as update_bn changes what is averaged
            done["after the loop"] += 1
            done["rate"] = optimizer.param_groups[0]["lr"]
        done |= {"digest": digest(model, averaged), "kept": vars(kept), "step": run.step, "stopping": run.stopping}
    except SystemExit as end:
        done["status"] = end.code
    return done


def distributed(batch: int, **more: Any) -> Callable[[], DataLoader[Any]]:
    """The same loader on any number of ranks: `batch` samples on each."""

    def make() -> DataLoader[Any]:
        world, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
        sampler: Any = DistributedSampler(Images(), num_replicas=world, rank=rank)
        return DataLoader(Images(), batch_size=batch, sampler=sampler, **more)

    return make


def states(run: RunDirectory) -> list[str]:
    """The events of a run, without its saves and stop requests."""
    return [event["event"] for event in read_events(run) if event["event"] not in ("checkpoint", "stop-requested")]


def told(run: RunDirectory) -> list[str]:
    return [event["message"] for event in read_events(run) if event["event"] == "warning"]


def failure(run: RunDirectory) -> str:
    return str([event["error"] for event in read_events(run) if event["event"] == "failed"][-1])
