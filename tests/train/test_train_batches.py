"""One step is one step of the global batch, however it is divided; evaluation is exact on any number of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset, TensorDataset
from train_ranks import run_ranks
from train_tasks import Noisy, Plain, final_state, job, losses, new_run, samples, train

from cluster_ddp.train import broadcast_object, is_main_process


class Weighted(Plain):
    """A loss as (sum, weight): samples of class 0 count double."""

    def loss(self, model: nn.Module, batch: Any) -> Any:
        inputs, labels = batch
        weights = 1.0 + (labels == 0).float()
        return (F.cross_entropy(model(inputs), labels, reduction="none") * weights).sum(), weights.sum()


class Doubles(Plain):
    """In float64, where the order of sums makes no visible difference."""

    def optimizer(self, model: nn.Module, lr: float) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr, momentum=0.9)

    def model(self) -> nn.Module:
        return super().model().double()

    def train_data(self) -> Dataset[Any]:
        inputs, labels = samples()
        return TensorDataset(inputs.double(), labels)

    def eval_data(self) -> Dataset[Any] | None:
        inputs, labels = samples(23, seed=6)
        return TensorDataset(inputs.double(), labels)


class WeightedDoubles(Doubles, Weighted):
    """Both."""


def by_hand(kind: type[Doubles], global_batch: int, steps: int, drop_last: bool) -> dict[str, Tensor]:
    """The training written out: whole global batches, one process."""
    from cluster_ddp.train.data.order import SampleStream
    from cluster_ddp.train.randomness import Use, derive, seed_everything

    task = kind()
    seed_everything(derive(Use.BUILD, 0))
    model = task.model()
    optimizer = task.optimizer(model, SECTIONS["lr"])
    inputs, labels = task.train_data().tensors  # type: ignore[attr-defined]
    stream = SampleStream(len(inputs), global_batch, 0, drop_last)
    for step in range(steps):
        indices = torch.from_numpy(stream.global_indices(step))
        loss = task.loss(model, (inputs[indices], labels[indices]))
        if isinstance(loss, tuple):
            loss = loss[0] / loss[1]
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return dict(model.state_dict())


SECTIONS: dict[str, Any] = {"steps": 9, "lr": 0.01, "evaluate_every": "end"}


def divided(kind: type[Doubles], drop_last: bool, accumulations: list[int]) -> list[tuple[dict[str, Any], Any]]:
    found = []
    for accumulation in accumulations:
        spec = job(train={**SECTIONS, "global_batch": 24, "accumulation_steps": accumulation, "drop_last": drop_last})
        trainer, outcome = train(kind(), spec)
        found.append((final_state(trainer), dict(outcome.metrics)))
    return found


@pytest.mark.parametrize("drop_last", [True, False])
@pytest.mark.parametrize("kind", [Doubles, WeightedDoubles])
def test_any_division_is_the_big_batch(kind: type[Doubles], drop_last: bool) -> None:
    """With drop_last false each epoch of 50 ends in a batch of 2: on 3 and 4 ranks some have no sample of it."""
    expected = by_hand(kind, 24, SECTIONS["steps"], drop_last)
    metrics = []
    for world_size, accumulations in ((1, [1, 4]), (3, [2]), (4, [1, 3])):
        for state, values in run_ranks(divided, world_size, kind, drop_last, accumulations)[0]:
            for name, tensor in expected.items():
                torch.testing.assert_close(state[f"model.{name}"], tensor, rtol=1e-10, atol=1e-13)
            metrics.append(values)
    # 23 samples to evaluate on divide by no number of ranks; accuracy is a count, so it is equal to the last bit.
    assert len({values["val/accuracy"] for values in metrics}) == 1
    for name in ("val/loss", "train/loss"):
        assert np.ptp([values[name] for values in metrics]) < 1e-9


def test_evaluation_is_the_mean_over_the_set() -> None:
    trainer, outcome = train(Doubles(), job(train={**SECTIONS, "global_batch": 24}))
    inputs, labels = samples(23, seed=6)
    with torch.no_grad():
        scores = trainer.model(inputs.double())
    assert outcome.metrics["val/accuracy"] == pytest.approx((scores.argmax(1) == labels).double().mean().item())
    assert outcome.metrics["val/loss"] == pytest.approx(F.cross_entropy(scores, labels).item(), rel=1e-12)


class Augmented(Plain):
    """Its samples are drawn again each time they are read."""

    def train_data(self) -> Dataset[Any]:
        return Noisy()


def travelling(folder: Path, attempt: int, stop_at: int | None, workers: int) -> bool:
    training = {**SECTIONS, "steps": 40, "global_batch": 12, "workers": workers}
    sections = {"train": training, "log": {"every_steps": 1, "sample_ids": True}}
    run = None
    if is_main_process():
        run = new_run(folder, **sections) if attempt == 0 else _the_run(folder)
    run = broadcast_object(run)
    _, outcome = train(Augmented(), job(**sections), run, attempt, stop_at=stop_at)
    return outcome.completed


def _the_run(folder: Path) -> Any:
    from cluster_ddp.run.directory import RunDirectory

    return RunDirectory(next(path for path in folder.iterdir() if path.is_dir()))


def test_other_world_sizes_go_on_with_the_same_global_batches(tmp_path: Path) -> None:
    """4 -> 2 -> 3 -> 4 ranks, with other workers: the samples and augmentation, and so the losses, of one rank."""
    from test_train_exactness import ids_of

    assert run_ranks(travelling, 1, tmp_path / "calm", 0, None, 0) == [True]
    for attempt, (world_size, stop_at, workers) in enumerate([(4, 8, 0), (2, 16, 2), (3, 24, 0), (4, None, 1)]):
        ended = run_ranks(travelling, world_size, tmp_path / "moved", attempt, stop_at, workers)
        assert set(ended) == {stop_at is None}
    calm, moved = _the_run(tmp_path / "calm"), _the_run(tmp_path / "moved")
    assert ids_of(calm) == ids_of(moved) and len(ids_of(calm)) == 40
    whole, parts = losses(calm), losses(moved)
    assert [step for step, _ in whole] == [step for step, _ in parts] == list(range(1, 41))
    assert max(abs(before - after) / before for (_, before), (_, after) in zip(whole, parts, strict=True)) < 1e-5


def test_a_rank_without_samples_changes_no_batchnorm_of_rank_0() -> None:
    """What is saved of the buffers is rank 0's, and rank 0 always has samples."""
    from cluster_ddp.job import BatchPlan
    from cluster_ddp.train import SampleStream, rank_micro_batches

    stream = SampleStream(samples=9, global_batch=8, seed=0, drop_last=False)
    counts = [next(rank_micro_batches(stream, BatchPlan(8, 4, 1, 2), rank, 1, 2)).samples for rank in range(4)]
    assert counts == [1, 0, 0, 0]
