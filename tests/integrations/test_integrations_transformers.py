"""A Trainer of transformers with evaluations, checkpoints of its own and an early end, stopped and gone on with."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections import defaultdict, deque
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from own_loops import begin_attempt, digest, failure, new_run, states, told
from stopped_script import stop_and_resume
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from train_ranks import preload, run_ranks


@pytest.fixture(scope="module", autouse=True)
def _preloaded() -> None:
    pytest.importorskip("transformers")  # not above: collecting would import it in each worker
    preload("transformers.trainer")


class Rows(Dataset[Any]):
    def __init__(self, first: int = 0) -> None:
        self.labels = [first, *range(1, 24)]

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
    args = transformers.TrainingArguments(
        output_dir=str(place / "output"), num_train_epochs=3, per_device_train_batch_size=8, save_strategy="no",
        logging_steps=1, use_cpu=True, report_to="none", disable_tqdm=True,
    )  # fmt: skip
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
    args = transformers.TrainingArguments(
        output_dir=str(place / "output"), num_train_epochs=3, per_device_train_batch_size=8, save_strategy="no",
        logging_steps=1, use_cpu=True, report_to="none", disable_tqdm=True,
    )  # fmt: skip
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


def with_other_data(place: Path) -> list[tuple[Any, ...] | None]:
    return [train(place, 0, 3), train(place, 1, first=7)]


def test_other_data_at_a_resume_are_refused(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    assert run_ranks(with_other_data, 1, run.path) == [[None, None]]
    assert "or are split differently" in failure(run)


class InAThread(DataLoader[Any]):
    """Makes its batches in a thread, as monai's ThreadDataLoader does without workers."""

    def __iter__(self) -> Any:
        with ThreadPoolExecutor(1) as pool:
            batches = super().__iter__()
            for _ in range(len(self)):
                yield pool.submit(next, batches).result()


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
