"""``cluster-ddp resume`` while others resume, cancel or begin the same run: one of them wins, and the others say so."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from cli_stage import Call, Slurm, stopped_run

from cluster_ddp.job import load_job
from cluster_ddp.run.attempt import begin_attempt, request_resume
from cluster_ddp.run.attempt_record import end_attempt
from cluster_ddp.run.directory import RunDirectory
from cluster_ddp.run.events import EventWriter, caller, read_events
from cluster_ddp.run.history import read_history
from cluster_ddp.run.record import add_slurm_job, announce_submission
from cluster_ddp.run.run_state import RunState
from cluster_ddp.run.runs import create_run
from cluster_ddp.run.status.report import describe
from cluster_ddp.run.stopfile import request_stop
from cluster_ddp.submit import local
from cluster_ddp.submit.base import SubmitError
from cluster_ddp.submit.resume import ResumePlan, plan_resume, resubmit
from cluster_ddp.submit.sbatch import SbatchSubmission


@pytest.fixture
def run(call: Call, here: Path, slurm: Slurm) -> RunDirectory:
    return stopped_run(call)


def stopped_here(folder: Path) -> RunDirectory:
    """A local run with one attempt, which a person has stopped."""
    made = create_run(load_job("job.yaml").spec, runs_dir=folder / "runs", via="local", script=None)
    attempt = begin_attempt(made, host="here", pid=0, nodes=1, procs=1)
    request_stop(attempt, reason="person", by="test")
    EventWriter(made, "rank-0").write("stopped", attempt=0, step=7, reason="person")
    end_attempt(attempt)
    return made


@pytest.mark.parametrize("begun", [False, True])
def test_a_second_resume_while_the_first_plans_changes_nothing(
    call: Call, here: Path, monkeypatch: pytest.MonkeyPatch, begun: bool
) -> None:
    made = stopped_here(here)
    before = made.job_file.read_bytes()

    plan_local = local.plan_local

    def plan(*arguments: Any, **options: Any) -> local.LocalStart:
        request_resume(made, by="the other")
        if begun:
            begin_attempt(made, host="here", pid=os.getpid(), nodes=1, procs=1)
        return plan_local(*arguments, **options)

    monkeypatch.setattr(local, "plan_local", plan)
    said = call("resume", made.id, "--set", "train.lr=0.5")
    assert said.status == 2
    assert "was just resumed by another command" in said.err and f"cluster-ddp status {made.id}" in said.err
    assert made.job_file.read_bytes() == before and not (made.path / "job.yaml.1").exists()
    assert [event["by"] for event in read_events(made) if event["event"] == "resume-requested"] == ["the other"]
    assert describe(made, None).state is (RunState.RUNNING if begun else RunState.PENDING)


def test_a_resume_that_loses_at_the_last_moment_does_not_forgive_the_attempt_of_the_winner(
    call: Call, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = stopped_here(here)

    def overtaken() -> str:  # the last thing before the wish is written
        request_resume(made, by="the other")
        begin_attempt(made, host="here", pid=os.getpid(), nodes=1, procs=1)
        return "the loser"

    with monkeypatch.context() as while_it_asks_who_calls:
        while_it_asks_who_calls.setattr("getpass.getuser", overtaken)
        said = call("resume", made.id)
    assert said.status == 2 and "is alive: attempt 1" in said.err
    assert describe(made, None).state is RunState.RUNNING
    assert call("stop", made.id).status == 0
    EventWriter(made, "rank-0").write("completed", attempt=1, step=20)
    end_attempt(made.attempt(1))
    assert describe(made, None).state is RunState.COMPLETED


def test_of_two_that_send_a_run_to_the_queue_one_does(
    call: Call, run: RunDirectory, slurm: Slurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = run.job_file.read_bytes()
    monkeypatch.setattr(SbatchSubmission, "check", lambda _: request_resume(run, by="the other"))
    said = call("resume", run.id, "--set", "slurm.partition=long")
    assert said.status == 2 and "was just resumed by another command" in said.err
    assert run.job_file.read_bytes() == before and len(slurm.submissions()) == 1


def test_a_run_whose_events_are_lost_can_be_resumed_again(call: Call, run: RunDirectory, slurm: Slurm) -> None:
    """Each call said that another one had just resumed it, and nothing else."""
    run.resume_file.write_text('{"by": "me", "requests": 1}')
    said = call("resume", run.id)
    assert said.status == 2 and f"its events are lost: remove {run.resume_file}, and repeat" in said.err
    run.resume_file.unlink()
    assert call("resume", run.id).status == 0


def test_of_four_calls_at_once_one_submits_and_the_others_say_so(
    call: Call, run: RunDirectory, slurm: Slurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_resume(run, read_history(run), describe(run, {}), [], None, None)
    together = threading.Barrier(4)
    monkeypatch.setattr(SbatchSubmission, "check", lambda _: together.wait(20))  # all have seen the same run

    def resume(_: int) -> str:
        try:
            return str(resubmit(plan, SbatchSubmission(plan.spec)))
        except SubmitError as error:
            return str(error)

    with ThreadPoolExecutor(4) as pool:
        said = sorted(pool.map(resume, range(4)))
    assert said[0] == "102" and len(slurm.submissions()) == 2
    assert all("was just resumed by another command (" in words for words in said[1:])
    assert sum(event["event"] == "resume-requested" for event in read_events(run)) == 1


def test_a_call_that_comes_before_the_winner_has_called_sbatch_submits_nothing(
    call: Call, run: RunDirectory, slurm: Slurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    send, said = SbatchSubmission.send, []

    def with_another_call_before(submission: SbatchSubmission, to: RunDirectory) -> str:
        if not said:
            said.append(call("resume", run.id))
        return send(submission, to)

    monkeypatch.setattr(SbatchSubmission, "send", with_another_call_before)
    assert call("resume", run.id).status == 0 and len(slurm.submissions()) == 2
    assert said[0].status == 2 and "is being submitted by process" in said[0].err


def test_a_call_that_has_seen_the_winner_submit_and_judges_when_it_has_ended_submits_nothing(
    call: Call, run: RunDirectory, slurm: Slurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    slurm.put_in_queue(run, "CANCELLED")
    announce_submission(run)
    request_resume(run, by="the winner")

    def judged_late(*seen: Any) -> ResumePlan:
        add_slurm_job(run, "102")
        monkeypatch.setattr("cluster_ddp.run.record.is_claimed", lambda _: False)
        return plan_resume(*seen)

    monkeypatch.setattr("cluster_ddp.submit.resume.plan_resume", judged_late)
    said = call("resume", run.id)
    assert said.status == 2 and "was just resumed by another command" in said.err
    assert len(slurm.submissions()) == 1


def test_a_run_that_is_cancelled_while_it_is_submitted_leaves_no_job_in_the_queue(
    call: Call, run: RunDirectory, slurm: Slurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    send = SbatchSubmission.send

    def cancelled_before(submission: SbatchSubmission, to: RunDirectory) -> str:
        assert call("cancel", to.id).status == 0
        return send(submission, to)

    monkeypatch.setattr(SbatchSubmission, "send", cancelled_before)
    said = call("resume", run.id)
    assert said.status == 2 and f"was cancelled by {caller()} while it was being submitted" in said.err
    assert (slurm.folder / "cancelled").read_text() == "102\n" and describe(run, {}).state is RunState.CANCELLED
    said = call("submit", "job.yaml")
    assert said.status == 2 and "Slurm job 103 has been taken back out of the queue" in said.err
    slurm.program("scancel", "exit 1")
    monkeypatch.setattr(SbatchSubmission, "send", lambda submission, to: noted_after_a_cancel(send, submission, to))
    said = call("submit", "job.yaml")
    assert said.status == 2 and "was cancelled by" in said.err and "Slurm job 104 may still be queued" in said.err


def noted_after_a_cancel(send: Any, submission: SbatchSubmission, run: RunDirectory) -> str:
    EventWriter(run, "login").write("cancelled", attempt=None, by="somebody")
    return str(send(submission, run))
