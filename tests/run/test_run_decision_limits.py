"""When requeues come to an end: the stall guard, and the job's own limits."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from run_builders import begin_dead, conclude, limited

from cluster_ddp.run.attempt import request_resume
from cluster_ddp.run.attempt_record import read_attempt
from cluster_ddp.run.directory import RunDirectory
from cluster_ddp.run.events import read_events
from cluster_ddp.run.record import add_slurm_job
from cluster_ddp.run.requeue.decision import decide
from cluster_ddp.run.stopfile import request_stop

Say = Callable[..., None]


def test_the_stall_guard_counts_attempts_without_a_new_checkpoint(run: RunDirectory, say: Say) -> None:
    actions = []
    for number, step in enumerate([50, 50, 80, None, 80, 70]):
        attempt = begin_dead(run, slurm_job_id="5", restart_count=number)
        if step is not None:
            say("checkpoint", number, at=100 * number, step=step)
        say("rank-failed", number, at=100 * number + 9, rank=3, host="n9", error="RuntimeError: CUDA error", step=step)
        decision = conclude(attempt)
        actions.append(decision.action)
    assert actions == ["requeue", "requeue", "requeue", "requeue", "requeue", "stall"]
    assert "3 attempts in a row ended without a new checkpoint" in decision.why
    assert "rank 3 on n9 at step 70 failed: RuntimeError: CUDA error" in decision.why
    ends = [event["event"] for event in read_events(run) if event["event"] in ("requeued", "stalled")]
    assert ends == ["requeued"] * 5 + ["stalled"]
    assert read_attempt(attempt).ended is not None


@pytest.mark.parametrize(("reason", "step", "action"), [
    ("preemption", None, "requeue"), ("preemption", 53, "stall"), ("time-limit", None, "stall"),
])  # fmt: skip
def test_attempts_that_were_preempted_before_their_first_step_are_not_counted(
    run: RunDirectory, say: Say, reason: str, step: int | None, action: str
) -> None:
    """As on a partition whose jobs are preempted again and again within seconds."""
    for number in range(5):
        attempt = begin_dead(run, slurm_job_id="5", restart_count=number)
        say("node-started", number, at=100 * number, node=0)
        say("resumed", number, at=100 * number + 1, step=50)
        if step is not None or number == 0:
            say("stopped", number, at=100 * number + 9, reason=reason, step=step or 51)
        if number == 0:
            say("checkpoint", 0, at=1, step=50)
        request_stop(attempt, reason=reason, by="the keeper")
        decision = conclude(attempt)
        if decision.action == "stall":
            break
    assert decision.action == action
    if action == "requeue":
        for number in range(5, 8):
            attempt = begin_dead(run, slurm_job_id="5", restart_count=number)
            say("rank-failed", number, at=100 * number, rank=3, host="n9", error="RuntimeError: CUDA error", step=None)
            decision = decide(run, attempt)
        assert decision.action == "stall"


def test_a_checkpoint_of_step_0_is_no_progress(run: RunDirectory, say: Say) -> None:
    attempt = begin_dead(run, slurm_job_id="5")
    say("checkpoint", 0, at=1, step=0)
    say("rank-failed", 0, at=2, rank=3, host="n9", error="RuntimeError: CUDA error", step=4)
    assert decide(limited(run, max_without_progress=1), attempt).action == "stall"


def test_a_damaged_checkpoint_does_not_count_so_training_up_to_it_again_is_progress(
    run: RunDirectory, say: Say
) -> None:
    limited(run, max_without_progress=1)
    attempt = begin_dead(run, slurm_job_id="5")
    say("checkpoint", 0, at=1, step=50)
    say("checkpoint", 0, at=2, step=100)
    conclude(attempt)
    attempt = begin_dead(run, slurm_job_id="5", restart_count=1)
    say("checkpoint-damaged", 1, at=3, step=100)
    assert decide(run, attempt).action == "stall"
    say("checkpoint", 1, at=4, step=90)
    assert decide(run, attempt).action == "requeue"


def test_a_persons_resume_resets_the_stall_guard_and_the_count_of_requeues(run: RunDirectory) -> None:
    limited(run, max_requeues=1, max_without_progress=2)
    first = begin_dead(run, slurm_job_id="5")
    assert decide(run, first).action == "requeue"
    second = begin_dead(run, slurm_job_id="5", restart_count=1)
    assert decide(run, second).action == "stall"
    request_resume(run, by="me")
    third = begin_dead(run, slurm_job_id="6")
    assert decide(run, third).action == "requeue"


@pytest.mark.parametrize(("limit", "words"), [(1, "requeued once,"), (2, "requeued 2 times,")])
def test_requeues_are_counted_and_the_jobs_own_limits_hold(run: RunDirectory, say: Say, limit: int, words: str) -> None:
    limited(run, max_requeues=limit)
    decisions = []
    for number in range(limit + 1):
        attempt = begin_dead(run, slurm_job_id="5", restart_count=number)
        say("checkpoint", number, at=number, step=10 * number + 10)
        decisions.append(decide(run, attempt))
    assert [decision.action for decision in decisions] == ["requeue"] * limit + ["stall"]
    assert words in decisions[-1].why


def test_a_single_attempt_without_a_new_checkpoint_may_be_the_limit(run: RunDirectory, say: Say) -> None:
    limited(run, max_without_progress=1)
    attempt = begin_dead(run, slurm_job_id="5")
    say("rank-failed", 0, step=9, rank=3, host="n9", error="RuntimeError: CUDA error")
    assert decide(run, attempt).why.startswith("the last attempt ended without a new checkpoint; the last error: ")


def test_the_next_job_of_a_chain_goes_on_where_requeues_are_not_allowed(run: RunDirectory, say: Say) -> None:
    limited(run, max_requeues=0)
    for job_id in ("5", "6"):
        add_slurm_job(run, job_id)
    first = begin_dead(run, slurm_job_id="5")
    request_stop(first, reason="time-limit", by="the keeper")
    say("checkpoint", 0, at=1, step=10)
    decision = conclude(first)
    assert decision.action == "stop" and "job 6 of its chain continues" in decision.why
    last = begin_dead(run, slurm_job_id="6")
    request_stop(last, reason="time-limit", by="the keeper")
    say("checkpoint", 1, at=2, step=20)
    assert conclude(last).action == "stall"


def test_a_run_of_which_no_node_ever_says_that_it_started_stalls(run: RunDirectory) -> None:
    for number, action in enumerate(("requeue", "requeue", "stall")):
        attempt = begin_dead(run, slurm_job_id="5", restart_count=number)
        request_stop(attempt, reason="preemption", by="job.sbatch")
        assert conclude(attempt).action == action
