"""Which state a run is in once its last attempt is over: how that ended, and what should have followed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from run_builders import begin, begin_dead, hide, slurm_job, state_of

from cluster_ddp.run.attempt_record import end_attempt
from cluster_ddp.run.directory import RunDirectory
from cluster_ddp.run.record import add_slurm_job
from cluster_ddp.run.run_state import RunState
from cluster_ddp.run.status.report import describe
from cluster_ddp.run.stopfile import request_stop

Say = Callable[..., None]


@pytest.mark.parametrize(
    ("events", "state", "reason"),
    [
        ([("completed", {"step": 300})], "COMPLETED", None),
        ([("stopped", {"step": 5, "reason": "time-limit"})], "LOST", "time-limit"),  # and not queued again
        ([("stopped", {"step": 5, "reason": "person"})], "STOPPED", "person"),
        ([("stopped", {"step": 5, "reason": "cancel"})], "CANCELLED", "cancelled"),
        ([("cancelled", {"by": "me@login"})], "CANCELLED", "me@login"),
        ([("failed", {"error": "ValueError: x", "rank": 1, "node": 3})], "FAILED", "rank 1 on node 3 failed: ValueErr"),
        ([("failed", {"error": "this is lost:\n  a: 1", "rank": 1})], "FAILED", "rank 1 failed: this is lost: a: 1"),
        ([("failed", {"error": "ImportError: \n\nmissing:\n a", "rank": 1})], "FAILED", "ImportError: missing: a"),
        ([("rank-failed", {"error": "ended by SIGKILL", "signal": "SIGKILL", "rank": 2})], "FAILED", "SIGKILL"),
        ([("stalled", {"reason": "3 attempts"})], "STALLED", "3 attempts"),
        ([("hang", {"reason": "no step for 60 s"})], "FAILED", "no step for 60 s"),
        ([("failed", {"error": "ValueError: x"}), ("hang", {"reason": "rank 1 hangs"})], "FAILED", "ValueError: x"),
        ([("failed", {"error": "timed out"}), ("hang", {"reason": "rank 1 hangs"})], "FAILED", "rank 1 hangs"),
        ([("hang", {"reason": "rank 1 hangs"}), ("stopped", {"reason": "hang"})], "FAILED", "rank 1 hangs"),
        ([("hang", {"step": 4, "reason": "behind"}), ("hang", {"step": 5, "reason": "ahead"})], "FAILED", "behind"),
        (
            [("hang", {"step": 5, "stopped": True, "reason": "stopped"}), ("hang", {"step": 4, "reason": "behind"})],
            "FAILED",
            "stopped",
        ),
        ([], "LOST", "Slurm no longer knows its job 7"),
    ],
)  # fmt: skip
def test_a_job_that_slurm_has_forgotten_is_judged_by_the_runs_own_events(
    run: RunDirectory, say: Say, events: list[tuple[str, dict[str, Any]]], state: str, reason: str | None
) -> None:
    begin(run, slurm_job_id="7")
    hide(run, 0)
    say("started", 0, at=0, step=0, total_steps=300)
    for name, fields in events:
        say(name, 0, **fields)
    found = describe(run, {})
    assert found.state.value == state
    assert found.reason is None if reason is None else reason in str(found.reason)


def test_an_end_that_only_slurm_knows_is_told_with_its_reason_and_the_output(run: RunDirectory, say: Say) -> None:
    """As when the run directory was renamed, and Slurm cannot open the job's output when it starts it again."""
    begin(run, slurm_job_id="7")
    hide(run, 0)
    found = describe(run, {"7": slurm_job("FAILED", "JobLaunchFailure", run_id=run.id)})
    assert found.state is RunState.LOST
    assert "ended as FAILED (Slurm: JobLaunchFailure)" in str(found.reason) and "(see slurm-7.out)" in str(found.reason)


