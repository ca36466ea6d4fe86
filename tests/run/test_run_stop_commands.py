"""`cluster-ddp stop` and `cancel`: whom they reach, and what they leave alone."""

from __future__ import annotations

import errno
import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from run_builders import begin, begin_dead, fake_slurm, hide, slurm_job

from cluster_ddp.cli import cancel as cli_cancel
from cluster_ddp.cli import stop as cli_stop
from cluster_ddp.run.attempt import request_resume
from cluster_ddp.run.attempt_record import end_attempt
from cluster_ddp.run.directory import AttemptDirectory, RunDirectory
from cluster_ddp.run.errors import RunEnded, RunError
from cluster_ddp.run.events import EventWriter, read_events
from cluster_ddp.run.record import add_slurm_job
from cluster_ddp.run.status.report import describe
from cluster_ddp.run.stopfile import read_stop, request_stop
from cluster_ddp.run.storage import Storage

Say = Callable[..., None]


Ddp = Callable[..., "subprocess.CompletedProcess[str]"]


def test_stop_asks_the_live_attempt(ddp: Ddp, run: RunDirectory) -> None:
    begin_dead(run)
    attempt = begin(run)
    done = ddp("stop", run.id)
    assert done.returncode == 0 and f"asked attempt 1 of {run.id}" in done.stderr
    request = read_stop(attempt)
    assert request is not None and (request.reason, request.level) == ("person", 1) and "@" in request.by
    assert read_stop(run.attempt(0)) is None
    assert [(event["event"], event["attempt"]) for event in read_events(run)][-1] == ("stop-requested", 1)


