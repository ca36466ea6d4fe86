"""``cluster-ddp resume``: what it refuses, what it keeps, what it changes, and where it sends the run."""

from __future__ import annotations

import json
import os
import re
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cli_stage import Call, Slurm, stopped_run

from cluster_ddp.checkpoint import verify
from cluster_ddp.checkpoint.errors import CheckpointError
from cluster_ddp.checkpoint.verify import CheckpointInfo
from cluster_ddp.cli.app import COMMANDS
from cluster_ddp.job import load_job, load_resolved
from cluster_ddp.run.attempt import begin_attempt, request_resume
from cluster_ddp.run.attempt_record import end_attempt
from cluster_ddp.run.directory import RunDirectory, step_name
from cluster_ddp.run.events import EventWriter, read_events
from cluster_ddp.run.record import read_record, update_record
from cluster_ddp.run.run_state import RunState
from cluster_ddp.run.runs import create_run
from cluster_ddp.run.status.report import RunStatus, describe
from cluster_ddp.run.stopfile import request_stop
from cluster_ddp.submit import local


@pytest.fixture
def run(call: Call, here: Path, slurm: Slurm) -> RunDirectory:
    return stopped_run(call)


def complete(run: RunDirectory) -> None:
    EventWriter(run, "rank-0").write("completed", attempt=0, step=20)


def test_a_stopped_run_goes_back_into_the_queue_in_its_own_directory(
    call: Call, run: RunDirectory, slurm: Slurm
) -> None:
    run.script.write_text(run.script.read_text() + "# edited by hand\n")
    said = call("resume", run.id, "--json")
    assert said.status == 0, said.err
    expected = {"run_id": run.id, "directory": str(run.path), "slurm_job_id": "102", "state": "PENDING"}
    assert json.loads(said.out) == expected
    assert slurm.submissions()[1][-2:] == [str(run.script), str(run.path)]
    assert run.script.read_text().endswith("# edited by hand\n")
    assert read_record(run).slurm_job_ids == ("101", "102")
    assert "resume-requested" in [event["event"] for event in read_events(run)]
    begin_attempt(run, slurm_job_id="102", host="n1", pid=0, nodes=2, procs=1)  # is not refused as stopped by a person


@pytest.mark.parametrize(("state", "advice"), [("RUNNING", "stop"), ("COMPLETING", "stop"), ("PENDING", "cancel")])
def test_what_is_alive_is_not_resumed(call: Call, run: RunDirectory, slurm: Slurm, state: str, advice: str) -> None:
    request_resume(run, by="me")
    begin_attempt(run, slurm_job_id="101", host="n1", pid=0, nodes=2, procs=1)
    slurm.put_in_queue(run, state)
    said = call("resume", run.id)
    assert said.status == 2
    assert f"cluster-ddp {advice} {run.id}" in said.err
    assert len(slurm.submissions()) == 1


def test_what_is_still_stopping_is_resumed_once_it_has_ended(call: Call, run: RunDirectory, slurm: Slurm) -> None:
    request_resume(run, by="me")
    attempt = begin_attempt(run, slurm_job_id="101", host="n1", pid=0, nodes=2, procs=1)
    request_stop(attempt, reason="person", by="me@login")
    slurm.put_in_queue(run, "COMPLETING")
    said = call("resume", run.id)
    assert said.status == 2 and len(slurm.submissions()) == 1
    assert "is still ending (Slurm job 101): me@login has asked it to stop" in said.err
    assert f"cluster-ddp stop {run.id}" not in said.err


def test_a_run_whose_machine_is_down_is_resumed_after_a_cancel(call: Call, here: Path) -> None:
    """Nothing here can tell it from one at work: `stop`, which was the advice, waited for it forever."""
    run = create_run(load_job("job.yaml").spec, runs_dir=here / "runs", via="local", script=None)
    attempt = begin_attempt(run, host="n1", pid=os.getpid(), nodes=1, procs=1)
    record = json.loads(attempt.record_file.read_text())
    attempt.record_file.write_text(json.dumps({**record, "host": "n1", "boot_id": "of n1"}))
    for _ in range(2):
        said = call("resume", run.id)
        assert said.status == 2
        assert f"If n1 is down, or nothing of the run is left there: cluster-ddp cancel {run.id}" in said.err
        request_stop(attempt, reason="person", by="me@login")
    assert call("cancel", run.id).status == 0
    assert describe(run, None).state is RunState.CANCELLED


def test_a_cancelled_run_that_still_saves_on_this_machine_stays_cancelled_until_it_has_ended(
    call: Call, here: Path
) -> None:
    """The resume was recorded before the attempt refused to begin: PENDING, without a reason, for minutes."""
    run = create_run(load_job("job.yaml").spec, runs_dir=here / "runs", via="local", script=None)
    begin_attempt(run, host="here", pid=os.getpid(), nodes=1, procs=1)
    assert call("cancel", run.id).status == 0
    said = call("resume", run.id)
    assert said.status == 2 and re.search(r"is still ending: \S+ has asked it to stop", said.err)
    assert describe(run, None).state is RunState.CANCELLED