@pytest.mark.parametrize("state", ["FAILED", "NODE_FAIL", "PREEMPTED", "COMPLETED", "DEADLINE"])
def test_a_restart_that_left_no_word_is_told_apart_from_the_stop_before_it(
    run: RunDirectory, say: Say, state: str
) -> None:
    """Slurm could not open the job's output, for one: the batch host has the run directory read-only, or not at all.

    Newer versions call a job PREEMPTED that has once been so, however its last start has ended. COMPLETED it is after
    the last attempt's own exit, where a controller that died at once has forgotten that it took the requeue.
    """
    begin(run, slurm_job_id="7")
    hide(run, 0)
    say("stopped", 0, step=5, reason="time-limit")
    say("node-finished", 0, node=0, outcome="stopped", reason="time-limit")
    say("requeued", 0, reason="stopped: time-limit")
    (run.path / "slurm-7.out").write_text("No module named 'cluster_ddp.launch'\n")  # or it is being installed again
    found = describe(run, {"7": slurm_job(state, "NonZeroExitCode", run_id=run.id)})
    assert found.state is RunState.LOST
    assert f"ended as {state} (Slurm: NonZeroExitCode) before an attempt started" in str(found.reason)
    told = "slurm-7.out ends with: No module named" in str(found.reason) and "run directory" in str(found.reason)
    assert told == (state not in ("DEADLINE", "COMPLETED", "NODE_FAIL"))
    assert ("its partition was removed" in str(found.reason)) == (state == "NODE_FAIL")
    assert ("forgotten the requeue" in str(found.reason)) == (state == "COMPLETED")
    assert str(found.reason).endswith(f"cluster-ddp resume {run.path}")
    assert state_of(run, {"7": slurm_job("PENDING", run_id=run.id)}) == "REQUEUED"


def test_a_waiting_job_whose_partition_was_removed_is_resumed_in_another(run: RunDirectory, say: Say) -> None:
    begin(run, slurm_job_id="7")
    hide(run, 0)
    say("stopped", 0, step=5, reason="preemption")
    say("requeued", 0, reason="stopped: preemption")
    found = describe(run, {"7": slurm_job("NODE_FAIL", "PartitionDown", run_id=run.id)})
    assert found.state is RunState.LOST and "slurm.partition=NAME" in str(found.reason)
    assert "may not have been able" not in str(found.reason)


@pytest.mark.parametrize("reason", ["terminated", "time-limit"])
def test_a_stop_whose_job_was_cancelled_is_the_cancel_that_slurm_tells_of(
    run: RunDirectory, say: Say, reason: str
) -> None:
    """A SIGTERM that nobody explained, or a warning with a cancel after it, within which the keeper was killed."""
    begin(run, slurm_job_id="7")
    hide(run, 0)
    say("stopped", 0, step=5, reason=reason)
    say("node-finished", 0, node=0, outcome="stopped", reason=reason)
    assert describe(run, {"7": slurm_job("CANCELLED", run_id=run.id)}).state is RunState.CANCELLED


def test_a_run_whose_keeper_was_killed_is_not_judged_for_ever(run: RunDirectory, say: Say) -> None:
    begin(run, slurm_job_id="7")
    hide(run, 0)
    say("rank-failed", 0, at=9_600, rank=1, host="n2", signal="SIGKILL", error="ended by SIGKILL")
    say("node-finished", 0, at=9_600, node=0, outcome="failed")
    assert state_of(run, None) == "FAILED"
    found = describe(run, {"7": slurm_job("FAILED", "RaisedSignal:9(Killed)", run_id=run.id)})
    assert found.state is RunState.FAILED and "SIGKILL; its keeper was killed, or its node failed" in str(found.reason)
    assert f"To continue: cluster-ddp resume {run.path}" in str(found.reason)


