"""What derived Trainers, models and callbacks of a program keep for themselves, stopped and gone on with."""

from __future__ import annotations

import os
import signal
from collections import defaultdict, deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from own_loops import begin_attempt, digest, new_run, told
from torch.utils.data import Dataset
from train_ranks import preload, run_ranks
from transformers_parts import Classifier, Rows


@pytest.fixture(scope="module", autouse=True)
def _preloaded() -> None:
    pytest.importorskip("transformers")  # not above: collecting would import it in each worker
    preload("transformers.trainer")


def train_counting(place: Path, attempt: int, stop_at: int = 0, strange: bool = False) -> tuple[Any, ...] | None:
    """What a Trainer that counts for itself ends with; None when it was stopped, which it asks for in this step."""
    import transformers

    from cluster_ddp.integrations.transformers import ResumeExactly

    class Counting(transformers.Trainer):  # type: ignore[misc]
        seen = 0

        def compute_loss(self, *arguments: Any, **more: Any) -> Any:
            self.seen += 1
            loss = super().compute_loss(*arguments, **more) * (1 + 0.1 * self.seen)
            self.recent["losses"].append(loss.item())
            self.inputs = [torch.rand(3)] if self.seen % 3 == 1 else self.inputs
            if strange:
                self.strange.count += 1
            elif self.seen == stop_at:
                os.kill(os.getpid(), signal.SIGUSR1)
            return loss + self.inputs[0].sum() * loss

    begin_attempt(place, attempt)
    args = transformers.TrainingArguments(
        output_dir=str(place / "output"), max_steps=8, save_strategy="no", use_cpu=True, report_to="none",
        disable_tqdm=True,
    )  # fmt: skip
    transformers.set_seed(1)
    model = Classifier()
    trainer = Counting(model, args, train_dataset=Rows(), callbacks=[ResumeExactly()])
    trainer.loss = torch.nn.Sequential(model)  # as the trainer of sentence-transformers has
    trainer.recent, trainer.strange = defaultdict(lambda: deque(maxlen=4)), SimpleNamespace(count=0)
    try:
        trainer.train()
    except SystemExit:
        return None
    return digest(model), trainer.seen, dict(trainer.recent)


def counting(calm: Path, broken: Path, strange: Path) -> list[tuple[Any, ...] | None]:
    ends = [train_counting(calm, 0), *(train_counting(broken, number, at) for number, at in enumerate((4, 5, 0)))]
    return [*ends, train_counting(strange, 0, strange=True)]


def test_what_a_derived_trainer_counts_is_kept_or_told(tmp_path: Path) -> None:
    calm, broken, strange = (new_run(tmp_path / name) for name in ("calm", "broken", "strange"))
    ((ended, *stopped, resumed, _),) = run_ranks(counting, 1, calm.path, broken.path, strange.path)
    assert ended is not None
    assert (stopped, resumed) == ([None, None], ended)
    assert told(calm) == told(broken) == []
    (message,) = told(strange)
    assert "steps change strange of the Counting, which no checkpoint contains" in message


def train_saving(place: Path) -> None:
    """A model of the library, which notes its class in its settings whenever the Trainer saves it."""
    import transformers

    from cluster_ddp.integrations.transformers import ResumeExactly

    class Images(Dataset[Any]):
        def __len__(self) -> int:
            return 16

        def __getitem__(self, index: int) -> dict[str, Any]:
            return {"pixel_values": torch.full((1, 4, 4), index / 16), "labels": index % 2}

    begin_attempt(place, 0)
    sizes = {"num_channels": 1, "embedding_size": 4, "hidden_sizes": [4], "depths": [1], "num_labels": 2}
    model = transformers.ResNetForImageClassification(transformers.ResNetConfig(layer_type="basic", **sizes))
    args = transformers.TrainingArguments(
        output_dir=str(place / "output"), max_steps=4, save_steps=1, use_cpu=True, report_to="none", disable_tqdm=True,
    )  # fmt: skip
    transformers.Trainer(model, args, train_dataset=Images(), callbacks=[ResumeExactly()]).train()
    assert model.config.architectures


