"""Programs with several blocks of join_run: a stop ends the program, and a second loop is refused."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from own_loops import LOADERS, Crash, begin_attempt, distributed, failure, interrupt, model_of, new_run, states
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from train_ranks import rank_environments, run_ranks, start_program

from cluster_ddp.launch.node.heartbeat import HeartbeatFile
from cluster_ddp.run.ending import Ending, outcome_of
from cluster_ddp.run.history import read_history
from cluster_ddp.train import TrainError, join_run
from cluster_ddp.train.own.occupied import occupied
from cluster_ddp.train.ranks.process import Beat


def evaluate(done: list[str], *, is_broken: bool = False) -> None:
    with join_run():
        done.append("evaluated")
        if is_broken:
            raise Crash


def train(done: list[str], folder: Path | None = None, at: int | None = None, how: str = "stop") -> None:
    with join_run(folder) as run:
        done.append("entered")
        several = run.world.world_size > 1
        model = DistributedDataParallel(model_of()) if several else model_of()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loader = distributed(6)() if several else LOADERS["shuffled"]()
        loader = run.resumable(loader, model=model, optimizer=optimizer, epochs=2)
        for _ in loader.epochs():
            for inputs, labels in loader:
                optimizer.zero_grad()
                F.cross_entropy(model(inputs), labels).backward()
                optimizer.step()
                if run.step == at:
                    interrupt(how)
        done.append("trained")


def program(place: Path, attempt: int, blocks: list[dict[str, Any] | str | None]) -> tuple[list[str], Any]:
    """Blocks, one after the other; what they did and the program's status."""
    begin_attempt(place, attempt)
    done: list[str] = []
    try:
        for block in blocks:
            if isinstance(block, dict):
                train(done, **block)
            else:
                evaluate(done, is_broken=block == "broken")
    except SystemExit as end:
        return done, end.code
    return done, None


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_stop_in_a_block_ends_the_program_before_the_next(ranks: int, tmp_path: Path) -> None:
    run = new_run(tmp_path)
    assert run_ranks(program, ranks, run.path, 0, [{"at": 3}, {}]) == [(["entered"], 0)] * ranks
    assert states(run) == ["started", "stopped"]
    assert run_ranks(program, ranks, run.path, 1, [{}, None]) == [(["entered", "trained", "evaluated"], None)] * ranks
    assert states(run) == ["started", "stopped", "resumed", "completed"]


