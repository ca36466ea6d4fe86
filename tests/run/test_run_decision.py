from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from typing import Any

import pytest
from run_builders import begin_dead, conclude

from cluster_ddp.run.directory import AttemptDirectory, RunDirectory
from cluster_ddp.run.ending import Ending, outcome_of
from cluster_ddp.run.history import read_history
from cluster_ddp.run.requeue.decision import Decision, decide, record_decision
from cluster_ddp.run.stopfile import request_stop

Say = Callable[..., None]
OUT_OF_MEMORY = "Traceback (most recent call last):\n  File x\ntorch.OutOfMemoryError: CUDA out of memory, tried 2 GiB"
PEER_LOST = "RuntimeError: [gloo/transport/tcp/pair.cc:537] Connection closed by peer [10.0.0.2]:3211"


@pytest.fixture
def attempt(run: RunDirectory) -> AttemptDirectory:
    return begin_dead(run, slurm_job_id="5")


def test_a_completed_run_is_done_whatever_else_happened(run: RunDirectory, attempt: AttemptDirectory, say: Say) -> None:
    say("started", 0, at=0, step=0)
    say("completed", 0, at=9, step=300)
    say("rank-failed", 0, at=10, rank=1, error="terminate called without an active exception", signal="SIGABRT")
    request_stop(attempt, reason="terminated", by="SIGTERM")
    assert decide(run, attempt).action == "done"


@pytest.mark.parametrize("reason", ["time-limit", "preemption", "hang", "agent-lost"])
def test_a_stop_that_is_nobodys_wish_is_requeued(
    run: RunDirectory, attempt: AttemptDirectory, say: Say, reason: str
) -> None:
    say("started", 0, at=0, step=0)
    say("checkpoint", 0, at=8, step=40)
    say("stopped", 0, at=9, step=40, reason=reason)
    decision = decide(run, attempt)
    assert decision.action == "requeue" and reason in decision.why


@pytest.mark.parametrize("reason", ["person", "cancel", "terminated"])
def test_a_stop_that_may_be_a_persons_wish_is_not(
    run: RunDirectory, attempt: AttemptDirectory, say: Say, reason: str
) -> None:
    say("checkpoint", 0, at=8, step=40)
    say("stopped", 0, at=9, step=40, reason=reason)
    assert decide(run, attempt).action == "stop"


@pytest.mark.parametrize(("reason", "runs", "action"), [
    ("terminated", True, "requeue"), ("terminated", False, "stop"), ("cancel", True, "stop"), ("person", True, "stop"),
])  # fmt: skip
def test_a_sigterm_while_slurm_lets_the_job_run_on_is_no_scancel(
    run: RunDirectory, attempt: AttemptDirectory, say: Say, reason: str, runs: bool, action: str
) -> None:
    say("checkpoint", 0, at=8, step=40)
    say("stopped", 0, at=9, step=40, reason=reason)
    assert decide(run, attempt, job_goes_on=lambda: runs).action == action


@pytest.mark.parametrize(
    ("explained", "action"),
    [("preemption", "requeue"), ("time-limit", "requeue"), ("agent-lost", "requeue"), ("cancel", "stop")],
)
def test_the_stop_file_explains_a_sigterm_that_the_ranks_could_not(
    run: RunDirectory, attempt: AttemptDirectory, say: Say, explained: str, action: str
) -> None:
    say("stopped", 0, at=9, step=40, reason="terminated")
    request_stop(attempt, reason=explained, by="job.sbatch")
    assert decide(run, attempt).action == action


@pytest.mark.parametrize(("reason", "action"), [("preemption", "requeue"), ("person", "stop"), ("terminated", "stop")])
def test_ranks_killed_before_they_could_save_do_not_change_why_they_were_stopped(
    run: RunDirectory, attempt: AttemptDirectory, say: Say, reason: str, action: str
) -> None:
    say("started", 0, at=0, step=0)
    request_stop(attempt, reason=reason, by="x")
    say("rank-failed", 0, at=9, rank=1, step=3, error="ended by SIGKILL; it left no message", signal="SIGKILL")
    say("failed", 0, at=10, rank=0, step=3, error=PEER_LOST)
    assert decide(run, attempt).action == action


def test_an_attempt_cancelled_from_outside_is_not_requeued(
    run: RunDirectory, attempt: AttemptDirectory, say: Say
) -> None:
    say("started", 0, at=0, step=0)
    say("cancelled", 0, at=5, by="me@login")
    assert decide(run, attempt).action == "stop"


