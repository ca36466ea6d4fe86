"""A save that does not fit into the grace: what `status` says of it, and how often the next attempt saves."""

from __future__ import annotations

import time
from typing import Any

import pytest
from run_builders import begin, begin_dead

from cluster_ddp.job import CheckpointSpec, JobSpec
from cluster_ddp.run.attempt_record import end_attempt
from cluster_ddp.run.directory import RunDirectory
from cluster_ddp.run.history import read_history
from cluster_ddp.run.status.report import describe
from cluster_ddp.run.unfinished import failed_save, seconds_between_saves
from cluster_ddp.train.ranks.distributed import World
from cluster_ddp.train.saving import Saving

Say = Any


def attempt_cut_short(run: RunDirectory, say: Say, number: int = 0, at: float = 0, **asked: Any) -> None:
    """An attempt that trains for 100 s, saves once in 8 s, and begins a save of step 117 that is not there."""
    end_attempt(begin_dead(run, slurm_job_id="7", restart_count=number))
    say("started" if number == 0 else "resumed", number, at=at, step=0)
    say("checkpoint", number, at=at + 20, step=10, samples=100, seconds=8.2)
    say("stop-requested", number, at=at + 99, node=0, level=2, **{"reason": "preemption", "grace": 4.0, **asked})
    say("stop-requested", number, at=at + 100, step=117, reason=asked.get("reason", "preemption"))


def warning(run: RunDirectory) -> str:
    (said,) = describe(run, {}).warnings
    return said


def test_status_says_what_was_not_finished_how_long_it_takes_and_what_to_set(run: RunDirectory, say: Say) -> None:
    attempt_cut_short(run, say)
    assert warning(run).startswith("save of step 117 not finished within 4 s of grace; a save takes about 8.2 s here. ")
    assert "Set checkpoint.every_steps or checkpoint.every_minutes" in warning(run)
    attempt_cut_short(run, say, 1, at=1000, reason="time-limit", grace=None)
    end_attempt(begin(run, slurm_job_id="7", restart_count=2))
    assert "not finished before the job ended" in warning(run)
    assert "Set requeue.warning for more time, or checkpoint.every_steps" in warning(run)


@pytest.mark.parametrize("word", ["stopped", "checkpoint", "checkpoint-failed"])
def test_a_save_that_came_to_an_end_is_none(run: RunDirectory, say: Say, word: str) -> None:
    attempt_cut_short(run, say)
    say(word, 0, at=103, step=117)
    assert describe(run, {}).warnings == ()
    assert seconds_between_saves(read_history(run)) is None


def test_a_save_that_a_second_try_made_durable_is_not_said_to_have_failed(run: RunDirectory, say: Say) -> None:
    begin(run)
    for step in (4, 11):
        failed = {"step": step, "file": "manifest", "rank": 0, "error": "Broken pipe"}
        say("checkpoint-failed", 0, **failed)
        say("warning", 0, message=f"{failed_save(failed)}; training continues; earlier checkpoints are kept")
    say("checkpoint", 0, step=11)
    assert [said.partition(" (")[0] for said in describe(run, {}).warnings] == ["the save of step 4 failed"]


def test_a_save_that_may_still_be_finished_is_none(run: RunDirectory, say: Say) -> None:
    begin(run)
    say("started", 0, step=0)
    say("stop-requested", 0, node=0, grace=60.0, reason="preemption")
    say("stop-requested", 0, step=117, reason="preemption")
    assert describe(run, {}).warnings == ()


@pytest.mark.parametrize(("every", "seconds"), [({"every_steps": 1000}, 25.0), ({"every_minutes": 10}, 25.0),
                                                ({"every_minutes": 0.1}, 6.0)])  # fmt: skip
def test_the_next_attempt_saves_so_often_that_something_remains(
    run: RunDirectory, say: Say, monkeypatch: pytest.MonkeyPatch, every: dict[str, float], seconds: float
) -> None:
    attempt_cut_short(run, say)
    job = JobSpec(name="x", task="pkg.mod:Task", checkpoint=CheckpointSpec(**every))
    now = time.monotonic()
    monkeypatch.setattr("cluster_ddp.train.saving.time.monotonic", lambda: now)
    saving = Saving(job, run, None, 1, World(0, 0, 1))
    first = Saving(job, run, None, 0, World(0, 0, 1))
    now += seconds - 0.1
    assert not saving.is_wanted()
    now += 0.2
    assert saving.is_wanted()
    assert first.is_wanted() == (every == {"every_minutes": 0.1})


def test_saves_that_take_long_stay_apart(run: RunDirectory, say: Say) -> None:
    attempt_cut_short(run, say)
    say("checkpoint", 0, at=60, step=20, samples=200, seconds=30)
    assert seconds_between_saves(read_history(run)) == 60.0


def test_an_attempt_that_was_killed_while_it_stopped_says_so(run: RunDirectory, say: Say) -> None:
    end_attempt(begin_dead(run, slurm_job_id="7"))
    say("stop-requested", 0, node=1, reason="terminated", by="SIGTERM to node 1 (n2)")
    found = describe(run, {})
    why = "it was killed before it could save, after SIGTERM to node 1 (n2)"
    assert found.state.value == "LOST" and found.reason is not None
    assert found.reason.startswith(f"{why}; Slurm no longer knows its job 7"), found.reason
