"""`cluster_ddp.submit.submit` and its handle, which is the same whatever starts the run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from light_agent import LIGHT_AGENT
from slurm_cluster import SlurmCluster
from training_job import write_job

from cluster_ddp.job import JobFileError
from cluster_ddp.run.directory import RunDirectory
from cluster_ddp.run.errors import RunNotFound
from cluster_ddp.run.status.report import describe
from cluster_ddp.submit import RunFailed, RunHandle, submit
from cluster_ddp.submit.base import SubmitError

# Stops a run in the middle, and sees what the handle says of it.
PROGRAM = """\
import json, sys, time
from cluster_ddp.submit import RunFailed, RunHandle, submit

run = submit("job.yaml", via=sys.argv[1])
while not run.status().step:
    assert run.state.open, run.status()
    time.sleep(0.5)
assert RunHandle(run.directory).state == "RUNNING"
try:
    run.wait(0.1, poll=0.1)
except TimeoutError as error:
    late = str(error)
run.stop()
state = run.wait(300, poll=0.5)
try:
    run.result()
except RunFailed as error:
    why = str(error)
try:
    run.stop()
except Exception as error:
    again = str(error)
run.cancel()
print(json.dumps([state, late, why, again, run.state, run.id]))
"""


def check(out: str) -> None:
    state, late, why, again, after, run_id = json.loads(out.splitlines()[-1])
    assert (state, after) == ("STOPPED", "CANCELLED")
    assert late == f"run {run_id} is still RUNNING after 0.1 s"
    assert why.startswith(f"run {run_id} is STOPPED: stopped by")
    assert again.startswith(f"run {run_id} is STOPPED: it is not running, so there is nothing to stop")


@pytest.mark.parametrize("via", ["sbatch", "submitit"])
@pytest.mark.timeout(600)
def test_handle_of_a_slurm_job(cluster: SlurmCluster, tmp_path: Path, via: str) -> None:
    write_job(tmp_path, braked=True, launch={"procs_per_node": 1}, slurm={"nodes": 1})
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, via],
        cwd=tmp_path, env=cluster.env | {"PYTHONPATH": LIGHT_AGENT}, capture_output=True, text=True, timeout=500,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    check(done.stdout)


@pytest.mark.timeout(600)
def test_handle_of_a_local_run_which_outlives_the_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.py").write_text("raise ValueError('no')\n")
    (tmp_path / "job.yaml").write_text("script: bad.py\n")
    start = "from cluster_ddp.submit import submit; print(submit('job.yaml', via='local').directory)"
    done = subprocess.run([sys.executable, "-c", start], cwd=tmp_path, capture_output=True, text=True, check=True)
    run = RunHandle(done.stdout.strip())
    with pytest.raises(RunFailed, match="ValueError: no"):
        run.result(300, poll=0.5)
    assert "ValueError: no" in run.logs(errors=True) and "ValueError: no" in run.logs(attempt=0, rank=0)
    assert run.status().to_json() == describe(RunDirectory(run.directory), None).to_json()
    with pytest.raises(SubmitError, match="it is not running, so there is nothing to stop"):
        run.stop()
    assert capfd.readouterr().out == ""


def test_wrong_calls_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SubmitError, match="sbatch, submitit, local"):
        submit("single-gpu", via="torque")
    with pytest.raises(JobFileError):
        submit("job.yaml")
    with pytest.raises(RunNotFound):
        RunHandle("nothing")
    assert list(tmp_path.iterdir()) == []
