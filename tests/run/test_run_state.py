"""Which state a run is in, and why: its own events and what Slurm says of its job."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from typing import Any

import pytest
from run_builders import begin, begin_dead, hide, job, slurm_job, state_of

from cluster_ddp.run import status
from cluster_ddp.run.attempt import request_resume
from cluster_ddp.run.attempt_record import end_attempt
from cluster_ddp.run.directory import RunDirectory
from cluster_ddp.run.errors import RunEnded
from cluster_ddp.run.jobs import living_jobs, slurm_job_ids
from cluster_ddp.run.record import add_slurm_job
from cluster_ddp.run.run_state import RunState
from cluster_ddp.run.runs import create_run
from cluster_ddp.run.status import describe
from cluster_ddp.run.stopfile import request_stop
from cluster_ddp.slurm.states import SlurmJob

Say = Callable[..., None]


@pytest.mark.parametrize(
    ("word", "state"),
    [("PENDING", "PENDING"), ("CONFIGURING", "PENDING"), ("RUNNING", "RUNNING"), ("COMPLETING", "RUNNING"),
     ("CANCELLED", "CANCELLED"), ("NODE_FAIL", "LOST"), (None, "LOST")],
)  # fmt: skip
def test_slurms_word_on_a_job_that_has_not_begun_an_attempt(run: RunDirectory, word: str | None, state: str) -> None:
    add_slurm_job(run, "7")
    found = describe(run, {"7": slurm_job(word, "Priority")} if word else {})
    assert found.state.value == state
    if state == "PENDING":
        assert found.reason == "jobs of a higher priority come first (Priority)"
    assert found.slurm_job_id == "7"


@pytest.mark.parametrize(
    ("word", "reason"),
    [
        ("PENDING", "JobHeldUser"),
        ("PENDING", "JobHoldMaxRequeue"),
        ("PENDING", "launch failed requeued held"),
        ("PENDING", "launch_failed_requeued_held"),
        ("PENDING", "user env retrieval failed requeued held"),
        ("PENDING", "launch failure limit exceeded requeued held"),
        ("PENDING", "job requeued in held state"),
        ("REQUEUE_HOLD", "None"),
        ("SPECIAL_EXIT", "job requeued in special exit state"),
        ("RESV_DEL_HOLD", "Reservation r2 was deleted"),
    ],
)
def test_a_held_job_is_not_waiting(run: RunDirectory, say: Say, word: str, reason: str) -> None:
    begin_dead(run, slurm_job_id="7")
    say("stopped", 0, step=5, reason="preemption")
    say("requeued", 0, reason="stopped: preemption")
    found = describe(run, {"7": slurm_job(word, reason)})
    assert found.state.value == "HELD"
    assert found.reason is not None and found.reason.endswith("release it with: scontrol release 7")
    assert (word if reason == "None" else reason) in found.reason
    assert not found.state.open, "status --watch would wait forever"
    own, _ = living_jobs(run, {"7": slurm_job(word, reason, run_id=run.id)})
    assert [job.job_id for job in own] == ["7"]


def test_what_an_administrator_holds(run: RunDirectory) -> None:
    add_slurm_job(run, "7")
    found = describe(run, {"7": slurm_job("PENDING", "JobHeldAdmin")})
    assert found.state.value == "HELD" and found.reason is not None
    assert "ask them for: scontrol release 7" in found.reason


def test_a_requeued_job_is_requeued_then_running(run: RunDirectory, say: Say) -> None:
    begin_dead(run, slurm_job_id="7")
    say("stopped", 0, step=5, reason="preemption")
    say("requeued", 0, reason="stopped: preemption")
    assert state_of(run, {"7": slurm_job("PENDING", "BeginTime")}) == "REQUEUED"
    assert state_of(run, {"7": slurm_job("RESV_DEL_HOLD", "Priority")}) == "REQUEUED"  # it was released
    assert state_of(run, None) == "REQUEUED"  # Slurm cannot be queried: the run's own word
    assert state_of(run, {"7": slurm_job("RUNNING")}) == "RUNNING"
    gone = describe(run, {})
    assert gone.state is RunState.LOST, "it was to come again, and nobody has stopped it"
    assert "preemption; its job was queued again; Slurm no longer knows its job 7: it was cancelled" in str(gone.reason)
    assert f"To continue: cluster-ddp resume {run.path}" in str(gone.reason)


def test_slurm_of_another_cluster_says_nothing(run: RunDirectory, say: Say, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where clusters share their storage, a run was LOST on the other's login node, and resumed while it trained."""
    begin(run, slurm_job_id="7", cluster="alpha")
    hide(run, 0)
    monkeypatch.setattr(status, "cluster_name", lambda: "beta")
    found = describe(run, {})
    assert found.state is RunState.RUNNING and "from here; this is its last known state" in str(found.reason)
    say("stopped", 0, step=5, reason="time-limit")
    say("requeued", 0, reason="stopped: time-limit")
    assert state_of(run, {}) == "REQUEUED"
    assert state_of(run, {"7": slurm_job("RUNNING")}) == "RUNNING", "of a federation"
    request_stop(run.attempt(0), reason="person", by="me")
    assert state_of(run, {}) == "STOPPED", "whatever Slurm would say"
    run.attempt(0).stop_file.unlink()
    for name in ("alpha", None):
        monkeypatch.setattr(status, "cluster_name", lambda name=name: name)
        assert state_of(run, {}) == "LOST"


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


