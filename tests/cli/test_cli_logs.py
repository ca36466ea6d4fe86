"""``cluster-ddp logs``, on run directories as node programs leave them."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path

import pytest
from cli_stage import Call
from failure_causes import with_cause

from cluster_ddp.job import JobSpec
from cluster_ddp.run.attempt import begin_attempt
from cluster_ddp.run.directory import AttemptDirectory, RunDirectory
from cluster_ddp.run.events import EventWriter
from cluster_ddp.run.runs import create_run

NODE_0 = "cluster-ddp: node 0 speaks\n[torchrun] its words\n[rank 0] step 1\n[rank 1] step 1\n[rank 1 err] careful\n"
NODE_1 = "[rank 2] step 1\n[rank 3] step\x1b]0;owned\x07 1\n"


@pytest.fixture
def run(here: Path, no_slurm: None) -> RunDirectory:
    return create_run(JobSpec(name="digits", script="train.py"), runs_dir=here / "runs", via="local", script=None)


def begin(run: RunDirectory) -> AttemptDirectory:
    return begin_attempt(run, host="here", pid=0, nodes=2, procs=2)


def test_lines_of_all_ranks_or_of_one(call: Call, run: RunDirectory) -> None:
    begin(run).log_file(0).write_text("[rank 0] of the first attempt\n")
    attempt = begin(run)
    attempt.log_file(0).write_text(NODE_0)
    attempt.log_file(1).write_text(NODE_1)
    said = call("logs", "digits")
    assert said.status == 0, said.err
    assert said.out.splitlines() == [
        "[node 0] cluster-ddp: node 0 speaks", "[node 0 torchrun] its words", "[rank 0] step 1", "[rank 1] step 1",
        "[rank 1 err] careful", "[rank 2] step 1", "[rank 3] step\\x1b]0;owned\\x07 1",
    ]  # fmt: skip
    assert call("logs", "digits", "--rank", "1").out == "step 1\ncareful\n"
    assert call("logs", "digits", "--node", "1").out.startswith("[rank 2] step 1\n[rank 3] ")
    assert call("logs", "digits", "--attempt", "0").out == "[rank 0] of the first attempt\n"
    assert "rank 3 printed nothing in attempt 0" in call("logs", "digits", "--attempt", "0", "--rank", "3").err


def test_what_is_not_there_is_said(call: Call, run: RunDirectory) -> None:
    assert "has not started an attempt" in call("logs", "digits").err
    begin(run).log_file(0).write_text(NODE_0)
    for option, words in (
        (("--attempt",), "no attempt 7: there are 0 to 0"),
        (("--node",), "no log for node 7"),
        (("--rank",), "has no rank 7: it has ranks 0 to 3"),
        (("-f", "--rank"), "has no rank 7: it has ranks 0 to 3"),
    ):
        said = call("logs", "digits", *option, "7")
        assert said.status == 2 and words in said.err and "Traceback" not in said.err
    assert "no rank failed in any attempt" in call("logs", "digits", "--errors").err


def test_the_error_of_the_rank_that_failed_first(call: Call, run: RunDirectory) -> None:
    attempt, events = begin(run), EventWriter(run, "node")
    lost, cause = (
        "RuntimeError: Connection closed by peer",
        "Traceback (most recent):\n  File x\nValueError: \x1b[2Jbad",
    )
    for rank, error in ((2, lost), (1, cause), (0, lost)):
        events.write(
            "rank-failed",
            attempt=0,
            **with_cause("rank-failed", {"rank": rank, "host": "n1", "step": 8, "error": error}),
            log=str(attempt.log_file(rank // 2)),
        )
    begin(run)  # has no failures of its own
    said = call("logs", "digits", "--errors")
    assert said.status == 0
    assert said.out.splitlines() == [
        "attempt 0: rank 1 on n1 at step 8 failed: ValueError: \\x1b[2Jbad (2 more followed)", "",
        "Traceback (most recent):", "  File x", "ValueError: \\x1b[2Jbad", "", f"more: {attempt.log_file(0)}",
    ]  # fmt: skip
    for job in (9, 10):
        (run.path / f"slurm-{job}.out").touch()
    said = call("logs", "digits", "--errors", "--attempt", "1").err
    assert "no rank failed in attempt 1" in said and said.strip().endswith("slurm-10.out")


def test_following_goes_over_a_requeue_to_the_end_of_the_run(call: Call, run: RunDirectory) -> None:
    first = begin(run)
    first.log_file(0).write_text("[rank 0] one\n")
    run.record_file.write_text(json.dumps({**json.loads(run.record_file.read_text()), "via": "sbatch"}))
    events = EventWriter(run, "keeper")

    def go_on() -> None:
        time.sleep(2.5)
        with first.log_file(0).open("a") as log:
            log.write("[rank 0] two\n")
        second = begin_attempt(run, host="here", pid=threading.get_native_id(), nodes=2, procs=2)
        second.log_file(0).write_text("[rank 0] three\n[rank 0] without an end")
        events.write("completed", attempt=1, step=3)

    # Until then the run looks as if it were in the queue again.
    first.record_file.write_text(json.dumps({**json.loads(first.record_file.read_text()), "slurm_job_id": "7"}))
    events.write("requeued", attempt=0, reason="stopped: preemption")
    other = threading.Thread(target=go_on)
    other.start()
    said = call("logs", "digits", "-f")
    other.join()
    assert said.status == 0, said.err
    assert said.out == "[rank 0] one\n[rank 0] two\n[rank 0] three\n[rank 0] without an end\n"
    assert "--- attempt 0" in said.err and "--- attempt 1" in said.err
    assert said.err.splitlines()[-1] == f"--- run {run.id}: COMPLETED"


def test_a_run_of_an_older_version_is_read_too(call: Call, run: RunDirectory) -> None:
    attempt = begin_attempt(run, host="here", pid=0, nodes=2, procs=4)
    folder = attempt.old_logs(0)
    for local, text in ((0, "first\n"), (1, "second\n")):
        (folder / "x_1" / "attempt_0" / str(local)).mkdir(parents=True)
        (folder / "x_1" / "attempt_0" / str(local) / "stderr.log").write_text(text)
    (folder / "agent.log").write_text("agent\n")
    attempt.report_file(0).write_text(
        json.dumps({"ranks": [{"rank": 6, "local_rank": 0}, {"rank": 7, "local_rank": 1}]})
    )
    assert call("logs", "digits").out == "[torchrun] agent\n[rank 6 err] first\n[rank 7 err] second\n"
    assert call("logs", "digits", "--rank", "7").out == "second\n"


def test_a_log_is_not_read_through_a_link(call: Call, run: RunDirectory, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret\n")
    begin(run).log_file(0).symlink_to(tmp_path / "secret")
    assert "secret" not in call("logs", "digits").out
