"""Which state a run is in, and why: its own events and what Slurm says of its job."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from typing import Any

import pytest
from run_builders import begin, begin_dead, hide, job, slurm_job, state_of

from cluster_ddp.run.attempt import request_resume
from cluster_ddp.run.attempt_record import end_attempt, read_attempt
from cluster_ddp.run.directory import RunDirectory
from cluster_ddp.run.errors import RunEnded
from cluster_ddp.run.jobs import living_jobs, slurm_job_ids
from cluster_ddp.run.record import add_slurm_job
from cluster_ddp.run.run_state import RunState
from cluster_ddp.run.runs import create_run
from cluster_ddp.run.status import report as status
from cluster_ddp.run.status.report import describe
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
    assert "preemption; its job was requeued; Slurm no longer knows its job 7: it was cancelled" in str(gone.reason)
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


def test_slurm_that_hides_the_jobs_of_others_says_nothing(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run of a colleague was LOST, and a `resume` would have started it beside itself."""
    begin(run, slurm_job_id="7")
    hide(run, 0)
    owner = run.record_file.stat().st_uid
    monkeypatch.setattr(status, "hides_jobs_of_others", lambda: True)
    for me, state in ((owner + 1, "RUNNING"), (owner, "LOST"), (0, "LOST")):
        monkeypatch.setattr(status.os, "geteuid", lambda me=me: me)
        assert state_of(run, {}) == state


@pytest.mark.parametrize(
    ("output", "words"),
    [
        (None, "(there is no slurm-7.out"),
        ("\n", "(slurm-7.out is empty; a line of launch.setup may have ended the script)"),
        ("loads cuda\nKilled\n\n", "(slurm-7.out ends with: Killed; a line of launch.setup may"),
        ("slurmstepd: error: TaskProlog failed status=1", "failed status=1). To continue"),
        ("cluster-ddp: cannot begin an attempt: Permission denied", "Permission denied). To continue"),
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
    assert str(found.reason).endswith(f"To continue: cluster-ddp resume {run.path}")


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


def test_a_run_that_is_being_judged_has_not_failed_where_slurm_cannot_be_asked(run: RunDirectory, say: Say) -> None:
    """With the controller down, its keeper takes a minute until it says that the requeue has to wait."""
    begin(run, slurm_job_id="7")
    hide(run, 0)
    say("rank-failed", 0, rank=1, host="n2", signal="SIGKILL", error="ended by SIGKILL")
    say("node-finished", 0, at=9_960, node=0, outcome="failed")
    found = describe(run, None)
    assert found.state is RunState.RUNNING and "what follows is being decided" in str(found.reason)
    assert state_of(run, {}) == "FAILED", "Slurm knows no job that could still decide"
    say("stalled", 0, reason="no progress")
    assert state_of(run, None) == "STALLED"


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
    ("name", "foreign", "started_before", "state"),
    [
        ("digits", True, True, "LOST"),
        ("another", False, False, "LOST"),
        ("another", False, True, "RUNNING"),  # somebody has changed its name and its comment
        ("digits", False, False, "RUNNING"),  # a site may replace comments
        ("", False, False, "RUNNING"),  # Slurm has not said
    ],
)
def test_a_job_id_that_slurm_gave_to_any_job_since_says_nothing(
    run: RunDirectory, say: Say, name: str, foreign: bool, started_before: bool, state: str
) -> None:
    begun = read_attempt(begin(run, slurm_job_id="7")).begun
    hide(run, 0)
    say("submitted", None, via="sbatch", slurm_job_id="7")
    owner = run.record_file.stat().st_uid + foreign
    found = SlurmJob("7", "RUNNING", "None", "n1", "(null)", begun + (-1.0 if started_before else 1.0), name, owner)
    assert state_of(run, {"7": found}) == state


def test_a_requeued_job_is_known_by_its_id_though_its_name_and_comment_were_changed(
    run: RunDirectory, say: Say
) -> None:
    end_attempt(begin_dead(run, slurm_job_id="7"))
    say("submitted", None, via="sbatch", slurm_job_id="7")
    say("stopped", 0, step=5, reason="preemption")
    waiting = {"7": SlurmJob("7", "PENDING", "BeginTime", "", "mine", None, "mine", run.record_file.stat().st_uid)}
    assert state_of(run, waiting) == "STOPPED", "not its job: none was requeued"
    say("requeued", 0)
    assert state_of(run, waiting) == "REQUEUED"


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