@pytest.mark.parametrize(
    ("output", "words"),
    [
        (None, "(there is no slurm-7.out"),
        ("\n", "(slurm-7.out is empty; a line of launch.setup may have ended the script)"),
        ("loads cuda\nKilled\n\n", "(slurm-7.out ends with: Killed; a line of launch.setup may"),
    ],
)
def test_an_end_before_an_attempt_is_told_with_the_end_of_the_output(
    run: RunDirectory, output: str | None, words: str
) -> None:
    """As after `kill -9 $$` in launch.setup, or `set -n`, with which bash reads the rest without running it."""
    add_slurm_job(run, "7")
    if output is not None:
        (run.path / "slurm-7.out").write_text(output)
    found = describe(run, {"7": slurm_job("FAILED", "JobLaunchFailure", run_id=run.id)})
    assert found.state is RunState.LOST and words in str(found.reason)


def test_an_end_that_only_slurm_knows_is_told_with_its_reason_and_the_output(run: RunDirectory, say: Say) -> None:
    """As when the run directory was renamed, and Slurm cannot open the job's output when it starts it again."""
    begin(run, slurm_job_id="7")
    hide(run, 0)
    found = describe(run, {"7": slurm_job("FAILED", "JobLaunchFailure", run_id=run.id)})
    assert found.state is RunState.LOST
    assert "ended as FAILED (Slurm: JobLaunchFailure)" in str(found.reason) and "(see slurm-7.out)" in str(found.reason)


def test_a_run_whose_requeue_is_delayed_has_not_failed_though_slurm_is_away(run: RunDirectory, say: Say) -> None:
    begin(run, slurm_job_id="7")
    hide(run, 0)
    say("rank-failed", 0, rank=1, host="n2", signal="SIGKILL", error="ended by SIGKILL")
    say("node-finished", 0, node=0, outcome="failed")
    say("requeue-delayed", 0, reason="Slurm's controller does not answer")
    found = describe(run, None)
    assert found.state is RunState.RUNNING and "trying to requeue the job" in str(found.reason)
    killed = describe(run, {"7": slurm_job("TIMEOUT", run_id=run.id)})
    assert killed.state is RunState.FAILED
    assert str(killed.reason).startswith(
        "requeue failed: Slurm's controller does not answer. To continue: cluster-ddp re"
    )
    say("requeue-failed", 0, reason="no answer")
    assert state_of(run, None) == "FAILED"


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
    found = describe(run, {"7": slurm_job(state, "NonZeroExitCode", run_id=run.id)})
    assert found.state is RunState.LOST
    assert f"ended as {state} (Slurm: NonZeroExitCode) before an attempt started" in str(found.reason)
    assert ("run directory" in str(found.reason)) == (state not in ("DEADLINE", "COMPLETED"))
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


