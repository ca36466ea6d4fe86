"""The names of metrics, read from the source of `evaluate`."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from cluster_ddp.train.metric_names import metric_names


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