def test_stop_reaches_an_attempt_that_begins_meanwhile(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slurm has started the run again between the look at it and the stop: storage that hangs makes minutes of that."""
    begin(run)
    status = describe(run, None)

    def after_a_restart(attempt: AttemptDirectory, **request: Any) -> Any:
        if attempt.number == 0:
            end_attempt(attempt)
            begin(run)
        return request_stop(attempt, **request)

    monkeypatch.setattr(cli_stop, "request_stop", after_a_restart)
    cli_stop.ask_to_stop(run, status)
    request = read_stop(run.attempt(1))
    assert request is not None and request.reason == "person"


def test_a_stop_that_cannot_be_written_says_how_to_end_the_job(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk was full, and the job waited for room: `stop` and `cancel` refused, without another way."""
    begin(run, slurm_job_id="7")
    status = describe(run, None)

    def full(*arguments: Any, **named: Any) -> Any:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(cli_stop, "request_stop", full)
    with pytest.raises(RunError, match=r"No space left on device\nTry again once .*: scancel 7$"):
        cli_stop.ask_to_stop(run, status)
    monkeypatch.setattr(EventWriter, "write", lambda *arguments, **named: False)
    with pytest.raises(RunError, match=r"(?s)was not cancelled: .*: scancel 7$"):
        cli_cancel.command(str(run.path))


def test_a_stop_that_comes_while_the_next_attempt_begins_holds(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended, rename = begin_dead(run, slurm_job_id="7"), Storage.rename

    def after_a_stop(storage: Storage, source: Path, target: Path) -> None:
        if target == run.attempt(1).path:
            request_stop(ended, reason="person", by="me")
        rename(storage, source, target)

    monkeypatch.setattr(Storage, "rename", after_a_stop)
    request = read_stop(begin(run, slurm_job_id="7", restart_count=1))
    assert request is not None and (request.reason, request.by) == ("person", "me")


@pytest.mark.parametrize("delayed", [False, True])
@pytest.mark.parametrize(("command", "reason"), [("stop", "person"), ("cancel", "cancel")])
def test_an_attempt_whose_nodes_have_ended_hears_that_it_is_not_to_be_queued_again(
    ddp: Ddp, run: RunDirectory, say: Say, tmp_path: Path, command: str, reason: str, delayed: bool
) -> None:
    """Its keeper still decides, or waits for Slurm's controller, maybe for long."""
    attempt = begin(run, slurm_job_id="7")
    hide(run, 0)
    say("rank-failed", 0, rank=0, host="n7", signal="SIGKILL", error="ended by SIGKILL")
    say("node-finished", 0, node=0, outcome="failed")
    if delayed:
        say("requeue-delayed", 0, reason="Slurm's controller does not answer")
    fake_slurm(tmp_path, "squeue", f"echo '7|7|RUNNING|n7|None|cluster_ddp {run.id}'")
    fake_slurm(tmp_path, "scancel", "")
    done = ddp(command, run.id)
    assert done.returncode == 0, done.stderr
    request = read_stop(attempt)
    assert request is not None and request.reason == reason
    if command == "stop":
        assert f"attempt 0 of {run.id} has ended already; no other attempt will follow it" in done.stderr


@pytest.mark.parametrize("state", ["PENDING", "RUNNING"])
def test_a_run_that_waits_to_start_again_or_starts_is_stopped(
    ddp: Ddp, run: RunDirectory, say: Say, tmp_path: Path, state: str
) -> None:
    """It was refused, with `cancel` as the only advice, though a stop a moment before would have held."""
    attempt = begin_dead(run, slurm_job_id="7")
    say("checkpoint", 0, step=10)
    end_attempt(attempt)
    say("requeued", 0, reason="preempted")
    fake_slurm(tmp_path, "squeue", f"echo '7|7|{state}||BeginTime|cluster_ddp {run.id}'")
    calls = fake_slurm(tmp_path, "scancel", "")
    done = ddp("stop", run.id)
    assert done.returncode == 0 and "has ended already; no other attempt will follow it" in done.stderr, done.stderr
    assert (calls.read_text() if calls.exists() else "") == ("--state=PENDING 7\n" if state == "PENDING" else "")
    with pytest.raises(RunEnded, match="was stopped by a person"):
        begin(run, slurm_job_id="7", restart_count=1)
    assert describe(run, {"7": slurm_job("CANCELLED", run_id=run.id)}).state.value == "STOPPED"
    request_resume(run, by="me")
    begin(run, slurm_job_id="8")


def test_stop_reaches_a_job_of_slurms_on_another_machine(ddp: Ddp, run: RunDirectory, tmp_path: Path) -> None:
    attempt = begin(run, slurm_job_id="7")
    hide(run, 0)
    fake_slurm(tmp_path, "squeue", f"echo '7|7|RUNNING|n7|None|cluster_ddp {run.id}'")
    assert ddp("stop", run.id).returncode == 0
    assert read_stop(attempt) is not None


def test_stop_takes_the_other_jobs_of_a_chain_out_of_the_queue(ddp: Ddp, run: RunDirectory, tmp_path: Path) -> None:
    for job_id in ("7", "8", "9"):
        add_slurm_job(run, job_id)
    begin(run, slurm_job_id="7")
    jobs = {"7": "RUNNING", "8": "PENDING", "9": "PENDING"}
    lines = [f"echo '{job}|{job}|{state}||Dependency|cluster_ddp {run.id}'" for job, state in jobs.items()]
    fake_slurm(tmp_path, "squeue", "\n".join(lines))
    fake_slurm(tmp_path, "scancel", f'echo "$1" >>{tmp_path}/cancelled')
    said = ddp("stop", run.id)
    assert said.returncode == 0 and "removed Slurm job 8 of its chain" in said.stderr, said.stderr
    assert (tmp_path / "cancelled").read_text().split() == ["8", "9"]


@pytest.mark.parametrize(
    ("ending", "advice"),
    [("stopped", "cluster-ddp resume"), ("completed", "is COMPLETED"), (None, "cluster-ddp cancel")],
)
def test_stop_refuses_when_nothing_is_alive(
    ddp: Ddp, run: RunDirectory, say: Say, ending: str | None, advice: str
) -> None:
    if ending:
        begin_dead(run)
        say(ending, 0, step=5, reason="time-limit")
    done = ddp("stop", run.id)
    assert (
        done.returncode == 2
        and "it is not running, so there is nothing to stop" in done.stderr
        and advice in done.stderr
    )
    assert read_stop(run.attempt(0)) is None


def test_stop_of_a_complete_run_names_the_job_that_still_runs(
    ddp: Ddp, run: RunDirectory, say: Say, tmp_path: Path
) -> None:
    """As one whose script evaluates for hours after its training."""
    attempt = begin(run, slurm_job_id="7")
    say("completed", 0, at=0, step=5)
    os.utime(attempt.path, (0, 0))
    fake_slurm(tmp_path, "squeue", f"echo '7|7|RUNNING|n1|None|cluster_ddp {run.id}'")
    assert ddp("stop", run.id).stderr.rstrip().endswith("To end it: scancel 7")


def test_cancel_of_a_local_run_stops_it_at_once_for_good(ddp: Ddp, run: RunDirectory) -> None:
    attempt = begin(run)
    assert ddp("cancel", run.id).returncode == 0
    request = read_stop(attempt)
    assert request is not None and (request.reason, request.level) == ("cancel", 2)
    assert json.loads(ddp("status", run.id, "--json").stdout)["state"] == "CANCELLED"
    with pytest.raises(RunEnded):
        begin(run)


def test_cancel_records_it_before_it_calls_scancel(ddp: Ddp, run: RunDirectory, tmp_path: Path) -> None:
    add_slurm_job(run, "6")
    begin_dead(run, slurm_job_id="7")
    fake_slurm(tmp_path, "squeue", f"echo '6|6|TIMEOUT||TimeLimit|x'; echo '7|7|RUNNING|n1|None|cluster_ddp {run.id}'")
    seen = tmp_path / "seen"
    calls = fake_slurm(
        tmp_path, "scancel", f'for file in {run.events}/login-*; do read line <"$file"; echo "$line"; done >{seen}'
    )
    done = ddp("cancel", run.id)
    assert done.returncode == 0 and "its Slurm job 7" in done.stderr
    assert calls.read_text() == "7\n"
    assert json.loads(seen.read_text())["event"] == "cancelled"


@pytest.mark.parametrize("comment", ["", "(null)", "mine", "cluster_ddp digits-20260101-000000-abcd"])
def test_cancel_leaves_a_job_alone_whose_comment_does_not_name_the_run(
    ddp: Ddp, run: RunDirectory, tmp_path: Path, comment: str
) -> None:
    add_slurm_job(run, "7")
    fake_slurm(tmp_path, "squeue", f"echo '7|7|RUNNING|n1|None|{comment}'")
    called = fake_slurm(tmp_path, "scancel", "")
    done = ddp("cancel", run.id)
    assert done.returncode == 0 and not called.exists()
    assert "Slurm job 7 (RUNNING) is recorded in this run, but its comment names" in done.stderr


def test_cancel_takes_a_job_whose_comment_names_the_run_and_goes_on(
    ddp: Ddp, run: RunDirectory, tmp_path: Path
) -> None:
    add_slurm_job(run, "7")
    fake_slurm(tmp_path, "squeue", f"echo '7|7|RUNNING|n1|None|cluster_ddp {run.id} mine'")
    called = fake_slurm(tmp_path, "scancel", "")
    assert ddp("cancel", run.id).returncode == 0
    assert called.read_text() == "7\n"


@pytest.mark.parametrize("job_id", ["--user=root", "7,8", "7 8", "", "-t", "7_", "7;x"])
def test_what_is_no_job_id_never_reaches_a_command_line(
    ddp: Ddp, run: RunDirectory, tmp_path: Path, job_id: str
) -> None:
    begin_dead(run)
    record = json.loads(run.record_file.read_text())
    run.record_file.write_text(json.dumps({**record, "slurm_job_ids": [job_id]}))
    attempt = json.loads(run.attempt(0).record_file.read_text())
    run.attempt(0).record_file.write_text(json.dumps({**attempt, "slurm_job_id": job_id}))
    called = [fake_slurm(tmp_path, name, "") for name in ("squeue", "scancel")]
    done = ddp("cancel", run.id)
    assert "slurm_job_ids has a value that cluster_ddp never writes" in done.stderr
    assert not any(calls.exists() for calls in called)


def test_cancel_without_slurm_still_keeps_the_run_from_beginning(ddp: Ddp, run: RunDirectory) -> None:
    add_slurm_job(run, "7")
    done = ddp("cancel", run.id)
    assert done.returncode == 3 and "marked as cancelled" in done.stderr and "7" in done.stderr
    with pytest.raises(RunEnded):
        begin(run, slurm_job_id="7")
    request_resume(run, by="me")
    begin(run, slurm_job_id="7")


def test_cancel_of_a_complete_run_changes_nothing(ddp: Ddp, run: RunDirectory, say: Say) -> None:
    begin_dead(run)
    say("completed", 0, step=300)
    done = ddp("cancel", run.id)
    assert done.returncode == 0 and "nothing to cancel" in done.stderr
    assert [event["event"] for event in read_events(run)] == ["completed"]