def test_a_run_that_is_being_judged_has_not_failed_where_slurm_cannot_be_asked(run: RunDirectory, say: Say) -> None:
    """With the controller away, its keeper takes a minute until it says that the requeue has to wait."""
    begin(run, slurm_job_id="7")
    hide(run, 0)
    say("rank-failed", 0, rank=1, host="n2", signal="SIGKILL", error="ended by SIGKILL")
    say("node-finished", 0, at=9_960, node=0, outcome="failed")
    found = describe(run, None)
    assert found.state is RunState.RUNNING and "what follows is being decided" in str(found.reason)
    assert state_of(run, {}) == "FAILED", "Slurm knows no job that could still decide"
    say("stalled", 0, reason="no progress")
    assert state_of(run, None) == "STALLED"


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
        assert f"killed before it had the job queued again; training stopped: {reason}. To continue:" in str(
            found.reason
        )
    if reason == "terminated":
        assert state_of(run, {"7": slurm_job("CANCELLED", run_id=run.id)}) == "CANCELLED"
    end_attempt(attempt)
    assert state_of(run, {"7": slurm_job("FAILED", run_id=run.id)}) == "STOPPED", "its keeper has seen it to its end"


def test_a_run_whose_keeper_was_killed_before_its_ranks_could_say_anything_is_lost(run: RunDirectory) -> None:
    """As where submitit's program is killed, whose job step Slurm kills at once."""
    begin(run, slurm_job_id="7")
    hide(run, 0)
    for reason in ("RaisedSignal:9(Killed)", "JobLaunchFailure"):  # the latter in 22.05
        found = describe(run, {"7": slurm_job("FAILED", reason, run_id=run.id)})
        assert found.state is RunState.LOST and "its keeper was killed, and training left no" in str(found.reason)
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


def test_a_job_id_that_slurm_gave_to_another_run_since_says_nothing(run: RunDirectory, say: Say) -> None:
    attempt = begin(run, slurm_job_id="7")
    hide(run, 0)
    say("stopped", 0, step=5, reason="time-limit")
    end_attempt(attempt)
    assert state_of(run, {"7": slurm_job("RUNNING", run_id="another-run")}) == "STOPPED"
    assert state_of(run, {"7": slurm_job("RUNNING", run_id=run.id)}) == "RUNNING"
    stranger = slurm_job("RUNNING", run_id="another-run")
    assert living_jobs(run, {"7": stranger}) == ([], [stranger._replace(job_id="7")])
    copied = RunDirectory(shutil.copytree(run.path, run.path.with_name("my-copy")))
    its_original = slurm_job("RUNNING", run_id=run.id)
    assert state_of(copied, {"7": its_original}) == "STOPPED", "`stop` of a copy would be heard by nobody"
    assert living_jobs(copied, {"7": its_original}) == ([], [its_original]), "`cancel` of a copy leaves the original"
    renamed = RunDirectory(run.path.rename(run.path.with_name("my-best")))
    assert state_of(renamed, {"7": slurm_job("RUNNING", run_id=run.id)}) == "RUNNING"


@pytest.mark.parametrize(
    ("comment", "name", "foreign", "state"),
    [
        ("(null)", "digits", True, "LOST"),
        ("(null)", "another", False, "LOST"),
        ("(null)", "digits", False, "RUNNING"),  # a site may replace comments
        ("(null)", "", False, "RUNNING"),  # Slurm has not said
    ],
)
def test_a_job_id_that_slurm_gave_to_any_job_since_says_nothing(
    run: RunDirectory, say: Say, comment: str, name: str, foreign: bool, state: str
) -> None:
    begin(run, slurm_job_id="7")
    hide(run, 0)
    say("submitted", None, via="sbatch", slurm_job_id="7")
    owner = run.record_file.stat().st_uid + foreign
    found = SlurmJob("7", "RUNNING", "None", "n1", comment, None, name, owner)
    assert state_of(run, {"7": found}) == state


def test_a_job_that_was_submitted_by_hand_may_have_any_name(run: RunDirectory) -> None:
    begin(run, slurm_job_id="7")
    hide(run, 0)
    owner = run.record_file.stat().st_uid
    assert state_of(run, {"7": SlurmJob("7", "RUNNING", "None", "n1", "(null)", None, "mine", owner)}) == "RUNNING"