def test_what_a_saved_model_notes_in_its_settings_is_not_told(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    run_ranks(train_saving, 1, run.path)
    assert told(run) == []


def _logging_each_step(place: Path) -> Any:
    import transformers

    return transformers.TrainingArguments(
        output_dir=str(place / "output"), num_train_epochs=3, per_device_train_batch_size=8, save_strategy="no",
        logging_steps=1, use_cpu=True, report_to="none", disable_tqdm=True,
    )  # fmt: skip


def train_watched(place: Path, attempt: int, is_first: bool, stop_at: int = 0) -> tuple[Any, ...] | None:
    """What a callback of the program's own ends with; None when it was stopped, which it asks for in this step."""
    import transformers

    from cluster_ddp.integrations.transformers import ResumeExactly

    class Best(transformers.TrainerCallback):  # type: ignore[misc]
        """Keeps the best loss, and the losses of all, and of this epoch."""

        def __init__(self, every: int) -> None:
            self.every, self.best, self.waited, self.epochs = every, float("inf"), 0, 0

        def on_train_begin(self, *_: Any, **__: Any) -> None:
            self.losses: list[float] = []

        def on_epoch_begin(self, *_: Any, **__: Any) -> None:
            self.epochs += 1
            self.of_epoch: list[float] = []

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            if "loss" in logs:
                self.losses.append(logs["loss"])
                self.of_epoch.append(logs["loss"])
                self.best, self.waited = min(self.best, logs["loss"]), self.waited + (logs["loss"] > self.best)

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == stop_at:
                os.kill(os.getpid(), signal.SIGUSR1)

    begin_attempt(place, attempt)
    args = _logging_each_step(place)
    transformers.set_seed(1)
    best = Best(attempt)
    callbacks = [best, ResumeExactly()] if is_first else [ResumeExactly(), best]
    trainer = transformers.Trainer(Classifier(), args, train_dataset=Rows(), callbacks=callbacks)
    try:
        trainer.train()
    except SystemExit:
        return None
    assert best.every == attempt  # how it was made is the program's
    return best.best, best.waited, best.epochs, best.losses, best.of_epoch


def watched(calm: Path, broken: Path, is_first: bool) -> list[tuple[Any, ...] | None]:
    stops = enumerate((2, 3, 7, 0))
    return [train_watched(calm, 0, is_first), *(train_watched(broken, number, is_first, at) for number, at in stops)]


@pytest.mark.parametrize("is_first", [True, False])
def test_what_a_callback_of_the_program_counts_is_kept(is_first: bool, tmp_path: Path) -> None:
    calm, broken = new_run(tmp_path / "calm"), new_run(tmp_path / "broken")
    ((ended, *stopped, resumed),) = run_ranks(watched, 1, calm.path, broken.path, is_first)
    assert ended is not None
    assert (stopped, resumed) == ([None] * 3, ended)
    assert told(calm) == told(broken) == []


def train_limited(place: Path, attempt: int, is_first: bool, stop_at: int = 0) -> tuple[Any, ...] | None:
    """As with callbacks that have a log, opened early or late, and that end training after some time."""
    import transformers

    from cluster_ddp.integrations.transformers import ResumeExactly

    time = SimpleNamespace(time=lambda: 1000.0 * attempt)

    class Limited(transformers.TrainerCallback):  # type: ignore[misc]
        def __init__(self) -> None:
            self.has_early, self.has_late, self.late, self.logged = False, False, None, 0

        def on_train_begin(self, *_: Any, **__: Any) -> None:
            self.begun = time.time()
            if not self.has_early:
                self.early, self.has_early = SimpleNamespace(lines=[]), True

        def on_log(self, *_: Any, **__: Any) -> None:
            if not self.has_late:
                self.late, self.has_late = SimpleNamespace(lines=[]), True
            self.logged += 1
            self.early.lines.append(self.logged)
            self.late.lines.append(self.logged)

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_training_stop |= time.time() - self.begun > 500
            if state.global_step == stop_at:
                os.kill(os.getpid(), signal.SIGUSR1)

    begin_attempt(place, attempt)
    args = _logging_each_step(place)
    limited, ours = Limited(), ResumeExactly()
    callbacks = [transformers.TrainerCallback(), limited, ours] if is_first else [ours, limited]
    trainer = transformers.Trainer(Classifier(), args, train_dataset=Rows(), callbacks=callbacks)
    try:
        trainer.train()
    except SystemExit:
        return None
    assert limited.late is not None
    return trainer.state.global_step, limited.logged, limited.early.lines, limited.late.lines


def limited(place: Path) -> list[tuple[Any, ...] | None]:
    return [train_limited(place, 0, True, stop_at=4), train_limited(place, 1, False)]


def test_what_a_callback_of_the_program_opens_and_the_time_are_those_of_the_attempt(tmp_path: Path) -> None:
    ((stopped, ended),) = run_ranks(limited, 1, new_run(tmp_path).path)
    since = [5, 6, 7, 8, 9, 10]
    assert (stopped, ended) == (None, (9, 10, since, since))
