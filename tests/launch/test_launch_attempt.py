"""The calls of the batch script, as it makes them: a process each."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cluster_ddp.launch.attempt import main
from cluster_ddp.run.attempt import begin_attempt, read_attempt, request_resume
from cluster_ddp.run.directory import RunDirectory, create_run
from cluster_ddp.run.events import EventWriter, read_events
from cluster_ddp.run.stopfile import read_stop
from cluster_ddp.run.storage import Storage
from cluster_ddp.spec import JobSpec

PROJECT = Path(__file__).parents[2]


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    spec = JobSpec(name="a", task="cluster_ddp.tasks.digits:Digits", launch={"procs_per_node": 2})
    return create_run(spec, runs_dir=tmp_path, via="sbatch", script="#!/bin/bash\n")


def call(*arguments: object, job: str = "77", restart: int = 0, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    environment |= {"PYTHONPATH": str(PROJECT), "SLURM_JOB_ID": job, "SLURM_JOB_NUM_NODES": "3"}
    environment |= {"SLURM_TASK_PID": str(os.getpid()), "SLURM_RESTART_COUNT": str(restart), **variables}
    return subprocess.run(
        [sys.executable, "-m", "cluster_ddp.launch.attempt", *map(str, arguments)],
        env=environment, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip


def happened(run: RunDirectory, event: str, attempt: int = 0, **fields: Any) -> None:
    EventWriter(run, "rank-0").write(event, attempt=attempt, **fields)


def test_begin_prints_the_attempt_and_the_same_allocation_gets_it_again(run: RunDirectory) -> None:
    assert call("begin", run.path).stdout == "0\n"
    assert call("begin", run.path).stdout == "0\n"
    record = read_attempt(run.attempt(0))
    assert (record.slurm_job_id, record.nodes, record.procs) == ("77", 3, 2)
    assert record.process is not None
    assert record.process.pid == os.getpid()
    assert call("begin", run.path, restart=1).stdout == "1\n"


@pytest.mark.parametrize(("patience", "begins"), [(20.0, True), (0.0, False)])
def test_begin_waits_for_room_on_a_full_disk(
    run: RunDirectory,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    patience: float,
    begins: bool,
) -> None:
    calls: list[Path] = []

    def mkdir(self: Storage, path: Path, **options: Any) -> None:
        calls.append(path)
        if len(calls) < 3:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        path.mkdir(**options)

    monkeypatch.setattr(Storage, "mkdir", mkdir)
    monkeypatch.setattr("cluster_ddp.launch.attempt._ROOM_POLL_SECONDS", 0.01)
    assert main(["begin", str(run.path), f"--patience={patience}"]) == (0 if begins else 2)
    told = capsys.readouterr()
    assert told.out == ("0\n" if begins else "")
    assert "No space left" in told.err


def test_begin_refuses_while_another_attempt_is_alive(run: RunDirectory) -> None:
    begin_attempt(run, host="here", pid=os.getpid(), nodes=1, procs=1)
    done = call("begin", run.path)
    assert (done.returncode, done.stdout) == (75, "")
    assert "is alive" in done.stderr
    assert "Traceback" not in done.stderr


def test_begin_has_nothing_to_do_for_a_complete_run_and_refuses_one_that_stalled(run: RunDirectory) -> None:
    call("begin", run.path)
    happened(run, "completed", step=9)
    done = call("begin", run.path, job="78")
    assert (done.returncode, done.stdout) == (0, "")
    assert "complete" in done.stderr


def test_only_a_person_starts_a_stalled_run_again(run: RunDirectory) -> None:
    call("begin", run.path)
    happened(run, "stalled", reason="no progress")
    done = call("begin", run.path, restart=1)
    assert (done.returncode, done.stdout) == (76, "")
    assert "cluster-ddp resume" in done.stderr
    request_resume(run, by="a person")
    assert call("begin", run.path, restart=2).stdout == "1\n"


def test_end_prints_one_word_and_records_the_verdict(run: RunDirectory) -> None:
    call("begin", run.path)
    happened(run, "started", step=0, world_size=2, total_steps=10)
    happened(run, "checkpoint", step=5)
    call("stop", run.path, 0, "--reason", "time-limit", "--grace", "60")
    request = read_stop(run.attempt(0))
    assert request is not None
    assert (request.reason, request.level, request.grace) == ("time-limit", 1, 60)
    happened(run, "stopped", step=5, reason="time-limit")
    done = call("end", run.path, 0)
    assert (done.returncode, done.stdout) == (0, "requeue\n")
    assert "requeued" in [event["event"] for event in read_events(run)]
    assert read_attempt(run.attempt(0)).ended


def stand_in(folder: Path, **programs: str) -> str:
    """A PATH on which Slurm's commands answer what they are told to."""
    for name, text in programs.items():
        program = folder / name
        program.write_text(f"#!/bin/sh\n{text}\n")
        program.chmod(0o755)
    return f"{folder}:{os.environ['PATH']}"


@pytest.mark.parametrize(("state", "word"), [("RUNNING", "requeue"), ("CANCELLED", "stop"), ("COMPLETING", "stop")])
def test_a_sigterm_that_is_no_scancel_does_not_end_the_run(
    run: RunDirectory, tmp_path: Path, state: str, word: str
) -> None:
    call("begin", run.path)
    happened(run, "checkpoint", step=5)
    happened(run, "stopped", step=5, reason="terminated")
    path = stand_in(tmp_path, squeue=f"echo {state}")
    assert call("end", run.path, 0, PATH=path).stdout == f"{word}\n"


def test_a_node_that_fails_again_is_named_behind_the_verdict(run: RunDirectory, tmp_path: Path) -> None:
    path = stand_in(tmp_path, sinfo="echo n2; echo n7")
    for number in (0, 1):
        call("begin", run.path, restart=number, PATH=path)
        for node in (1, 2):
            EventWriter(run, f"node-{node}").write("node-started", attempt=number, node=node, host=f"n{node}")
        EventWriter(run, "node-1").write("node-finished", attempt=number, node=1, outcome="failed")
    assert call("end", run.path, 1, PATH=path).stdout == "requeue n2\n"
    lost = [(event["attempt"], event["host"]) for event in read_events(run) if event["event"] == "node-lost"]
    assert lost == [(0, "n2"), (1, "n2")]


@pytest.mark.parametrize(
    ("outcomes", "word"), [(("done", "done"), "done"), (("done", "failed"), "requeue"), (("done", None), "requeue")]
)
def test_the_node_programs_speak_for_a_script(run: RunDirectory, outcomes: tuple[str | None, ...], word: str) -> None:
    call("begin", run.path)
    for node, outcome in enumerate(outcomes):
        writer = EventWriter(run, f"node-{node}")
        writer.write("node-started", attempt=0, node=node, script=True)
        if outcome is not None:
            writer.write("node-finished", attempt=0, node=node, outcome=outcome, status=int(outcome == "failed"))
    assert call("end", run.path, 0).stdout == f"{word}\n"


def test_beginning_is_quick_since_it_loads_little(run: RunDirectory) -> None:
    code = (
        "import sys; from cluster_ddp.launch.attempt import main; main(['begin', sys.argv[1]]);"
        "print(*sorted({'torch', 'pydantic', 'yaml', 'rich', 'typer', 'numpy'} & set(sys.modules)))"
    )
    environment = {**os.environ, "PYTHONPATH": str(PROJECT)}
    command = [sys.executable, "-c", code, str(run.path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "0\n\n"
