"""Ranks that do not share the run directory are refused before they train."""

from __future__ import annotations

import ctypes
import os
import subprocess
import time
from pathlib import Path

import pytest
import torch
from train_ranks import run_ranks

from cluster_ddp.train import join_run
from cluster_ddp.train.ranks.distributed import find_world
from cluster_ddp.train.ranks.meeting import meet_in

_NEW_MOUNTS = 0x20000  # CLONE_NEWNS


def joining(folder: Path, of_its_own: str = "") -> str:
    """What a rank is told that joins a run whose folder it shares with the others, or not."""
    rank = int(os.environ["RANK"])
    if of_its_own == "name":
        folder = folder / str(rank)
    elif of_its_own == "disk" and rank == 1:
        assert ctypes.CDLL(None).unshare(_NEW_MOUNTS) == 0
        subprocess.run(["mount", "--make-rprivate", "/"], check=True)
        subprocess.run(["mount", "-t", "tmpfs", "a-disk-of-its-own", str(folder)], check=True)
    try:
        with join_run(folder):
            pass
    except SystemExit as end:
        return str(end.__cause__)
    return ""


def joining_together(folder: Path) -> str:
    """`joining`, and no rank leaves before the other has joined: rank 0 would take the store along."""
    told = joining(folder / "made")
    (folder / f"joined-{os.environ['RANK']}").touch()
    while len(list(folder.glob("joined-*"))) < 2:
        time.sleep(0.01)
    return told


def meeting_with_versions(folder: Path) -> tuple[str | None, str | None]:
    """What ranks are warned of with the same version of torch, and with another one on rank 1."""
    same = meet_in(folder, find_world())
    if os.environ["RANK"] == "1":
        torch.__version__ = "1.0"  # type: ignore[misc]
    return same, meet_in(folder, find_world())


def test_ranks_with_different_versions_of_torch_are_warned(tmp_path: Path) -> None:
    for same, other in run_ranks(meeting_with_versions, 2, tmp_path):
        assert same is None
        assert other is not None and f"versions of torch, {torch.__version__} on " in other and "but 1.0 on " in other


def test_ranks_that_share_their_directory_meet_and_leave_no_mark(tmp_path: Path) -> None:
    assert run_ranks(joining_together, 2, tmp_path) == ["", ""]
    assert list((tmp_path / "made").glob(".*")) == []


def test_ranks_that_were_given_different_folders_are_refused(tmp_path: Path) -> None:
    for told in run_ranks(joining, 2, tmp_path, "name"):
        assert f"{tmp_path}/0, and rank 1 on " in told and f" {tmp_path}/1. " in told
        assert "pass the same folder to join_run() on all ranks" in told
    assert list(tmp_path.glob("*/*")) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to mount a disk for one rank alone")
def test_a_directory_that_a_host_has_for_itself_is_refused(tmp_path: Path) -> None:
    for told in run_ranks(joining, 2, tmp_path, "disk"):
        assert told.startswith("rank 1 on ") and f"into the run directory {tmp_path}: " in told
        assert "on storage that all hosts share" in told


def test_a_directory_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for told in run_ranks(joining, 2, tmp_path / "file" / "run"):
        assert f"cannot make the run directory {tmp_path}/file/run: " in told
