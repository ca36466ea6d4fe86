"""A Trainer of transformers with evaluations, checkpoints of its own and an early end, stopped and gone on with."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from own_loops import begin_attempt, digest, new_run, states, told
from torch import Tensor, nn
from torch.utils.data import Dataset
from train_ranks import preload, run_ranks

from cluster_ddp.run.directory import RunDirectory


@pytest.fixture(scope="module", autouse=True)
def _preloaded() -> None:
    pytest.importorskip("transformers")  # not above: collecting would import it in each worker
    preload("transformers.trainer")


class Rows(Dataset[Any]):
    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": torch.full((4,), index / 24) + 0.1 * torch.randn(4), "labels": torch.tensor(index % 3)}


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        outputs = self.layer(x)
        return {"loss": nn.functional.cross_entropy(outputs, labels), "logits": outputs}


def train(place: Path, attempt: int, stop_at: int = 0, patience: int = 99, **more: Any) -> tuple[Any, ...] | None:
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
    trainer = transformers.Trainer(model, args, train_dataset=Rows(), eval_dataset=Rows(), callbacks=callbacks)
    try:
        result = trainer.train()
    except SystemExit:
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


def train_counting(place: Path) -> None:
    """Three steps of a Trainer that counts for itself."""
    import transformers

    from cluster_ddp.integrations.transformers import ResumeExactly

    class Counting(transformers.Trainer):  # type: ignore[misc]
        seen = 0

        def compute_loss(self, *arguments: Any, **more: Any) -> Any:
            self.seen += 1
            return super().compute_loss(*arguments, **more)

    args = transformers.TrainingArguments(
        output_dir=str(place / "output"), max_steps=3, save_strategy="no", use_cpu=True, report_to="none",
        disable_tqdm=True,
    )  # fmt: skip
    for kind in (transformers.Trainer, Counting):
        run = place if kind is Counting else new_run(place).path
        begin_attempt(run, 0)
        kind(Classifier(), args, train_dataset=Rows(), callbacks=[ResumeExactly()]).train()
        if kind is not Counting:
            assert told(RunDirectory(run)) == []


def test_what_a_derived_trainer_counts_is_told(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    run_ranks(train_counting, 1, run.path)
    (message,) = told(run)
    assert "steps change seen of the Counting, which no checkpoint holds" in message


def attempts(calm: Path, broken: Path, stop_at: list[int], more: dict[str, Any]) -> list[tuple[Any, ...] | None]:
    return [train(calm, 0, **more), *(train(broken, number, at, **more) for number, at in enumerate([*stop_at, 0]))]


@pytest.mark.parametrize(
    ("stop_at", "more"),
    [
        ([3], {"learning_rate": 1e-3, "eval_on_start": True}),
        ([8, 24], {"learning_rate": 1e-3, "load_best_model_at_end": True, "save_total_limit": 2}),
        ([6], {"learning_rate": 30.0, "patience": 2}),  # it ends there, by EarlyStoppingCallback
    ],
    ids=["within an epoch", "after an epoch and the last step", "at an early end"],
)
def test_a_trainer_that_evaluates_and_saves_goes_on_exactly(
    stop_at: list[int], more: dict[str, Any], tmp_path: Path
) -> None:
    calm, broken = new_run(tmp_path / "calm"), new_run(tmp_path / "broken")
    (ends,) = run_ranks(attempts, 1, calm.path, broken.path, stop_at, more)
    assert ends[1:] == [None] * len(stop_at) + [ends[0]]
    assert states(broken)[-2:] == ["resumed", "completed"]