def test_a_strangers_job_with_an_id_of_ours_is_no_sign_of_life(call: Call, run: RunDirectory, slurm: Slurm) -> None:
    slurm.queue.write_text("101|101|RUNNING|n9|None|cluster_ddp other-20260101-000000-abcd\n")
    assert call("resume", run.id).status == 0


def test_settings_change_the_job_and_the_script_and_keep_the_old_job(
    call: Call, run: RunDirectory, slurm: Slurm
) -> None:
    old = run.job_file.read_bytes()
    assert call("resume", run.id, "--set", "slurm.partition=long", "--nodes", "4", "--procs", "2").status == 0
    spec = load_resolved(run.job_file)
    assert (spec.slurm.partition, spec.slurm.nodes, spec.launch.procs_per_node) == ("long", 4, 2)
    assert (run.path / "job.yaml.1").read_bytes() == old
    assert "#SBATCH --nodes=4" in run.script.read_text()
    assert run.script.stat().st_mode & 0o777 == 0o700
    assert call("resume", run.id, "--set", "slurm.partition=short").status == 0
    assert load_resolved(run.path / "job.yaml.2").slurm.partition == "long"


def test_without_settings_the_job_file_stays(call: Call, run: RunDirectory) -> None:
    call("resume", run.id)
    assert not (run.path / "job.yaml.1").exists()


def test_a_wrong_setting_changes_nothing(call: Call, run: RunDirectory, slurm: Slurm) -> None:
    old = run.job_file.read_bytes()
    assert call("resume", run.id, "--set", "slurm.tiem=1").status == 2
    assert run.job_file.read_bytes() == old
    assert len(slurm.submissions()) == 1


def test_where_there_is_no_slurm_nothing_changes(call: Call, run: RunDirectory, no_slurm: None) -> None:
    old = run.job_file.read_bytes()
    assert call("resume", run.id, "--set", "slurm.partition=long").status == 3
    assert run.job_file.read_bytes() == old


def test_the_global_batch_is_the_runs_for_life(call: Call, run: RunDirectory, slurm: Slurm) -> None:
    update_record(run, global_batch=64)
    said = call("resume", run.id, "--set", "train.global_batch=128")
    assert said.status == 2
    assert "the global batch of this run is 64, and cannot change" in said.err
    assert len(slurm.submissions()) == 1
    assert call("resume", run.id, "--set", "train.global_batch=64").status == 0


@pytest.mark.parametrize(
    ("schedule", "setting", "said_so"),
    [
        ("cosine", "train.lr=0.5", True),
        ("cosine", "train.seed=3", True),
        ("cosine", "train.workers=2", False),
        ("cosine", "train.steps=40", True),
        ("step", "train.epochs=3", True),  # by default it drops by thirds of the whole
        ("constant", "train.steps=40", False),
        ("constant", "train.batch_size=4", True),  # two micro-batches, each with random numbers of its own
        ("constant", "train.batch_size=16", False),  # the share of a rank is 8
        ("constant", "train.scaler.growth_interval=100", True),
    ],
)
def test_a_change_that_ends_exactness_is_said(
    call: Call, run: RunDirectory, schedule: str, setting: str, said_so: bool
) -> None:
    update_record(run, global_batch=16)
    run.job_file.write_text(run.job_file.read_text().replace("schedule: constant", f"schedule: {schedule}"))
    said = call("resume", run.id, "--set", setting)
    assert said.status == 0
    assert (f"{setting.split('=')[0]} changes from" in said.err) is said_so


def test_the_first_scale_of_fp16_is_not_said_to_change_the_weights(call: Call, run: RunDirectory) -> None:
    said = call("resume", run.id, "--set", "train.scaler.initial=16")
    assert said.status == 0
    assert "otherwise the saved scale continues" in said.err and "weights will differ" not in said.err


@pytest.mark.parametrize("setting", ["launch.snapshot=true", "runs_dir=elsewhere", "storage.mode=group"])
def test_what_a_directory_was_made_by_does_not_change(
    call: Call, run: RunDirectory, slurm: Slurm, setting: str
) -> None:
    said = call("resume", run.id, "--set", setting)
    assert said.status == 2 and len(slurm.submissions()) == 1
    assert f"{setting.split('=')[0]}: this takes effect when a run's directory is made" in said.err


def test_the_average_of_the_weights_is_not_begun_in_the_middle(call: Call, run: RunDirectory, slurm: Slurm) -> None:
    (run.checkpoints / step_name(5)).mkdir(parents=True)
    said = call("resume", run.id, "--set", "train.ema_decay=0.9")
    assert said.status == 2 and len(slurm.submissions()) == 1
    assert "train.ema_decay: this run has trained without an average of the weights" in said.err


