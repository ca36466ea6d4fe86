"""The names of metrics, read from the source of `evaluate`, and what is refused by them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from train_tasks import Plain, job

from cluster_ddp.train import TaskError
from cluster_ddp.train.evaluation.metric_names import metric_names
from cluster_ddp.train.trainer import Trainer


class AddsMetrics:
    """Ways of writing down the names of metrics."""

    def by_item(self, model: nn.Module) -> dict[str, Any]:
        found = {"loss": model}
        if model.training:
            found["accuracy"] = model
        return found

    @torch.no_grad()
    def in_two_places(self, model: nn.Module) -> dict[str, Any]:
        if model.training:
            return {"loss": model}
        return {"loss": model, "accuracy": model}

    def by_update(self, model: nn.Module) -> dict[str, Any]:
        found = {"loss": model}
        found.update(accuracy=model)
        return found

    def of_another(self, model: nn.Module) -> dict[str, Any]:
        return {"loss": model, **self.by_item(model)}

    def by_number(self, model: nn.Module) -> dict[str, Any]:
        return {f"top{number}": model for number in (1, 5)}


def test_the_source_shows_the_names_of_metrics_or_not() -> None:
    tasks = AddsMetrics()
    both = ["loss", "accuracy"]
    assert metric_names(tasks.by_item) == both and metric_names(tasks.in_two_places) == both
    assert [metric_names(way) for way in (tasks.by_update, tasks.of_another, tasks.by_number)] == [None] * 3


class NamesByVariable(Plain):
    """Its source does not show the names of its metrics."""

    def evaluate(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        return dict(super().evaluate(model, batch))


def test_the_metric_of_the_best_checkpoint_must_exist(tmp_path: Path) -> None:
    """This is found out at the start, if the source shows the names; else by the first evaluation."""
    sections: dict[str, Any] = {
        "train": {"steps": 4, "global_batch": 24},
        "checkpoint": {"keep_best": {"metric": "val/acuracy"}},
    }
    refusal = r"val/acuracy.*val/accuracy, val/loss"
    with pytest.raises(TaskError, match=refusal):
        Trainer(job(**sections), Plain())
    trainer = Trainer(job(**sections), NamesByVariable())
    with pytest.raises(TaskError, match=refusal):
        trainer.run()
