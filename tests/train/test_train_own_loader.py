"""run.resumable: ordinary loops over ordinary DataLoaders go on exactly where they were left, whatever they read."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from own_loops import (
    EPOCHS,
    LOADERS,
    SAMPLES,
    Images,
    begin_attempt,
    failure,
    loop,
    new_run,
    states,
)
from own_loops import told as warnings_of
from torch.utils.data import DataLoader, Sampler
from train_ranks import run_ranks

from cluster_ddp.run.directory import RunDirectory
from cluster_ddp.train import join_run


def as_one(*parts: dict[str, Any]) -> dict[str, Any]:
    """What several attempts did together: a batch done again after a crash counts once."""
    whole = dict(parts[-1])
    for what in ("losses", "after epochs"):
        whole[what] = sorted({tuple(row) for part in parts for row in part[what]})
    return whole


# An iterable set has no length in batches that is right with several workers: 44 rows in two parts are 8 batches.
BATCHES = {"iterable": 8, "iterable, workers": 8}


def story(calm: Path, broken: Path, kind: str) -> list[dict[str, Any]]:
    """A run that is left alone, and one that crashes in the second epoch and is stopped in the third."""
    more = {"batches": BATCHES.get(kind)}
    return [
        loop(calm, 0, kind, **more),
        loop(broken, 0, kind, (1, 1), "crash", **more),
        loop(broken, 1, kind, (2, 3), "stop", **more),
        loop(broken, 2, kind, **more),
    ]


@pytest.mark.parametrize("kind", [kind for kind in LOADERS if "per rank" not in kind])
def test_a_loop_goes_on_exactly_after_a_crash_and_a_stop(kind: str, tmp_path: Path) -> None:
    run = new_run(tmp_path / "broken")
    (told,) = run_ranks(story, 1, new_run(tmp_path / "calm").path, run.path, kind)
    calm, first, second, third = told
    assert (first["status"], first["after the loop"]) == (1, 0)
    assert (second["status"], second["after the loop"], second["stopping"]) == (None, 0, True)
    assert as_one(first, second, third) == as_one(calm)
    assert len(third["losses"]) < len(calm["losses"]) / 2
    assert states(run) == ["started", "failed", "resumed", "stopped", "resumed", "completed"]


@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_go_on_exactly(ranks: int, tmp_path: Path) -> None:
    calm = run_ranks(loop, ranks, new_run(tmp_path / "calm").path, 0, "6 per rank")
    run = new_run(tmp_path / "broken").path
    first = run_ranks(loop, ranks, run, 0, "6 per rank", (1, 1), "stop")
    second = run_ranks(loop, ranks, run, 1, "6 per rank")
    assert [as_one(*parts) for parts in zip(first, second, strict=True)] == [as_one(part) for part in calm]
    assert 0 < len(second[0]["losses"]) < len(calm[0]["losses"])


def test_a_stop_in_the_last_batch_lets_the_program_end(tmp_path: Path) -> None:
    """What follows the loop uses variables of the loop, which no resume without a batch would set."""
    run = new_run(tmp_path)
    (told,) = run_ranks(ends, 1, run.path)
    assert [[row[0] for row in part["after epochs"]] for part in told] == [[0, 1, 2], []]
    assert [part["after the loop"] for part in told] == [1, 0]
    assert told[1]["digest"] == told[0]["digest"]  # with what the code after the loop changed
    assert states(run) == ["started", "completed", "resumed", "completed"]


def ends(place: Path) -> list[dict[str, Any]]:
    """A stop in the last batch of all, and one more attempt of the run, which is over."""
    return [loop(place, 0, "shuffled", (EPOCHS - 1, 7), "stop"), loop(place, 1, "shuffled")]


def test_a_stop_that_comes_before_a_long_evaluation_is_not_lost_with_it(tmp_path: Path) -> None:
    (told,) = run_ranks(evaluating, 1, new_run(tmp_path / "calm").path, new_run(tmp_path / "broken", every=50).path)
    calm, first, second = told
    assert (first["status"], second["losses"][0][:2]) == (1, (2, 0))
    assert as_one(first, second) == as_one(calm)


def evaluating(calm: Path, broken: Path) -> list[dict[str, Any]]:
    """Stopped in the last batch of an epoch, and killed in the code that follows."""
    how = "stop, and crash after the epoch"
    return [loop(calm, 0, "shuffled"), loop(broken, 0, "shuffled", (1, 7), how), loop(broken, 1, "shuffled")]


def test_more_epochs_go_on_where_a_completed_run_ended(tmp_path: Path) -> None:
    (told,) = run_ranks(longer, 1, new_run(tmp_path / "calm").path, new_run(tmp_path / "grown").path)
    calm, grown = told
    assert grown["losses"] == calm["losses"][8:]


def longer(calm: Path, grown: Path) -> list[dict[str, Any]]:
    loop(grown, 0, "shuffled", epochs=1)
    return [loop(calm, 0, "shuffled"), loop(grown, 1, "shuffled")]


def best_loaded(place: Path, attempt: int, steps: int, *, loads: bool) -> None:
    """A loop after which the program loads the weights of an earlier step."""
    begin_attempt(place, attempt)
    with join_run() as run:
        torch.manual_seed(5)
        model = torch.nn.Linear(6, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        best = copy.deepcopy(model.state_dict())
        for _ in run.steps(steps, model=model, optimizer=optimizer):
            optimizer.zero_grad()
            model(torch.randn(4, 6)).square().mean().backward()
            optimizer.step()
        if loads:
            model.load_state_dict(best)


@pytest.mark.parametrize("loads", [True, False])
def test_more_steps_from_weights_that_the_code_after_the_loop_has_loaded_are_told(loads: bool, tmp_path: Path) -> None:
    run = new_run(tmp_path)
    run_ranks(best_loaded, 1, run.path, 0, 3, loads=loads)
    run_ranks(best_loaded, 1, run.path, 1, 3, loads=loads)  # nothing is left to do
    assert warnings_of(run) == []
    run_ranks(best_loaded, 1, run.path, 2, 5, loads=loads)
    assert [message.startswith("the code after the loop had changed the weights") for message in warnings_of(run)] == (
        [True] if loads else []
    )


def test_fewer_epochs_than_before_are_told(tmp_path: Path) -> None:
    """As by epochs - start_epoch, in a program that has checkpoints of its own."""
    run = new_run(tmp_path)
    run_ranks(loop, 1, run.path, 0, "tensors", (0, 4), "stop")
    run_ranks(loop, 1, run.path, 1, "tensors", epochs=2)
    (message,) = warnings_of(run)
    assert message.startswith(
        "the training now ends at step 14, but at 21 when the checkpoint was saved: pass the epochs="
    )


@pytest.mark.parametrize(("kind", "accumulate"), [("12 per rank", 1), ("6 per rank", 2)])
def test_another_number_of_ranks_keeps_the_steps_and_their_samples(kind: str, accumulate: int, tmp_path: Path) -> None:
    read = {}
    for ranks, what, each in ((2, "6 per rank", 1), (1, kind, accumulate)):
        run = new_run(tmp_path / str(ranks))
        run_ranks(reading, ranks, run.path, 0, what, each, None)
        read[ranks] = steps_of(run.path, 0)
    assert read[1] == read[2]
    run = new_run(tmp_path / "changed")
    run_ranks(reading, 2, run.path, 0, "6 per rank", 1, (1, 1))
    (told,) = run_ranks(reading, 1, run.path, 1, kind, accumulate, None)
    assert told["status"] is None
    assert steps_of(run.path, 0) | steps_of(run.path, 1) == read[2]
    assert warnings_of(run) == []


def reading(place: Path, attempt: int, kind: str, accumulate: int, at: tuple[int, int] | None) -> dict[str, Any]:
    """A loop whose losses are the sums of the samples' indices; noted by step."""
    told = loop(place, attempt, kind, at, accumulate=accumulate, first_input=True)
    with (place / f"read-{attempt}-{os.environ['RANK']}").open("w") as file:
        file.writelines(f"{epoch} {number // accumulate} {index}\n" for epoch, number, index in told["indices"])
    return told


