"""The user's command that is told how a run has ended: when it runs, what it gets, and that it can do no harm."""

from __future__ import annotations

import errno
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
from run_builders import begin_dead, job

from cluster_ddp.launch import notice
from cluster_ddp.run.attempt_record import end_attempt
from cluster_ddp.run.directory import RunDirectory
from cluster_ddp.run.events import COMPLETED, FAILED, STARTED, STOPPED, EventWriter
from cluster_ddp.run.runs import create_run
from cluster_ddp.run.status.report import describe


def asking_for(folder: Path, command: str, *on: str) -> RunDirectory:
    """A run whose job has `notify:`."""
    settings: dict[str, Any] = {"command": command, **({"on": list(on)} if on else {})}
    return create_run(job(notify=settings), runs_dir=folder, via="local", script=None)


def ended(run: RunDirectory, event: str, **fields: Any) -> None:
    """Play an attempt that has ended so."""
    attempt = begin_dead(run)
    writer = EventWriter(run, "rank-0")
    writer.write(STARTED, attempt=attempt.number, step=0, world_size=1, total_steps=9)
    writer.write(event, attempt=attempt.number, **fields)
    end_attempt(attempt)


def test_command_gets_the_status_once_for_each_end(tmp_path: Path) -> None:
    told = tmp_path / "told"
    run = asking_for(tmp_path, f"cat >> '{told}'; echo nobody sees this")
    ended(run, FAILED, step=5, rank=0, error="ValueError: no")
    notice.give_notice(run, writer="test")
    notice.give_notice(run, writer="test")
    first = json.loads(told.read_text())
    assert first == json.loads(json.dumps(describe(run, None).to_json()))
    assert (first["state"], first["run_id"]) == ("FAILED", run.id)
    assert "ValueError" in first["reason"]
    ended(run, COMPLETED, step=9)
    notice.give_notice(run, writer="test")
    assert [json.loads(line)["state"] for line in told.read_text().splitlines()] == ["FAILED", "COMPLETED"]
    assert describe(run, None).warnings == ()


@pytest.mark.parametrize(
    ("on", "event", "fields"),
    [(("failed", "stalled"), COMPLETED, {"step": 9}), ((), STOPPED, {"step": 5, "reason": "person"})],
)
def test_other_ends_are_passed_over(tmp_path: Path, on: tuple[str, ...], event: str, fields: dict[str, Any]) -> None:
    run = asking_for(tmp_path, f"touch '{tmp_path}/told'", *on)
    ended(run, event, **fields)
    notice.give_notice(run, writer="test")
    assert not (tmp_path / "told").exists()


def test_command_that_fails_is_told_once_as_a_warning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = asking_for(tmp_path, "echo one >&2; printf 'no route\\033[2J' >&2; exit 7")
    ended(run, COMPLETED, step=9)
    for _ in range(2):
        notice.give_notice(run, writer="test")
    said = capsys.readouterr().err
    assert said.count("exited with status 7: no route\\x1b[2J") == 1 and "\033" not in said
    status = describe(run, None)
    assert status.state.value == "COMPLETED"
    assert [warning for warning in status.warnings if "with status 7" in warning] == list(status.warnings)


def test_command_that_hangs_is_ended_with_all_that_it_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notice, "NOTICE_SECONDS", 0.5)
    run = asking_for(tmp_path, f"(sleep 3; touch '{tmp_path}/late') & sleep 600")
    ended(run, COMPLETED, step=9)
    notice.give_notice(run, writer="test")
    assert "did not end within" in describe(run, None).warnings[0]
    time.sleep(4)
    assert not (tmp_path / "late").exists()


def test_a_full_temporary_folder_harms_nothing_but_the_notice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full() -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    run = asking_for(tmp_path, "true")
    ended(run, COMPLETED, step=9)
    monkeypatch.setattr(tempfile, "TemporaryFile", full)
    notice.give_notice(run, writer="test")
    assert "cannot notify anybody: [Errno 28] No space left on device" in capsys.readouterr().err