@pytest.mark.parametrize("reason", ["terminated", "preemption", "time-limit"])
def test_a_run_whose_keeper_was_killed_is_lost_although_training_could_save(
    run: RunDirectory, say: Say, reason: str
) -> None:
    """Slurm ends the step of a batch process that is gone: nobody has stopped the run, and nothing brings it back."""
    attempt = begin(run, slurm_job_id="7")
    hide(run, 0)
    say("stop-requested", 0, reason=reason, node=0, by="SIGTERM to node 0 (n1)")
    say("stopped", 0, step=15, reason=reason)
    say("node-finished", 0, node=0, outcome="stopped", reason=reason)
    assert state_of(run, {"7": slurm_job("COMPLETING", run_id=run.id)}) == "RUNNING"
    for jobs in ({"7": slurm_job("PREEMPTED", run_id=run.id)}, {}):
        found = describe(run, jobs)
        assert found.state is RunState.LOST
        assert str(found.reason).startswith("Slurm job 7 ended as PREEMPTED: " if jobs else "its keeper")
        assert f"killed before it requeued the job; training stopped: {reason}. To continue:" in str(found.reason)
    if reason == "terminated":
        assert state_of(run, {"7": slurm_job("CANCELLED", run_id=run.id)}) == "CANCELLED"
    end_attempt(attempt)
    assert state_of(run, {"7": slurm_job("FAILED", run_id=run.id)}) == "STOPPED", "its keeper has seen it to its end"


def test_a_run_whose_keeper_was_killed_before_its_ranks_could_say_anything_is_lost(run: RunDirectory) -> None:
    """As where submitit's program is killed, whose job step Slurm kills at once."""
    begin(run, slurm_job_id="7")
    hide(run, 0)
    or_moved = ", or Slurm could not open its output in the run directory"
    for reason, doubt in (
        ("RaisedSignal:9(Killed)", ""),
        ("RaisedSignal:53(Real-time signal 19)", or_moved),
        ("JobLaunchFailure", or_moved),  # either of them in 22.05
    ):
        found = describe(run, {"7": slurm_job("FAILED", reason, run_id=run.id)})
        assert found.state is RunState.LOST
        assert f"its keeper was killed{doubt}, and training left no" in str(found.reason)
        assert f"To continue: cluster-ddp resume {run.path}" in str(found.reason)


def test_a_run_that_a_person_stops_as_it_is_queued_again_is_stopped(run: RunDirectory, say: Say) -> None:
    attempt = begin(run, slurm_job_id="7")
    hide(run, 0)
    say("node-finished", 0, node=0, outcome="stopped")
    say("requeued", 0, reason="stopped: time-limit")
    end_attempt(attempt)
    assert state_of(run, {"7": slurm_job("FAILED", run_id=run.id)}) == "LOST"
    request_stop(attempt, reason="person", level=1, by="me")
    assert state_of(run, {"7": slurm_job("FAILED", run_id=run.id)}) == "STOPPED"


def test_a_scancel_of_the_requeued_job_is_a_cancel(run: RunDirectory, say: Say) -> None:
    begin_dead(run, slurm_job_id="7")
    say("stopped", 0, step=5, reason="preemption")
    say("requeued", 0, reason="stopped: preemption")
    found = describe(run, {"7": slurm_job("CANCELLED")})
    assert found.state is RunState.CANCELLED
    assert found.reason is not None and "7" in found.reason


def test_of_a_chain_whose_next_job_has_been_cancelled_it_is_said_that_nothing_continues_it(
    run: RunDirectory, say: Say
) -> None:
    for job_id in ("7", "8"):
        add_slurm_job(run, job_id)
    attempt = begin_dead(run, slurm_job_id="7")
    say("stopped", 0, step=5, reason="time-limit")
    end_attempt(attempt)
    found = describe(run, {"7": slurm_job("COMPLETED"), "8": slurm_job("CANCELLED")})
    assert found.state is RunState.STOPPED and found.reason is not None
    assert "Slurm job 8 of its chain was to continue it, and is no longer in the queue" in found.reason
    assert f"cluster-ddp resume {run.path}" in found.reason
    assert describe(run, {"8": slurm_job("PENDING", "Dependency")}).state is RunState.REQUEUED
    add_slurm_job(run, "9")
    say("start-refused", 0, slurm_job_id="8", message="Slurm job 8 was started while attempt 0 was alive")
    assert "Slurm job 9 of its chain was to continue it" in str(describe(run, {}).reason)
    assert describe(run, None).reason == "stopped: time-limit"  # Slurm cannot be queried
