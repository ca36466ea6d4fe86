"""The keeper's decisions alone; tests/submit performs it as a process, with signals and stand-ins for Slurm."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from starts import start
from waiting import wait_for

from cluster_ddp.job import JobSpec
from cluster_ddp.launch.keeper.allocation import SlurmAllocation
from cluster_ddp.launch.keeper.batch_host import BatchHost
from cluster_ddp.launch.keeper.deciding import job_action_for
from cluster_ddp.launch.keeper.end_of_job import EndOfJob
from cluster_ddp.launch.keeper.job_step import with_attempt
from cluster_ddp.run.ending import Action
from cluster_ddp.run.runs import create_run

PROJECT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("action", "reason", "cannot_decide", "job_action"),
    [
        ("done", None, False, "end"),
        ("done", "preemption", True, "end"),
        ("stop", "cancel", False, "end"),
        ("stop", "terminated", False, "end"),
        ("requeue", None, False, "requeue"),
        ("requeue", "time-limit", False, "requeue"),
        ("requeue", "requeued", True, "requeue"),
        ("requeue", "cancel", False, "end"),
        (None, "time-limit", True, "requeue"),
        (None, "cancel", True, "end"),
        (None, None, False, "fail"),
        ("fail", None, False, "fail"),
        ("fail", "time-limit", True, "fail"),
        ("stall", "preemption", False, "fail"),
    ],
)
def test_the_job_action(action: Action | None, reason: str | None, cannot_decide: bool, job_action: str) -> None:
    assert job_action_for(action, reason=reason, cannot_decide=cannot_decide) == job_action


def test_a_keeper_that_gets_no_more_threads_does_without(monkeypatch: pytest.MonkeyPatch) -> None:
    """The user has as many processes as ulimit -u allows: it ended in a traceback, and the run was LOST."""

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert BatchHost().within(60, lambda: "decided") == "decided"


def test_what_takes_long_is_not_waited_for_once_there_is_no_time() -> None:
    blocked, began = threading.Event(), time.monotonic()
    assert BatchHost().within(60, blocked.wait, unless=lambda: True) is None
    assert time.monotonic() - began < 20
    blocked.set()


def test_an_error_of_what_is_waited_for_is_raised_at_once() -> None:
    began = time.monotonic()
    with pytest.raises(OSError, match="away"):
        BatchHost().within(60, _raise)
    assert time.monotonic() - began < 20


def test_what_the_keeper_says_does_not_hold_it_up() -> None:
    """The job's output is in the run directory: storage that hangs kept it from requeueing the job."""
    code = (
        "import os, sys; from cluster_ddp.launch.keeper.batch_host import say;"
        "from cluster_ddp.process import fast_exit;"
        "say('x' * (1 << 20)); say('and more'); fast_exit(3, at_once=True)"
    )
    reading, writing = os.pipe()  # which takes less than that
    done = subprocess.run([sys.executable, "-c", code], stdout=writing, stderr=writing, timeout=60)
    os.close(writing)
    os.close(reading)
    assert done.returncode == 3


def test_a_look_at_storage_that_blocks_is_given_up_and_not_repeated_while_it_is_blocked() -> None:
    host, back, ended = BatchHost(), threading.Event(), threading.Event()
    assert host.glance(lambda: "seen") == "seen"
    with pytest.raises(OSError, match="away"):
        host.glance(_raise)
    assert host.glance(lambda: back.wait(60) and ended.set()) is None
    assert host.glance(_raise) is None
    back.set()
    assert ended.wait(60)
    wait_for(lambda: host.glance(lambda: "seen again") == "seen again", seconds=60)


def _raise() -> None:
    raise OSError("away")


class _Clock(BatchHost):
    """A batch host whose time is set by hand, and on which nothing runs in the background."""

    time = 0.0

    def now(self) -> float:
        return self.time

    def in_background(self, do: Callable[[], None]) -> None:
        do()


class _Asked(SlurmAllocation):
    """An allocation that counts how often it is asked ahead; from the third time on, Slurm ends the job."""

    times = 0

    def ask_ahead(self) -> bool:
        self.times += 1
        return self.times > 2

    def end(self, since: float, seconds: float) -> tuple[str, float | None] | None:
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
        "import sys, cluster_ddp.launch.keeper.keeper;"
        "print(*sorted({'torch', 'pydantic', 'yaml', 'rich', 'typer', 'numpy'} & set(sys.modules)))"
    )
    environment = {**os.environ, "PYTHONPATH": str(PROJECT)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True, timeout=120
    )
    assert done.stdout == "\n"


def test_what_deciding_needs_is_loaded_while_the_step_runs(tmp_path: Path) -> None:
    """Between SIGTERM and SIGKILL there may be 5 s, on a machine that is busy with the save."""
    spec = JobSpec(name="a", task="cluster_ddp.tasks.digits:Digits", launch={"procs_per_node": 1})
    run = create_run(spec, runs_dir=tmp_path, via="sbatch", script="#!/bin/bash\n")
    environment = {
        **os.environ,
        "PYTHONPATH": f"{PROJECT}:{Path(__file__).parent}:{PROJECT}/tests/run",
        "PATH": "/nowhere",
    }
    done = subprocess.run(
        [sys.executable, "-c", _ONE_LIFE, str(run.path)],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    assert done.stdout.splitlines() == ["before the step: False", "at the signal: True"]


_ONE_LIFE = """
import sys
from pathlib import Path
import simulated_job, simulated_world
from cluster_ddp.run.directory import RunDirectory

class Host(simulated_job.SimulatedHost):
    def start_job_step(self, *arguments, **named):
        print("before the step:", "pydantic" in sys.modules)
        return super().start_job_step(*arguments, **named)

    def _happen(self, word):
        print("at the signal:", "pydantic" in sys.modules)
        super()._happen(word)

simulated_job.SimulatedHost = Host
life = simulated_world.Life(((10.0, "preemption"),))
simulated_job.live(simulated_world.World(RunDirectory(Path(sys.argv[1])), 0, life))
"""


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
