"""Lightning's callbacks that change the training: exact, told or refused at once."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from own_loops import begin_attempt, digest, failure, new_run, told
from stopped_script import stop_and_resume
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from train_ranks import preload, run_ranks

from cluster_ddp.train.errors import TrainError

KINDS = {
    "StochasticWeightAveraging": ({"swa_lrs": 0.1}, "take WeightAveraging"),
    "GradientAccumulationScheduler": ({"scheduling": {0: 1, 1: 2}}, "take accumulate_grad_batches="),
    "BackboneFinetuning": ({}, "give the optimizer all parameters from the beginning"),
    "LearningRateFinder": ({}, "find it by a program of its own"),
}


# The Trainer's or fit's own settings, by what the refusal calls them.
SETTINGS = {
    "takes one training DataLoader, and there are 2: let one data set provide all samples": {"several": True},
    "reload_dataloaders_every_n_epochs exactly: leave it out": {"ends": {"reload_dataloaders_every_n_epochs": 1}},
    "give the Trainer max_epochs or max_steps": {"ends": {"max_epochs": -1}},
    "two ResumeExactly() exactly: give it one": {"kind": "ResumeExactly"},
}


@pytest.fixture(scope="module", autouse=True)
def _preloaded() -> None:
    pytest.importorskip("lightning")  # not above: collecting would import it in each worker
    preload("lightning")


def fit(
    place: Path,
    attempt: int,
    stop_at: int | None,
    kind: str,
    ends: dict[str, Any] | None = None,
    *,
    seed: int = 1,
    several: bool = False,
    plateau: bool = False,
    **settings: Any,
) -> tuple[str | None, int, list[int | None]]:
    """The weights that an attempt ends with, None when it was stopped or refused, the batches validated, steps logged.

    Parameters
    ----------
    ends
        When training ends and is validated.
    several
        Whether there are two training DataLoaders.
    plateau
        Whether the last validation sets the learning rate after each epoch.
    """
    import lightning as L
    from lightning.pytorch import callbacks, loggers

    from cluster_ddp.integrations.lightning import ResumeExactly

    class Classifier(L.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.backbone = nn.Linear(4, 3)

        def training_step(self, batch: tuple[Tensor, Tensor], number: int) -> Tensor:
            if self.global_step == stop_at:
                os.kill(os.getpid(), signal.SIGUSR1)
            loss = nn.functional.cross_entropy(self.backbone(batch[0]), batch[1])
            self.log("loss", loss)
            return loss

        def validation_step(self, batch: tuple[Tensor, Tensor], number: int) -> None:
            self.log("val_loss", nn.functional.cross_entropy(self.backbone(batch[0]), batch[1]))

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
            if not plateau:
                return optimizer
            scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, threshold=10.0, patience=0)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val_loss"}}

    class Average(L.Callback):  # type: ignore[misc]
        """As people write it."""

        def on_fit_start(self, trainer: Any, module: Any) -> None:
            self.average = nn.Linear(4, 3)

        def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
            for kept, weight in zip(self.average.parameters(), module.parameters(), strict=True):
                kept.data.lerp_(weight.data, 0.1)

        def on_save_checkpoint(self, trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
            checkpoint["average"] = self.average.state_dict()

    class Count(L.Callback):  # type: ignore[misc]
        def on_validation_batch_end(self, *_: Any) -> None:
            validated.append(1)

    class Steps(loggers.logger.DummyLogger):  # type: ignore[misc]
        def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
            logged.append(step)

    class Keeping(Average):
        def state_dict(self) -> dict[str, Any]:
            return {"average": self.average.state_dict()}

        on_save_checkpoint = L.Callback.on_save_checkpoint

    class Unfreezing(L.Callback):  # type: ignore[misc]
        """Freezes the weight until the second epoch."""

        def on_fit_start(self, trainer: Any, module: Any) -> None:
            module.backbone.weight.requires_grad_(False)

        def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
            if trainer.current_epoch == 1:
                module.backbone.weight.requires_grad_()

    validated: list[int] = []
    logged: list[int | None] = []
    begin_attempt(place, attempt)
    L.seed_everything(seed, verbose=False)
    model = Classifier()
    data = TensorDataset(torch.rand(16, 4), torch.arange(16) % 3)
    train = DataLoader(data, 4, shuffle=True, num_workers=1, persistent_workers=True)
    own = {"Average": Average, "Keeping": Keeping, "Unfreezing": Unfreezing, "ResumeExactly": ResumeExactly}
    made = own.get(kind) or getattr(callbacks, kind)
    trainer = L.Trainer(
        **(ends or {"max_epochs": 3}), accelerator="cpu", devices=1, num_sanity_val_steps=0,
        logger=Steps(), log_every_n_steps=1,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        callbacks=[ResumeExactly(), made()] if made is Unfreezing else [made(**settings), Count(), ResumeExactly()],
    )  # fmt: skip
    try:
        trainer.fit(model, {"a": train, "b": train} if several else train, DataLoader(data, 8))
    except SystemExit:
        return None, len(validated), logged
    return digest(model), len(validated), logged


def attempts(
    calm: Path, broken: Path, stop_at: int, *how: Any, **settings: Any
) -> list[tuple[str | None, int, list[int | None]]]:
    return [
        fit(calm, 0, None, *how, **settings),
        fit(broken, 0, stop_at, *how, **settings),
        fit(broken, 1, None, *how, **settings),
    ]


@pytest.mark.parametrize(("kind", "settings"), [("EMAWeightAveraging", {"decay": 0.9}), ("Keeping", {})])
def test_an_average_that_a_callback_gives_is_exact(kind: str, settings: dict[str, Any], tmp_path: Path) -> None:
    calm, broken = new_run(tmp_path / "calm"), new_run(tmp_path / "broken")
    ((ended, stopped, resumed),) = run_ranks(attempts, 1, calm.path, broken.path, 5, kind, **settings)
    assert (stopped[0], resumed[0]) == (None, ended[0])
    assert told(broken) == []


@pytest.mark.parametrize("stop_at", [2, 6])
@pytest.mark.parametrize("ends", [{"max_epochs": 3}, {"max_epochs": -1, "max_steps": 11}], ids=["epochs", "steps"])
def test_the_last_batch_of_an_epoch_alone_and_all_that_is_validated_and_logged_are_as_without_a_stop(
    ends: dict[str, int], stop_at: int, tmp_path: Path
) -> None:
    calm, broken = new_run(tmp_path / "calm"), new_run(tmp_path / "broken")
    how = {**ends, "val_check_interval": 3}  # of four batches: it is stopped after the validation in an epoch
    ((ended, stopped, resumed),) = run_ranks(attempts, 1, calm.path, broken.path, stop_at, "Timer", how)
    assert ended[1] == 3 * 2  # three times two batches
    assert (stopped[0], resumed[0], stopped[1] + resumed[1], stopped[2] + resumed[2]) == (None, *ended)


def test_an_average_that_nothing_keeps_is_told(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    ((ended, _, _),) = run_ranks(fit, 1, run.path, 0, None, "Average")
    assert ended is not None
    of_hook, of_module = told(run)
    assert "on_save_checkpoint() of Average only affects Lightning's own" in of_hook
    assert "(Linear)" in of_module
    assert "Make it a part of the LightningModule" in of_module


def test_weights_that_a_callback_unfreezes_later_are_exact(tmp_path: Path) -> None:
    calm, broken = new_run(tmp_path / "calm"), new_run(tmp_path / "broken")
    ((ended, stopped, resumed),) = run_ranks(attempts, 1, calm.path, broken.path, 5, "Unfreezing")
    assert (stopped[0], resumed[0]) == (None, ended[0])


def test_a_rate_that_a_validation_within_the_epoch_decides_is_exact(tmp_path: Path) -> None:
    calm, broken = new_run(tmp_path / "calm"), new_run(tmp_path / "broken")
    how = "Keeping", {"max_epochs": 3, "val_check_interval": 3}
    ((ended, stopped, resumed),) = run_ranks(attempts, 1, calm.path, broken.path, 6, *how, plateau=True)
    assert (stopped[0], resumed[0]) == (None, ended[0])


def with_other_data(place: Path) -> list[str | None]:
    return [fit(place, 0, 5, "Timer")[0], fit(place, 1, None, "Timer", seed=2)[0]]


def test_other_data_at_a_resume_are_refused(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    assert run_ranks(with_other_data, 1, run.path) == [[None, None]]
    assert "or are split differently" in failure(run)


def refused(folder: Path) -> list[str]:
    found = []
    ways = [{"kind": kind, **settings} for kind, (settings, _) in KINDS.items()]
    for number, how in enumerate([*ways, *({"kind": "Timer", **how} for how in SETTINGS.values())]):
        run = new_run(folder / str(number))
        assert fit(run.path, 0, None, **how) == (None, 0, [])
        found.append(failure(run))
    return found


def test_what_cannot_be_exact_is_refused_at_once(tmp_path: Path) -> None:
    (found,) = run_ranks(refused, 1, tmp_path)
    messages = [f"the callback {kind} exactly: {remedy}" for kind, (_, remedy) in KINDS.items()]
    for error, message in zip(found, [*messages, *SETTINGS], strict=True):
        assert message in error


def fitted_with_the_class() -> str:
    import lightning as L
    from lightning.pytorch.demos.boring_classes import BoringModel

    from cluster_ddp.integrations.lightning import ResumeExactly

    trainer = L.Trainer(accelerator="cpu", devices=1, logger=False, enable_checkpointing=False,
                        callbacks=[ResumeExactly])  # type: ignore[list-item]  # fmt: skip
    with pytest.raises(TrainError) as caught:
        trainer.fit(BoringModel())
    return str(caught.value)


def test_the_class_in_place_of_a_callback_is_refused() -> None:
    (message,) = run_ranks(fitted_with_the_class, 1)
    assert message.endswith("write callbacks=[ResumeExactly()]")


UNCHANGED = """
import os, sys, time, torch, lightning as L
from lightning.pytorch.callbacks import ModelCheckpoint

class Classifier(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 3)

    def training_step(self, batch, number):
        time.sleep(0.02)
        print("trains", self.global_step, flush=True)
        self.trainer.should_stop = resume
        return torch.nn.functional.cross_entropy(self.layer(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

resume, place = "--resume" in sys.argv, os.environ["PLACE"]
data = torch.utils.data.TensorDataset(torch.ones(40000, 4), torch.zeros(40000, dtype=torch.long))
trainer = L.Trainer(
    max_epochs=2, accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False,
    callbacks=[ModelCheckpoint(place, save_last=True, save_on_exception=True)],
)
last = place + "/last.ckpt" if resume else None
trainer.fit(Classifier(), torch.utils.data.DataLoader(data, batch_size=4), ckpt_path=last)
"""


def test_an_unchanged_trainer_saves_its_own_checkpoint_when_it_is_stopped_and_goes_on_from_it(tmp_path: Path) -> None:
    trained = [int(line.split()[1]) for line in stop_and_resume(tmp_path, UNCHANGED) if line.startswith("trains")]
    saved = min(int(path.stem.rpartition("=")[2]) for path in tmp_path.glob("epoch=*-step=*.ckpt"))
    assert trained[-1] == trained[-2] + 1 == saved
