"""Trains a case of the zoo in one go, and again from what a crash would have left, and compares the two bit by bit."""

from __future__ import annotations

import json
import shutil
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
import xxhash
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.utils.data import Dataset

from cluster_ddp.job import ClusterDDPError, JobSpec
from cluster_ddp.run.directory import RunDirectory
from cluster_ddp.run.runs import create_run
from cluster_ddp.train import Task, Trainer, broadcast_object, is_main_process

STEPS = 8  # of 8 samples each, of 44: the second epoch begins after 5
SAVED_EVERY = 3
CRASHES = (4, 7)  # each is followed by a resume from the step before; the second one within the second epoch
OF_TRAINING = ("step", "samples", "epoch", "scalars", "tensors", "shards")  # in a manifest

Loss = Callable[[Tensor, Tensor], Any]


def _mean(scores: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(scores.float(), labels)


def _weighed(scores: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    weights = 1.0 + labels.float()
    return (F.cross_entropy(scores.float(), labels, reduction="none") * weights).sum(), weights.sum()


def _counted(scores: Tensor, labels: Tensor) -> tuple[Tensor, int]:
    return F.cross_entropy(scores.float(), labels, reduction="sum"), len(labels)


LOSSES: dict[str, Loss] = {"mean": _mean, "(sum, weight)": _weighed, "(sum, number)": _counted}


@dataclass(frozen=True)
class Case:
    """One training: names in the tables of the zoo, and keys of the job file's `train` section."""

    optimizer: str = "AdamW"
    model: str = "mlp"
    data: str = "map"
    loss: str = "mean"
    train: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        settings = [f"{key}={value}" for key, value in self.train.items()]
        return ", ".join([self.optimizer, self.model, self.data, self.loss, *settings])


class Crash(Exception):
    """What ends an attempt in the middle of an epoch."""


MADE: WeakKeyDictionary[Task, Optimizer] = WeakKeyDictionary()


class ZooTask(Task):
    """A case as a task; `crash` is the step that raises.

    At the step of `left`, the run's directory is copied: what a machine that dies at that moment leaves.

    The tables are imported by its methods: in all that a task's module imports, the trainer looks for what changes.
    """

    left: tuple[int, str] | None = None  # a step, and the place of the copy

    def __init__(self, case: Case, crash: int | None = None) -> None:
        self.case, self.crash = case, crash
        self.losses: dict[int, float] = {}
        self.trainer: Trainer | None = None

    @property
    def made(self) -> Optimizer:
        """The optimizer; kept apart, because what a task holds is searched, and most do not hold it."""
        return MADE[self]

    def model(self) -> nn.Module:
        from zoo_awkward import AWKWARD, REFUSED_MODELS
        from zoo_models import MODELS

        return {**MODELS, **AWKWARD, **REFUSED_MODELS}[self.case.model]()

    def train_data(self) -> Dataset[Any]:
        from zoo_data import DATA, REFUSED_DATA

        return {**DATA, **REFUSED_DATA}[self.case.data]()

    def optimizer(self, model: nn.Module, lr: float) -> Optimizer:
        from zoo_optimizers import OPTIMIZERS

        MADE[self] = OPTIMIZERS[self.case.optimizer](model, lr)
        return MADE[self]

    def loss(self, model: nn.Module, batch: Any) -> Any:
        assert self.trainer is not None
        if self.trainer.step == self.crash:
            raise Crash
        if self.left is not None and self.trainer.step == self.left[0]:
            self._leave(Path(self.left[1]))
        inputs, labels = batch.values() if isinstance(batch, dict) else batch
        targets = getattr(self.trainer.model, "targets", None)
        hints = targets(inputs) if targets is not None else 0.0  # before DDP sends the buffers of rank 0
        loss = LOSSES[self.case.loss](model(inputs) + hints, labels)
        value = loss[0] if isinstance(loss, tuple) else loss
        self.losses[self.trainer.step] = float(value.detach())
        return loss

    def _leave(self, place: Path) -> None:
        assert self.trainer is not None and self.trainer.directory is not None
        if is_main_process() and not place.exists():  # the other ranks wait for this one's gradients
            shutil.copytree(self.trainer.directory.path, place)


@dataclass(frozen=True)
class Verdict:
    """What became of a case.

    Attributes
    ----------
    different
        Names of what differs at the end, with a word on how; none: the case is exact.
    refused
        The product's message, and the step after which it came (-1: before the first; None: not before a resume).
    error
        The last line of an error that is not the product's.
    """

    different: tuple[str, ...] = ()
    refused: str | None = None
    refused_at: int | None = -1
    error: str | None = None

    @property
    def exact(self) -> bool:
        return not self.different and self.refused is None and self.error is None

    def __str__(self) -> str:
        if self.refused is not None:
            when = "only at a resume" if self.refused_at is None else f"after step {self.refused_at}"
            return f"refused {when}: {self.refused}"
        if self.error is not None:
            return f"error: {self.error}"
        if self.different:
            return f"{len(self.different)} differ: {', '.join(self.different[:6])}"
        return "exact"


def job_of(case: Case) -> JobSpec:
    """The job of a case. What lies on the CPU is saved in the foreground: a crash must not overtake it."""
    usual = {"steps": STEPS, "global_batch": 8, "lr": 0.01, "schedule": "cosine", "ema_decay": 0.9}
    train = {**usual, "deterministic": torch.cuda.is_available(), **case.train}
    return JobSpec.model_validate(
        {
            "name": "zoo",
            "task": "zoo_training:ZooTask",
            "train": {key: value for key, value in train.items() if value is not None},
            "checkpoint": {"every_steps": SAVED_EVERY, "background": False, "keep_last": 1},
            "log": {"every_steps": 1000},
        }
    )


def judge(
    case: Case, folder: Path, make: Callable[..., ZooTask] = ZooTask, crashes: tuple[int, ...] = CRASHES
) -> Verdict:
    """Train a case on the ranks of this group, calmly and through crashes; `folder` is this case's own.

    The first crash is that of the calm training: it goes on, and so does an attempt from what lay on the disk then. In
    the end the two checkpoints must be alike: a later crash could find nothing else.
    """
    job = job_of(case)
    crashes = tuple(crash for crash in crashes if crash < case.train.get("steps", STEPS))
    trainer: Trainer | None = None
    resumes = False

    def attempt(run: RunDirectory, number: int, crash: int | None, left: tuple[int, str] | None = None) -> ZooTask:
        nonlocal trainer, resumes
        trainer, resumes = None, number > 0
        task = make(case, crash)
        task.left = left
        task.trainer = trainer = Trainer(job, task, run, number)
        try:
            trainer.run()
        except Crash:
            assert trainer.step == crash
        else:
            assert crash is None, "the loss was never computed at the step that was to crash"
        return task

    try:
        calm, broken = _new_run(job, folder / "calm"), RunDirectory(folder / "broken")
        whole = attempt(calm, 0, None, (crashes[0], str(broken.path)) if crashes else None)
        if not crashes:
            return Verdict()
        parts = [attempt(broken, number, crash) for number, crash in enumerate((*crashes[1:], None), start=1)]
    except ClusterDDPError as error:
        return Verdict(refused=str(error), refused_at=None if resumes else -1 if trainer is None else trainer.step)
    except Exception as error:
        return Verdict(error=_last_line(error))
    losses: dict[int, float] = {}  # not step 0's, which only settles DDP's buckets
    for part in parts:
        losses.update({step: loss for step, loss in part.losses.items() if step > 0})
    lost = {step: loss for step, loss in whole.losses.items() if step in losses or step >= crashes[0]}
    different = [f"the loss of step {step}" for step, loss in lost.items() if losses.get(step) != loss]
    different += differences(live_state(whole), live_state(parts[-1]))
    different += differences(saved_state(calm), saved_state(broken))
    return Verdict(different=tuple(different))


def _new_run(job: JobSpec, folder: Path) -> RunDirectory:
    made = create_run(job, runs_dir=folder, via="local", script=None) if is_main_process() else None
    run = broadcast_object(made)
    assert run is not None
    return run


def _last_line(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if "cluster_ddp" in frame.filename and "zoo" not in frame.name] or frames
    place = f"{Path(ours[-1].filename).name}:{ours[-1].lineno}"
    return f"{place}: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"


def live_state(task: ZooTask) -> dict[str, Any]:
    """What is in the live model and optimizer: a digest for each tensor and number by its name."""
    assert task.trainer is not None
    model = task.trainer.model
    names: dict[Any, str] = {parameter: name for name, parameter in model.named_parameters()}
    found = {f"model.{name}": value for name, value in model.state_dict(keep_vars=True).items()}
    found |= {f"buffer.{name}": value for name, value in model.named_buffers()}
    for key, state in task.made.state.items():
        found[f"optimizer.{names.get(key, key)}"] = state
    for number, group in enumerate(task.made.param_groups):
        found[f"group {number}"] = {
            key: [names[parameter] for parameter in value] if key == "params" else value for key, value in group.items()
        }
    found["optimizer's own"] = {
        key: value for key, value in task.made.state_dict().items() if key not in ("state", "param_groups")
    }
    return {name: digest for whole, value in found.items() for name, digest in _digests(whole, value)}


def saved_state(run: RunDirectory) -> dict[str, Any]:
    """All that the last checkpoint holds, EMA included."""
    [*_, last] = sorted(run.checkpoints.glob("step-*"))
    manifest = json.loads((last / "manifest.json").read_text())
    tensors = {
        f"{last.name}: {name}": tensor_digest(tensor)
        for shard in last.glob("*.safetensors")
        for name, tensor in load_file(shard).items()
    }
    return tensors | {f"{last.name}: {key}": manifest[key] for key in OF_TRAINING}


def differences(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """What is not alike, by name, with a word on how."""
    alike = {name for name in one.keys() & other.keys() if one[name] == other[name]}
    return [f"{name} {_how(one, other, name)}" for name in sorted((one.keys() | other.keys()) - alike)]


def _how(one: Mapping[str, Any], other: Mapping[str, Any], name: str) -> str:
    if name not in one or name not in other:
        return "is missing" if name in one else "came from nowhere"
    before, after = one[name], other[name]
    if isinstance(before, tuple) and isinstance(after, tuple):
        kinds = ("dtype", "shape", "strides", "values")
        return " ".join(kind for kind, old, new in zip(kinds, before, after, strict=True) if old != new)
    return f"{before!r} -> {after!r}"


def _digests(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Tensor):
        yield name, tensor_digest(value)
    elif isinstance(value, Mapping):
        for key, part in value.items():
            yield from _digests(f"{name}.{key}", part)
    elif isinstance(value, (list, tuple)):
        yield name, f"{type(value).__name__} of {len(value)}"
        for number, part in enumerate(value):
            yield from _digests(f"{name}[{number}]", part)
    else:
        yield name, repr(value)


def tensor_digest(tensor: Tensor) -> tuple[str, tuple[int, ...], tuple[int, ...], str]:
    """Dtype, shape, strides and a hash of the bytes; NaN equals NaN, and 0 is not -0."""
    tensor = tensor.detach()
    if tensor.is_sparse:
        tensor = tensor.to_dense()
    flat = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    data = flat.contiguous().as_strided((flat.numel(),), (1,)).view(torch.uint8).cpu().numpy().tobytes()
    return str(tensor.dtype), tuple(tensor.shape), tuple(tensor.stride()), xxhash.xxh3_64_hexdigest(data)
