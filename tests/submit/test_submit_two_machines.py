"""A local run that is started on a second machine while it trains on the first: the newer attempt is the run's."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from light_agent import LIGHT_AGENT
from same_training import lines, newest_manifest
from training_job import write_job
from waiting import PATIENCE, wait_for

from cluster_ddp.run.attempt import request_resume
from cluster_ddp.run.directory import RunDirectory
from cluster_ddp.run.lineage import read_origin
from cluster_ddp.run.runs import list_runs

SMALL: dict[str, Any] = {
    "launch": {"procs_per_node": 1}, "train": {"epochs": 1}, "checkpoint": {"every_steps": 5}, "log": {"every_steps": 1}
}  # fmt: skip


def told(run: RunDirectory, name: str, attempt: int) -> list[dict[str, Any]]:
    events = [event for path in run.events.glob("*.jsonl") for event in lines(path)]
    return [event for event in events if event["event"] == name and event["attempt"] == attempt]


def ranks_of(run: RunDirectory) -> list[int]:
    """The process ids of the run's ranks."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            environment = (process / "environ").read_bytes()
            if b"\0RANK=" in environment and bytes(run.path) in environment:
                found.append(int(process.name))
    return found


def signal_all(processes: list[int], number: int) -> None:
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, number)


@pytest.mark.timeout(600)
def test_run_that_is_started_on_two_machines_is_the_newer_ones(tmp_path: Path) -> None:
    job = write_job(tmp_path, braked=True, **SMALL)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    environment |= {"PYTHONPATH": LIGHT_AGENT, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "cluster_ddp"]
    with (tmp_path / "first").open("w") as out:
        first = subprocess.Popen([*command, "local", str(job)], cwd=tmp_path, env=environment, stdout=out, stderr=out)
    started, held = [first], list[int]()
    try:
        wait_for(lambda: any(told(run, "checkpoint", 0) for run in list_runs(tmp_path / "runs")), "attempt 0 saves")
        (run,) = list_runs(tmp_path / "runs")
        program, ranks = told(run, "node-started", 0)[0]["pid"], ranks_of(run)
        held = [program, *ranks]  # the program sees nothing of the newer attempt; the rank goes on once that trains
        signal_all(held, signal.SIGSTOP)
        record = json.loads(run.attempt(0).record_file.read_text())
        elsewhere = {**record, "host": "another-machine", "boot_id": "another"}
        run.attempt(0).record_file.write_text(json.dumps(elsewhere))
        request_resume(run, by="somebody who takes it for dead")
        with (tmp_path / "second").open("w") as out:
            second = subprocess.Popen(
                [*command, "resume", str(run.path)], cwd=tmp_path, env=environment, stdout=out, stderr=out
            )
        started.append(second)
        wait_for(lambda: bool(told(run, "resumed", 1)), "attempt 1 trains")
        signal_all(ranks, signal.SIGCONT)
        wait_for(lambda: bool(told(run, "checkpoint-skipped", 0)), "attempt 0 wants to save")
        (tmp_path / "brake").unlink()
        assert second.wait(PATIENCE) == 0, (tmp_path / "second").read_text()
        signal_all(held, signal.SIGCONT)
        first.wait(PATIENCE)
    finally:
        signal_all(held, signal.SIGCONT)
        for process in started:
            process.kill()
            process.wait()
    origin = read_origin(run.attempt(1))
    assert origin is not None and origin.step is not None and origin.step >= 5
    assert newest_manifest(run.path)["attempt"] == 1
    status = json.loads(
        subprocess.run(
            [*command, "status", str(run.path), "--json"],
            cwd=tmp_path, env=environment, capture_output=True, text=True, check=True, timeout=PATIENCE,
        ).stdout
    )  # fmt: skip
    assert (status["state"], status["attempts"], status["step"]) == ("COMPLETED", 2, status["total_steps"])
    assert any("still ran attempt 0 until" in text and "beside a newer one" in text for text in status["warnings"])
