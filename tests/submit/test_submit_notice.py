"""What the user is told of by `notify:`, by every way to start a run; tests/launch has the notice itself."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from stage import CHECKOUT, CRASH, DONE, Stage

from cluster_ddp.run.events import NOTIFIED, read_events
from cluster_ddp.run.runs import list_runs


def states_told(folder: Path) -> list[str]:
    told = folder / "told"
    return [json.loads(line)["state"] for line in told.read_text().splitlines()] if told.exists() else []


@pytest.mark.parametrize(("training", "status", "states"), [(DONE, 0, ["COMPLETED"]), (CRASH, 0, [])])
def test_keeper_gives_it_when_the_job_is_over(tmp_path: Path, training: str, status: int, states: list[str]) -> None:
    """A crash is queued again here, so nobody is told of it."""
    stage = Stage(tmp_path)
    script = stage.write()
    with (stage.run / "job.yaml").open("a") as job:
        job.write(f"notify: {{command: \"cat >> '{tmp_path}/told'; exit 3\", on: [completed, failed]}}\n")
    stage.does(**{"training.sh": training})
    assert stage.perform(script) == status, stage.output
    assert states_told(tmp_path) == states


def test_local_gives_it_and_its_exit_status_stays(tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text("raise ValueError('no')\n")
    (tmp_path / "job.yaml").write_text(f"script: bad.py\nnotify: {{command: \"cat >> '{tmp_path}/told'; exit 3\"}}\n")
    done = subprocess.run(
        [sys.executable, "-m", "cluster_ddp", "local", "job.yaml"],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(CHECKOUT)}, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == 4, done.stderr
    assert states_told(tmp_path) == ["FAILED"]
    assert "notify.command: exited with status 3" in done.stderr
    (run,) = list_runs(tmp_path / "runs")
    (notified,) = (event for event in read_events(run) if event["event"] == NOTIFIED)
    assert (notified["state"], notified["error"]) == ("FAILED", "exited with status 3")
