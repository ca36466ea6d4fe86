"""What `stop`, `cancel` and `resume` do with a copy of a run directory: nothing that reaches the original."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
from cli_stage import Call, Slurm, the_sweep

from cluster_ddp.job import load_job
from cluster_ddp.run.attempt import begin_attempt
from cluster_ddp.run.attempt_record import list_attempts
from cluster_ddp.run.directory import RunDirectory
from cluster_ddp.run.errors import RunAlive
from cluster_ddp.run.record import read_record
from cluster_ddp.run.runs import create_run
from cluster_ddp.run.status.report import describe
from cluster_ddp.run.stopfile import read_stop
from cluster_ddp.slurm.states import SlurmJob


@pytest.fixture
def run(call: Call, here: Path, slurm: Slurm) -> RunDirectory:
    """A run that trains, in an attempt that looks alive from here."""
    submitted = RunDirectory(Path(json.loads(call("submit", "job.yaml", "--json").out)["directory"]))
    begin_attempt(submitted, slurm_job_id="101", host="n1", pid=os.getpid(), nodes=2, procs=1)
    slurm.put_in_queue(submitted, "RUNNING")
    return submitted


@pytest.fixture(params=["elsewhere/{}", "elsewhere/my-copy", "runs/my-copy"])
def copied(request: pytest.FixtureRequest, run: RunDirectory, here: Path) -> RunDirectory:
    """A copy of it, under its name in another folder, or under another name."""
    target = here / request.param.format(run.id)
    return RunDirectory(Path(shutil.copytree(run.path, target)))


def cancelled(slurm: Slurm) -> list[str]:
    file = slurm.folder / "cancelled"
    return file.read_text().split() if file.exists() else []


@pytest.mark.parametrize(("command", "status"), [("cancel", 0), ("stop", 2)])
def test_the_original_is_left_alone(
    call: Call, slurm: Slurm, run: RunDirectory, copied: RunDirectory, command: str, status: int
) -> None:
    said = call(command, str(copied.path))
    assert said.status == status, said.err
    assert f"{copied.path} is a copy of {run.path}; that run and its Slurm jobs are left alone" in said.err
    assert cancelled(slurm) == [] and read_stop(run.attempt(0)) is None
    assert "its Slurm job" not in said.err.replace("its Slurm jobs are left alone", "")


def test_a_copy_is_resumed_as_a_run_of_its_own(
    call: Call, slurm: Slurm, run: RunDirectory, copied: RunDirectory
) -> None:
    said = call("resume", str(copied.path))
    assert said.status == 0, said.err
    assert f"is a copy of {run.path}" in said.err
    name = copied.id if copied.path.parent == run.path.parent else copied.path
    assert f"cluster-ddp stop {name} " in said.err, "by the name of the original, the original would be stopped"
    slurm.queue.write_text(
        f"101|101|RUNNING|n[1-2]|None|cluster_ddp {run.id}\n102|102|PENDING||Priority|cluster_ddp {copied.id}\n"
    )
    jobs = {
        "101": SlurmJob("101", "RUNNING", "None", "n[1-2]", f"cluster_ddp {run.id}"),
        "102": SlurmJob("102", "PENDING", "Priority", "", f"cluster_ddp {copied.id}"),
    }
    assert (describe(copied, jobs).state.value, describe(copied, jobs).slurm_job_id) == ("PENDING", "102")
    assert (describe(run, jobs).state.value, describe(run, jobs).slurm_job_id) == ("RUNNING", "101")
    assert call("cancel", str(copied.path)).status == 0
    assert cancelled(slurm) == ["102"]


def test_an_attempt_of_a_copy_begins_beside_that_of_its_original(run: RunDirectory, copied: RunDirectory) -> None:
    """As of a job that a person submits with the copy's script."""
    begin_attempt(copied, slurm_job_id="102", host="n1", pid=os.getpid(), nodes=2, procs=1)
    assert [attempt.number for attempt in list_attempts(copied)] == [0, 1]
    assert read_record(copied).jobs_of_original == ("101",)
    with pytest.raises(RunAlive, match="attempt 1"):
        begin_attempt(copied, slurm_job_id="103", host="n1", pid=os.getpid(), nodes=2, procs=1)


def test_a_copy_of_a_local_run_begins_beside_its_original(here: Path) -> None:
    run = create_run(load_job("job.yaml").spec, runs_dir=here / "runs", via="local", script=None)
    begin_attempt(run, host="n1", pid=os.getpid(), nodes=1, procs=1)
    copied = RunDirectory(shutil.copytree(run.path, here / "copy"))
    begin_attempt(copied, host="n1", pid=os.getpid(), nodes=1, procs=1)
    with pytest.raises(RunAlive, match="attempt 1"):
        begin_attempt(copied, host="n1", pid=os.getpid(), nodes=1, procs=1)
    with pytest.raises(RunAlive, match="attempt 0"):
        begin_attempt(run, host="n1", pid=os.getpid(), nodes=1, procs=1)


def test_what_was_moved_is_the_original(call: Call, slurm: Slurm, run: RunDirectory, here: Path) -> None:
    moved = RunDirectory(run.path.rename(here / "moved"))
    said = call("cancel", str(moved.path))
    assert said.status == 0 and "is a copy" not in said.err
    assert cancelled(slurm) == ["101"]


@pytest.mark.parametrize("command", ["cancel", "stop", "resume"])
def test_a_copy_of_a_sweep_never_reaches_its_original(here: Path, slurm: Slurm, call: Call, command: str) -> None:
    slurm.program("scontrol", 'echo "MaxArraySize            = 1001"')
    call("sweep", "--no-check", "job.yaml", "--grid", "train.lr=1e-3,1e-4")
    sweep = the_sweep(here)
    slurm.queue.write_text(f"101_0|101|PENDING||Priority|cluster_ddp {sweep.id}\n")
    copied = shutil.copytree(sweep.path, here / "elsewhere" / sweep.id)
    said = call(command, str(copied))
    assert said.status == 2 and f"{copied} is a copy of sweep {sweep.path}" in said.err
    assert not (slurm.folder / "cancelled").exists() and len(slurm.submissions()) == 1
    copied.rename(here / "aside")
    sweep.path.rename(here / "runs" / "moved")
    assert call("cancel", str(here / "runs" / "moved")).status == 0