def test_the_average_of_the_weights_is_not_left_out_in_the_middle(call: Call, run: RunDirectory, slurm: Slurm) -> None:
    run.job_file.write_text(run.job_file.read_text().replace("ema_decay: null", "ema_decay: 0.9"))
    assert call("resume", run.id, "--set", "train.ema_decay=0.8").status == 0  # there is no checkpoint yet
    (run.checkpoints / step_name(5)).mkdir(parents=True)
    slurm.queue.write_text("")
    said = call("resume", run.id, "--set", "train.ema_decay=null")
    assert said.status == 2 and "contain an average of the weights (decay 0.8)" in said.err


def test_a_complete_run_is_left_alone(call: Call, run: RunDirectory, slurm: Slurm) -> None:
    complete(run)
    said = call("resume", run.id, "--json")
    assert said.status == 0
    assert json.loads(said.out)["state"] == "COMPLETED"
    assert len(slurm.submissions()) == 1
    assert call("resume", run.id, "--set", "train.steps=20", "--set", "train.lr=0.5").status == 0
    assert len(slurm.submissions()) == 1
    assert not (run.path / "job.yaml.1").exists()


def test_a_complete_run_with_more_to_do_goes_on(call: Call, run: RunDirectory, slurm: Slurm) -> None:
    complete(run)
    assert call("resume", run.id, "--set", "train.steps=40").status == 0
    assert len(slurm.submissions()) == 2
    assert load_resolved(run.job_file).train.steps == 40