def test_a_copy_of_a_living_run_does_not_say_that_slurm_has_forgotten_the_job(run: RunDirectory) -> None:
    begin(run, slurm_job_id="7")
    hide(run, 0)
    copied = RunDirectory(shutil.copytree(run.path, run.path.with_name("my-copy")))
    found = describe(copied, {"7": slurm_job("RUNNING", run_id=run.id)})
    assert found.state is RunState.LOST and f"this is a copy of {run.path}" in str(found.reason)


def test_without_slurm_a_running_job_is_told_as_last_known(run: RunDirectory, say: Say) -> None:
    add_slurm_job(run, "7")
    assert state_of(run, None) == "PENDING"
    begin(run, slurm_job_id="7")
    hide(run, 0)
    found = describe(run, None)
    assert found.state is RunState.RUNNING and "Slurm cannot be queried about job 7" in str(found.reason)
    say("failed", 0, error="ValueError: x")
    assert state_of(run, None) == "FAILED"


def test_what_a_person_resumed_is_pending_again(run: RunDirectory, say: Say) -> None:
    for ending in ("completed", "stalled", "cancelled"):
        attempt = begin_dead(run, slurm_job_id="7")
        say(ending, attempt.number, step=5)
        assert state_of(run, {}) == ending.upper()
        request_resume(run, by="me")
        assert state_of(run, {"7": slurm_job("PENDING")}) == "PENDING"


def test_a_scancel_of_the_requeued_job_is_a_cancel(run: RunDirectory, say: Say) -> None:
    begin_dead(run, slurm_job_id="7")
    say("stopped", 0, step=5, reason="preemption")
    say("requeued", 0, reason="stopped: preemption")
    found = describe(run, {"7": slurm_job("CANCELLED")})
    assert found.state is RunState.CANCELLED
    assert found.reason is not None and "7" in found.reason


def test_of_a_chain_of_jobs_the_running_one_counts_then_the_next(run: RunDirectory) -> None:
    for job_id in ("7", "8", "9"):
        add_slurm_job(run, job_id)
    begin_dead(run, slurm_job_id="7")
    assert slurm_job_ids(run) == ["7", "8", "9"]
    running = describe(run, {"8": slurm_job("RUNNING"), "9": slurm_job("PENDING", "Dependency")})
    assert (running.state, running.slurm_job_id) == (RunState.RUNNING, "8")
    waiting = describe(
        run, {"7": slurm_job("TIMEOUT"), "8": slurm_job("PENDING", "Dependency"), "9": slurm_job("PENDING")}
    )
    assert (waiting.state, waiting.slurm_job_id) == (RunState.REQUEUED, "8")
    seen = {
        "7": slurm_job("TIMEOUT", run_id=run.id),
        "8": slurm_job("PENDING", run_id=run.id),
        "9": slurm_job("PENDING", run_id=run.id),
    }
    own, others = living_jobs(run, seen)
    assert ([job.job_id for job in own], others) == (["8", "9"], [])


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
    assert describe(run, None).reason == "stopped: time-limit"  # Slurm cannot be queried


def test_a_run_whose_attempts_somebody_has_removed_is_told_by_its_events(run: RunDirectory, say: Say) -> None:
    add_slurm_job(run, "7")
    begin_dead(run, slurm_job_id="7")
    say("node-started", 0, node=0, host="n0")
    shutil.rmtree(run.attempts)
    say("stopped", 0, step=5, reason="time-limit")
    assert describe(run, {"7": slurm_job("PENDING")}).state is RunState.REQUEUED
    assert begin(run, slurm_job_id="7", restart_count=1).number == 1, "the events of attempt 0 are not its own"
    shutil.rmtree(run.attempts)
    say("node-started", 1, node=0, host="n0")
    say("completed", 1, step=9)
    assert describe(run, {"7": slurm_job("COMPLETED")}).state is RunState.COMPLETED
    with pytest.raises(RunEnded, match="complete"):
        begin(run, slurm_job_id="7", restart_count=2)


def test_a_run_that_was_never_submitted_says_so(runs_dir: Any) -> None:
    run = create_run(job(), runs_dir=runs_dir, via="sbatch", script=None)
    assert describe(run, {}).reason == "not submitted yet"
