"""TensorBoard and wandb: one wandb run for all attempts, offline without a key, nothing but on rank 0."""

from __future__ import annotations

import json
import types
from pathlib import Path
from typing import Any

import pytest
from train_tasks import Plain, job, new_run, train

from cluster_ddp.run.record import read_record
from cluster_ddp.train.metrics import loggers
from cluster_ddp.train.metrics.file import MetricsFile
from cluster_ddp.train.metrics.log import Report
from cluster_ddp.train.metrics.loggers import Wandb


@pytest.fixture(autouse=True)
def _no_key(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))


def sections(**log: Any) -> dict[str, Any]:
    return {"train": {"steps": 9, "global_batch": 24}, "log": {"every_steps": 1, **log}}


def test_wandb_offline_holds_one_run_after_three_attempts(tmp_path: Path) -> None:
    settings = sections(wandb={"project": "digits"})
    run = new_run(tmp_path, **settings)
    for attempt, stop_at in enumerate([2, 5, None]):
        train(Plain(), job(**settings), run, attempt, stop_at=stop_at)
    folders = sorted((run.path / "wandb").glob("offline-run-*"))
    assert len(folders) == 3
    wandb_id = read_record(run).wandb_id
    # wandb adds a number to the folder of a second attempt in the same second.
    assert {folder.name.split("-")[3] for folder in folders} == {wandb_id}
    assert all(list(folder.glob(f"run-{wandb_id}*.wandb")) for folder in folders)


class FakeWandb:
    """Cannot be reached online."""

    class errors:
        CommError = type("CommError", (Exception,), {})
        AuthenticationError = type("AuthenticationError", (Exception,), {})

    def __init__(self, folder: Path) -> None:
        self.inits: list[dict[str, Any]] = []
        self.calls: list[Any] = []
        self.folder = folder

    def Settings(self, **options: Any) -> dict[str, Any]:
        return options

    def init(self, **arguments: Any) -> Any:
        self.inits.append(arguments)
        if arguments["mode"] == "online":
            raise self.errors.CommError("timed out")
        return types.SimpleNamespace(
            dir=str(self.folder / "offline-run-1" / "files"),
            define_metric=lambda *args, **kwargs: self.calls.append((args, kwargs)),
            log=lambda values: self.calls.append(values),
            finish=lambda exit_code: self.calls.append(exit_code),
        )


def test_wandb_falls_back_to_offline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake = FakeWandb(tmp_path)
    monkeypatch.setitem(__import__("sys").modules, "wandb", fake)  # type: ignore[arg-type]
    spec = job(**sections(wandb={"mode": "online", "init_timeout": 7}))
    run = new_run(tmp_path, **sections())
    logger = Wandb(spec, spec.log.wandb, run, "abc")  # type: ignore[arg-type]
    assert [call["mode"] for call in fake.inits] == ["online", "offline"]
    assert all(call["settings"]["init_timeout"] == 7 and call["id"] == "abc" for call in fake.inits)
    assert all(call["resume"] == "allow" for call in fake.inits)
    assert f"wandb sync {tmp_path / 'offline-run-1'}" in capsys.readouterr().err
    logger.log(3, {"train/loss": 0.5})
    logger.log(2, {"train/loss": 0.6})  # repeated after a crash: a value, not wandb's own counter, which only grows
    logger.close(failed=True)
    assert fake.calls[-3:] == [{"step": 3, "train/loss": 0.5}, {"step": 2, "train/loss": 0.6}, 1]
    assert (("*",), {"step_metric": "step"}) in fake.calls


def test_wandb_is_online_with_a_key_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = job(**sections(wandb={})).log.wandb
    assert settings is not None
    assert loggers.wandb_mode(settings) == "offline"
    (tmp_path / "netrc").write_text("machine api.wandb.ai login user password 0\n")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    assert loggers.wandb_mode(settings) == "online"
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert loggers.wandb_mode(settings) == "offline"


def test_no_key_reaches_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    secret = "0123456789abcdef" * 2 + "01234567"
    monkeypatch.setenv("WANDB_API_KEY", secret)
    settings = sections(wandb={"mode": "offline"})
    run = new_run(tmp_path, **settings)
    train(Plain(), job(**settings), run)
    found = [path for path in run.path.rglob("*") if path.is_file() and secret.encode() in path.read_bytes()]
    assert found == []


def test_tensorboard_shows_repeated_steps_once(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    settings = sections(tensorboard=True)
    run = new_run(tmp_path, **settings)
    train(Plain(), job(**settings), run, stop_at=4)
    train(Plain(), job(**settings), run, attempt=1)
    events = EventAccumulator(str(run.path / "tensorboard"))
    events.Reload()
    steps = [event.step for event in events.Scalars("train/loss")]
    assert steps == list(range(1, 10))
    assert {"val/accuracy", "lr"} <= set(events.Tags()["scalars"])


class FullDisk:
    """A logger that cannot write, from its first step on or only at the end."""

    def __init__(self, *, at: str) -> None:
        self.at = at
        self.calls: list[str] = []

    def log(self, step: int, values: object) -> None:
        self._write("log")

    def close(self, *, failed: bool) -> None:
        self._write("close")

    def _write(self, what: str) -> None:
        self.calls.append(what)
        if self.at == what:
            raise OSError(28, "No space left on device")


def test_a_logger_that_fails_is_told_once_and_ends_no_training(capsys: pytest.CaptureFixture[str]) -> None:
    failing = [FullDisk(at=at) for at in ("log", "close", "never")]
    report = Report(loggers=failing)
    for step in (1, 2):
        report.log(step=step, samples=8, epoch=0, values={"train/loss": 0.5})
    report.close(failed=False)
    assert [logger.calls for logger in failing] == [["log"], ["log", "log", "close"], ["log", "log", "close"]]
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 2
    assert all(
        "cluster-ddp: FullDisk has failed (OSError: [Errno 28] No space left on device)" in line for line in said
    )


def test_metrics_go_on_after_a_torn_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n{"step": 2, "tr')
    file = MetricsFile(path, attempt=1)
    file.write(step=2, samples=64, epoch=0, values={"train/loss": 0.25, "grad_norm": float("nan")})
    lines = path.read_text().splitlines()
    assert lines[1] == '{"step": 2, "tr'
    row = json.loads(lines[2])
    assert row.pop("time") > 1e9
    assert row == {"step": 2, "samples": 64, "epoch": 0, "attempt": 1, "train/loss": 0.25, "grad_norm": None}
    file.close()
