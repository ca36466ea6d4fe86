"""A step in which no node program comes up: the process of the step is real, and does nothing."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest

from cluster_ddp.launch.keeper import job_step_output, running_job_step
from cluster_ddp.launch.keeper.running_job_step import RunningJobStep
from cluster_ddp.launch.sign_of_life import SignOfLife, SilentNodes
from cluster_ddp.run.directory import AttemptDirectory, RunDirectory
from cluster_ddp.run.stopfile import request_stop


@pytest.fixture
def attempt(tmp_path: Path) -> AttemptDirectory:
    attempt = RunDirectory(tmp_path).attempt(0)
    attempt.path.mkdir(parents=True)
    return attempt


def start(attempt: AttemptDirectory, *, seconds: int = 600) -> RunningJobStep:
    return RunningJobStep(["sleep", str(seconds)], os.environ, attempt, 2, os.getpid())


def ends(step: RunningJobStep, *, within: float = 0.5) -> bool:
    deadline = time.monotonic() + within
    while not step.has_ended():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def test_a_step_that_waits_before_its_first_node_ends_when_the_run_is_stopped(
    attempt: AttemptDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running_job_step, "SILENT_SECONDS", 0.0)
    step = start(attempt)
    assert not ends(step)
    request_stop(attempt, reason="person", by="me")
    assert ends(step) and not step.unstarted
    assert step.killed_by is None, "it was ended here"


def test_an_srun_that_is_killed_is_known(attempt: AttemptDirectory) -> None:
    step = RunningJobStep(["bash", "-c", "kill -KILL $$"], os.environ, attempt, 2, os.getpid())
    assert ends(step, within=60) and step.killed_by == "SIGKILL"


def test_the_output_of_a_process_that_was_left_behind_is_waited_for_once(
    attempt: AttemptDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_step_output, "DRAIN_SECONDS", 0.5)
    step = RunningJobStep(["bash", "-c", "sleep 5 &"], os.environ, attempt, 1, os.getpid())
    assert ends(step, within=60)
    asked = time.monotonic()
    assert step.has_ended()
    assert time.monotonic() - asked < 0.4, "the keeper would take it for storage that hangs"


def test_a_step_in_which_no_node_comes_up_ends_some_time(
    attempt: AttemptDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running_job_step, "START_SECONDS", 0.2)
    step = start(attempt)
    assert ends(step) and step.unstarted


def test_a_step_in_which_no_node_comes_up_ends_also_while_storage_hangs(
    attempt: AttemptDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waited until the time limit."""
    answers = threading.Event()

    def look(nodes: SilentNodes) -> list[int]:
        answers.wait(60)
        return []

    monkeypatch.setattr(SilentNodes, "look", look)
    monkeypatch.setattr(running_job_step, "START_SECONDS", 0.2)
    step = start(attempt)
    looking = threading.Thread(target=step.has_ended)
    looking.start()
    assert not step.end_unbegun()
    time.sleep(0.3)
    assert step.end_unbegun() and step.has_exited and step.unstarted
    assert not step.end_unbegun(), "it has been said"
    answers.set()
    looking.join(60)
    assert step.has_ended() and step.killed_by is None


def test_a_step_whose_srun_somebody_has_stopped_before_any_node_came_up_ends(
    attempt: AttemptDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was waited for during an hour, and each of its nodes was blamed."""
    monkeypatch.setattr(running_job_step, "SILENT_SECONDS", 0.2)
    step = RunningJobStep(["bash", "-c", "kill -STOP $$"], os.environ, attempt, 2, os.getpid())
    assert ends(step, within=60) and step.unstarted and step.stood_still
    assert step.killed_by is None, "it was ended here"


def test_a_step_of_which_a_node_lives_goes_on(attempt: AttemptDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running_job_step, "START_SECONDS", 0.0)
    monkeypatch.setattr(running_job_step, "SILENT_SECONDS", 0.0)
    SignOfLife(attempt.alive_file(1)).give()
    request_stop(attempt, reason="person", by="me")
    step = start(attempt, seconds=1)
    assert not ends(step)
    assert ends(step, within=60), "its process has ended"
