"""`cluster-ddp status` and `list`, as people and programs call them."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from run_builders import begin, begin_dead, fake_slurm, job

from cluster_ddp.printing import say_if_slow
from cluster_ddp.run.directory import RunDirectory
from cluster_ddp.run.events import EventWriter
from cluster_ddp.run.record import add_slurm_job
from cluster_ddp.run.runs import create_run

Say = Callable[..., None]


Ddp = Callable[..., "subprocess.CompletedProcess[str]"]


def test_status_of_one_run_is_an_object_of_several_a_list(ddp: Ddp, run: RunDirectory, runs_dir: Path) -> None:
    other = create_run(job(), runs_dir=runs_dir, via="local", script=None)
    begin(run)
    one = json.loads(ddp("status", run.id, "--json").stdout)
    assert (one["run_id"], one["state"], one["attempts"]) == (run.id, "RUNNING", 1)
    assert json.loads(ddp("status", str(run.path), "--json").stdout)["run_id"] == run.id
    for arguments in ([], [run.id, other.id]):
        assert {entry["run_id"] for entry in json.loads(ddp("status", *arguments, "--json").stdout)} == {
            run.id,
            other.id,
        }


def test_status_for_people(ddp: Ddp, run: RunDirectory, runs_dir: Path, say: Say) -> None:
    begin_dead(run)
    say("started", 0, at=0, step=0, total_steps=300)
    say("checkpoint", 0, at=9, step=30, samples=960)
    values = {"data_wait": 0.5, "train/loss": 0.25, "val/accuracy": 0.9712}
    run.metrics_file.write_text(json.dumps({"step": 30, "samples": 960, "attempt": 0, **values}) + "\n")
    say("failed", 0, at=10, step=31, rank=3, host="n2", error="ValueError: [/not markup]")
    for arguments in ([run.id], []):
        done = ddp("status", *arguments)
        assert done.returncode == 0 and done.stderr == ""
        for text in (
            run.id,
            "FAILED",
            "30 of 300 (10%)",
            "val/accuracy 0.9712  train/loss 0.25  data_wait 0.5",
            "rank 3 on n2 at step 31 failed",
            "[/not markup]",
        ):
            assert text.lower() in done.stdout.lower(), text
    assert "960" in ddp("status", run.id).stdout and "productive" in ddp("status", run.id).stdout
    create_run(job(), runs_dir=runs_dir, via="local", script=None)
    assert len(ddp("status").stdout.splitlines()) == 3


def on_terminal(columns: int, runs_dir: Path, *arguments: str) -> list[str]:
    """The lines that a command leaves on a terminal of that width, without colours."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 12, columns, 0, 0))
    environment = {**os.environ, "CLUSTER_DDP_RUNS": str(runs_dir), "TERM": "xterm", "PATH": ""}
    for name in ("COLUMNS", "LINES"):
        environment.pop(name, None)
    command = [sys.executable, "-m", "cluster_ddp", *arguments]
    shown = b""
    with subprocess.Popen(command, env=environment, stdin=theirs, stdout=theirs, stderr=subprocess.DEVNULL) as called:
        os.close(theirs)
        try:
            while piece := os.read(ours, 65536):
                shown += piece
        except OSError:
            pass  # this is how Linux tells that the other side is gone
        finally:
            os.close(ours)
    assert called.returncode == 0
    stays = re.sub(r"\x1b\[\?1049h.*\x1b\[\?1049l", "", shown.decode(), flags=re.DOTALL)  # the alternate screen
    return re.sub(r"\x1b\[[0-9;]*[A-Za-z]", "", stays).splitlines()


@pytest.fixture
def long_told(run: RunDirectory, runs_dir: Path, say: Say) -> tuple[str, str]:
    """The ids of a run with long metrics and a long reason, and of one that waits."""
    begin_dead(run)
    say("started", 0, at=0, step=0, total_steps=80)
    values = {f"val/a-metric-with-a-long-name-{number}": 0.123456789 for number in range(4)}
    run.metrics_file.write_text(json.dumps({"step": 30, "samples": 960, "attempt": 0, **values}) + "\n")
    say("failed", 0, at=10, step=31, rank=3, host="n2", error="ValueError: " + "much to say " * 30 + "and the end")
    return run.id, create_run(job(), runs_dir=runs_dir, via="local", script=None).id


