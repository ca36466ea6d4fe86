"""The command `clean`: what it removes of old runs, and above all what it does not."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from checkpoint_cases import checkpointer, save
from torch import nn

from cluster_ddp.cli import app
from cluster_ddp.job import JobSpec, dump_resolved
from cluster_ddp.run.attempt import begin_attempt
from cluster_ddp.run.attempt_record import end_attempt
from cluster_ddp.run.directory import RunDirectory, steps_in
from cluster_ddp.run.events import COMPLETED, STOPPED, EventWriter, login_writer
from cluster_ddp.run.sweep import Element, SweepDirectory, SweepRecord, change_sweep

DAY = 86400
Clean = Callable[..., tuple[int, str, str]]
MakeRun = Callable[..., RunDirectory]


@pytest.fixture
def clean(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Clean:
    """Call ``cluster-ddp clean``; the exit status and what it said."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CLUSTER_DDP_RUNS", str(tmp_path))

    def called(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["cluster-ddp", "clean", *arguments])
        status = app.main()
        said = capfd.readouterr()
        return status, said.out, said.err

    return called


@pytest.fixture
def make(tmp_path: Path) -> MakeRun:
    """Make a run with three checkpoints, the first of which is the best, in which nothing happened for so many days."""

    def made(
        name: str = "digits", *, end: str | None = COMPLETED, days: int = 40, path: Path | None = None
    ) -> RunDirectory:
        run = RunDirectory(path or tmp_path / f"{name}-20260101-000000-abcd")
        for folder in (run.events, run.attempts, run.checkpoints):
            folder.mkdir(parents=True)
        record = {"id": run.id, "name": name, "created": 0, "via": "local", "wandb_id": "1"}
        run.record_file.write_text(json.dumps(record))
        spec = JobSpec(
            name=name,
            task="cluster_ddp.tasks.digits:Digits",
            train={"steps": 30},
            checkpoint={"keep_best": {"metric": "val/accuracy"}},
        )
        run.job_file.write_text(dump_resolved(spec))
        attempt = begin_attempt(run, host=os.uname().nodename, pid=0 if end else os.getpid(), nodes=1, procs=1)
        target = checkpointer(run.checkpoints, run_id=run.id)
        for step in (10, 20, 30):
            tensors = {f"model.{key}": value for key, value in nn.Linear(4, 4).state_dict().items()}
            save(target, step, tensors, **{"val/accuracy": 1 - step / 100})
        target.finish()
        if end:
            EventWriter(run, login_writer()).write(end, attempt=0, step=30, reason="asked")
            end_attempt(attempt)
        then = time.time() - days * DAY
        for path in sorted(run.path.rglob("*"), reverse=True):
            os.utime(path, (then, then))
        os.utime(run.path, (then, then))
        return run

    return made


def test_only_yes_removes_and_the_last_and_the_best_stay(clean: Clean, make: MakeRun) -> None:
    run = make()
    status, out, err = clean()
    assert status == 0 and "step-00000020" in out and out.count("step-") == 1 and "--yes removes" in err
    assert steps_in(run.checkpoints) == [10, 20, 30]
    clean("--yes")
    assert steps_in(run.checkpoints) == [10, 30]
    assert not [path for path in run.checkpoints.iterdir() if path.name.startswith("tmp-")]


@pytest.mark.parametrize(("option", "left"), [("--keep-best", [10]), ("--all", [])])
def test_more_goes_only_when_told(clean: Clean, make: MakeRun, option: str, left: list[int]) -> None:
    run = make()
    clean("--yes", option)
    assert steps_in(run.checkpoints) == left


def test_runs_of_sweeps_are_cleaned_like_others(clean: Clean, make: MakeRun, tmp_path: Path) -> None:
    names = [f"000{number}-lr={number}" for number in range(3)]
    elements = tuple(Element(name, (f"train.lr={number}",)) for number, name in enumerate(names))
    for sweep_id in ("first-sweep-1", "second-sweep-2"):
        sweep = SweepDirectory(tmp_path / sweep_id)
        sweep.path.mkdir()
        change_sweep(sweep, lambda _, sweep_id=sweep_id: SweepRecord(sweep_id, 0.0, elements))
        for name in names[:2]:
            make(path=sweep.path / name)
    (tmp_path / "first-sweep-1" / names[2]).symlink_to(make("elsewhere").path)
    (tmp_path / "damaged-sweep-3").mkdir()
    (tmp_path / "damaged-sweep-3" / "sweep.json").write_text("{")
    status, out, err = clean()
    assert status == 0 and out.count("step-00000020") == 5 and "note: damaged-sweep-3: " in err
    assert f"second-sweep-2/{names[1]}/checkpoints/step-00000020" in out
    clean("--yes", "second-sweep")
    left = {path: steps_in(RunDirectory(path.parent).checkpoints) for path in tmp_path.glob("*/*/run.json")}
    assert sorted(path.parts[-3] for path, steps in left.items() if steps == [10, 30]) == ["second-sweep-2"] * 2


def test_what_is_young_resumable_or_alive_stays(clean: Clean, make: MakeRun) -> None:
    runs = [make("young", days=3), make("stopped", end=STOPPED), make("alive", end=None)]
    clean("--yes", "--all")
    assert [steps_in(run.checkpoints) for run in runs] == [[10, 20, 30]] * 3
    clean("--yes", "--all", "--resumable")
    assert [steps_in(run.checkpoints) for run in runs] == [[10, 20, 30], [], [10, 20, 30]]


def test_the_last_that_is_kept_is_an_intact_one(clean: Clean, make: MakeRun) -> None:
    run = make()
    for step in (10, 30):
        (shard,) = (run.checkpoints / f"step-000000{step}").glob("shard-*")
        data = bytearray(shard.read_bytes())
        data[-1] ^= 1
        about = shard.stat()
        shard.write_bytes(data)
        os.utime(shard, (about.st_atime, about.st_mtime))
    clean("--yes")
    assert steps_in(run.checkpoints) == [10, 20, 30], "20 is the only intact one"


def test_nothing_is_removed_through_a_link(clean: Clean, make: MakeRun, tmp_path: Path) -> None:
    run, elsewhere = make(), tmp_path / "elsewhere"
    (run.checkpoints / "step-00000020").rename(elsewhere)
    (run.checkpoints / "step-00000020").symlink_to(elsewhere)
    clean("--yes", "--all", "--older", "0s")
    assert sorted(path.name.split("-")[0] for path in elsewhere.iterdir()) == ["manifest.json", "shard"]
    other = make("linked")
    other.checkpoints.rename(tmp_path / "moved")
    other.checkpoints.symlink_to(tmp_path / "moved")
    status, _, err = clean("--yes", "--all", "--older", "0s")
    assert status == 0 and "is a link" in err
    assert steps_in(tmp_path / "moved") == [10, 20, 30]


def test_a_run_with_a_file_in_place_of_a_folder_is_named_and_others_are_cleaned(clean: Clean, make: MakeRun) -> None:
    fine, *damaged = make("fine"), make("a").attempts, make("b").checkpoints
    for folder in damaged:
        folder.rename(folder.with_suffix(".moved"))
        folder.touch()
    status, _, err = clean("--yes", "--all", "--older", "0s")
    assert status == 0 and steps_in(fine.checkpoints) == []
    assert all(f"is left alone: {folder} is not a folder" in err for folder in damaged)


def test_a_wrong_age_is_told(clean: Clean) -> None:
    status, _, err = clean("--older", "soon")
    assert status == 2 and "--older 'soon'" in err
