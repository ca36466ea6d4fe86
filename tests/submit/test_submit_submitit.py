"""Runs through submitit: its local executor for real, the script of its Slurm executor with stand-ins for Slurm.

Torchrun and ranks that meet are in the first test; in the others, which mean submitit and the keeper, a script without
torch stands in for both.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

import pytest
from light_agent import LIGHT_AGENT
from stage import replace_file
from waiting import wait_for

from cluster_ddp.job import JobSpec
from cluster_ddp.launch.ports import job_port
from cluster_ddp.run.attempt import begin_attempt
from cluster_ddp.run.attempt_record import list_attempts, read_attempt
from cluster_ddp.run.directory import RunDirectory
from cluster_ddp.run.events import NODE_LOST, EventWriter, read_events
from cluster_ddp.run.record import read_record
from cluster_ddp.run.runs import create_run
from cluster_ddp.run.stopfile import read_stop
from cluster_ddp.submit.base import SubmitError
from cluster_ddp.submit.submitit import SubmititSubmission

T = TypeVar("T")
HERE = Path(__file__).parent
PROJECT = HERE.parents[1]
PATIENCE = 120.0
JOB_ID = str(os.getpid())  # the port to meet at comes from it, and others may be testing on this machine
STEPS = 10
PREEMPTED = f"JobId={JOB_ID} JobState=RUNNING Reason=None Restarts=0 PreemptTime=2026-11-20T11:08:11 X=y"
TAKEN_BACK = f"JobId={JOB_ID} JobState=COMPLETING Reason=None Restarts=1 EndTime=Unknown X=y"
CANCELLED = f"JobId={JOB_ID} JobState=COMPLETING Reason=None Restarts=0 PreemptTime=None X=y"
QUIET = f"JobId={JOB_ID} JobState=RUNNING Reason=None Restarts=0 PreemptTime=None X=y"


class Place:
    """A folder with a job file, and an environment with or without Slurm."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.bin = folder / "bin"
        self.bin.mkdir()
        for tool in ("bash", "env", "cat", "cp", "dirname", "git", "timeout"):
            (self.bin / tool).symlink_to(str(shutil.which(tool)))
        self.job = folder / "job.yaml"
        self.brake = folder / "brake"  # while it exists, training does not come to its end
        self.write_job("beating_rank.py", procs=1)
        strange = ("SLURM", "SBATCH", "CLUSTER_DDP", "SUBMITIT")
        self.environment = {name: value for name, value in os.environ.items() if not name.startswith(strange)}
        self.environment |= {
            "PATH": str(self.bin), "PYTHONPATH": LIGHT_AGENT, "OMP_NUM_THREADS": "1",
            "CLUSTER_DDP_RUNS": str(folder / "runs"),
        }  # fmt: skip
        self.started: list[subprocess.Popen[bytes]] = []

    def write_job(self, script: str, procs: int) -> None:
        """Write the job file."""
        self.job.write_text(
            f"name: small\nscript: {HERE / script}\nargs: ['{STEPS}', '{self.brake}']\n"
            f'launch: {{procs_per_node: {procs}}}\nslurm: {{time: "00:10:00"}}\nrequeue: {{warning: 20s}}\n'
        )

    def use_torchrun(self) -> None:
        """Have ranks that torchrun starts, and that meet."""
        self.environment["PYTHONPATH"] = str(PROJECT)
        self.write_job("gloo_rank.py", procs=2)

    def add_slurm(self) -> None:
        """Put Slurm's commands into place."""
        self.says(QUIET)
        self.program("sbatch", f'cp "$1" "$here/script"; echo "Submitted batch job {JOB_ID}"')
        self.program("srun", 'echo "$@" >>"$here/steps"; while [[ $1 == --* ]]; do shift; done; exec "$@"')
        self.program("squeue", "")
        requeue = 'requeue) echo "$2" >>"$here/requeued" ;; update) echo "$*" >>"$here/requeued" ;;'
        self.program("scontrol", f'case "$1" in {requeue} *) [[ $2 != job ]] || cat "$here/job" ;; esac')

    def says(self, job: str) -> None:
        """What ``scontrol show job`` answers."""
        replace_file(self.bin / "job", job + "\n")

    def program(self, name: str, body: str) -> None:
        """Put a stand-in into place."""
        replace_file(self.bin / name, f'#!/bin/bash\nhere=$(dirname "$0")\n{body}\n', mode=0o755)

    def submit(self) -> RunDirectory:
        """Call ``cluster-ddp submit --via submitit``; the run."""
        done = self.try_to_submit()
        assert done.returncode == 0, done.stderr
        return RunDirectory(Path(json.loads(done.stdout)["directory"]))

    def try_to_submit(self) -> subprocess.CompletedProcess[str]:
        """The same, whatever comes of it."""
        command = [sys.executable, "-m", "cluster_ddp", "submit", str(self.job), "--via", "submitit", "--json"]
        return subprocess.run(
            command, cwd=self.folder, env=self.environment, capture_output=True, text=True, timeout=PATIENCE
        )

    def start_task(self, run: RunDirectory, restarts: int = 0) -> subprocess.Popen[bytes]:
        """Start submitit's batch script, on the one node of the job."""
        variables = {
            "SUBMITIT_EXECUTOR": "slurm", "SLURM_JOB_ID": JOB_ID, "SLURM_JOB_NUM_NODES": "1", "SLURM_NODEID": "0",
            "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "1", "SLURM_JOB_NODELIST": "localhost",
            "SLURM_RESTART_COUNT": str(restarts),
        }  # fmt: skip
        with (self.folder / f"task-{restarts}.log").open("wb") as log:
            self.started.append(
                subprocess.Popen(
                    ["bash", str(self.bin / "script")],
                    env=self.environment | variables, cwd=self.folder, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                )
            )  # fmt: skip
        return self.started[-1]

    def log(self) -> str:
        """What the tasks have printed."""
        return "\n".join(file.read_text() for file in sorted(self.folder.glob("task-*.log")))

    def requeues(self) -> list[str]:
        """What ``scontrol requeue`` was called for, and what was updated."""
        file = self.bin / "requeued"
        return file.read_text().splitlines() if file.exists() else []


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    made = Place(tmp_path)
    yield made
    for process in made.started:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        process.wait()


