"""A training that was stopped and resumed is bitwise the one that was not."""

from __future__ import annotations

import os
import random
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import Dataset, default_collate
from train_ranks import run_ranks
from train_tasks import Everything, Plain, differences, final_state, job, losses, new_run, train

from cluster_ddp.run.reading import parse_lines
from cluster_ddp.train.data.fetch import Fetcher
from cluster_ddp.train.metrics.losses import StepLoss, TotalLosses
from cluster_ddp.train.precision import set_backends
from cluster_ddp.train.randomness import StepSeeds, seed_host

STEPS = 20


def settings(accumulation: int, workers: int = 0) -> dict[str, Any]:
    return {
        "train": {
            "steps": STEPS,
            "global_batch": 24,
            "accumulation_steps": accumulation,
            "lr": 0.01,
            "schedule": "cosine",
            "warmup_steps": 3,
            "ema_decay": 0.9,
            "clip_norm": 1.0,
            "bucket_mb": 0.02,
            "workers": workers,
            "evaluate_every": "7 steps",
        },
        "log": {"every_steps": 1, "sample_ids": True},
    }


def uninterrupted_and_resumed(folder: Path, accumulation: int, workers: int) -> dict[str, Any] | None:
    """Train once in one go, once with stops after about 7 and 11 steps and other numbers of workers."""
    from cluster_ddp.train import broadcast_object, is_main_process

    def run_of(kind: str, **sections: Any) -> Any:
        return broadcast_object(new_run(folder / kind, **sections) if is_main_process() else None)

    sections = settings(accumulation)
    calm = run_of("calm", **sections)
    whole, _ = train(Everything(), job(**sections), calm)
    broken = run_of("broken", **sections)
    stops = []
    for attempt, (stop_at, some) in enumerate([(6, workers), (10, 0), (None, workers)]):
        part, outcome = train(Everything(), job(**settings(accumulation, some)), broken, attempt, stop_at=stop_at)
        stops.append((outcome.completed, outcome.step))
    if not is_main_process():
        return None
    return {
        "stops": stops,
        "different": differences(final_state(whole), final_state(part)),
        "task": (whole.task.seen, part.task.seen, bool((whole.task.mean == part.task.mean).all())),
        "losses": (losses(calm), losses(broken)),
        "ids": (ids_of(calm), ids_of(broken)),
        "evaluations": (_evaluations(calm), _evaluations(broken)),
    }


def ids_of(run: Any) -> list[tuple[int, list[int]]]:
    steps: dict[int, list[int]] = {}
    for file in sorted(run.attempts.glob("*/samples-rank*.jsonl")):
        for row in parse_lines(file.read_bytes()):
            steps.setdefault(row["step"], []).extend(row["ids"])
    return sorted(steps.items())


def _evaluations(run: Any) -> dict[int, float]:
    return {row["step"]: row["val/loss"] for row in parse_lines(run.metrics_file.read_bytes()) if "val/loss" in row}


@pytest.mark.parametrize(
    ("world_size", "accumulation", "workers"), [(1, 1, 2), (2, 3, 0), (3, 2, 0), (4, 1, 0), (4, 2, 1)]
)
def test_resume_is_bitwise_exact(tmp_path: Path, world_size: int, accumulation: int, workers: int) -> None:
    result = run_ranks(uninterrupted_and_resumed, world_size, tmp_path, accumulation, workers)[0]
    assert [completed for completed, _ in result["stops"]] == [False, False, True]
    first, second, last = (step for _, step in result["stops"])
    assert 6 <= first < 10 <= second < last == STEPS
    assert result["different"] == []
    whole_seen, resumed_seen, same_mean = result["task"]
    assert whole_seen == resumed_seen and same_mean
    whole, resumed = result["losses"]
    assert len(whole) == STEPS and whole == resumed
    assert result["evaluations"][0] == result["evaluations"][1] and set(result["evaluations"][0]) == {7, 14, 20}
    whole_ids, resumed_ids = result["ids"]
    assert whole_ids == resumed_ids
    for start in range(0, STEPS, 2):  # two steps of 24 make an epoch of the 50 samples, the last two dropped
        seen = [index for _, ids in whole_ids[start : start + 2] for index in ids]
        assert len(seen) == 48 == len(set(seen))


