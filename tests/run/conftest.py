from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from failure_causes import with_cause
from hostile_runs import Commands, make_bad_run, make_neighbour
from run_builders import job

from cluster_ddp.cli import app
from cluster_ddp.run.directory import RunDirectory
from cluster_ddp.run.runs import create_run

Say = Callable[..., None]


@pytest.fixture
def runs_dir(tmp_path: Path) -> Path:
    return tmp_path / "runs"


@pytest.fixture
def run(runs_dir: Path) -> RunDirectory:
    return create_run(job(), runs_dir=runs_dir, via="local", script=None)


@pytest.fixture
def say(run: RunDirectory) -> Say:
    """Put an event into the run's history, at a time of one's choice (seconds from the first)."""
    origin = time.time() - 10_000

    def write(
        event: str, attempt: int | None = None, *, at: float | None = None, writer: str = "w", **fields: Any
    ) -> None:
        moment = time.time() if at is None else origin + at
        line = json.dumps({"time": moment, "event": event, "attempt": attempt, **with_cause(event, fields)})
        with (run.events / f"{writer}.jsonl").open("a") as file:
            file.write(line + "\n")

    return write


@pytest.fixture
def ddp(
    runs_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Callable[..., subprocess.CompletedProcess[str]]:
    """The command, called in this process, on a machine whose PATH holds no Slurm but that of the test."""
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("CLUSTER_DDP_RUNS", str(runs_dir))

    def call(*arguments: str) -> subprocess.CompletedProcess[str]:
        capfd.readouterr()
        with monkeypatch.context() as here:
            here.setenv("PATH", str(tmp_path / "bin"))
            here.setattr(sys, "argv", ["cluster-ddp", *arguments])
            status = app.main()
        said = capfd.readouterr()
        return subprocess.CompletedProcess(arguments, status, said.out, said.err)

    return call


@pytest.fixture(scope="module")
def commands(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Commands]:
    called = Commands(tmp_path_factory.mktemp("hostile"))
    yield called
    called.end()


@pytest.fixture
def folder(commands: Commands) -> Iterator[Path]:
    """The folder in which `commands` are called, with a run that has done something, and a healthy neighbour."""
    make_neighbour(commands.runs)
    make_bad_run(commands.runs)
    yield commands.runs
    shutil.rmtree(commands.runs)