def wait_for_steps(run: RunDirectory, attempt: int = 0) -> None:
    def stepping() -> bool:
        logs = run.attempt(attempt).path.glob("node-0.log")
        return any("step 10" in log.read_text() for log in logs)

    wait_for(stepping, f"steps in attempt {attempt}")


def names(run: RunDirectory, attempt: int) -> list[str]:
    return [event["event"] for event in read_events(run) if event.get("attempt") == attempt]


def test_the_local_executor_stops_requeues_and_completes(place: Place) -> None:
    place.use_torchrun()
    place.brake.touch()
    run = place.submit()
    wait_for_steps(run)
    first = read_attempt(list_attempts(run)[0])
    assert first.process is not None
    os.kill(first.process.pid, signal.SIGUSR2)  # what submitit sends before the time limit
    wait_for(lambda: "stopped" in names(run, 0), "the first attempt stops")
    place.brake.unlink()
    wait_for(lambda: "completed" in names(run, 1), "the second attempt completes")
    assert "stopped" in names(run, 0)
    assert "requeued" in names(run, 0)
    (result,) = wait_for(lambda: list((run.path / "submitit").glob("*_result.pkl")), "submitit's result")
    assert b"done" in result.read_bytes()
    assert read_record(run).via == "submitit"


def test_only_the_run_directorys_name_is_pickled_in_a_folder_of_ones_own(place: Place) -> None:
    place.add_slurm()
    run = place.submit()
    folder = run.path / "submitit"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    from submitit.core.utils import DelayedSubmission

    payload = DelayedSubmission.load(folder / f"{JOB_ID}_submitted.pkl")
    assert vars(payload.function) == {"run_directory": str(run.path)}
    assert (payload.args, payload.kwargs) == ((), {})
    assert read_record(run).slurm_job_ids == (JOB_ID,)
    assert payload.function.checkpoint().function.run_directory == str(run.path)


def test_what_submitit_asks_slurm_for(place: Place) -> None:
    place.add_slurm()
    more = "slurm: {nodes: 3, gpus_per_node: 'a100:2', cpus_per_task: 4, mem: 8G, "
    place.job.write_text(place.job.read_text().replace("slurm: {", more))
    run = place.submit()
    lines = (place.bin / "script").read_text().splitlines()
    expected = (
        "nodes=3 ntasks-per-node=1 gpus-per-node=a100:2 cpus-per-task=4 mem=8G time=00:10:00 signal=B:USR2@20 "
        "open-mode=append requeue job-name=small"
    )
    for option in [*expected.split(), f"comment='cluster_ddp {run.id}'"]:
        assert f"#SBATCH --{option}" in lines
    assert not [line for line in lines if line.startswith("srun")]
    assert [line for line in lines if line.startswith(f"exec {sys.executable} ")]


