"""The batch script that a run or a sweep keeps, and beside it what to do when a start fails before Python runs."""

from __future__ import annotations

from pathlib import Path

from cluster_ddp.run.storage import Storage, replace_file

START_FAILED = "start-failed.sh"
_POLICY = Path(__file__).with_name("start_failed.sh")


def keep_script(storage: Storage, script: Path, text: str, *, mode: int) -> None:
    """Write a batch script, and `start-failed.sh` to its folder, which it calls."""
    replace_file(storage, script.with_name(START_FAILED), _POLICY.read_bytes(), mode=mode & 0o660)
    replace_file(storage, script, text.encode(), mode=mode)
