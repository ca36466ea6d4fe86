"""What `status` and `list` show of a run."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable

import pytest
from run_builders import begin, begin_dead, slurm_job

from cluster_ddp.cli import list as cli_list
from cluster_ddp.cli import status as cli_status
from cluster_ddp.run.attempt_record import end_attempt
from cluster_ddp.run.directory import AttemptDirectory, RunDirectory
from cluster_ddp.run.record import add_slurm_job
from cluster_ddp.run.run_state import RunState
from cluster_ddp.run.status.report import describe
from cluster_ddp.run.stopfile import request_stop
from cluster_ddp.slurm.commands import parse_queue

Say = Callable[..., None]
Command = Callable[..., subprocess.CompletedProcess[str]]


def test_the_contract_of_status_json(run: RunDirectory, say: Say) -> None:
    begin(run, slurm_job_id="12")
    say("started", 0, at=0, step=0, world_size=4, total_steps=300, training="4 ranks")
    say("checkpoint", 0, at=5, step=40, samples=1280)
    (run.checkpoints / "step-00000040").mkdir()
    row = {"step": 50, "samples": 1600, "epoch": 1, "attempt": 0, "time": time.time(), "train/loss": 0.5}
    run.metrics_file.write_text(json.dumps(row) + "\n")
    found = describe(run, {"12": slurm_job("RUNNING")}).to_json()
    goodput = found.pop("goodput")
    assert found == {
        "run_id": run.id, "name": "digits", "state": "RUNNING", "attempts": 1, "step": 50, "total_steps": 300,
        "samples": 1600, "training": "4 ranks", "last_checkpoint": 40, "metrics": {"train/loss": 0.5},
        "slurm_job_id": "12", "reason": None, "warnings": (), "directory": str(run.path),
        "world_size": 4, "samples_per_second": None, "seconds_left": None, "last_failure": None,
    }  # fmt: skip
    assert set(goodput) == {"productive_seconds", "lost_seconds", "running_seconds", "waiting_seconds", "ratio"}
    json.dumps(found, allow_nan=False)


@pytest.mark.parametrize(
    ("event", "reason"),
    [("node-lost", "node 1 (n7) was lost: no sign of life"), ("hang", "rank 1 on n7 hangs: no sign of life for 61 s")],
)
def test_what_failed_before_is_the_lost_node_or_the_hang_and_not_what_followed(
    run: RunDirectory, say: Say, event: str, reason: str
) -> None:
    begin_dead(run)
    say("started", 0, at=0, step=0, world_size=2, total_steps=300)
    say("rank-failed", 0, at=3, rank=0, host="n6", step=8, error="RuntimeError: Connection closed by peer")
    say(event, 0, at=60, host="n7", reason=reason)
    begin(run, slurm_job_id="12")
    assert describe(run, {"12": slurm_job("RUNNING")}).last_failure == f"attempt 0: {reason}"


def test_speed_and_end_are_told_while_it_trains_and_what_failed_before(run: RunDirectory, say: Say) -> None:
    begin_dead(run)
    say("started", 0, at=0, step=0, world_size=4, total_steps=300)
    say("rank-failed", 0, at=3, rank=3, host="n7", step=8, error="ValueError: bad")
    begin(run, slurm_job_id="12")
    say("resumed", 1, step=0, world_size=4, total_steps=300)
    row = {"step": 50, "samples": 1600, "epoch": 1, "attempt": 1, "time": time.time(), "samples_per_second": 512.0}
    run.metrics_file.write_text(json.dumps({**row, "seconds_per_step": 2.0}) + "\n")
    found = describe(run, {"12": slurm_job("RUNNING")})
    assert found.world_size == 4 and found.samples_per_second == 512.0
    assert found.seconds_left == pytest.approx(500, abs=60)
    assert found.last_failure == "attempt 0: rank 3 on n7 at step 8 failed: ValueError: bad"
    say("completed", 1, step=300)
    ended = describe(run, {})
    assert ended.seconds_left is None and ended.samples_per_second is None


@pytest.mark.parametrize(
    ("begun", "logged", "told"),
    [
        (300, 10, "50 of 300 (17%)"),
        (400, 300, "50 of 300 (17%), no further one reported for 5m 00s"),
        (300, None, "0 of 300 (0%), no further one reported for 5m 00s"),
        (10, None, "0 of 300 (0%)"),
    ],
)
def test_a_training_that_has_reported_no_step_for_a_while_is_told(
    run: RunDirectory, say: Say, ddp: Command, begun: float, logged: float | None, told: str
) -> None:
    begin(run)
    say("started", 0, at=10_000 - begun, step=0, total_steps=300)
    if logged is not None:
        row = {"step": 50, "samples": 1600, "epoch": 1, "attempt": 0, "time": time.time() - logged, "train/loss": 0.5}
        run.metrics_file.write_text(json.dumps(row) + "\n")
    assert f"step             {told}\n" in ddp("status", run.id).stdout
    say("completed", 0, step=300)
    assert "reported for" not in ddp("status", run.id).stdout


def test_nodes_that_give_no_sign_of_life_are_told_while_it_trains(run: RunDirectory, say: Say) -> None:
    attempt = begin(run, slurm_job_id="12")
    say("started", 0, at=0, step=0)
    for node in range(6):
        say("node-started", 0, node=node, host=f"n{node}")
    (silent := [attempt.alive_file(node) for node in (0, 1, 2, 4)])[0].parent.mkdir(exist_ok=True)
    for file in (*silent, attempt.alive_file(3)):  # the last node has signed off
        file.touch()
    assert describe(run, {"12": slurm_job("RUNNING")}).reason is None
    for file in silent:
        os.utime(file, (time.time() - 190,) * 2)
    told = describe(run, {"12": slurm_job("RUNNING")}).reason
    assert told is not None and told.startswith("no sign of life from n0, n1, n2 and 1 more for 3 min")
    assert describe(run, {"12": slurm_job("PENDING")}).reason != told


def begin_on_two_nodes(run: RunDirectory, say: Say) -> AttemptDirectory:
    """An attempt of a job whose two node programs have just given a sign of life."""
    attempt = begin(run, slurm_job_id="12")
    say("started", 0, at=0, step=0)
    for node in range(2):
        say("node-started", 0, node=node, host=f"n{node}")
        attempt.alive_file(node).parent.mkdir(exist_ok=True)
        attempt.alive_file(node).touch()
    return attempt


def test_a_running_job_whose_nodes_have_ended_is_told(run: RunDirectory, say: Say) -> None:
    """Its run directory was full: neither the end nor the restart, which waited for room, could be recorded."""
    attempt = begin_on_two_nodes(run, say)
    attempt.alive_file(0).unlink()
    assert describe(run, {"12": slurm_job("RUNNING")}).reason is None
    attempt.alive_file(1).unlink()
    assert describe(run, {"12": slurm_job("RUNNING")}).reason is None, "its keeper has hardly looked"
    os.utime(attempt.path, (time.time() - 190,) * 2)
    told = describe(run, {"12": slurm_job("RUNNING")}).reason
    assert told is not None and told.startswith("attempt 0 has ended on its nodes") and "free space" in told


def test_a_job_that_still_holds_nodes_minutes_after_its_run_has_ended_is_told(
    run: RunDirectory, say: Say, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its slurmstepd on the batch host was killed, which Slurm did not notice, or its keeper was stopped."""
    begin(run, slurm_job_id="7")
    say("completed", 0, at=0, step=5)  # by the clock of a node, which is hours behind
    assert describe(run, {"7": slurm_job("RUNNING")}).reason is None
    here = time.time
    monkeypatch.setattr(time, "time", lambda: here() + 400)
    for state in ("RUNNING", "STOPPED"):
        found = describe(run, {"7": slurm_job(state)})
        assert found.state is RunState.COMPLETED
        assert found.reason is not None and found.reason.endswith("To end it: scancel 7")
    assert describe(run, {"7": slurm_job("COMPLETING")}).reason is None