@pytest.mark.parametrize(
    ("answer", "runs"), [("Socket timed out on send/recv operation", 1), ("Requested time limit is invalid", 0)]
)
def test_a_run_stays_when_its_job_may_be_in_the_queue(place: Place, answer: str, runs: int) -> None:
    place.add_slurm()
    refuse = f"echo 'sbatch: error: Batch job submission failed: {answer}' >&2; exit 1"
    place.program("sbatch", f"[[ $1 == --test-only ]] || {{ {refuse}; }}")
    done = place.try_to_submit()
    assert done.returncode == 3 and answer in done.stderr
    assert ("squeue --me" in done.stderr) == bool(runs)
    assert len(list((place.folder / "runs").iterdir())) == runs


@pytest.mark.parametrize(("limit", "option"), [(0, "no-requeue"), (3, "requeue")])
def test_slurm_itself_queues_again_only_what_the_job_file_lets_be_queued_again(limit: int, option: str) -> None:
    job = {"name": "x", "task": "pkg.mod:Task", "requeue": {"max_requeues": limit}}
    lines = SubmititSubmission(JobSpec.model_validate(job)).batch_script.splitlines()
    assert [line for line in lines if line.startswith("#SBATCH") and "requeue" in line] == [f"#SBATCH --{option}"]


def test_a_preempted_job_is_requeued_by_sigterm_too(place: Place) -> None:
    """submitit itself passes SIGTERM by, and clusters that send nothing else would lose the run."""
    place.add_slurm()
    place.brake.touch()
    run = place.submit()
    task = place.start_task(run)
    wait_for_steps(run)
    end = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(time.time() + 200))
    place.says(PREEMPTED.replace(" PreemptTime", f" EndTime={end} Deadline=N/A PreemptTime"))
    task.send_signal(signal.SIGTERM)
    task.wait(PATIENCE)
    request = read_stop(list_attempts(run)[0])
    assert request is not None and request.grace is not None
    assert 150 < request.grace < 200, "the grace that Slurm gives, and a margin"
    assert place.requeues() == [JOB_ID], place.log()
    assert {"stopped", "requeued"} <= set(names(run, 0))
    place.says(QUIET.replace("Restarts=0", "Restarts=1"))
    place.brake.unlink()
    again = place.start_task(run, restarts=1)
    assert again.wait(PATIENCE) == 0, place.log()
    assert "completed" in names(run, 1)
    assert [read_attempt(attempt).slurm_job_id for attempt in list_attempts(run)] == [JOB_ID, JOB_ID]


def test_the_warning_signal_requeues(place: Place) -> None:
    place.add_slurm()
    place.brake.touch()
    run = place.submit()
    task = place.start_task(run)
    wait_for_steps(run)
    task.send_signal(signal.SIGUSR2)
    task.wait(PATIENCE)
    assert place.requeues() == [JOB_ID], place.log()
    assert next(event for event in read_events(run) if event["event"] == "stop-requested")["reason"] == "time-limit"


@pytest.mark.parametrize(
    ("says", "reason"), [(CANCELLED, "cancel"), (TAKEN_BACK, "preemption")], ids=["cancelled", "requeued"]
)
def test_what_is_not_ours_to_requeue(place: Place, says: str, reason: str) -> None:
    place.add_slurm()
    place.brake.touch()
    run = place.submit()
    task = place.start_task(run)
    wait_for_steps(run)
    place.says(says)
    task.send_signal(signal.SIGTERM)
    task.wait(PATIENCE)
    assert place.requeues() == [], place.log()
    request = read_stop(list_attempts(run)[0])  # once Slurm has answered, before or after the ranks have saved
    assert request is not None and request.reason == reason


