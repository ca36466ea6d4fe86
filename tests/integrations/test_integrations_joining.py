"""What the integrations have in common: nothing is imported before it is used, and what cannot be exact is refused."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from cluster_ddp.integrations.joining import FrameworkSteps, map_batches
from cluster_ddp.train.errors import TrainError


def test_no_framework_is_imported_before_it_is_used() -> None:
    code = "import sys, cluster_ddp.integrations.joining; print({'transformers', 'lightning'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


def steps(batch: int, world: int, samples: int) -> FrameworkSteps:
    count = -(-samples // (batch * world))
    return FrameworkSteps(3, count, batch, accumulate=1, world=world, samples=samples, limit=3 * count)


def test_another_number_of_ranks_needs_a_data_set_of_whole_steps() -> None:
    steps(8, 1, 96).expect_same_batches(dataclasses.asdict(steps(4, 2, 96)))
    steps(8, 1, 97).expect_same_batches(dataclasses.asdict(steps(8, 1, 97)))
    with pytest.raises(TrainError, match="97 samples are not a multiple of the 8 in a step"):
        steps(8, 1, 97).expect_same_batches(dataclasses.asdict(steps(4, 2, 97)))
    with pytest.raises(TrainError, match="give the DataLoader batch_size=8"):
        steps(4, 1, 96).expect_same_batches(dataclasses.asdict(steps(4, 2, 96)))


class Rows(IterableDataset[torch.Tensor]):
    def __len__(self) -> int:
        return 4

    def __iter__(self) -> Iterator[torch.Tensor]:
        yield from torch.arange(4)


def test_an_iterable_data_set_is_refused() -> None:
    with pytest.raises(TrainError, match="make it map-style"):
        map_batches(DataLoader(Rows()), 1)


def test_a_trainer_that_cannot_be_exact_is_refused_as_it_is_made(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    from cluster_ddp.integrations.transformers import ResumeExactly

    args = transformers.TrainingArguments(output_dir=str(tmp_path), max_steps=1, report_to="none", use_cpu=True)
    with pytest.raises(TrainError, match="a Trainer with an IterableDataset exactly: make it map-style"):
        transformers.Trainer(torch.nn.Linear(1, 1), args, train_dataset=Rows(), callbacks=[ResumeExactly()])
    with pytest.raises(TrainError, match=r"a Trainer with two ResumeExactly\(\) exactly: give it one"):
        transformers.Trainer(torch.nn.Linear(1, 1), args, callbacks=[ResumeExactly(), ResumeExactly()])
