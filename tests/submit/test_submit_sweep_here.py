"""A sweep on this machine: several elements at once, each a run of its own, of one rank without torch."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from light_agent import LIGHT_AGENT
from waiting import wait_for

from cluster_ddp.run.directory import RunDirectory
from cluster_ddp.run.status.report import RunStatus
from cluster_ddp.run.sweep import Element, SweepDirectory, SweepRecord, change_sweep
from cluster_ddp.submit import sweep_here
from cluster_ddp.submit.sweep_here import Place, SweepHere

JOB = f"""\
name: small
script: {Path(__file__).with_name("beating_rank.py")}
args: ["30"]
"""
PATIENCE = 240.0


@pytest.fixture
def here(tmp_path: Path) -> Path:
    (tmp_path / "job.yaml").write_text(JOB)
    return tmp_path


def start(here: Path, *arguments: str) -> subprocess.Popen[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "CLUSTER_DDP_"))}
    return subprocess.Popen(
        [sys.executable, "-m", "cluster_ddp", *arguments],
        cwd=here, env=environment | {"PYTHONPATH": LIGHT_AGENT}, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def finish(process: subprocess.Popen[str], status: int) -> tuple[str, str]:
    out, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == status, err
    return out, err


def elements(here: Path) -> list[dict[str, Any]]:
    (sweep,) = (here / "runs").iterdir()
    out, _ = finish(start(here, "status", str(sweep), "--json"), 0)
    found: list[dict[str, Any]] = json.loads(out)
    return found


def test_nothing_is_started_once_another_has_the_claim(tmp_path: Path) -> None:
    """`stop` has taken it away, and the same sweep was started again at once, before this process looked."""
    sweep, element = SweepDirectory(tmp_path), Element("0000-as-it-is", ())
    change_sweep(sweep, lambda _: SweepRecord("s", 1.0, (element,), "local", submitting={"pid": 1, "since": 2.0}))
    sweep.job_file.write_text(JOB)
    ours = {"pid": 1, "since": 1.0}
    SweepHere(sweep, [Place(())], None, None, lambda status: None, ours, claim_seconds=0.0).run([element])
    assert not sweep.run(element).path.exists()


def test_elements_that_train_go_on_where_another_cannot_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a full disk; nor can the sweep's record be read."""

    def full(*_: Any, **__: Any) -> RunDirectory:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(sweep_here, "run_of_element", full)
    ended: list[RunStatus] = []
    training = Place((), subprocess.Popen(["sleep", "0.5"]), RunDirectory(tmp_path / "run"))
    others = [Element("0001-a", ()), Element("0002-b", ())]
    SweepHere(SweepDirectory(tmp_path), [training, Place(())], None, None, ended.append, None, 0.0).run(others)
    assert len(ended) == 1
    said = "0001-a cannot be started, and no further elements will be started: [Errno 28] No space left on device"
    assert said in capsys.readouterr().err


@pytest.mark.timeout(600)
def test_two_at_once_and_only_what_is_missing_again(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sweep = ("sweep", "job.yaml", "--local", "--at-once", "2", "--gpus", "none", "--grid")
    out, err = finish(start(here, *sweep, "args=[150],[160]", "--json"), 0)
    assert json.loads(out)["state"] == "COMPLETED"
    assert err.count("COMPLETED  000") == 2
    both = elements(here)
    assert [(row["run_id"], row["state"], row["step"]) for row in both] == [
        ("0000-args=150", "COMPLETED", 150),
        ("0001-args=160", "COMPLETED", 160),
    ]
    starts = [json.loads((Path(row["directory"]) / "attempts/000/attempt.json").read_text()) for row in both]
    assert max(row["begun"] for row in starts) < min(row["ended"] for row in starts), "not at once"
    # The third is new. Ctrl-C is for it, too; what it has saved is not lost.
    running = start(here, *sweep, "args=[150],[160],[170]")
    (folder,) = (here / "runs").iterdir()
    started = "0002-args=170/attempts/000/node-0.log"  # before that, nobody handles Ctrl-C
    wait_for(lambda: (folder / started).exists() or running.poll() is not None, "the third")
    assert running.poll() is None
    running.send_signal(signal.SIGINT)
    running.communicate(timeout=PATIENCE)
    assert running.returncode in (0, 5)  # it may have been over before
    assert elements(here)[2]["state"] == ("STOPPED" if running.returncode else "COMPLETED")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    finish(start(here, "resume", str(folder)), 0)
    assert [row["state"] for row in elements(here)] == ["COMPLETED"] * 3