@pytest.mark.parametrize("others", ["other", ""])
def test_a_host_that_failed_twice_is_given_back_before_training_while_there_are_others(
    place: Place, others: str
) -> None:
    place.add_slurm()
    place.program("sinfo", f"printf '%s\\n' localhost {others}")
    run = place.submit()
    for restarts in (0, 1):
        begin_attempt(run, slurm_job_id=JOB_ID, restart_count=restarts, host="localhost", pid=0, nodes=1, procs=2)
        EventWriter(run, "w").write(NODE_LOST, attempt=restarts, host="localhost", node=0)
    place.says(QUIET.replace("Restarts=0", "Restarts=2"))
    place.start_task(run, restarts=2).wait(PATIENCE)
    if others:
        assert place.requeues() == [JOB_ID, f"update JobId={JOB_ID} ExcNodeList=localhost"], place.log()
        assert len(list_attempts(run)) == 2
        place.start_task(run, restarts=3).wait(PATIENCE)  # Slurm has not kept the job from it
        assert len(place.requeues()) == 2
    else:
        assert place.requeues() == [], place.log()
    assert "completed" in names(run, 2), place.log()


def test_the_step_is_that_of_our_own_script_and_a_complete_run_is_not_trained_again(place: Place) -> None:
    place.add_slurm()
    run = place.submit()
    assert place.start_task(run).wait(PATIENCE) == 0, place.log()
    assert place.start_task(run, restarts=1).wait(PATIENCE) == 0, place.log()
    assert len(list_attempts(run)) == 1
    (step,) = (place.bin / "steps").read_text().splitlines()
    assert step.startswith("--export=ALL --ntasks-per-node=1 --kill-on-bad-exit=1 --wait=0 ")
    assert f" -m cluster_ddp.launch.node --run {run.path} --attempt 0 -- torchrun --nnodes=1 " in step
    assert f" --rdzv-id={JOB_ID}.0 --rdzv-backend=c10d --rdzv-endpoint=localhost:{job_port(int(JOB_ID))} " in step


def test_a_setup_line_that_fails_ends_the_job(place: Place) -> None:
    place.add_slurm()
    place.job.write_text(place.job.read_text().replace("launch: {", "launch: {setup: ['no_such_module load cuda'], "))
    run = place.submit()
    assert place.start_task(run).wait(PATIENCE) == 1
    assert "launch.setup: status 127 from: no_such_module load cuda" in place.log()
    assert list_attempts(run) == []


def test_a_resume_brings_what_the_script_calls(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """submitit writes its script again, and the run may be of a version that had no such file: no start succeeded."""
    place.add_slurm()
    monkeypatch.setenv("PATH", str(place.bin))
    spec = JobSpec.model_validate({"name": "a", "task": "a:B", "slurm": {"time": "1h"}, "launch": {"setup": ["true"]}})
    run = create_run(spec, runs_dir=place.folder / "runs", via="submitit", script="of an older version")
    SubmititSubmission(spec).send(run)
    for name in re.findall(r"/([a-z-]+\.sh)", (place.bin / "script").read_text()):
        assert (run.path / name).is_file(), name


def test_a_start_on_a_host_without_python_is_tried_again(place: Place) -> None:
    place.add_slurm()
    place.program("sleep", "exit 0")
    run = place.submit()
    script = place.bin / "script"
    script.write_text(script.read_text().replace(sys.executable, "/nowhere/python"))
    assert place.start_task(run, restarts=1).wait(PATIENCE) == 1
    assert "no Python with cluster_ddp, submitit starts on" in place.log()
    assert place.requeues() == [JOB_ID]


def test_a_dry_run_shows_submitits_script(place: Place) -> None:
    command = [sys.executable, "-m", "cluster_ddp", "submit", str(place.job), "--via", "submitit", "--dry-run"]
    done = subprocess.run(
        command, cwd=place.folder, env=place.environment, capture_output=True, text=True, timeout=PATIENCE
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("#!/bin/bash")
    assert re.search(r"^exec .*submitit\.core\._submit RUN_DIRECTORY/submitit$", done.stdout, re.MULTILINE)


def test_what_submitit_cannot_do_is_said_before_the_queue(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    base = {"name": "x", "task": "pkg.mod:Task"}
    monkeypatch.setenv("PATH", str(place.bin))
    with pytest.raises(SubmitError, match="--via sbatch"):
        SubmititSubmission(JobSpec.model_validate({**base, "launch": {"container": {"image": "x.sif"}}})).check()
    with pytest.raises(SubmitError, match="cluster-ddp local"):
        SubmititSubmission(JobSpec.model_validate({**base, "slurm": {"nodes": 2}})).check()
    place.add_slurm()
    with pytest.raises(SubmitError, match=r"slurm\.time"):
        SubmititSubmission(JobSpec.model_validate({**base, "slurm": {"nodes": 2}})).check()
