"""A Trainer of transformers with evaluations, checkpoints of its own and an early end, stopped and gone on with."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from own_loops import InAThread, begin_attempt, digest, failure, new_run, states
from stopped_script import stop_and_resume
from torch import Tensor
from torch.utils.data import DataLoader
from train_ranks import preload, run_ranks
from transformers_parts import Classifier, Rows


@pytest.fixture(scope="module", autouse=True)
def _preloaded() -> None:
    pytest.importorskip("transformers")  # not above: collecting would import it in each worker
    preload("transformers.trainer")


def train(
    place: Path, attempt: int, stop_at: int = 0, patience: int = 99, first: int = 0, **more: Any
) -> tuple[Any, ...] | None:
    """What one attempt ends with; None when it was stopped, which it asks for in this step."""
    import transformers

    from cluster_ddp.integrations.transformers import ResumeExactly

    class Stop(transformers.TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == stop_at:
                os.kill(os.getpid(), signal.SIGUSR1)

    begin_attempt(place, attempt)
    transformers.set_seed(1)
    model, folder = Classifier(), place / "output"
    args = transformers.TrainingArguments(
        output_dir=str(folder), num_train_epochs=4, per_device_train_batch_size=4, logging_steps=1,
        eval_strategy="steps", eval_steps=2, save_strategy="steps", save_steps=2, metric_for_best_model="loss",
        use_cpu=True, report_to="none", disable_tqdm=True, **more,
    )  # fmt: skip
    callbacks = [transformers.EarlyStoppingCallback(patience), Stop(), ResumeExactly()]
    trainer = transformers.Trainer(model, args, train_dataset=Rows(first), eval_dataset=Rows(), callbacks=callbacks)
    try:
        result = trainer.train()
    except SystemExit:
        assert multiprocessing.active_children() == []  # for which it would wait forever as it exits
        return None
    last = max(folder.glob("checkpoint-*"), key=lambda path: int(path.name.rpartition("-")[2]))
    callbacks_saved = json.loads((last / "trainer_state.json").read_text())["stateful_callbacks"]
    evaluations = sum("eval_loss" in entry for entry in trainer.state.log_history)
    return (
        digest(model),
        evaluations,
        result.training_loss,
        trainer.state.total_flos,
        trainer.state.best_metric,
        callbacks_saved,
    )


def with_other_data(place: Path) -> list[tuple[Any, ...] | None]:
    return [train(place, 0, 3), train(place, 1, first=7)]


def test_other_data_at_a_resume_are_refused(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    assert run_ranks(with_other_data, 1, run.path) == [[None, None]]
    assert "or are split differently" in failure(run)


class Unseeded(Rows):
    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {**super().__getitem__(index), "x": torch.from_numpy(np.random.default_rng().random(4, np.float32))}


LOADERS = {"thread": lambda: InAThread(Rows(), 4), "unseeded": lambda: DataLoader(Unseeded(), 4)}


def train_over(place: Path, kind: str) -> None:
    import transformers

    from cluster_ddp.integrations.transformers import ResumeExactly

    class Loading(transformers.Trainer):  # type: ignore[misc]
        def get_train_dataloader(self) -> Any:
            return LOADERS[kind]()

    begin_attempt(place, 0)
    args = transformers.TrainingArguments(
        output_dir=str(place / "output"), max_steps=3, save_strategy="no", use_cpu=True, report_to="none",
        disable_tqdm=True,
    )  # fmt: skip
    with contextlib.suppress(SystemExit):
        Loading(Classifier(), args, train_dataset=Rows(), callbacks=[ResumeExactly()]).train()


@pytest.mark.parametrize(
    ("kind", "why"),
    [("thread", "the DataLoader reads the data set in a thread of its own"), ("unseeded", "sample 0 of the training")],
)
def test_a_loader_that_cannot_be_exact_is_refused_by_name(kind: str, why: str, tmp_path: Path) -> None:
    run = new_run(tmp_path)
    run_ranks(train_over, 1, run.path, kind)
    assert why in failure(run)


def attempts(calm: Path, broken: Path, stop_at: list[int], more: dict[str, Any]) -> list[tuple[Any, ...] | None]:
    return [train(calm, 0, **more), *(train(broken, number, at, **more) for number, at in enumerate([*stop_at, 0]))]


@pytest.mark.parametrize(
    ("stop_at", "more"),
    [
        ([3], {"learning_rate": 1e-3, "eval_on_start": True, "dataloader_num_workers": 1}),
        ([8, 24], {"learning_rate": 1e-3, "load_best_model_at_end": True, "save_total_limit": 2}),
        # It ends there, by EarlyStoppingCallback, with the weights of an earlier step.
        ([6], {"learning_rate": 30.0, "patience": 2, "load_best_model_at_end": True}),
    ],
    ids=["within an epoch", "after an epoch and the last step", "at an early end"],
)
def test_a_trainer_that_evaluates_and_saves_goes_on_exactly(
    stop_at: list[int], more: dict[str, Any], tmp_path: Path
) -> None:
    calm, broken = new_run(tmp_path / "calm"), new_run(tmp_path / "broken")
    (ends,) = run_ranks(attempts, 1, calm.path, broken.path, stop_at, more)
    assert [end for end in ends[1:] if end is not None] == [ends[0]]  # by the last attempt, or that of the last step
    assert states(broken)[-2:] == ["resumed", "completed"]


UNCHANGED = """
import os, sys, time, torch, transformers

class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        time.sleep(0.02)
        return {"x": torch.ones(4), "labels": torch.tensor(index % 3)}

class Classifier(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 3)

    def forward(self, x, labels):
        return {"loss": torch.nn.functional.cross_entropy(self.layer(x), labels)}

class Tell(transformers.TrainerCallback):
    def on_step_end(self, args, state, control, **_):
        print("trains", state.global_step, flush=True)
        control.should_training_stop |= resume

resume = "--resume" in sys.argv
args = transformers.TrainingArguments(
    output_dir=os.environ["PLACE"] + "/output", max_steps=10000, per_device_train_batch_size=4,
    enable_jit_checkpoint=True, save_strategy="no", use_cpu=True, report_to="none", disable_tqdm=True,
)
trainer = transformers.Trainer(Classifier(), args, train_dataset=Rows(), callbacks=[Tell()])
trainer.train(resume_from_checkpoint=resume)
"""


def test_an_unchanged_trainer_saves_its_own_checkpoint_when_it_is_stopped_and_goes_on_from_it(tmp_path: Path) -> None:
    trained = [int(line.split()[1]) for line in stop_and_resume(tmp_path, UNCHANGED) if line.startswith("trains")]
    (saved,) = (tmp_path / "output").glob("checkpoint-*")
    assert trained[-1] == int(saved.name.rpartition("-")[2]) + 1 > 2
