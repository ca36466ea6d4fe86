"""What follows for a script of which nothing is known but that it runs, and for how long."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from run_builders import begin_dead, conclude

from cluster_ddp.run.directory import RunDirectory
from cluster_ddp.run.requeue.decision import decide
from cluster_ddp.run.stopfile import request_stop

Say = Callable[..., None]


def test_a_script_that_reports_no_checkpoints_is_not_taken_for_stalled(run: RunDirectory, say: Say) -> None:
    for number in range(5):
        attempt = begin_dead(run, slurm_job_id="5", restart_count=number)
        say("node-started", number, at=number, node=0, host="n1", script=True)
        request_stop(attempt, reason="time-limit", by="job.sbatch")
        assert conclude(attempt).action == "requeue"


def test_a_script_that_reports_nothing_has_got_on_whenever_it_was_asked_to_end(run: RunDirectory, say: Say) -> None:
    actions = []
    for number, stopped in enumerate([True, True, False, False, True, False, False, False]):
        attempt = begin_dead(run, slurm_job_id="5", restart_count=number)
        say("node-started", number, at=10 * number, node=0, host="n1", script=True)
        if stopped:
            say("stopped", number, at=10 * number + 1, step=None, reason="preemption")
        else:
            say("rank-failed", number, at=10 * number + 1, rank=0, host="n1", error="RuntimeError: NCCL error")
        decision = conclude(attempt)
        actions.append(decision.action)
    assert actions == ["requeue"] * 7 + ["stall"]
    assert decision.why.startswith("3 attempts in a row failed; the last error: rank 0 on n1")


@pytest.mark.parametrize(("seconds", "action"), [(599, "fail"), (3600, "requeue")])
def test_a_script_that_reports_nothing_fails_at_its_start_only_when_it_starts(
    run: RunDirectory, say: Say, seconds: float, action: str
) -> None:
    attempt = begin_dead(run, slurm_job_id="5")
    say("node-started", 0, at=0, node=0, host="n1", script=True)
    say("rank-failed", 0, at=seconds, rank=1, host="n1", error="ValueError: no such label")
    decision = decide(run, attempt)
    assert decision.action == action
    assert "ValueError: no such label" in decision.why
    assert ("failed in its first 10 minutes" in decision.why) == (action == "fail")
