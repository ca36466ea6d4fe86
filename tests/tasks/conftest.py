from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.utils.data import default_collate

from cluster_ddp.train import Task

Train = Callable[..., torch.nn.Module]


@pytest.fixture
def train() -> Train:
    """A plain training loop, so that these tests are about the tasks alone: AdamW, linear warm-up and decay."""

    def run(task: Task, *, steps: int, batch: int, lr: float, seed: int = 0) -> torch.nn.Module:
        torch.manual_seed(seed)
        model, data = task.model(), task.train_data()
        optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
        done = 0
        while done < steps:
            order = torch.randperm(len(data)).tolist()
            for start in range(0, len(data) - batch + 1, batch):
                if done == steps:
                    break
                for group in optimizer.param_groups:
                    group["lr"] = lr * min((done + 1) / 30, 1 - done / steps)
                items = default_collate(fetch(data, order[start : start + batch]))
                loss = task.loss(model, items)
                if isinstance(loss, tuple):
                    loss = loss[0] / loss[1]
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                done += 1
        return model.eval()

    return run


@pytest.fixture
def evaluate() -> Callable[[Task, torch.nn.Module], dict[str, float]]:
    """The mean of each of a task's metrics over its whole validation set."""

    def run(task: Task, model: torch.nn.Module) -> dict[str, float]:
        data = task.eval_data()
        batch = default_collate(fetch(data, list(range(len(data)))))
        with torch.no_grad():
            values = task.evaluate(model, batch)
        assert all(value.shape == (len(data),) for value in values.values())
        return {name: float(value.mean()) for name, value in values.items()}

    return run


def fetch(data: torch.utils.data.Dataset, indices: list[int]) -> list:
    if hasattr(data, "__getitems__"):
        return data.__getitems__(indices)
    return [data[index] for index in indices]
