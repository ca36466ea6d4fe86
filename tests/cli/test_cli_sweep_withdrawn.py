"""Elements of a sweep that was stopped or cancelled before they had begun do not begin, even if Slurm starts them."""

from __future__ import annotations

import errno
import os
import subprocess
from pathlib import Path

import pytest
from cli_stage import Call, Slurm, the_sweep

from cluster_ddp.cli import sweep_end
from cluster_ddp.run.sweep import SweepDirectory
from cluster_ddp.slurm.commands import submit_script
from cluster_ddp.submit.element import main as element_program

SWEEP = ("sweep", "--no-check", "job.yaml", "--grid", "train.lr=1e-3,1e-4")


@pytest.fixture
def slurm(slurm: Slurm) -> Slurm:
    slurm.program("scontrol", 'echo "MaxArraySize            = 1001"')
    return slurm


def start(sweep: SweepDirectory, job: str, monkeypatch: pytest.MonkeyPatch) -> int:
    """What the script of the array's task 1 does; its exit status."""
    for name, value in {"JOB_ID": "9", "ARRAY_JOB_ID": job, "ARRAY_TASK_ID": "1"}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    return element_program([str(sweep.path), "1"])


@pytest.mark.parametrize("command", ["cancel", "stop"])
def test_they_do_not_begin_though_slurm_could_not_be_reached(
    here: Path, slurm: Slurm, call: Call, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    assert call(*SWEEP).status == 0
    sweep, queue = the_sweep(here), (slurm.folder / "squeue").read_text()
    slurm.program("squeue", "echo 'slurm_load_jobs error: Invalid user' >&2; exit 1")
    said = call(command, sweep.id)
    assert said.status == 3
    assert f"no further element of sweep {sweep.id} will start, but its jobs may still be running or queued" in said.err
    assert start(sweep, "101", monkeypatch) == 76
    slurm.program("scontrol", 'echo "$*" >"$here/asked"')
    assert subprocess.run([sweep.script, sweep.path, "0"], capture_output=True, timeout=60).returncode == 76
    assert (slurm.folder / "asked").read_text() == "update JobId=101_1 Requeue=0\n"  # a site may have RequeueExit=76
    assert not list(sweep.path.glob("0001-*"))
    slurm.program("scontrol", 'echo "MaxArraySize            = 1001"')
    (slurm.folder / "squeue").write_text(queue)
    slurm.queue.write_text(f"101_1|103|FAILED|n1|NonZeroExitCode|cluster_ddp {sweep.id}\n")
    assert "the sweep was stopped or cancelled before it started; cluster-ddp resume" in call("status", sweep.id).out
    assert call("resume", sweep.id).status == 0
    assert start(sweep, "102", monkeypatch) == 0


@pytest.mark.parametrize("command", ["cancel", "stop"])
def test_a_full_disk_is_told_with_the_command_that_ends_the_jobs(
    here: Path, slurm: Slurm, call: Call, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    assert call(*SWEEP).status == 0
    monkeypatch.setattr(sweep_end, "update_sweep", full)
    said = call(command, the_sweep(here).id)
    assert said.status == 2 and "sweep.json: No space left on device" in said.err
    assert "or end its jobs directly: scancel 101" in said.err


def test_they_do_not_begin_if_the_array_was_submitted_meanwhile_and_stays_in_the_queue(
    here: Path, slurm: Slurm, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cancelled_before(*arguments: str, **more: list[str]) -> str:
        assert call("cancel", the_sweep(here).id).status == 0
        slurm.program("scancel", "echo 'scancel: error: Access/permission denied' >&2; exit 1")
        return submit_script(*arguments, **more)  # type: ignore[arg-type]

    monkeypatch.setattr("cluster_ddp.submit.sweep.submit_script", cancelled_before)
    assert call(*SWEEP).status == 3
    assert start(the_sweep(here), "101", monkeypatch) == 76