@pytest.mark.parametrize("damage", ["newest", "all", "none"])
def test_a_complete_run_whose_last_checkpoint_is_damaged_goes_on(
    call: Call, run: RunDirectory, slurm: Slurm, monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    complete(run)
    (run.checkpoints / "step-00000020").mkdir()

    def newest_intact(*_: Any) -> tuple[None, None, list[CheckpointInfo]]:
        if damage == "all":
            raise CheckpointError("none is intact")
        newest = CheckpointInfo(run.checkpoints / "step-00000020", "damaged", 20)
        return None, None, [newest] if damage == "newest" else []

    monkeypatch.setattr(verify, "newest_intact", newest_intact)
    assert call("resume", run.id).status == 0
    assert len(slurm.submissions()) == (1 if damage == "none" else 2)


def test_a_run_of_another_version_goes_on_with_a_note(call: Call, run: RunDirectory, slurm: Slurm) -> None:
    written = run.job_file.read_text() + "alerts: [me]\n"
    run.job_file.write_text(written)
    said = call("resume", run.id, "--json")
    assert said.status == 0, said.err
    assert "note: " in said.err and "alerts: cluster_ddp" in said.err
    assert run.job_file.read_text() == written
    slurm.queue.write_text("")
    end_attempt(begin_attempt(run, slurm_job_id="102", host="n1", pid=0, nodes=2, procs=1))
    said = call("resume", run.id, "--set", "train.workers=2")
    assert said.status == 0, said.err
    assert (run.path / "job.yaml.1").read_text() == written
    assert load_resolved(run.job_file).train.workers == 2 and "alerts" not in run.job_file.read_text()


def test_settings_that_cannot_be_written_change_nothing(
    call: Call, run: RunDirectory, slurm: Slurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise PermissionError(13, "Permission denied")

    before = run.job_file.read_text()
    monkeypatch.setattr("cluster_ddp.submit.resume.replace_file", refuse)
    said = call("resume", run.id, "--set", "train.workers=2")
    assert said.status == 2
    assert f"{run.job_file}: Permission denied" in said.err and "unexpected" not in said.err
    assert run.job_file.read_text() == before
    assert len(slurm.submissions()) == 1


def test_a_user_without_a_name(call: Call, run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    def nameless() -> str:
        raise KeyError("getpwuid(): uid not found: 4242")

    monkeypatch.setattr("getpass.getuser", nameless)
    assert call("resume", run.id).status == 0
    assert call("cancel", run.id).status == 0


def test_a_controller_that_does_not_answer_holds_nobody_up(
    call: Call, run: RunDirectory, slurm: Slurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cluster_ddp.cli.run_states.SLURM_SECONDS", 0.5)
    slurm.program("squeue", "exec sleep 60")
    began = time.monotonic()
    said = call("status", run.id, "--json")
    assert time.monotonic() - began < 30
    assert said.status == 0 and json.loads(said.out)["state"] == "STOPPED"
    assert "showing the run directories only" in said.err


@pytest.mark.parametrize("cancelled", [False, True])
def test_when_sbatch_refuses_the_run_stays_as_it_was(
    call: Call, run: RunDirectory, slurm: Slurm, cancelled: bool
) -> None:
    if cancelled:
        assert call("cancel", run.id).status == 0
    slurm.put_in_queue(run, "CANCELLED")  # a chain's, or removed from the queue by `stop`
    before = json.loads(call("status", run.id, "--json").out)
    slurm.program("sbatch", "echo 'sbatch: error: no' >&2; exit 1")
    for _ in range(2):
        assert call("resume", run.id).status == 3
        now = json.loads(call("status", run.id, "--json").out)
        assert (now["state"], now["reason"]) == (before["state"], before["reason"])
    assert read_record(run).slurm_job_ids == ("101",)


def test_a_run_that_does_not_exist(call: Call, here: Path, slurm: Slurm) -> None:
    assert call("resume", "nothing").status == 2


def test_a_run_without_its_job_is_told_and_what_to_do(call: Call, run: RunDirectory) -> None:
    for what, remove in (("is empty", lambda: run.job_file.write_text("")), ("is missing", run.job_file.unlink)):
        remove()
        said = call("resume", run.id)
        told = f"{run.job_file} {what}, and the run cannot be resumed without it: put a copy of it back"
        assert said.status == 2 and told in said.err
        for command in (("status",), ("status", run.id), ("list",)):
            assert told in call(*command).out


def test_a_run_that_was_started_in_a_way_that_is_not_known(call: Call, here: Path, slurm: Slurm) -> None:
    made = create_run(load_job("job.yaml").spec, runs_dir=here / "runs", via="later", script=None)
    said = call("resume", made.id)
    assert said.status == 2
    assert "via later, which this version" in said.err and str(made.path) in said.err
    assert set(re.findall("cluster-ddp ([a-z]+)", said.err)) <= COMMANDS.keys()


def test_what_is_said_of_a_run_of_launch_is_what_helps(call: Call, here: Path, no_slurm: None) -> None:
    made = create_run(load_job("job.yaml").spec, runs_dir=here / "runs", via="launch", script=None)
    begin_attempt(made, host="here", pid=os.getpid(), nodes=2, procs=1)
    for command in ("stop", "cancel"):
        said = call(command, made.id)
        assert said.status == 0, said.err
        assert "run the same commands again, on every node" in said.err and "resume" not in said.err
    end_attempt(made.attempt(0))
    assert "To continue it: run the same commands again" in call("stop", made.id).err


def test_devices_are_for_a_run_on_this_machine(call: Call, here: Path, run: RunDirectory, slurm: Slurm) -> None:
    said = call("resume", run.id, "--gpus", "0")
    assert said.status == 2
    assert "--gpus is for runs on this machine" in said.err and "via sbatch" in said.err
    made = create_run(load_job("job.yaml").spec, runs_dir=here / "runs", via="local", script=None)
    assert "--gpus 0,0: give each device once" in call("resume", made.id, "--gpus", "0,0").err


def test_a_local_run_with_ranks_that_do_not_divide_its_batch_is_left_as_it_is(call: Call, here: Path) -> None:
    made = create_run(load_job("job.yaml").spec, runs_dir=here / "runs", via="local", script=None)
    update_record(made, global_batch=48, nodes=1, procs=2)
    said = call("resume", made.id, "--procs", "5", "--set", "train.workers=2")
    assert said.status == 2
    assert "48 cannot be divided among 5 ranks" in said.err and "3, 4, 6, 8" in said.err
    assert not (made.path / "job.yaml.1").exists() and read_events(made) == []
    assert read_record(made).procs == 2


def test_a_local_start_with_ranks_that_do_not_divide_the_batch_makes_no_run(call: Call, here: Path) -> None:
    said = call("local", "job.yaml", "--procs", "5", "--set", "train.global_batch=48")
    assert said.status == 2
    assert "48 cannot be divided among 5 ranks" in said.err
    assert not (here / "runs").exists()


@pytest.mark.parametrize("status", [0, 4, 5])
def test_a_local_run_stays_in_the_foreground(
    call: Call, here: Path, monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    made = create_run(load_job("job.yaml").spec, runs_dir=here / "runs", via="local", script=None)
    resumed: list[tuple[Any, ...]] = []

    def run_attempt(run: RunDirectory, start: local.LocalStart, **_: Any) -> RunStatus:
        resumed.append((run, start.nodes, start.procs))
        state = {0: RunState.COMPLETED, 4: RunState.FAILED, 5: RunState.STOPPED}[status]
        return replace(describe(run, None), state=state)

    monkeypatch.setattr(local, "run_attempt", run_attempt)
    said = call("resume", made.id, "--procs", "3", "--json")
    assert said.status == status
    assert resumed == [(made, 2, 3)]  # the nodes of the job file
    assert json.loads(said.out)["run_id"] == made.id
    assert not (made.path / "job.yaml.1").exists()
