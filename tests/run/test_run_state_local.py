"""The states of a local run: it is alive while its process is."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import pytest
from run_builders import begin, begin_dead, hide, state_of

from cluster_ddp.run.attempt import request_resume
from cluster_ddp.run.attempt_record import end_attempt
from cluster_ddp.run.directory import RunDirectory
from cluster_ddp.run.run_state import RunState
from cluster_ddp.run.status.report import describe
from cluster_ddp.run.stopfile import request_stop

Say = Callable[..., None]


def test_a_local_run_is_alive_while_its_process_is(run: RunDirectory, say: Say) -> None:
    assert state_of(run) == "PENDING"
    attempt = begin(run)
    assert state_of(run) == "RUNNING"
    request_stop(attempt, reason="person", by="me")
    assert describe(run, {}).reason == "stopping: asked by me"
    say("stopped", 0, step=5, reason="person")
    assert state_of(run) == "RUNNING"  # it is still tearing down: a resume now would be refused
    end_attempt(attempt)
    assert state_of(run) == "STOPPED"


def test_a_local_run_whose_process_is_gone_without_a_word_is_lost(run: RunDirectory, say: Say) -> None:
    begin_dead(run)
    say("started", 0, at=0, step=0)
    assert state_of(run, {}) == "LOST"


def test_a_local_run_that_could_not_begin_does_not_wait_for_ever(
    run: RunDirectory, say: Say, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = time.time()
    assert state_of(run) == "PENDING"  # made a moment ago
    monkeypatch.setattr("cluster_ddp.run.status.starting.time.time", lambda: now + 100)
    assert state_of(run) == "LOST"
    end_attempt(begin_dead(run))
    say("stopped", 0, step=5, reason="person")
    request_resume(run, by="me")
    monkeypatch.setattr("cluster_ddp.run.status.starting.time.time", lambda: now + 10)
    assert state_of(run) == "PENDING"
    monkeypatch.setattr("cluster_ddp.run.status.starting.time.time", lambda: now + 200)
    assert state_of(run) == "STOPPED"  # as before: whoever resumed it was refused a folder, or killed


def test_a_local_run_on_another_machine_is_told_as_last_known(run: RunDirectory, say: Say) -> None:
    begin(run)
    hide(run, 0)
    found = describe(run, {})
    assert found.state is RunState.RUNNING and "n7, which cannot be checked from here" in str(found.reason)
    say("node-started", 0, node=0, host="n7")
    (alive := run.attempt(0).alive_file(0)).touch()
    os.utime(alive, (time.time() - 190,) * 2)  # as when the machine has lost power
    assert "last known state; no sign of life from n7 for 3 min" in str(describe(run, {}).reason)
    say("stopped", 0, step=5, reason="person")
    assert state_of(run) == "STOPPED"