@pytest.mark.parametrize("arguments", [["status"], ["status", "--watch"]])
@pytest.mark.parametrize("columns", [60, 80, 120, 200])
def test_a_terminal_shows_whole_ids_and_states(
    long_told: tuple[str, str], runs_dir: Path, columns: int, arguments: list[str]
) -> None:
    if "--watch" in arguments:
        cancel = [sys.executable, "-m", "cluster_ddp", "cancel", long_told[1]]
        subprocess.run(cancel, env={**os.environ, "CLUSTER_DDP_RUNS": str(runs_dir)}, check=True, capture_output=True)
    heading, *lines = on_terminal(columns, runs_dir, *arguments)
    assert heading.split()[:3] == ["RUN", "STATE", "STEP"]
    waiting = "CANCELLED" if "--watch" in arguments else "PENDING"
    assert {tuple(line.split()[:2]) for line in lines} == {(long_told[0], "FAILED"), (long_told[1], waiting)}
    assert all(len(line) <= columns for line in (heading, *lines))
    assert "JOB" not in heading and "CHECKPOINT" not in heading, "nothing is told there"
    (failed,) = (line.rstrip() for line in lines if "FAILED" in line)
    assert ("REASON" in heading) == failed.endswith("…")
    assert ("REASON" in heading) >= (columns >= 120) and ("METRICS" in heading) >= (columns >= 200)


def test_a_terminal_too_narrow_for_an_id_cuts_it_and_says_so(long_told: tuple[str, str], runs_dir: Path) -> None:
    _, *lines = on_terminal(30, runs_dir, "status")
    assert sorted(line.split()[1] for line in lines) == ["FAILED", "PENDING"]
    assert all(line.split()[0].endswith("…") for line in lines)


def test_a_pipe_gets_everything_whole(ddp: Ddp, long_told: tuple[str, str]) -> None:
    heading, *lines = ddp("status").stdout.splitlines()
    assert len(lines) == 2 and "…" not in "".join(lines) and "JOB" in heading
    assert not [line for line in (heading, *lines) if line.endswith(" ")], "a column is filled up behind the last"
    (failed,) = (line for line in lines if "FAILED" in line)
    assert "val/a-metric-with-a-long-name-3 0.1235" in failed and failed.rstrip().endswith("and the end")


def test_watching_ends_when_nothing_is_left_to_happen(ddp: Ddp, run: RunDirectory, say: Say) -> None:
    begin_dead(run)
    say("completed", 0, step=300)
    done = ddp("status", "--watch")
    assert done.returncode == 0
    assert done.stdout.split() == [run.id, "COMPLETED", "step", "300"]
    assert json.loads(ddp("status", run.id, "--watch", "--json").stdout)["state"] == "COMPLETED"


def test_watching_shows_what_changes_and_asks_slurm_only_every_so_often(
    run: RunDirectory, runs_dir: Path, tmp_path: Path, say: Say
) -> None:
    (tmp_path / "bin").mkdir()
    calls = fake_slurm(tmp_path, "squeue", f"echo '7|7|RUNNING|n1|None|cluster_ddp {run.id}'")
    begin_dead(run, slurm_job_id="7")
    say("started", 0, at=0, step=0, total_steps=300)
    environment = {**os.environ, "CLUSTER_DDP_RUNS": str(runs_dir), "PATH": f"{tmp_path / 'bin'}:/bin:/usr/bin"}
    command = [sys.executable, "-m", "cluster_ddp", "status", "--watch", run.id]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as watching:
        assert watching.stdout is not None
        try:
            assert "RUNNING  step 0 of 300" in watching.stdout.readline()
            say("checkpoint", 0, at=9, step=150)
            assert "RUNNING  step 150 of 300" in watching.stdout.readline()
            say("completed", 0, step=300)
            assert "COMPLETED" in watching.stdout.readline()
            assert watching.wait(timeout=120) == 0
        finally:
            watching.kill()
    assert len(calls.read_text().splitlines()) == 1


def test_one_call_of_squeue_serves_all_runs(ddp: Ddp, run: RunDirectory, runs_dir: Path, tmp_path: Path) -> None:
    other = create_run(job(), runs_dir=runs_dir, via="sbatch", script=None)
    add_slurm_job(run, "7")
    add_slurm_job(other, "8")
    calls = fake_slurm(tmp_path, "squeue", "echo '7|7|RUNNING|n1|None|x'; echo '8|8|PENDING||Priority|x'")
    found = {entry["run_id"]: entry for entry in json.loads(ddp("status", "--json").stdout)}
    assert (found[run.id]["state"], found[run.id]["slurm_job_id"]) == ("RUNNING", "7")
    assert (found[other.id]["state"], found[other.id]["reason"]) == (
        "PENDING",
        "jobs of a higher priority come first (Priority)",
    )
    assert len(calls.read_text().splitlines()) == 1


