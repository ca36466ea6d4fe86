"""Numbers that steps change in places of many kinds, which a task forgets to save, are told."""

from __future__ import annotations

import concurrent.futures
import datetime
import importlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from zoo_models import FEATURES, device
from zoo_told import told
from zoo_training import Case, ZooTask


class Sets:
    """A value that is kept by the class."""

    value = 0

    def __get__(self, instance: object, owner: type) -> int:
        return self.value

    def __set__(self, instance: object, value: int) -> None:
        self.value = value


class Helper:
    pass


class Configuration:
    level = 0


class Generation:
    temperature = 0


class Pace:
    """A number that a step sets before it reads it by name."""

    of_pace: float

    def __init__(self) -> None:
        self.of_pace = 1.0


class Private:
    """A value that only its class knows of."""

    __slots__ = ("__value",)

    def __init__(self) -> None:
        self.__value = [0]

    def __getattr__(self, name: str) -> Any:
        raise KeyError(name)

    def count(self) -> None:
        self.__value[0] += 1


class Whole(int):
    """A number with attributes."""


def _made_here() -> type:
    class Counter:
        seen = 0

    return Counter


class Elsewhere(ZooTask):
    """Keeps numbers in places of many kinds."""

    __slots__ = ("in_slot",)
    described = Sets()

    class Settings:
        seen = 0

    @staticmethod
    def counted(memory: list[int] = [0]) -> None:  # noqa: B006
        memory[0] += 1

    def __init__(self, case: Case, crash: int | None = None) -> None:
        super().__init__(case, crash)
        self.in_slot, self.day = 0, datetime.date(2026, 1, 1)
        self.future = concurrent.futures.Future[int]()
        self.cache, self.by_name = Helper(), importlib.import_module("zoo_by_name")
        self.config, self.private, self.whole = Configuration(), Private(), Whole(1)
        self.counter: Any = _made_here()
        self.pace, self.window = Pace(), torch.eye(6)
        self.generation, self.read_only = Generation(), np.zeros(2000)
        self.generator = np.random.default_rng(0)

    def model(self) -> nn.Module:
        self.other = nn.Linear(FEATURES, 1, device=device())
        uses = [0]

        def count(_: Tensor) -> None:
            uses[0] += 1

        self.other.weight.register_hook(count)
        return super().model()

    def loss(self, model: nn.Module, batch: Any) -> Any:
        self.in_slot, self.described = self.in_slot + 1, self.described + 1
        self.Settings.seen += 1
        self.counter.seen += 1
        self.counted()
        self.day += datetime.timedelta(days=1)
        self.future = concurrent.futures.Future()
        self.cache.length = getattr(self.cache, "length", 0) + 1  # type: ignore[attr-defined]
        self.by_name.count()
        self.generator.spawn(1)
        self.private.count()
        self.config.level += 1
        self.generation.temperature += 1
        self.read_only = self.read_only + (np.arange(2000) == 1000)  # its repr() omits that one
        self.read_only.flags.writeable = False
        self.whole.uses = getattr(self.whole, "uses", 0) + 1  # type: ignore[attr-defined]
        torch.use_deterministic_algorithms(False)
        factor = sum(vars(self.pace).values())  # reads all
        self.pace.of_pace = 0.5 * factor
        self.window = self.window * self.pace.of_pace  # depends only on the distance to the diagonal, and on the step
        return super().loss(model, batch) * factor + 0.0 * self.other(batch[0]).mean()


def test_numbers_in_places_of_many_kinds_are_told(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = "CALLS = 0\n\n\nclass Calls:\n    def count(self):\n        global CALLS\n        CALLS += 1\n"
    (tmp_path / "zoo_of_object.py").write_text(f"{counts}\n\ncount = Calls().count\n")
    imports = "from zoo_of_object import count as also_count\n\n"
    (tmp_path / "zoo_by_name.py").write_text(
        f"{imports}{counts}\n\ndef count():\n    also_count()\n    Calls().count()\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(Helper, "__module__", "transformers.cache_utils")
    monkeypatch.setattr(Configuration, "__module__", "transformers.configuration_utils")
    monkeypatch.setattr(Generation, "__module__", "transformers.generation.configuration_utils")
    monkeypatch.setattr("cluster_ddp.train.checks.unsaved.MAX_NAMES", 30)
    names = told(Elsewhere, tmp_path / "runs", capfd)
    assert names == [
        "Counter.seen", "Elsewhere.counted", "Elsewhere.described", "Settings.seen", "task.cache", "task.config",
        "task.day", "task.future", "task.generation", "task.generator", "task.in_slot", "task.other", "task.pace",
        "task.private", "task.read_only", "task.whole", "task.window", "the settings of torch",
        "zoo_by_name.CALLS", "zoo_of_object.CALLS",
    ]  # fmt: skip


class HooksAll(ZooTask):
    """Counts in a hook of all modules."""

    def model(self) -> nn.Module:
        seen = 0

        def count(*_: Any) -> None:
            nonlocal seen
            seen += 1

        self.handle = nn.modules.module.register_module_forward_hook(count)
        return super().model()


def test_what_hooks_of_all_modules_keep_is_told(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    try:
        assert told(HooksAll, tmp_path, capfd) == ["the hooks of all modules"]
    finally:
        nn.modules.module._global_forward_hooks.clear()