def test_a_second_loop_in_a_later_block_is_refused(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    ((done, status),) = run_ranks(program, 1, run.path, 0, [{}, {}])
    assert (done, status) == (["entered", "trained", "entered"], 1)
    assert "in this block of join_run() or in an earlier one" in failure(run)
    outcome = outcome_of(read_history(run), 0)
    assert outcome.ending is Ending.FAILED_AT_START  # another start would come to the same end
    assert "a run has one loop" in outcome.why
    assert run_ranks(program, 1, run.path, 1, [{}]) == [(["entered"], None)]  # a person has mended the program
    assert outcome_of(read_history(run), 1).ending is Ending.COMPLETED


def test_an_evaluation_that_fails_after_training_has_failed_the_run(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    assert run_ranks(program, 1, run.path, 0, [{}, "broken"]) == [(["entered", "trained", "evaluated"], 1)]
    assert outcome_of(read_history(run), 0).ending is Ending.FAILED
    assert run_ranks(program, 1, run.path, 1, [{}, None]) == [(["entered", "evaluated"], None)]
    assert outcome_of(read_history(run), 1).ending is Ending.COMPLETED


def refused_first(place: Path) -> list[str]:
    """A loop that is refused, and another in the same block, as where a cell of a notebook has been mended."""
    begin_attempt(place, 0)
    seen = []
    with join_run() as run:
        model = model_of()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for things in ({"model": model}, {"model": model, "optimizer": optimizer}):
            try:
                loader = run.resumable(LOADERS["shuffled"](), epochs=1, **things)
            except TrainError as error:
                seen.append(str(error))
        for _ in loader.epochs():
            for inputs, labels in loader:
                optimizer.zero_grad()
                F.cross_entropy(model(inputs), labels).backward()
                optimizer.step()
        try:
            run.steps(3, model=model, optimizer=optimizer)
        except TrainError as error:
            seen.append(str(error))
    return seen


def test_a_loop_that_is_refused_is_none(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    ((first, second),) = run_ranks(refused_first, 1, run.path)
    assert first.startswith("no torch.optim.Optimizer is passed in") and second.startswith("a run has one loop")
    assert states(run) == ["started", "completed"]


def test_a_block_that_only_evaluates_does_not_complete_the_run(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    assert run_ranks(program, 1, run.path, 0, [None, {"at": 4, "how": "crash"}]) == [(["evaluated", "entered"], 1)]
    assert outcome_of(read_history(run), 0).ending is Ending.FAILED
    assert run_ranks(program, 1, run.path, 1, [None, {}]) == [(["evaluated", "entered", "trained"], None)]
    assert outcome_of(read_history(run), 1).ending is Ending.COMPLETED


def by_hand(folder: Path) -> list[tuple[list[str], Any]]:
    """The same without cluster-ddp, in one process, which is a script's."""
    os.environ.pop("CLUSTER_DDP_RUN", None)
    sys.modules["__main__"].__file__ = str(folder / "train.py")
    ends = []
    for name, at in (("one", None), ("other", None), ("other", None), ("third", 3), ("third", None), ("fourth", None)):
        done: list[str] = []
        status = None
        try:
            train(done, folder / name, at)
        except SystemExit as end:
            status = end.code
        ends.append((done, status))
    return ends


def test_without_the_launcher_each_folder_has_its_blocks_and_a_stop_ends_all(tmp_path: Path) -> None:
    (ends,) = run_ranks(by_hand, 1, tmp_path)
    trained, refused = (["entered", "trained"], None), (["entered"], 1)
    assert ends == [trained, trained, refused, (["entered"], None), ([], 0), ([], 0)]


def folds(folder: Path, ats: list[int | None]) -> list[float]:
    """One run after the other; what is drawn for the next."""
    os.environ.pop("CLUSTER_DDP_RUN", None)
    sys.modules["__main__"].__file__ = str(folder / "train.py")
    torch.manual_seed(3)
    drawn = []
    for number, at in enumerate(ats):
        train([], folder / str(number), at)
        drawn.append(torch.rand(()).item())
    return drawn


def test_what_follows_a_run_draws_the_same_where_that_was_complete_already(tmp_path: Path) -> None:
    (calm,) = run_ranks(folds, 1, tmp_path / "calm", [None, None])
    run_ranks(folds, 1, tmp_path / "broken", [None, 3])
    assert run_ranks(folds, 1, tmp_path / "broken", [None, None]) == [calm]


def test_one_of_several_processes_that_begin_at_the_same_moment_has_the_folder(tmp_path: Path) -> None:
    forked = multiprocessing.get_context("fork")
    begins, won = forked.Barrier(6), forked.Value("i", 0)

    def join() -> None:
        begins.wait(60)
        with contextlib.suppress(TrainError), occupied(tmp_path / "own"):
            with won.get_lock():
                won.value += 1
            begins.wait(60)
            return
        begins.wait(60)

    processes = [forked.Process(target=join) for _ in range(6)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert won.value == 1


HOGWILD = """
import multiprocessing, sys
from cluster_ddp.train import join_run

forked = multiprocessing.get_context("fork")
inside, refused = forked.Event(), forked.Event()

def train(number):
    if number == 1:
        inside.wait(60)
    try:
        with join_run(sys.argv[1]):
            print(number, "is inside", flush=True)
            inside.set()
            refused.wait(60)
    finally:
        refused.set()

processes = [forked.Process(target=train, args=(number,)) for number in range(2)]
for process in processes:
    process.start()
for process in processes:
    process.join()
"""


@pytest.mark.parametrize("launched", [True, False])
def test_a_second_process_does_not_join_as_the_same_rank(launched: bool, tmp_path: Path) -> None:
    """As where a program forks its workers, or is started twice: each would resume from the other's checkpoints."""
    run = new_run(tmp_path)
    program, log = tmp_path / "hogwild.py", tmp_path / "log"
    program.write_text(HOGWILD)
    heartbeat = HeartbeatFile.create(slots=1)
    more = {"CLUSTER_DDP_HEARTBEAT": str(heartbeat.path)}
    environment = {name: value for name, value in os.environ.items() if not name.startswith("CLUSTER_DDP_")}
    if launched:
        begin_attempt(run.path, 0)
        environment = rank_environments(run, 1)[0] | more
    process = start_program(environment, log, program, str(tmp_path / "own"))
    process.join(60)
    heartbeat.unlink()
    assert log.read_text().count("is inside") == 1
    if launched:
        assert "is already rank 0 of this run" in failure(run)
    else:
        assert f"trains in {tmp_path / 'own'} at the same time" in log.read_text()
        assert [path.name for path in (tmp_path / "own").iterdir()] == ["checkpoints"]


def test_a_copy_of_a_rank_does_not_train_on(capfd: pytest.CaptureFixture[str]) -> None:
    """Both would write the same checkpoints, and share what the thread that writes them has open."""
    beat = Beat()
    beat.step(1)
    if (child := os.fork()) == 0:
        beat.step(2)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
    assert f"process {child} ends here: the program has forked it" in capfd.readouterr().err
