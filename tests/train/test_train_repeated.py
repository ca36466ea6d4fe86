"""Steps that a resume repeats are compared with what they were before it."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from own_loops import begin_attempt, told
from own_loops import new_run as own_run
from torch import Tensor, nn
from train_ranks import run_ranks
from train_tasks import Plain, StopAt, attentive, job, new_run, train

from cluster_ddp.run.directory import RunDirectory
from cluster_ddp.run.phase import Phase
from cluster_ddp.run.reading import parse_lines
from cluster_ddp.train import Trainer, is_main_process, join_run
from cluster_ddp.train.ranks.distributed import find_world
from cluster_ddp.train.repeated import RepeatedSteps

SECTIONS: dict[str, Any] = {
    "train": {"steps": 16, "global_batch": 8},
    "checkpoint": {"every_steps": 6, "background": False},
}
HIDDEN = "STEPS_SO_FAR"  # an environment variable, which no check of the first steps sees
NOT_EXACT = "the resume is not exact: the loss at step {} was "


class Crash(Exception):
    """Ends an attempt."""


class Hidden(Plain):
    """Depends on how many losses this process has computed, which no checkpoint contains."""

    crash: int | None = None

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        computed = int(os.environ.get(HIDDEN, "0"))
        if computed == self.crash:
            raise Crash
        os.environ[HIDDEN] = str(computed + 1)
        return super().loss(model, batch) * self.factor(computed)

    def factor(self, computed: int) -> float:
        return 1.0 + computed / 100


class Exact(Hidden):
    def factor(self, computed: int) -> float:
        return 1.0


def interrupted(task: type[Hidden], run: RunDirectory, *, crash: int | None = None, stop_at: int | None = None) -> None:
    """The first attempt; the losses are counted from 0 again after it, as in a new process."""
    first = task()
    first.crash = crash
    os.environ.pop(HIDDEN, None)
    if crash is None:
        train(first, job(**SECTIONS), run, stop_at=stop_at)
    else:
        with pytest.raises(Crash):
            train(first, job(**SECTIONS), run)
    os.environ.pop(HIDDEN, None)


def test_a_difference_is_told_after_a_crash(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run = new_run(tmp_path, **SECTIONS)
    interrupted(Hidden, run, crash=9)
    train(Hidden(), job(**SECTIONS), run, 1)
    (message,) = told(run)
    assert message.startswith(NOT_EXACT.format(7))
    assert message in capfd.readouterr().err


class HiddenInGradients(Exact):
    """The same, of which only the gradients show anything."""

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        computed = int(os.environ.get(HIDDEN, "0"))
        loss = super().loss(model, batch)
        loss.register_hook(lambda gradient: gradient * (1.0 + computed / 100))
        return loss


def test_what_only_gradients_show_is_told_after_a_stop(tmp_path: Path) -> None:
    run = new_run(tmp_path, **SECTIONS)
    interrupted(HiddenInGradients, run, stop_at=8)
    train(HiddenInGradients(), job(**SECTIONS), run, 1)
    (message,) = told(run)
    assert message.startswith("the resume is not exact: the norm of the gradients at step 9 was ")


def test_a_difference_is_told_after_a_stop(tmp_path: Path) -> None:
    run = new_run(tmp_path, **SECTIONS)
    interrupted(Hidden, run, stop_at=8)
    train(Hidden(), job(**SECTIONS), run, 1)
    (message,) = told(run)
    assert message.startswith(NOT_EXACT.format(9))


@pytest.mark.parametrize(("how", "steps"), [({"crash": 9}, "steps 7 to 9"), ({"stop_at": 8}, "step 9")])
def test_an_exact_resume_says_so(
    how: dict[str, int], steps: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = new_run(tmp_path, **SECTIONS)
    interrupted(Exact, run, **how)
    train(Exact(), job(**SECTIONS), run, 1)
    assert told(run) == []
    assert f"the loss at {steps} is the same as before the resume" in capfd.readouterr().out


def test_nothing_is_compared_with_other_settings(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run = new_run(tmp_path, **SECTIONS)
    interrupted(Hidden, run, crash=9)
    train(Hidden(), job(**{**SECTIONS, "train": {**SECTIONS["train"], "lr": 0.5}}), run, 1)
    assert told(run) == []
    assert "before the resume" not in capfd.readouterr().out


@pytest.mark.parametrize(
    "damage", ["", "{", "[1]\n", '{"steps": ["x", 3], "numbers": [7, "?"]}\n', '{"steps": 7}\n', "\x00" * 50]
)
def test_a_damaged_file_does_no_harm(damage: str, tmp_path: Path) -> None:
    run = new_run(tmp_path, **SECTIONS)
    interrupted(Exact, run, crash=9)
    file = run.attempt(0).steps_file
    for content in (damage, file.read_text().splitlines()[0] + "\n" + damage):
        file.write_text(content)
        train(Exact(), job(**SECTIONS), run, 1)
        assert told(run) == []


def resumed_on_ranks(run: RunDirectory, task: str) -> None:
    kind = {"Hidden": Hidden, "Exact": Exact}[task]
    interrupted(kind, run, stop_at=8)
    train(kind(), job(**SECTIONS), run, 1)
    if is_main_process():
        messages = told(run)
        assert len(messages) == (kind is Hidden)
        assert all(message.startswith("the resume is not exact") for message in messages)


@pytest.mark.parametrize("task", ["Hidden", "Exact"])
def test_a_stop_of_several_ranks(task: str, tmp_path: Path) -> None:
    run_ranks(resumed_on_ranks, 2, new_run(tmp_path, **SECTIONS), task)


def own_loop(
    place: Path, attempt: int, crash: int | None, factor: float, stop: int | None = None, *arguments: str
) -> None:
    """A loop of one's own whose rate is multiplied by `factor` in step 8, as by a file that has changed."""
    begin_attempt(place, attempt)
    sys.argv[1:] = arguments
    with contextlib.suppress(SystemExit), join_run() as run:
        torch.manual_seed(3)
        model = nn.Linear(4, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in run.steps(12, model=model, optimizer=optimizer):
            optimizer.zero_grad()
            (model(torch.rand(5, 4)).square().mean() * (factor if step == 7 else 1.0)).backward()
            optimizer.step()
            if step == crash:
                raise Crash
            if step == stop:
                os.kill(os.getpid(), signal.SIGUSR1)


@pytest.mark.parametrize("factor", [1.0, 1.001])
def test_the_weights_of_a_loop_of_ones_own(factor: float, tmp_path: Path) -> None:
    run = own_run(tmp_path, every=5)
    run_ranks(own_loop, 1, run.path, 0, 9, 1.0)
    run_ranks(own_loop, 1, run.path, 1, None, factor)
    start = "the resume is not exact: the norm of the weights at step 8 was "
    assert [message.startswith(start) for message in told(run)] == [True] * (factor != 1.0)


class CountsGradients(Plain):
    """Its loss depends on a buffer that a backward pass changes."""

    def model(self) -> nn.Module:
        model = super().model()
        seen = torch.zeros(())
        model.register_buffer("seen", seen)

        def count(*_: Any) -> None:
            seen.add_(1.0)

        model.get_submodule("2").register_full_backward_hook(count)
        return model

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return super().loss(model, batch) * (1.0 + cast("Tensor", model.seen))


def test_what_a_backward_pass_changes_makes_no_difference_after_a_stop(tmp_path: Path) -> None:
    sections = {**SECTIONS, "train": {**SECTIONS["train"], "accumulation_steps": 2}}
    run = new_run(tmp_path, **sections)
    train(CountsGradients(), job(**sections), run, stop_at=8)
    train(CountsGradients(), job(**sections), run, 1)
    assert told(run) == []


def test_a_loss_that_ends_the_process_after_a_stop_does_no_harm(tmp_path: Path) -> None:
    phases = []

    class Ends(Plain):
        def loss(self, model: nn.Module, batch: Any) -> Tensor:
            if trainer.step == 8:
                phases.append(trainer.session.beat.phase)
                sys.exit("no more")
            return super().loss(model, batch)

    wish = StopAt()
    trainer = Trainer(job(**SECTIONS), Ends(), new_run(tmp_path, **SECTIONS), process=attentive(wish))
    wish.trainer, wish.step = trainer, 8
    assert not trainer.run().completed
    assert phases == [Phase.DONE]  # so that one that hangs is ended soon


def test_each_number_keeps_its_step_and_its_circumstances(tmp_path: Path) -> None:
    run = new_run(tmp_path, **SECTIONS)
    said: list[str] = []
    for attempt, lr, numbers in ((0, 0.1, (0.25, 0.5)), (0, 0.2, (1.0, 1.0)), (1, 0.1, (0.25, 0.5))):
        spec = job(**{**SECTIONS, "train": {**SECTIONS["train"], "lr": lr}})
        steps = RepeatedSteps(spec, run, attempt, find_world(), said.append)
        steps.begin()
        steps.resume(6, 0)
        steps.save(6)
        steps.note(7, numbers[0])
        steps.note(8, torch.tensor(numbers[1]))
        steps.close()
    assert said == []
    assert [line["steps"] for line in parse_lines(run.attempt(1).steps_file.read_bytes())[1:]] == [[7, 8]]


def test_within_an_attempt_only_what_the_last_process_has_written_counts(tmp_path: Path) -> None:
    """An attempt may have several: torchrun starts the ranks again, here with arguments that change the training."""
    run = own_run(tmp_path, every=5)
    run_ranks(own_loop, 1, run.path, 0, 10, 1.0)
    shutil.rmtree(run.path / "checkpoints" / "step-00000010")
    run_ranks(own_loop, 1, run.path, 0, None, 1.5, 7, "--faster")
    run_ranks(own_loop, 1, run.path, 0, None, 1.5)
    assert told(run) == []
