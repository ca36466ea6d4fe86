"""A run directory that is removed or renamed under its training, or whose storage goes away."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from cluster_ddp.launch.node.vanished import RunWatch
from cluster_ddp.run.directory import RunDirectory


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def gone_for(watch: RunWatch, clock: Clock, seconds: int) -> bool:
    """Look every second; whether it has vanished at the end."""
    vanished = False
    for _ in range(seconds):
        clock.now += 1.0
        vanished = watch.why_nothing_is_saved() is not None
    return vanished


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "runs" / "run"
    (folder / "attempts/001").mkdir(parents=True)
    return folder


def watch_over(run: Path, clock: Clock) -> RunWatch:
    return RunWatch(RunDirectory(run).attempt(1), clock=clock)


@pytest.mark.parametrize("renamed", ["run", ".", "run/attempts/001"])
def test_a_run_that_is_away_for_a_minute_has_vanished(run: Path, tmp_path: Path, renamed: str) -> None:
    clock = Clock()
    watch = watch_over(run, clock)
    assert not gone_for(watch, clock, 300)
    (run.parent / renamed).resolve().rename(tmp_path / "moved")
    assert not gone_for(watch, clock, 50)
    assert gone_for(watch, clock, 25)


def test_a_run_that_comes_back_has_not_vanished(run: Path, tmp_path: Path) -> None:
    clock = Clock()
    watch = watch_over(run, clock)
    for _ in range(3):
        run.rename(tmp_path / "moved")
        assert not gone_for(watch, clock, 50)
        (tmp_path / "moved").rename(run)
        assert not gone_for(watch, clock, 20)


def test_storage_that_is_away_is_waited_for_and_then_given_up(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stale(_: Path) -> None:
        raise OSError(116, "Stale file handle")

    clock = Clock()
    watch = watch_over(run, clock)
    monkeypatch.setattr(Path, "lstat", stale)
    assert not gone_for(watch, clock, 890)
    monkeypatch.undo()
    assert not gone_for(watch, clock, 20)
    monkeypatch.setattr(Path, "lstat", stale)
    assert not gone_for(watch, clock, 890)
    assert gone_for(watch, clock, 30)


UNMOUNTED = """
import shutil, subprocess, sys
from pathlib import Path
from cluster_ddp.launch.node.vanished import RunWatch
from cluster_ddp.run.directory import RunDirectory

storage = Path(sys.argv[1])
subprocess.run(["mount", "-t", "tmpfs", "tmpfs", storage], check=True)
attempt = RunDirectory(storage / "runs" / "run").attempt(1)
attempt.path.mkdir(parents=True)
now = [100.0]
watch = RunWatch(attempt, clock=lambda: now[0])
if sys.argv[2] == "unmounted":
    subprocess.run(["umount", storage], check=True)
else:
    shutil.rmtree(attempt.run.path)
vanished = False
for _ in range(int(sys.argv[3])):
    now[0] += 1.0
    vanished = watch.why_nothing_is_saved()
print(vanished)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to mount a file system")
@pytest.mark.parametrize(
    ("what", "seconds", "why"),
    [
        ("unmounted", 600, "None"),
        ("unmounted", 930, "the storage of FOLDER/runs/run has been unavailable for 15 min"),
        ("removed", 80, "FOLDER/runs/run was removed or renamed"),
    ],
)
def test_storage_that_is_not_mounted_is_waited_for(tmp_path: Path, what: str, seconds: int, why: str) -> None:
    alone = ["unshare", "--mount", sys.executable, "-c", UNMOUNTED, str(tmp_path), what, str(seconds)]
    done = subprocess.run(alone, capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == why.replace("FOLDER", str(tmp_path)), done.stderr