def steps_of(place: Path, attempt: int) -> dict[tuple[str, str], list[str]]:
    """The samples of each step, of all ranks together."""
    found: dict[tuple[str, str], list[str]] = {}
    for file in place.glob(f"read-{attempt}-*"):
        for line in file.read_text().splitlines():
            epoch, step, index = line.split()
            found.setdefault((epoch, step), []).append(index)
    return {step: sorted(indices) for step, indices in found.items()}


def test_another_number_of_ranks_that_would_change_the_steps_is_refused(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    run_ranks(loop, 2, run.path, 0, "6 per rank", (1, 1), "stop")
    assert run_ranks(loop, 1, run.path, 1, "6 per rank")[0]["status"] == 1
    assert "2 ranks with batches of 6 and 4 steps per epoch, now there are 1 rank with batches of 6 " in failure(run)
    assert "give the DataLoader batch_size=12" in failure(run)


def test_accumulated_gradients_are_neither_saved_nor_lost(tmp_path: Path) -> None:
    (told,) = run_ranks(accumulating, 1, tmp_path)
    for calm, first, second in told:
        assert as_one(first, second) == as_one(calm)


def accumulating(folder: Path) -> list[list[dict[str, Any]]]:
    """Told by `accumulate`, and seen."""
    stories = []
    for told in (True, False):
        more: dict[str, Any] = {"accumulate": 3, "told": told}
        calm, broken = (new_run(folder / f"{name}-{told}", every=1).path for name in ("calm", "broken"))
        stories.append(
            [
                loop(calm, 0, "shuffled", **more),
                loop(broken, 0, "shuffled", (1, 3), "stop", **more),  # the first of three
                loop(broken, 1, "shuffled", **more),
            ]
        )
    return stories


def reads(place: Path) -> list[int]:
    """A resume in the middle of an epoch."""
    log = place / "read"
    more: dict[str, Any] = {"make": lambda: DataLoader(Images(str(log)), batch_size=6)}
    loop(place, 0, "", (1, 3), "stop", **more)
    log.unlink()
    loop(place, 1, "", (1, 7), "stop", **more)
    return [int(line) for line in log.read_text().split()]


def test_a_resume_reads_nothing_again(tmp_path: Path) -> None:
    ((*read,),) = run_ranks(reads, 1, new_run(tmp_path).path)
    assert set(read) == set(range(24, SAMPLES))  # in order; the first of them several times, to see that they come back


class Curriculum(Sampler[list[int]]):
    """Its batches become smaller from epoch to epoch, and more."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    @property
    def size(self) -> int:
        return 11 - 4 * self.epoch

    def __len__(self) -> int:
        return SAMPLES // self.size

    def __iter__(self) -> Iterator[list[int]]:
        for first in range(0, SAMPLES - self.size + 1, self.size):
            yield list(range(first, first + self.size))


def lessons(folder: Path) -> list[Any]:
    ends = []
    for batches in (None, 3):
        place = new_run(folder / str(batches)).path
        ends.append(loop(place, 0, make=lambda: DataLoader(Images(), batch_sampler=Curriculum()), batches=batches))
    return ends


def test_epochs_of_other_lengths_are_refused_unless_their_length_is_told(tmp_path: Path) -> None:
    ((refused, told),) = run_ranks(lessons, 1, tmp_path)
    assert (refused["status"], told["status"]) == (1, None)
    assert [(epoch, number) for epoch, number, _ in told["losses"]] == [(e, n) for e in range(3) for n in range(3)]
    (run,) = (tmp_path / "None").glob("*")
    assert "has a length of 6 in epoch 1, but had 4 at first" in failure(RunDirectory(run))
