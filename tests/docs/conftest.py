"""Starting programs as a reader of the pages would."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from documented import PROJECT, Call

from cluster_ddp.cli import app

OTHERS = "SLURM_", "CLUSTER_DDP_"  # variables of a job or a run in which the tests may be running


@pytest.fixture
def call(tmp_path: Path) -> Iterator[Call]:
    """Start a Python module as a program in `tmp_path`, on CPUs, with more variables if given."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(OTHERS)}
    environment |= {"PYTHONPATH": str(PROJECT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    environment |= {"GLOO_SOCKET_IFNAME": "lo", "COLUMNS": "200"}
    started: list[subprocess.Popen[str]] = []

    def start(*arguments: str, **variables: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-m", *arguments],
            cwd=tmp_path, env=environment | variables, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()


@pytest.fixture
def ask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Give ``cluster-ddp`` a command that starts nothing, in this process and in `tmp_path`; what it printed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    for name in [name for name in os.environ if name.startswith(OTHERS)]:
        monkeypatch.delenv(name)

    def asked(*arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", ["cluster-ddp", *arguments])
        status = app.main()
        said = capfd.readouterr()
        assert status == 0, said
        return f"{said.out}{said.err}"

    return asked
