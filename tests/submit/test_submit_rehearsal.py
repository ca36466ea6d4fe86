"""`cluster-ddp rehearse`: a program that resumes exactly, one that does not, and one that never repeats itself."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from light_agent import LIGHT_AGENT

HERE = Path(__file__).parent
PROJECT = HERE.parents[1]


def start(folder: Path, job: str, *options: str, light: bool = False) -> subprocess.Popen[str]:
    """Start to rehearse a job in a folder."""
    (folder / "job.yaml").write_text(f"name: rehearsed\nruns_dir: {folder / 'runs'}\n{job}")
    environment = os.environ | {"PYTHONPATH": LIGHT_AGENT if light else str(PROJECT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "cluster_ddp", "rehearse", "job.yaml", "--gpus", "none", *options]
    return subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def rehearse(folder: Path, job: str, *options: str, light: bool = False) -> subprocess.CompletedProcess[str]:
    """Rehearse a job in a folder, from which nothing is left if it is exact."""
    with start(folder, job, *options, light=light) as started:
        stdout, stderr = started.communicate(timeout=300)
    return subprocess.CompletedProcess(started.args, started.returncode, stdout, stderr)


def test_a_loop_that_resumes_exactly_on_two_ranks_is_called_exact(tmp_path: Path) -> None:
    """It keeps numbers that differ by rank, has buffers of its own on each, and stops within an epoch."""
    job = f"script: {HERE / 'rehearsed_loop.py'}\nlaunch: {{procs_per_node: 2}}\n"
    done = rehearse(tmp_path, job, "--steps", "7", "--stop-after", "3")
    assert done.returncode == 0, done.stderr
    assert "EXACT  stopped after step 3 and resumed, the run has the same bits after step 7" in done.stderr
    assert "NOT EXACT" not in done.stderr
    assert "without a stop" in done.stderr.split("---")[1]
    assert "once more" not in done.stderr
    assert list((tmp_path / "runs").iterdir()) == []


@pytest.mark.parametrize(("task", "repeats"), [("Counting", True), ("Unrepeatable", False)])
def test_what_is_not_exact_is_named_with_its_cause(tmp_path: Path, task: str, repeats: bool) -> None:
    job = f"task: {HERE / 'rehearsed_tasks.py'}:{task}\ntrain: {{epochs: 2, global_batch: 8}}\n"
    done = rehearse(tmp_path, job, "--steps", "3", "--json")
    assert done.returncode == 4, done.stderr
    found = json.loads(done.stdout)
    assert (found["exact"], found["step"], found["repeats"]) == (False, 3, repeats)
    assert "model.weight" in found["different"]
    assert "NOT EXACT" in done.stderr
    assert ("cause      the resume" if repeats else "cause      the program") in done.stderr
    assert ("first      train/loss of step 2: " in done.stderr) is repeats
    assert Path(found["directory"]).is_dir()
    assert len(list(Path(found["directory"]).iterdir())) == 3


def test_a_job_that_ends_before_the_stop_is_told_so(tmp_path: Path) -> None:
    job = f"task: {HERE / 'rehearsed_tasks.py'}:Counting\ntrain: {{steps: 2, global_batch: 8}}\n"
    done = rehearse(tmp_path, job)
    assert done.returncode == 4
    assert (
        "the job has ended after 2 steps, so a stop after 10 never came: give --stop-after less than 2" in done.stderr
    )


def test_a_script_that_saves_nothing_has_nothing_to_compare(tmp_path: Path) -> None:
    (tmp_path / "plain.py").write_text("print('trained')\n")
    done = rehearse(tmp_path, "script: plain.py\n", light=True)
    assert done.returncode == 4
    assert "nothing to compare: add the lines of docs/own-code.md to it" in done.stderr


def test_a_part_that_fails_says_where_its_output_is(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("raise ValueError('no data')\n")
    done = rehearse(tmp_path, "script: broken.py\n", light=True)
    assert done.returncode == 4
    assert "this part of the rehearsal ended as FAILED" in done.stderr
    assert "no data" in done.stderr
    assert f"cluster-ddp logs {tmp_path / 'runs' / 'rehearsal-'}" in done.stderr


def test_a_rehearsal_that_a_person_stops_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "long.py").write_text("import time\nprint('trains', flush=True)\ntime.sleep(200)\n")
    with start(tmp_path, "script: long.py\n", light=True) as started:
        assert started.stdout is not None
        assert next(line for line in started.stdout if "trains" in line)
        started.send_signal(signal.SIGINT)
        _, errors = started.communicate(timeout=100)
    assert started.returncode == 5
    assert "the rehearsal was stopped in step 0; nothing of it is kept" in errors
    assert list((tmp_path / "runs").iterdir()) == []


def test_a_stop_after_the_last_step_is_refused(tmp_path: Path) -> None:
    done = rehearse(tmp_path, "script: plain.py\n", "--steps", "5", "--stop-after", "5")
    assert done.returncode == 2
    assert "--stop-after 5 must be less than --steps 5" in done.stderr
    assert not (tmp_path / "runs").exists()
