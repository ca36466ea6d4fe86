"""An evaluation leaves no trace in the training, not even one that a stop cuts short."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from own_loops import told
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.utils.data import Dataset, IterableDataset
from train_tasks import (
    CLASSES,
    FEATURES,
    Plain,
    StopAt,
    attentive,
    differences,
    final_state,
    job,
    losses,
    new_run,
    samples,
    train,
)

from cluster_ddp.checkpoint.export import export_newest
from cluster_ddp.checkpoint.verify import run_id_of
from cluster_ddp.run.directory import RunDirectory
from cluster_ddp.run.events import read_events
from cluster_ddp.run.reading import parse_lines
from cluster_ddp.train import Task, Trainer

SETTINGS: dict[str, Any] = {
    "train": {"steps": 9, "global_batch": 8, "lr": 0.01, "evaluate_every": "3 steps"},
    "log": {"every_steps": 1},
}


class Stopping(Plain):
    """Its second evaluation asks to stop, in the second batch."""

    def __init__(self, stop: StopAt | None = None) -> None:
        self.stop = stop
        self.batches = 0

    def evaluate(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        self.batches += 1
        if self.stop is not None and self.batches == 5:  # of 3 for an evaluation
            self.stop.step = 0
        return super().evaluate(model, batch)


class CountsCalls(nn.Module):
    """Depends on how often it was called: by a buffer, and by a number of which modules keep track themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(FEATURES, CLASSES)
        self.calls: Tensor
        self.register_buffer("calls", torch.zeros(()))
        self.own = 0

    def forward(self, inputs: Tensor) -> Tensor:
        self.calls += 1
        self.own += 1
        scores: Tensor = self.net(inputs)
        return scores * (1 + 0.01 * self.calls + 0.02 * self.own)

    def get_extra_state(self) -> int:
        return self.own

    def set_extra_state(self, state: int) -> None:
        self.own = state


class OfCalls(Stopping):
    def model(self) -> nn.Module:
        return CountsCalls()


