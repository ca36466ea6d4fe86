"""The contenders of `benchmarks/step_overhead.py`: the same training, written for each of the libraries.

A contender is made once per process (``make(rank, world)``) and then called with a number of steps and a function that
the model calls at each entry into its forward. It trains a new model from scratch each time.
"""

from __future__ import annotations

import contextlib
import gc
import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer
    from torch.utils.data import Dataset

BATCH = 32
FEATURES = 64
HIDDEN = 256
CLASSES = 10
SAMPLES = 4096
LEARNING_RATE = 1e-3

Tick = Callable[[], None]
Run = Callable[[int, Tick], None]


@dataclass(frozen=True)
class Contender:
    """How a contender is made, and the package it needs beyond torch."""

    make: Callable[[int, int], Run]
    needs: str | None = None


def tensors() -> tuple[Tensor, Tensor]:
    """Give the samples, shape (4096, 64), and their classes, shape (4096,)."""
    import torch

    random = torch.Generator().manual_seed(0)
    features = torch.randn(SAMPLES, FEATURES, generator=random)
    return features, torch.randint(CLASSES, (SAMPLES,), generator=random)


def model(tick: Tick) -> nn.Module:
    """Build the model, which calls `tick` at each entry into its forward."""
    import torch

    class Ticking(torch.nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            tick()
            result: Tensor = super().forward(x)  # type: ignore[no-untyped-call]
            return result

    torch.manual_seed(0)
    layers = torch.nn
    return Ticking(
        layers.Linear(FEATURES, HIDDEN),
        layers.ReLU(),
        layers.Linear(HIDDEN, HIDDEN),
        layers.ReLU(),
        layers.Linear(HIDDEN, CLASSES),
    )


def adamw(module: nn.Module) -> Optimizer:
    """Make the optimizer that all use."""
    import torch

    return torch.optim.AdamW(module.parameters(), lr=LEARNING_RATE, fused=True)


def batches(steps: int, rank: int, world: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Give this rank's batches, cut out of shuffled tensors: the least that a loop written by hand does."""
    import torch

    features, classes = tensors()
    random = torch.Generator()
    epoch = 0
    while True:
        random.manual_seed(epoch)
        order = torch.randperm(SAMPLES, generator=random)[rank::world]
        for rows in order.split(BATCH):  # type: ignore[no-untyped-call]
            if steps == 0:
                return
            steps -= 1
            yield features[rows], classes[rows]
        epoch += 1


@contextlib.contextmanager
def process_group(world: int) -> Iterator[None]:
    """Join the other ranks over Gloo, where there are any."""
    import torch.distributed as dist

    if world > 1:
        dist.init_process_group("gloo")
    yield
    if world > 1:
        gc.collect()  # a DDP module that outlives its group can hang when it goes
        dist.barrier()
        dist.destroy_process_group()


def bare_loop(rank: int, world: int) -> Run:
    """Write the loop by hand."""
    from torch.nn import functional as F
    from torch.nn.parallel import DistributedDataParallel

    def train(steps: int, tick: Tick) -> None:
        module = model(tick)
        if world > 1:
            module = DistributedDataParallel(module)
        optimizer = adamw(module)
        for features, classes in batches(steps, rank, world):
            optimizer.zero_grad()
            F.cross_entropy(module(features), classes).backward()  # type: ignore[no-untyped-call]
            optimizer.step()

    def run(steps: int, tick: Tick) -> None:
        with process_group(world):
            train(steps, tick)

    return run


def default_loader(rank: int, world: int) -> Run:
    """Write the loop that most people write: a DataLoader with its defaults over a TensorDataset."""
    from torch.nn import functional as F
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

    def train(steps: int, tick: Tick) -> None:
        module = model(tick)
        if world > 1:
            module = DistributedDataParallel(module)
        optimizer = adamw(module)
        data = TensorDataset(*tensors())
        sampler: DistributedSampler[Any] | None = DistributedSampler(data) if world > 1 else None
        loader = DataLoader(data, batch_size=BATCH, shuffle=sampler is None, sampler=sampler)
        done = epoch = 0
        while done < steps:
            if sampler is not None:
                sampler.set_epoch(epoch)
            for features, classes in loader:
                if done == steps:
                    break
                optimizer.zero_grad()
                F.cross_entropy(module(features), classes).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                done += 1
            epoch += 1

    def run(steps: int, tick: Tick) -> None:
        with process_group(world):
            train(steps, tick)

    return run


def this_trainer(rank: int, world: int, by_sample: bool = False) -> Run:
    """Use this package's Trainer with its defaults, in a run directory, as `cluster-ddp local` does.

    With `by_sample` the data set has only ``__getitem__``, so that each sample is fetched and seeded by itself.
    """
    from torch.nn import functional as F
    from torch.utils.data import Dataset, TensorDataset

    from cluster_ddp.job import JobSpec
    from cluster_ddp.launch.node.heartbeat import HeartbeatFile
    from cluster_ddp.run.attempt import begin_attempt
    from cluster_ddp.run.runs import create_run
    from cluster_ddp.train import Task, Trainer
    from cluster_ddp.train.ranks import distributed
    from cluster_ddp.train.ranks.distributed import (
        barrier,
        broadcast_object,
        cleanup_distributed,
        find_world,
        setup_distributed,
    )
    from cluster_ddp.train.ranks.process import become_rank

    class BySample(Dataset[tuple["Tensor", "Tensor"]]):
        def __init__(self) -> None:
            self.features, self.classes = tensors()

        def __len__(self) -> int:
            return SAMPLES

        def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
            return self.features[index], self.classes[index]

    class Tiny(Task):
        def __init__(self, tick: Tick) -> None:
            self.tick = tick

        def model(self) -> nn.Module:
            return model(self.tick)

        def train_data(self) -> Dataset[Any]:
            return BySample() if by_sample else TensorDataset(*tensors())

        def loss(self, model: nn.Module, batch: Any) -> Tensor:
            features, classes = batch
            return F.cross_entropy(model(features), classes)

        def optimizer(self, model: nn.Module, lr: float) -> Optimizer:
            return adamw(model)

    def run(steps: int, tick: Tick) -> None:
        settings = {"steps": steps, "batch_size": BATCH, "lr": LEARNING_RATE}
        job = JobSpec.model_validate({"name": "overhead", "task": "overhead:Tiny", "train": settings})
        with tempfile.TemporaryDirectory() as folder:
            setup_distributed()
            made = create_run(job, runs_dir=Path(folder), via="local", script=None) if rank == 0 else None
            directory = broadcast_object(made)
            assert directory is not None
            if rank == 0:
                begin_attempt(directory, host="localhost", pid=os.getpid(), nodes=1, procs=world)
            barrier()
            heartbeat = HeartbeatFile.create(
                slots=world
            )  # the stop check then costs what it costs under the node program
            os.environ["CLUSTER_DDP_HEARTBEAT"] = str(heartbeat.path)
            process = become_rank(find_world(), directory.attempt(0))
            process.stop.install(job.requeue.signal)
            try:
                Trainer(job, Tiny(tick), directory, 0, process=process).run()
            finally:
                heartbeat.unlink()
            cleanup_distributed()
        # A rank trains once, and keeps its group until it ends. Here the threads of many groups would come together,
        # which wake up now and then: 5 us per group and step.
        gc.collect()
        distributed._held_groups.clear()

    return run


def fabric(rank: int, world: int) -> Run:
    """Use Lightning Fabric around the bare loop's batches."""
    from lightning.fabric import Fabric
    from torch.nn import functional as F

    engine = Fabric(accelerator="cpu", devices=world, strategy="ddp" if world > 1 else "auto")

    def run(steps: int, tick: Tick) -> None:
        engine.launch()
        plain = model(tick)
        module, optimizer = engine.setup(plain, adamw(plain))
        for features, classes in batches(steps, rank, world):
            optimizer.zero_grad()
            engine.backward(F.cross_entropy(module(features), classes))
            optimizer.step()

    return run


def lightning_trainer(rank: int, world: int, logging: bool = False) -> Run:
    """Use Lightning's Trainer without logger, checkpoints and progress bar; `logging` adds one self.log per step."""
    import lightning
    from torch.nn import functional as F

    class Module(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self, tick: Tick) -> None:
            super().__init__()
            self.net = model(tick)

        def training_step(self, batch: tuple[Tensor, Tensor], _: int) -> Tensor:
            loss = F.cross_entropy(self.net(batch[0]), batch[1])
            if logging:
                self.log("loss", loss)
            return loss

        def configure_optimizers(self) -> Optimizer:
            return adamw(self)

    class Batches:
        def __init__(self, steps: int) -> None:
            self.steps = steps

        def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
            return batches(self.steps, rank, world)

        def __len__(self) -> int:
            return self.steps

    def run(steps: int, tick: Tick) -> None:
        trainer = lightning.Trainer(
            accelerator="cpu",
            devices=world,
            strategy="ddp" if world > 1 else "auto",
            max_steps=steps,
            max_epochs=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(Module(tick), Batches(steps))

    return run


def accelerate(rank: int, world: int) -> Run:
    """Use Accelerate around the bare loop's batches."""
    from accelerate import Accelerator  # type: ignore[import-untyped]
    from torch.nn import functional as F

    def run(steps: int, tick: Tick) -> None:
        engine = Accelerator(cpu=True)
        plain = model(tick)
        module, optimizer = engine.prepare(plain, adamw(plain))
        for features, classes in batches(steps, rank, world):
            optimizer.zero_grad()
            engine.backward(F.cross_entropy(module(features), classes))
            optimizer.step()

    return run


CONTENDERS = {
    "bare loop": Contender(bare_loop),
    "bare loop, again": Contender(bare_loop),
    "this Trainer": Contender(this_trainer),
    "Lightning Fabric": Contender(fabric, needs="lightning"),
    "Accelerate": Contender(accelerate, needs="accelerate"),
    "Lightning Trainer": Contender(lightning_trainer, needs="lightning"),
    "Lightning Trainer, one self.log": Contender(partial(lightning_trainer, logging=True), needs="lightning"),
    "default DataLoader": Contender(default_loader),
    "this Trainer, sample by sample": Contender(partial(this_trainer, by_sample=True)),
}
"""By the name in the table, in its order."""

os.environ.setdefault("ACCELERATE_USE_CPU", "true")
