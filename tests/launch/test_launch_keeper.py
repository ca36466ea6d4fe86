"""The keeper's decisions alone; tests/submit performs it as a process, with signals and stand-ins for Slurm."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from cluster_ddp.launch.keeper import what_follows
from cluster_ddp.launch.step import with_attempt

PROJECT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("word", "reason", "out_of_time", "follows"),
    [
        ("done", None, False, "end"),
        ("done", "preemption", True, "end"),
        ("stop", "cancel", False, "end"),
        ("stop", "terminated", False, "end"),
        ("requeue", None, False, "start again"),
        ("requeue", "time-limit", False, "start again"),
        ("requeue", "requeued", True, "start again"),
        ("requeue", "cancel", False, "end"),
        (None, "time-limit", True, "start again"),
        (None, "cancel", True, "end"),
        (None, None, False, "fail"),
        ("fail", None, False, "fail"),
        ("fail", "time-limit", True, "fail"),
        ("stall", "preemption", False, "fail"),
    ],
)
def test_what_follows(word: str | None, reason: str | None, out_of_time: bool, follows: str) -> None:
    assert what_follows(word, reason=reason, out_of_time=out_of_time) == follows


def test_what_the_user_wrote_in_braces_stays() -> None:
    step = ["srun", "python", "-m", "x", "--attempt", "{attempt}", "--", "torchrun", "--rdzv-id=7.{attempt}", "t.py"]
    own = ["--attempt", "{attempt}", "--rdzv-id={attempt}"]
    assert with_attempt([*step, *own], 3) == [
        *["srun", "python", "-m", "x", "--attempt", "3", "--", "torchrun", "--rdzv-id=7.3", "t.py"],
        *own,
    ]


def test_the_keeper_starts_quickly_since_it_loads_little() -> None:
    code = (
        "import sys, cluster_ddp.launch.keeper;"
        "print(*sorted({'torch', 'pydantic', 'yaml', 'rich', 'typer', 'numpy'} & set(sys.modules)))"
    )
    environment = {**os.environ, "PYTHONPATH": str(PROJECT)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True, timeout=120
    )
    assert done.stdout == "\n"


def test_outside_of_a_job_it_says_so() -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SLURM")}
    command = [
        sys.executable,
        "-m",
        "cluster_ddp.launch.keeper",
        "--run",
        "/nowhere",
        "--warning",
        "USR1",
        "--",
        "srun",
    ]
    done = subprocess.run(
        command,
        env={**environment, "PYTHONPATH": str(PROJECT)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 2
    assert "SLURM_JOB_ID" in done.stderr