@pytest.mark.parametrize(
    "error",
    ["ModuleNotFoundError: No module named 'connection'", OUT_OF_MEMORY, "ended with exit status 1; it left no message",
     "pydantic.ValidationError: 1 validation error"],
)  # fmt: skip
def test_what_fails_before_the_first_step_is_not_tried_again(
    run: RunDirectory, attempt: AttemptDirectory, say: Say, error: str
) -> None:
    say("started", 0, at=0, step=0)
    say("failed", 0, at=1, step=0, rank=2, node=1, host="n2", error=error, phase="training")
    say("failed", 0, at=2, step=0, rank=0, node=0, host="n1", error=PEER_LOST, phase="training")
    decision = decide(run, attempt)
    assert decision.action == "fail"
    assert f"rank 2 on n2 at step 0 failed: {error.splitlines()[-1]}" in decision.why


TRACEBACK = """Traceback (most recent call last):
  File "/home/me/my_task.py", line 36, in __init__
    raise RuntimeError("bad news")
          ^^^^^^^^^^^^
RuntimeError: bad news
  indented
more of it"""


def test_the_line_of_a_traceback_that_is_said_is_its_error(
    run: RunDirectory, attempt: AttemptDirectory, say: Say
) -> None:
    say("rank-failed", 0, rank=1, node=0, error=TRACEBACK, phase="setup")
    assert decide(run, attempt).why.endswith("failed: RuntimeError: bad news")


def test_what_fails_before_training_even_starts_is_not_tried_again(
    run: RunDirectory, attempt: AttemptDirectory, say: Say
) -> None:
    say("failed", 0, step=None, rank=0, node=0, error="ImportError: cannot import name 'Digits'", phase="setup")
    assert decide(run, attempt).action == "fail"


def test_ranks_that_failed_to_meet_have_failed_though_the_others_had_to_be_ended(
    run: RunDirectory, attempt: AttemptDirectory, say: Say
) -> None:
    say("failed", 0, at=9, rank=0, node=0, host="first", error=f"rank 0 of 2 cannot meet the others: {PEER_LOST}")
    say("stop-requested", 0, at=19, reason="agent-lost", level=2, node=1, by="the supervisor")
    say("node-finished", 0, at=40, node=1, outcome="killed", reason="agent-lost")
    request_stop(attempt, reason="agent-lost", by="the supervisor")
    ended = outcome_of(read_history(run), 0)
    assert (ended.ending, ended.stop_reason) == (Ending.FAILED, None)
    assert "cannot meet the others" in ended.why
    assert decide(run, attempt).action == "requeue"


@pytest.mark.parametrize(
    "failure",
    [
        {"event": "rank-failed", "rank": 1, "error": "ended by SIGKILL; it left no message", "signal": "SIGKILL"},
        {"event": "rank-failed", "rank": 1, "error": "ended without a message; killed from outside", "cause": "host"},
        {"event": "failed", "rank": 0, "error": PEER_LOST},
        {"event": "failed", "rank": 0, "error": "torch.distributed.DistNetworkError: The client socket has timed out"},
        {"event": "failed", "rank": 0, "error": "OSError: [Errno 28] No space left on device"},
        {"event": "failed", "rank": 0, "error": "OSError: [Errno 122] Disk quota exceeded: '/shared/me/x'"},
        {"event": "failed", "rank": 0, "error": "OSError: [Errno 108] Cannot send after transport endpoint shutdown"},
        {"event": "failed", "rank": 0, "error": "rank 0 cannot meet the others: Resource temporarily unavailable"},
        {"event": "failed", "rank": 0, "error": "RuntimeError: can't start new thread"},
        {"event": "hang", "reason": "no step for 60 s"},
    ],
)
def test_what_the_surroundings_did_is_tried_again_even_before_the_first_step(
    run: RunDirectory, attempt: AttemptDirectory, say: Say, failure: dict[str, Any]
) -> None:
    say("started", 0, at=0, step=0)
    say(failure.pop("event"), 0, at=1, step=0, **failure)
    say("failed", 0, at=2, step=0, rank=3, error=PEER_LOST)
    assert decide(run, attempt).action == "requeue"


def test_an_attempt_that_left_no_word_is_tried_again(run: RunDirectory, attempt: AttemptDirectory) -> None:
    assert decide(run, attempt).action == "requeue"


@pytest.mark.parametrize("evidence", ["failed step", "checkpoint", "metrics"])
def test_a_failure_after_a_finished_step_is_tried_again(
    run: RunDirectory, attempt: AttemptDirectory, say: Say, evidence: str
) -> None:
    say("resumed", 0, at=0, step=100)
    if evidence == "checkpoint":
        say("checkpoint", 0, at=1, step=110, samples=1)
    if evidence == "metrics":
        run.metrics_file.write_text(json.dumps({"step": 110, "attempt": 0, "train/loss": 1.0}) + "\n")
    say("failed", 0, at=2, step=101 if evidence == "failed step" else 100, error="ValueError: loss is nan", rank=0)
    assert decide(run, attempt).action == "requeue"