def grouped_losses(number: int) -> tuple[list[float], list[float]]:
    chance = random.Random(os.environ["RANK"])
    losses = [StepLoss(torch.device("cpu")) for _ in range(number)]
    for loss in losses:
        loss.add(chance.random(), 1 / 3)
    return TotalLosses(losses).read(), [TotalLosses([loss]).read()[0] for loss in losses]


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
def test_a_scripted_function_has_the_same_gradients_in_each_call() -> None:
    """Torch would optimize it after the first: in an attempt that resumes, that is another step."""

    def swish(x: torch.Tensor) -> torch.Tensor:
        return x * x.sigmoid()

    scripted = torch.jit.script(swish)
    set_backends(job().train, torch.device("cpu"))
    values = torch.randn(1000, generator=torch.Generator().manual_seed(0)).requires_grad_()
    first, second = (torch.autograd.grad(scripted(values).sum(), values)[0] for _ in "12")
    assert torch.equal(first, second)


def test_a_loss_is_the_same_to_the_last_bit_whatever_it_is_exchanged_with() -> None:
    """An all-reduce adds the ranks' parts in an order that depends on how many there are: found by a chaos run."""
    found = run_ranks(grouped_losses, 3, 100)
    assert all(together == alone for together, alone in found)
    assert found[0] == found[1] == found[2]


def test_the_generator_of_opencv_is_seeded_where_it_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    seeds: list[int] = []
    monkeypatch.setitem(sys.modules, "cv2", SimpleNamespace(setRNGSeed=seeds.append))
    for step in (3, 4, 3):
        StepSeeds(1, 0, torch.device("cpu")).apply(step, 0)
    assert seeds[0] == seeds[2] != seeds[1]
    assert all(0 <= seed < 2**31 for seed in seeds), "it takes an int of C"
    for other in (None, SimpleNamespace()):  # an import that is forbidden, and something else of this name
        monkeypatch.setitem(sys.modules, "cv2", other)
        StepSeeds(1, 0, torch.device("cpu")).apply(3, 0)


@pytest.mark.parametrize("bits", [np.random.MT19937, np.random.PCG64])
def test_generators_begin_as_their_libraries_seed_them_whatever_they_drew_before(bits: Any) -> None:
    before, seed = np.random.get_bit_generator(), (7 << 32) + 5

    def drawn() -> tuple[float, ...]:
        return torch.randn(()).item(), random.gauss(0, 1), random.random(), np.random.random_sample()

    try:
        np.random.set_bit_generator(bits(1))
        torch.manual_seed(seed)
        random.seed(5)
        np.random.seed(5)
        expected = drawn()  # random has another normal number in store now
        seed_host(seed)
        assert drawn() == expected
    finally:
        np.random.set_bit_generator(before)


class ByOpenCV(Dataset[Any]):
    """Draws from OpenCV's generator, for few samples."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> float:
        return float(sys.modules["cv2"].randu(np.zeros((1, 1)), 0, 1)[0, 0]) if index > 40 else 0.0


def test_samples_that_opencv_draws_are_each_seeded_by_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = np.random.RandomState(0)  # OpenCV's is of another kind, and one for all as well

    def randu(array: Any, low: float, high: float) -> Any:
        return array + generator.uniform(low, high)

    monkeypatch.setitem(sys.modules, "cv2", SimpleNamespace(setRNGSeed=generator.seed, randu=randu))

    def read(*batches: list[int]) -> list[float]:
        fetcher = Fetcher(ByOpenCV(), default_collate, 1, exact=True)
        return [sample for batch in batches for sample in fetcher(0, np.array(batch)).tolist()]

    calm = read([0, 1, 2], [50, 51, 3], [52, 53, 4])
    assert read([52, 53, 4], [50, 51, 3])[:2] == calm[6:8] and len(set(calm[3:5] + calm[6:8])) == 4


class DrawsAll(Plain):
    """Notes the first random number that each of its parts is made with."""

    def __init__(self) -> None:
        self.first: dict[str, float] = {}

    def model(self) -> nn.Module:
        self.first["model"] = torch.rand(()).item()
        return super().model()

    def train_data(self) -> Dataset[Any]:
        self.first["train_data"] = torch.rand(()).item()
        return super().train_data()

    def eval_data(self) -> Dataset[Any] | None:
        self.first["eval_data"] = torch.rand(()).item()
        return super().eval_data()

    def optimizer(self, model: nn.Module, lr: float) -> Optimizer:
        self.first["optimizer"] = torch.rand(()).item()
        return super().optimizer(model, lr)


def test_random_weights_and_random_data_have_nothing_in_common() -> None:
    """Targets that a task draws must not be the weights that its model begins with."""
    first, again = DrawsAll(), DrawsAll()
    for task in (first, again):
        train(task, job(train={"steps": 1, "global_batch": 24}))
    assert first.first == again.first
    assert len(set(first.first.values())) == 4
