"""Exactness for what people train, on two and three ranks. All cases run in one group of processes."""

from __future__ import annotations

from pathlib import Path

import pytest
from train_ranks import run_ranks
from zoo_table import OF_RANKS
from zoo_training import CRASHES, Case, judge


def judge_all(cases: list[Case], folder: Path, crashes: tuple[int, ...]) -> list[str]:
    """The verdict on each case, by this rank."""
    return [str(judge(case, folder / str(number), crashes=crashes)) for number, case in enumerate(cases)]


@pytest.mark.parametrize(("world_size", "crashes"), [(2, CRASHES), (3, CRASHES[:1])])
def test_cases_are_exact_on_several_ranks(world_size: int, crashes: tuple[int, ...], tmp_path: Path) -> None:
    cases = [Case(**{**vars(case), "train": {"global_batch": 12, **case.train}}) for case in OF_RANKS]
    for verdicts in run_ranks(judge_all, world_size, cases, tmp_path, crashes):
        assert dict(zip(map(str, cases), verdicts, strict=True)) == {str(case): "exact" for case in cases}
