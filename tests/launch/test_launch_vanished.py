"""A run directory that is removed or renamed under its training."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from cluster_ddp.launch.vanished import RunWatch


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
        vanished = watch.has_vanished()
    return vanished


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "runs" / "run"
    folder.mkdir(parents=True)
    return folder


@pytest.mark.parametrize("renamed", ["run", "."])
def test_a_run_that_is_away_for_a_minute_has_vanished(run: Path, tmp_path: Path, renamed: str) -> None:
    clock = Clock()
    watch = RunWatch(run, clock=clock)
    assert not gone_for(watch, clock, 300)
    (run.parent / renamed).resolve().rename(tmp_path / "moved")
    assert not gone_for(watch, clock, 50)
    assert gone_for(watch, clock, 25)


def test_a_run_that_comes_back_has_not_vanished(run: Path, tmp_path: Path) -> None:
    clock = Clock()
    watch = RunWatch(run, clock=clock)
    for _ in range(3):
        run.rename(tmp_path / "moved")
        assert not gone_for(watch, clock, 50)
        (tmp_path / "moved").rename(run)
        assert not gone_for(watch, clock, 20)


def test_storage_that_is_away_says_nothing_about_the_run(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stale(_: Path) -> None:
        raise OSError(116, "Stale file handle")

    clock = Clock()
    watch = RunWatch(run, clock=clock)
    monkeypatch.setattr(Path, "lstat", stale)
    assert not gone_for(watch, clock, 600)


UNMOUNTED = """
import subprocess, sys
from pathlib import Path
from cluster_ddp.launch.vanished import RunWatch

storage = Path(sys.argv[1])
subprocess.run(["mount", "-t", "tmpfs", "tmpfs", storage], check=True)
(run := storage / "runs" / "run").mkdir(parents=True)
now = [100.0]
watch = RunWatch(run, clock=lambda: now[0])
if sys.argv[2] == "unmounted":
    subprocess.run(["umount", storage], check=True)
else:
    run.rmdir()
vanished = False
for _ in range(600):
    now[0] += 1.0
    vanished = watch.has_vanished()
print(vanished)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to mount a file system")
@pytest.mark.parametrize(("what", "vanished"), [("unmounted", "False"), ("removed", "True")])
def test_storage_that_is_not_mounted_says_nothing_about_the_run(tmp_path: Path, what: str, vanished: str) -> None:
    alone = ["unshare", "--mount", sys.executable, "-c", UNMOUNTED, str(tmp_path), what]
    done = subprocess.run(alone, capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == vanished, done.stderr