def test_the_accounting_tells_of_jobs_that_squeue_has_forgotten(
    ddp: Ddp, run: RunDirectory, runs_dir: Path, tmp_path: Path
) -> None:
    waited, never_began = create_run(job(), runs_dir=runs_dir, via="sbatch", script=None), run
    add_slurm_job(never_began, "7")
    begin_dead(waited, slurm_job_id="8")
    EventWriter(waited, "x").write("stopped", attempt=0, step=5, reason="preemption")
    EventWriter(waited, "x").write("requeued", attempt=0, reason="stopped: preemption")
    fake_slurm(tmp_path, "squeue", "exit 0")
    calls = fake_slurm(tmp_path, "sacct", 'for n in 7 8; do echo "$n|$n|CANCELLED by 0|n1|None|"; done')
    found = {entry["run_id"]: entry for entry in json.loads(ddp("status", "--json").stdout)}
    assert {entry["state"] for entry in found.values()} == {"CANCELLED"}
    assert "was cancelled before it continued" in found[waited.id]["reason"]
    assert len(calls.read_text().splitlines()) == 1


def test_status_without_slurm_tells_what_the_directory_knows(ddp: Ddp, run: RunDirectory, say: Say) -> None:
    begin_dead(run, slurm_job_id="7")
    say("stopped", 0, step=5, reason="time-limit")
    done = ddp("status", run.id, "--json")
    assert json.loads(done.stdout)["state"] == "STOPPED"
    assert "showing the run directories only" in done.stderr


def test_list(ddp: Ddp, run: RunDirectory) -> None:
    (row,) = json.loads(ddp("list", "--json").stdout)
    assert set(row) == {"run_id", "name", "state", "created", "via", "attempts", "last_checkpoint", "slurm_job_id",
                        "directory"}  # fmt: skip
    assert (row["run_id"], row["via"], row["state"]) == (run.id, "local", "PENDING")
    heading, line = ddp("list").stdout.splitlines()
    assert heading.split()[:2] == ["RUN", "STATE"] and line.split()[:2] == [run.id, "PENDING"]


def test_no_runs_is_no_error(ddp: Ddp) -> None:
    for command in ("list", "status"):
        assert (ddp(command).returncode, ddp(command).stdout) == (0, "")
        assert json.loads(ddp(command, "--json").stdout) == []


def test_a_run_that_is_not_there_is_answered_with_status_2(ddp: Ddp, run: RunDirectory) -> None:
    for command in ("status", "stop", "cancel"):
        done = ddp(command, "unknown")
        assert done.returncode == 2 and "no run 'unknown'" in done.stderr and run.id in done.stderr


@pytest.mark.parametrize(("seconds", "said"), [(0.05, "no answer yet\n"), (60.0, "")])
def test_what_takes_long_is_said(seconds: float, said: str, capfd: pytest.CaptureFixture[str]) -> None:
    with say_if_slow("no answer yet", seconds=seconds):
        time.sleep(0.3)
    assert capfd.readouterr().err == said


@pytest.mark.parametrize("command", [("stop", "x"), ("logs", "x"), ("resume", "x"), ("status", "x"), ("status",)])
def test_each_command_says_that_it_waits_for_storage(
    ddp: Ddp, runs_dir: Path, command: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Storage that hangs blocks a process, perhaps forever, from where it looks for the run."""
    timer = threading.Timer
    monkeypatch.setattr(threading, "Timer", lambda _seconds, *what: timer(0.01, *what))
    iterdir = Path.iterdir
    monkeypatch.setattr(Path, "iterdir", lambda path: (time.sleep(0.1), iterdir(path))[1])
    assert "waiting for the storage of the runs to answer" in ddp(*command).stderr


def test_ctrl_c_ends_watching_without_complaint(run: RunDirectory, runs_dir: Path) -> None:
    begin(run)
    environment = {**os.environ, "CLUSTER_DDP_RUNS": str(runs_dir)}
    command = [sys.executable, "-m", "cluster_ddp", "status", "--watch"]
    with subprocess.Popen(
        command,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # ignored where tests run in the background
    ) as watching:
        try:
            assert watching.stdout is not None and "RUNNING" in watching.stdout.readline()
            time.sleep(0.2)
            watching.send_signal(signal.SIGINT)
            _, complaint = watching.communicate(timeout=120)
        finally:
            watching.kill()
    assert (watching.returncode, complaint) == (0, "")