class OfItsMetric(Stopping):
    """Its loss depends on what its evaluations gave, as with a schedule that goes by a plateau."""

    def __init__(self, stop: StopAt | None = None) -> None:
        super().__init__(stop)
        self.seen = torch.zeros(())

    def evaluate(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        values = super().evaluate(model, batch)
        self.seen = self.seen + values["loss"].mean()
        return values

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return super().loss(model, batch) * (1 + 0.1 * self.seen)

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.seen = state["seen"]


class OfATeacher(Stopping):
    """Learns from a copy of the model that it has only later, and that its loading makes in training mode.

    The dropout of another network is on until an evaluation turns it off.
    """

    def __init__(self, stop: StopAt | None = None) -> None:
        super().__init__(stop)
        self.steps = 0
        self.teacher: nn.Module | None = None
        self.other = nn.Dropout(0.5)

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(FEATURES, CLASSES), nn.Dropout(0.5))

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        self.steps += 1
        if self.steps == 4:
            self.teacher = copy.deepcopy(model).eval()
        loss = super().loss(model, batch)
        loss = loss + self.other(batch[0]).mean() * model(batch[0]).mean()
        return loss if self.teacher is None else loss + (self.teacher(batch[0]) ** 2).mean()

    def evaluate(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        if self.steps == 6:
            self.other.eval()
        return super().evaluate(model, batch)

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps, "teacher": None if self.teacher is None else self.teacher.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.steps = state["steps"]
        if state["teacher"] is not None:
            self.teacher = self.model()
            self.teacher.load_state_dict(state["teacher"])


class Draws(nn.Module):
    """Draws from a generator of its own, in evaluations too."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(FEATURES, CLASSES)
        self.generator = torch.Generator()

    def forward(self, inputs: Tensor) -> Tensor:
        scores: Tensor = self.net(inputs + 0.3 * torch.randn(inputs.shape, generator=self.generator))
        return scores


class OfDraws(Stopping):
    def model(self) -> nn.Module:
        return Draws()


class Passes(IterableDataset[Any]):
    """Twenty samples, again and again; it does not say how many."""

    def __iter__(self) -> Iterator[Any]:
        yield from zip(*samples(20), strict=True)


class OfPasses(Stopping):
    def train_data(self) -> Dataset[Any]:
        return Passes()


class OfWeights(Stopping):
    """Its evaluation changes weights, as an embedding with max_norm does in each forward pass."""

    def evaluate(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        for weight in model.parameters():
            weight.mul_(0.99)
        return super().evaluate(model, batch)


class Follows(nn.Module):
    """Has a frozen layer that follows another one in each forward pass, also of an evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(FEATURES, CLASSES)
        self.slow = copy.deepcopy(self.net).requires_grad_(False)

    def forward(self, inputs: Tensor) -> Tensor:
        scores: Tensor = self.net(inputs) + self.slow(inputs)
        with torch.no_grad():
            self.slow.weight.lerp_(self.net.weight, 0.1)
        return scores


class OfFollowing(Stopping):
    def model(self) -> nn.Module:
        return Follows()


class Merges(nn.Linear):
    """A frozen layer and a trained one of low rank, which eval() adds to its weight and train() takes off again."""

    def __init__(self) -> None:
        super().__init__(FEATURES, CLASSES)
        self.weight.requires_grad_(False)
        self.down, self.up = nn.Parameter(torch.randn(2, FEATURES)), nn.Parameter(torch.ones(CLASSES, 2))
        self.register_buffer("merged", torch.tensor(False))

    def train(self, mode: bool = True) -> Merges:
        if mode == bool(self.merged):
            self.weight.data += (-1 if mode else 1) * self.up @ self.down
            self.merged.fill_(not mode)
        return super().train(mode)

    def forward(self, inputs: Tensor) -> Tensor:
        scores = super().forward(inputs)
        return scores if self.merged else scores + inputs @ (self.up @ self.down).T


class OfMerged(Stopping):
    def model(self) -> nn.Module:
        return nn.Sequential(Merges(), nn.LayerNorm(CLASSES))


class OfMergedAlone(OfMerged):
    def eval_data(self) -> None:
        return None


@pytest.mark.parametrize("ema", [None, 0.9])
def test_weights_that_are_merged_for_an_evaluation_come_back_as_they_were(ema: float | None) -> None:
    spec = job(train={**SETTINGS["train"], "ema_decay": ema})
    (evaluated, _), (alone, _) = train(OfMerged(), spec), train(OfMergedAlone(), spec)
    assert differences(final_state(evaluated), final_state(alone)) == []


class ScheduleFree(SGD):
    """Trains where it interpolates to a fast sequence, and evaluates elsewhere (Defazio 2024, arXiv:2405.15682)."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr=lr, momentum=0.9)
        for group in self.param_groups:
            group["training"] = False  # as schedulefree has it: a loop that does not call train() is refused

    def eval(self) -> None:
        self._move(to_training=False, share=1 - 1 / 0.9)

    def train(self) -> None:
        self._move(to_training=True, share=1 - 0.9)

    @torch.no_grad()
    def _move(self, *, to_training: bool, share: float) -> None:
        for group in self.param_groups:
            if group["training"] != to_training:
                group["training"] = to_training
                for weight in group["params"]:
                    if weight in self.state:
                        weight.lerp_(self.state[weight]["momentum_buffer"], share)

    def step(self, closure: Any = None) -> Any:
        assert all(group["training"] for group in self.param_groups)
        return super().step(closure)


class OfModes(Stopping):
    def optimizer(self, model: nn.Module, lr: float) -> Optimizer:
        return ScheduleFree(model.parameters(), lr)


def stopped_in_an_evaluation(make: Callable[[StopAt], Task], folder: Path, **more: Any) -> RunDirectory:
    sections = SETTINGS | more
    run = new_run(folder, **sections)
    wish = StopAt()
    trainer = Trainer(job(**sections), make(wish), run, process=attentive(wish))
    wish.trainer, wish.step = trainer, 1000
    outcome = trainer.run()
    assert (outcome.completed, outcome.step) == (False, 6)
    return run


def evaluations(run: RunDirectory) -> list[tuple[int, float]]:
    return sorted(
        (row["step"], row["val/loss"]) for row in parse_lines(run.metrics_file.read_bytes()) if "val/loss" in row
    )


@pytest.mark.parametrize(
    ("make", "ema"), [(OfCalls, None), (OfItsMetric, None), (OfATeacher, None), (OfDraws, None), (OfModes, None),
                      (OfWeights, None), (OfWeights, 0.9), (OfMerged, None), (OfMerged, 0.9), (OfFollowing, None)]
)  # fmt: skip
def test_an_evaluation_that_was_cut_short_leaves_no_trace(
    make: type[Stopping], ema: float | None, tmp_path: Path
) -> None:
    sections: dict[str, Any] = {**SETTINGS, "train": {**SETTINGS["train"], "ema_decay": ema}}
    calm = new_run(tmp_path / "calm", **sections)
    whole, _ = train(make(), job(**sections), calm)
    broken = stopped_in_an_evaluation(make, tmp_path / "broken", **sections)
    resumed, outcome = train(make(), job(**sections), broken, attempt=1)
    assert outcome.completed
    assert differences(final_state(whole), final_state(resumed)) == []
    assert losses(broken) == losses(calm)
    assert evaluations(broken) == evaluations(calm)
    assert not [message for message in told(broken) if "not exact" in message]


@pytest.mark.parametrize("best", [{"metric": "train/loss", "mode": "min"}, None])
def test_an_evaluation_done_again_is_in_the_checkpoint_of_its_step(best: Any, tmp_path: Path) -> None:
    """What the best is chosen by is kept; and an attempt after that does not evaluate once more."""
    kept = {"checkpoint": {"keep_best": best, "keep_last": 9}}
    run = stopped_in_an_evaluation(Stopping, tmp_path, **kept)
    train(Stopping(), job(**SETTINGS, **kept), run, attempt=1)
    manifest = json.loads((run.checkpoints / "step-00000006" / "manifest.json").read_text())
    assert {"train/loss", "val/loss"} <= manifest["metrics"].keys()
    assert manifest["scalars"]["counts"]["evaluated_step"] == 6


def test_an_evaluation_done_again_is_of_the_epoch_that_was_under_way(tmp_path: Path) -> None:
    """A stream knows it by what was restored alone: it was logged, and saved, as epoch 0."""
    best = {"checkpoint": {"keep_best": {"metric": "val/loss", "mode": "min"}, "keep_last": 9}}
    run = stopped_in_an_evaluation(OfPasses, tmp_path, **best)
    train(OfPasses(), job(**SETTINGS, **best), run, attempt=1)
    [logged] = [row for row in parse_lines(run.metrics_file.read_bytes()) if row["step"] == 6 and "val/loss" in row]
    manifest = json.loads((run.checkpoints / "step-00000006" / "manifest.json").read_text())
    assert logged["epoch"] == manifest["epoch"] == 2, "48 samples of passes of 20"


def test_an_optimizer_with_weights_to_evaluate_is_evaluated_with_them(tmp_path: Path) -> None:
    run = new_run(tmp_path, **SETTINGS)
    task = OfModes()
    trainer, outcome = train(task, job(**SETTINGS), run)
    assert isinstance(trainer.optimizer, ScheduleFree)
    as_trained = mean_loss(task, trainer.model)
    trainer.optimizer.eval()
    assert outcome.metrics["val/loss"] == pytest.approx(mean_loss(task, trainer.model)) != as_trained
    [warning] = [event for event in read_events(run) if "ScheduleFree" in event.get("message", "")]
    assert "export --ema writes them" in warning["message"]


def test_a_checkpoint_holds_what_the_optimizer_evaluates_with(tmp_path: Path) -> None:
    run = stopped_in_an_evaluation(OfModes, tmp_path)
    trainer, outcome = train(OfModes(), job(**SETTINGS), run, attempt=1)
    trainer.optimizer.eval()  # type: ignore[attr-defined]
    assert export_newest(run.checkpoints, run_id_of(run), tmp_path / "model", ema=True)[1].step == outcome.step
    exported, evaluated = load_file(tmp_path / "model"), trainer.model.state_dict()
    assert exported.keys() == evaluated.keys()
    assert all(torch.equal(exported[name], evaluated[name]) for name in evaluated)


def mean_loss(task: Task, model: nn.Module) -> float:
    with torch.no_grad():
        values = task.evaluate(model, task.eval_data().tensors)  # type: ignore[union-attr]
    return float(values["loss"].double().mean())