def test_a_job_whose_ranks_do_more_after_training_is_not_said_to_be_left_behind(
    run: RunDirectory, say: Say, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a script that evaluates after the block of `join_run`: nobody should end its job."""
    attempt = begin_on_two_nodes(run, say)
    say("completed", 0, step=5)
    attempt.alive_file(1).unlink()
    here = time.time
    monkeypatch.setattr(time, "time", lambda: here() + 400)
    os.utime(attempt.alive_file(0), (here() + 390,) * 2)
    found = describe(run, {"12": slurm_job("RUNNING")})
    assert found.state is RunState.COMPLETED
    assert found.reason is not None and found.reason.startswith("Slurm job 12 runs until all ranks have exited")
    attempt.alive_file(0).unlink()
    assert str(describe(run, {"12": slurm_job("RUNNING")}).reason).endswith("To end it: scancel 12")


def test_processes_that_a_signal_has_stopped_wait_for_another_signal(run: RunDirectory, say: Say) -> None:
    begin_on_two_nodes(run, say)
    told = describe(run, {"12": slurm_job("STOPPED")})
    assert told.state is RunState.SUSPENDED
    assert str(told.reason).endswith("scancel --signal=CONT 12; scancel --signal=CONT --full 12")
    assert "when Slurm resumes it" in str(describe(run, {"12": slurm_job("SUSPENDED")}).reason)


def test_a_node_is_silent_where_the_clock_of_the_storage_is_ahead(
    run: RunDirectory, say: Say, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempt = begin_on_two_nodes(run, say)
    here = time.time
    monkeypatch.setattr(time, "time", lambda: here() - 3600)
    assert describe(run, {"12": slurm_job("RUNNING")}).reason is None
    os.utime(attempt.alive_file(1), (here() - 190,) * 2)
    told = describe(run, {"12": slurm_job("RUNNING")}).reason
    assert told is not None and told.startswith("no sign of life from n1 for 3 min")
    request_stop(attempt, reason="person", by="me")
    assert describe(run, {"12": slurm_job("RUNNING")}).reason == f"stopping: asked by me; {told}"


def test_a_silent_node_is_told_while_the_time_limit_asks_it_to_stop(run: RunDirectory, say: Say) -> None:
    attempt = begin_on_two_nodes(run, say)
    request_stop(attempt, reason="time-limit", by="the keeper")
    os.utime(attempt.alive_file(1), (time.time() - 190,) * 2)
    told = str(describe(run, {"12": slurm_job("RUNNING")}).reason)
    assert told.startswith("stopping: time-limit; no sign of life from n1 for 3 min")


def test_a_silent_node_of_a_run_without_slurm_is_told_without_slurm(run: RunDirectory, say: Say) -> None:
    """As where nobody reads its output, or its machine lost power."""
    attempt = begin(run)
    say("node-started", 0, node=0, host="n0")
    attempt.alive_file(0).touch()
    os.utime(attempt.alive_file(0), (time.time() - 190,) * 2)
    told = str(describe(run, None).reason)
    assert told.startswith("no sign of life from n0 for 3 min: ") and "terminal" in told and "Slurm" not in told


def test_no_node_is_silent_because_the_clock_here_is_ahead_of_the_storages(
    run: RunDirectory, say: Say, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempt = begin_on_two_nodes(run, say)
    before = sorted(attempt.path.iterdir())
    here = time.time
    monkeypatch.setattr(time, "time", lambda: here() + 3600)
    assert describe(run, {"12": slurm_job("RUNNING")}).reason is None
    for node in range(2):
        os.utime(attempt.alive_file(node), (here() - 190,) * 2)
    told = describe(run, {"12": slurm_job("RUNNING")}).reason
    assert told is not None and told.startswith("no sign of life from n0, n1 for 3 min")
    assert sorted(attempt.path.iterdir()) == before


def test_when_slurm_expects_a_job_to_start_is_told(run: RunDirectory) -> None:
    add_slurm_job(run, "7")
    jobs = parse_queue("7|7|PENDING||Resources@2026-11-22T13:05:00|cluster_ddp x\n8|8|PENDING||Priority@N/A|\n")
    assert jobs["7"].reason == "Resources" and (jobs["8"].reason, jobs["8"].starts) == ("Priority", None)
    found = describe(run, {"7": jobs["7"]._replace(comment="")})
    assert found.reason is not None and found.reason.endswith(
        "(Resources); Slurm expects it to start at 2026-11-22 13:05"
    )


def test_steps_that_were_done_again_count_as_the_later_attempt_says(run: RunDirectory, say: Say) -> None:
    begin_dead(run)
    begin_dead(run)
    say("started", 0, at=0, step=0, total_steps=300)
    say("checkpoint", 0, at=1, step=40, samples=400)
    rows = [
        {"step": 60, "attempt": 0, "samples": 600, "train/loss": 0.6, "val/accuracy": 0.9},
        {"step": 50, "attempt": 1, "samples": 500, "train/loss": 0.7},
    ]
    run.metrics_file.write_text(json.dumps(rows[0]) + "\n")
    say("resumed", 1, at=2, step=40, total_steps=300)
    assert (describe(run, {}).step, describe(run, {}).samples) == (40, 400)
    run.metrics_file.write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"step": 51, "att')
    found = describe(run, {})
    assert (found.step, found.samples) == (50, 500)
    assert found.metrics == {"train/loss": 0.7, "val/accuracy": 0.9}


def test_a_long_metrics_file_is_read_from_its_end(run: RunDirectory) -> None:
    begin_dead(run)
    with run.metrics_file.open("w") as file:
        for step in range(60_000):
            file.write(json.dumps({"step": step, "attempt": 0, "train/loss": 0.5, "filling": "x" * 60}) + "\n")
    began = time.process_time()
    assert describe(run, {}).step == 59_999
    assert time.process_time() - began < 2.0


def test_only_finished_and_sound_checkpoints_count(run: RunDirectory) -> None:
    assert describe(run, {}).last_checkpoint is None
    for name in ("step-00000010", "step-00000020", "damaged-step-00000030", "tmp-step-00000040", "step-5", "step-x"):
        (run.checkpoints / name).mkdir()
    assert describe(run, {}).last_checkpoint == 20


def test_a_run_that_was_killed_before_its_first_checkpoint_shows_how_far_it_came(run: RunDirectory, say: Say) -> None:
    begin_dead(run)
    say("started", 0, at=0, step=0, world_size=2, total_steps=100)
    say("node-finished", 0, at=9, node=0, outcome="killed", step=27)
    found = describe(run, None)
    assert (found.step, found.total_steps, found.last_checkpoint) == (27, 100, None)


def test_a_listing_reads_what_it_shows_and_each_file_once(
    run: RunDirectory, say: Say, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    begin_dead(run)
    say("failed", 0, step=5, error="ValueError: no")
    end_attempt(run.attempt(0))
    run.metrics_file.write_text(json.dumps({"step": 5, "attempt": 0, "val/loss": 0.5}) + "\n")
    monkeypatch.setenv("CLUSTER_DDP_RUNS", str(run.path.parent))
    opened: list[str] = []
    really_open = os.open

    def noted(path: str | os.PathLike[str], *arguments: int) -> int:
        opened.append(os.fspath(path))
        return really_open(path, *arguments)

    monkeypatch.setattr(os, "open", noted)
    say("completed", 0, step=5)
    cli_list.command()
    assert str(run.record_file) in opened and str(run.metrics_file) not in opened
    opened.clear()
    cli_status.command()
    assert str(run.metrics_file) in opened
    assert len(opened) == len(set(opened))
    assert "val/loss 0.5" in capsys.readouterr().out
