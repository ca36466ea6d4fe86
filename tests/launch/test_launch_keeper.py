"""The keeper's decisions alone; tests/submit performs it as a process, with signals and stand-ins for Slurm."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from starts import start

from cluster_ddp.launch.allocation import SlurmAllocation
from cluster_ddp.launch.batch_host import BatchHost
from cluster_ddp.launch.end_of_job import EndOfJob
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


class _Clock(BatchHost):
    """A batch host whose time is set by hand, and on which nothing runs beside."""

    time = 0.0

    def now(self) -> float:
        return self.time

    def beside(self, do: Callable[[], None]) -> None:
        do()


class _Asked(SlurmAllocation):
    """An allocation that counts how often it is asked ahead; from the third time on, Slurm ends the job."""

    times = 0

    def ask_ahead(self) -> bool:
        self.times += 1
        return self.times > 2

    def end(self, since: float) -> tuple[str, float | None] | None:
        return "time-limit", None


def test_slurm_is_asked_now_and_then_when_the_job_ends() -> None:
    """Its time limit may be changed; and a signal that was lost is made up for."""
    host, allocation = _Clock(), _Asked(start())
    end = EndOfJob(allocation, host, warning=signal.SIGUSR1)
    end.ask_ahead()
    asked = []
    for host.time in (0.0, 299.0, 300.0, 301.0, 599.0, 600.0):
        end.react_to_next(wait=0.0)
        asked.append(allocation.times)
    assert asked == [1, 1, 2, 2, 2, 3]
    end.react_to_all()
    assert end.reason == "time-limit"


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
