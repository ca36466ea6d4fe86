"""Ended runs are read once; what has changed since, and a cache that is not what was written, never mislead."""

from __future__ import annotations

import json
import math
import os
import time
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest
from run_builders import begin, begin_dead

from cluster_ddp.cli import status as cli_status
from cluster_ddp.run.attempt import request_resume
from cluster_ddp.run.attempt_record import end_attempt
from cluster_ddp.run.directory import RunDirectory
from cluster_ddp.run.runs import list_runs
from cluster_ddp.run.status.cache import EndedRun, EndedRuns
from cluster_ddp.run.status.report import RunStatus, describe
from cluster_ddp.run.stopfile import request_stop
from cluster_ddp.slurm.states import SlurmJob

Say = Callable[..., None]
HOUR = 3_600


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "cluster-ddp"


@pytest.fixture
def ended(run: RunDirectory, say: Say) -> RunDirectory:
    """A run that was completed an hour ago."""
    attempt = begin_dead(run, slurm_job_id="7")
    say("started", 0, at=0, step=0, world_size=2, total_steps=300)
    say("checkpoint", 0, at=50, step=300, samples=1280)
    say("completed", 0, at=60, step=300)
    row = {"step": 300, "samples": 9600, "epoch": 1, "attempt": 0, "time": time.time(), "loss": 0.5, "bad": None}
    run.metrics_file.write_text(json.dumps(row) + "\n")
    (run.checkpoints / "step-00000300").mkdir()
    end_attempt(attempt)
    rest(run)
    return run


def rest(run: RunDirectory) -> None:
    """Let nothing of a run have changed for an hour."""
    for path in (run.path, *run.path.rglob("*")):
        os.utime(path, (time.time() - HOUR, time.time() - HOUR))


def look(run: RunDirectory, jobs: dict[str, SlurmJob] | None = None) -> tuple[RunStatus, bool]:
    """What a command tells of the only run there is, and whether it had to be read for that."""
    runs = EndedRuns(run.path.parent)
    known = [runs.read_known(run) for run in list_runs(run.path.parent)]
    (status,) = [runs.describe(entry, {} if jobs is None else jobs) for entry in known]
    runs.save([entry.run for entry in known])
    return status, not isinstance(known[0], EndedRun)


def same(one: RunStatus, other: RunStatus) -> bool:
    return repr(one) == repr(other)  # one metric is not a number


def test_an_ended_run_is_read_once(ended: RunDirectory, cache: Path) -> None:
    first, read = look(ended)
    assert read and first.state.value == "COMPLETED" and math.isnan(first.metrics["bad"])
    again, read = look(ended)
    assert not read and same(again, first) and same(again, describe(ended, {}))
    (file,) = cache.iterdir()
    assert file.stat().st_mode & 0o077 == 0


def remove_checkpoint(run: RunDirectory, _: Say) -> None:
    (run.checkpoints / "step-00000300").rmdir()


def put_link(run: RunDirectory, _: Say) -> None:
    run.events.rename(run.path / "moved")
    run.events.symlink_to("moved")


CHANGES: dict[str, Callable[[RunDirectory, Say], object]] = {
    "an event": lambda run, say: say("warning", 0, message="late"),
    "another writer's event": lambda run, say: say("cancelled", 0, writer="login-b", by="me"),
    "asked to resume": lambda run, say: request_resume(run, by="me"),
    "another attempt": lambda run, say: begin(run, slurm_job_id="7", restart_count=1),
    "a stop file": lambda run, say: request_stop(run.attempt(0), reason="person", by="me"),
    "no checkpoint": remove_checkpoint,
    "no metrics": lambda run, say: run.metrics_file.unlink(),
    "no job": lambda run, say: run.job_file.unlink(),
    "another record": lambda run, say: run.record_file.write_text("{}"),
    "a link": put_link,
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_changes_afterwards_is_told(ended: RunDirectory, say: Say, change: str) -> None:
    before, _ = look(ended)
    if change == "another attempt":
        request_resume(ended, by="me")
    CHANGES[change](ended, say)
    after, read = look(ended)
    fresh = describe(ended, {})
    assert read and (after.state, after.reason, after.warnings) == (fresh.state, fresh.reason, fresh.warnings)
    assert (after.last_checkpoint, after.attempts) == (fresh.last_checkpoint, fresh.attempts)
    assert change == "a stop file" or not same(after, before)


def test_what_slurm_knows_of_its_job_counts(ended: RunDirectory) -> None:
    look(ended)
    queued = {"7": SlurmJob("7", "PENDING", "Priority", "", f"cluster_ddp {ended.id}")}
    assert same(look(ended, queued)[0], describe(ended, queued))


def test_only_what_rests_is_kept(ended: RunDirectory, say: Say) -> None:
    say("warning", 0, message="a moment ago")
    look(ended)
    assert look(ended)[1]


def test_a_run_that_is_not_over_is_read_each_time(run: RunDirectory, say: Say) -> None:
    begin(run, slurm_job_id="7")
    say("started", 0, step=0)
    rest(run)
    look(run)
    assert look(run)[1]


def damaged(file: Path) -> None:
    file.write_bytes(file.read_bytes().replace(b"COMPLETED", b"CANCELLED"))


def of_another_version(file: Path) -> None:
    body = file.read_bytes().partition(b"\n")[2].replace(b'"version": "', b'"version": "9.')
    file.write_bytes(b"%08x\n" % zlib.crc32(body) + body)


def of_another_revision(file: Path) -> None:
    """As one between two releases leaves it, which calls itself the same and keeps something else."""
    body = file.read_bytes().partition(b"\n")[2].replace(b'"warnings"', b'"remarks"')
    file.write_bytes(b"%08x\n" % zlib.crc32(body) + body)


def linked(file: Path) -> None:
    file.rename(file.with_name("elsewhere"))
    file.symlink_to(file.with_name("elsewhere"))


def a_strangers(file: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can give files away")
    os.chown(file, 12345, 12345)


@pytest.mark.parametrize("spoil", [damaged, of_another_version, of_another_revision, linked, a_strangers, Path.unlink])
def test_a_cache_that_is_not_ones_own_word_is_passed_over(
    ended: RunDirectory, cache: Path, spoil: Callable[[Path], None]
) -> None:
    look(ended)
    (file,) = cache.iterdir()
    spoil(file)
    status, read = look(ended)
    assert read and status.state.value == "COMPLETED"
    assert not look(ended)[1]  # it is written again


def test_without_a_place_for_the_cache_status_tells_the_same(
    ended: RunDirectory, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CLUSTER_DDP_RUNS", str(ended.path.parent))
    monkeypatch.setenv("PATH", "")
    said = []
    for place in ("/dev/null", "", "/dev/null"):
        monkeypatch.setenv("XDG_CACHE_HOME", place or str(ended.path.parent.parent / "cache"))
        cli_status.command([])
        said.append(capsys.readouterr().out)
    assert "COMPLETED" in said[0] and said[0] == said[1] == said[2]
