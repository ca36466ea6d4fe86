"""Starting programs as a reader of the pages would."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from documented import PROJECT, Call


@pytest.fixture
def call(tmp_path: Path) -> Iterator[Call]:
    """Start a Python module as a program in `tmp_path`, on CPUs, with more variables if given."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "CLUSTER_DDP_"))}
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