def test_a_failure_at_the_step_it_resumed_from_is_no_progress(
    run: RunDirectory, attempt: AttemptDirectory, say: Say
) -> None:
    say("resumed", 0, at=0, step=100)
    say("failed", 0, at=2, step=100, error="ValueError: bad shape", rank=0)
    assert decide(run, attempt).action == "fail"


def test_what_comes_back_in_every_attempt_is_not_tried_again_however_far_the_run_has_come(
    run: RunDirectory, attempt: AttemptDirectory, say: Say
) -> None:
    say("started", 0, at=0, step=0)
    say("checkpoint", 0, at=1, step=10, samples=1)
    record_decision(attempt, Decision("requeue", "stopped: preemption"), writer="batch")
    second = begin_dead(run, slurm_job_id="5", restart_count=1)
    error = "no intact checkpoint is left in /socket/checkpoints: what to do\n  step-00000010: missing"
    say("failed", 1, at=2, step=None, error=error, rank=0, comes_back=True)
    decision = decide(run, second)
    assert decision.action == "fail"
    assert decision.why.endswith("rank 0 failed: no intact checkpoint is left in /socket/checkpoints: what to do")


def test_a_failure_that_was_mended_inside_the_allocation_does_not_count(
    run: RunDirectory, attempt: AttemptDirectory, say: Say
) -> None:
    say("started", 0, at=0, step=0)
    say("failed", 0, at=1, step=0, error="ValueError: x", rank=0)
    say("resumed", 0, at=2, step=0)
    assert decide(run, attempt).why.startswith("it (batch host ")


def test_the_node_that_left_no_record_is_named_where_others_did(
    run: RunDirectory, attempt: AttemptDirectory, say: Say
) -> None:
    for node in range(2):
        say("node-started", 0, at=node, node=node, host=f"n{node + 1}")
    assert decide(run, attempt).why.startswith("it (batch host ")
    say("node-finished", 0, at=3, node=1, host="n2", outcome="failed")
    assert decide(run, attempt).why.startswith("node n1 left no record of its end")


def test_a_failure_on_a_host_whose_clock_is_behind_counts(
    run: RunDirectory, attempt: AttemptDirectory, say: Say
) -> None:
    """By the clock of its own host rank 1 was killed before rank 0 began; it is the cause of what rank 0 says."""
    say("rank-failed", 0, at=0, step=8, rank=1, host="n2", signal="SIGKILL", error="ended by SIGKILL")
    say("started", 0, at=1, step=0)
    say("failed", 0, at=2, step=8, rank=0, host="n1", error="RuntimeError: Connection closed by peer")
    assert decide(run, attempt).why == "rank 1 on n2 at step 8 failed: ended by SIGKILL"


def test_what_an_older_attempt_says_of_the_runs_end_does_not_count(run: RunDirectory, say: Say) -> None:
    """Its node was cut from the controller, and trained on."""
    begin_dead(run, slurm_job_id="5")
    newer = begin_dead(run, slurm_job_id="5", restart_count=1)
    say("completed", 0, at=9, step=300)
    say("stalled", 0, at=10, reason="x")
    assert decide(run, newer).action == "requeue"
    say("completed", 1, at=11, step=300)
    assert decide(run, newer).action == "done"


def test_a_sigterm_that_follows_a_nodes_failure_is_no_stop(
    run: RunDirectory, attempt: AttemptDirectory, say: Say
) -> None:
    say("node-failed", 0, at=1, host="n2", error="it cannot start: no room", suspect=True)
    say("stopped", 0, at=2, step=0, reason="terminated")
    decision = decide(run, attempt, job_goes_on=lambda: False)
    assert (decision.action, decision.why) == ("requeue", "node n2 failed: it cannot start: no room")
    request_stop(attempt, reason="cancel", by="a person")
    assert decide(run, attempt).action == "stop"


def test_a_lost_node_explains_what_the_ranks_of_the_others_say(
    run: RunDirectory, attempt: AttemptDirectory, say: Say
) -> None:
    say("rank-failed", 0, at=1, node=0, host="n1", rank=0, error="RuntimeError: Connection closed by peer")
    say("node-lost", 0, at=2, host="n2", node=1, reason="node n2 was lost: no sign of life")
    assert decide(run, attempt).why == "node n2 was lost: no sign of life"
    say("rank-failed", 0, at=3, node=0, host="n1", rank=0, error="ValueError: of the program's own")
    assert "of the program's own" in decide(run, attempt).why


def test_a_full_disk_does_not_change_the_decision(
    run: RunDirectory, attempt: AttemptDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.rmtree(attempt.path)
    attempt.path.write_text("")
    assert conclude(attempt).action == "requeue"
    printed = capsys.readouterr()
    assert printed.out == "" and "the end of attempt 0 cannot be recorded" in printed.err
