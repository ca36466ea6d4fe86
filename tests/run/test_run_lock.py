"""The lock of run.json: nothing that one of many writers noted is lost, whatever their clocks say and however slow."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import signal
import time
from pathlib import Path

import pytest

from cluster_ddp.run import lock
from cluster_ddp.run.directory import RunDirectory
from cluster_ddp.run.lock import LockHeld, change_file
from cluster_ddp.run.record import add_slurm_job, read_record, update_record
from cluster_ddp.run.storage import Storage

WRITERS, JOBS = 12, 4
fork = multiprocessing.get_context("fork")


def folder_of_lock(run: RunDirectory) -> Path:
    return run.path / ".run.json.holder"


def note_jobs(run: RunDirectory, index: int, skew: float) -> None:
    real = time.time
    time.time = lambda: real() + skew
    for count in range(JOBS):
        add_slurm_job(run, f"{index + 1}_{count}")


def test_changes_by_many_processes_are_all_kept_though_their_clocks_differ_by_minutes(run: RunDirectory) -> None:
    changes = [fork.Process(target=note_jobs, args=(run, index, 60.0 * (index - 6))) for index in range(WRITERS)]
    for process in changes:
        process.start()
    for process in changes:
        process.join(60)
    assert sorted(read_record(run).slurm_job_ids) == sorted(f"{a + 1}_{b}" for a in range(WRITERS) for b in range(JOBS))
    assert [path.name for path in run.path.glob(".*")] == []


def hold(run: RunDirectory, inside: Path, *, job_id: str) -> None:
    """Note a job, and halt the first time while the lock is held."""

    def content() -> bytes:
        record = json.loads(run.record_file.read_bytes())
        if not inside.exists():
            inside.touch()
            os.kill(os.getpid(), signal.SIGSTOP)
        return json.dumps({**record, "slurm_job_ids": [*record["slurm_job_ids"], job_id]}).encode()

    change_file(Storage(), run.record_file, content)


def start_holder(run: RunDirectory, tmp_path: Path) -> multiprocessing.process.BaseProcess:
    process = fork.Process(target=hold, args=(run, tmp_path / "inside"), kwargs={"job_id": "1"})
    process.start()
    os.waitpid(process.pid or 0, os.WUNTRACED)  # returns once it has halted
    return process


def test_a_holder_that_died_is_not_waited_for(run: RunDirectory, tmp_path: Path) -> None:
    process = start_holder(run, tmp_path)
    process.kill()
    process.join()
    began = time.monotonic()
    add_slurm_job(run, "2")
    assert time.monotonic() - began < 2
    assert read_record(run).slurm_job_ids == ("2",)


def test_a_holder_that_is_overtaken_begins_again_and_nothing_is_lost(
    run: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = start_holder(run, tmp_path)
    monkeypatch.setattr(lock, "SLOW_SECONDS", 0.3)
    add_slurm_job(run, "2")
    add_slurm_job(run, "3")
    os.kill(process.pid, signal.SIGCONT)
    process.join(20)
    assert process.exitcode == 0
    assert read_record(run).slurm_job_ids == ("2", "3", "1")


def test_a_slow_holder_that_ends_does_not_remove_the_lock_of_the_next_one(run: RunDirectory) -> None:
    def overtaken() -> bytes | None:
        folder = folder_of_lock(run)
        (mine,) = folder.iterdir()
        mine.unlink()  # as one does who takes the lock, and then holds it
        (folder / "somebody~1~2~3~4~5").touch()
        return None

    change_file(Storage(), run.record_file, overtaken)
    assert [path.name for path in folder_of_lock(run).iterdir()] == ["somebody~1~2~3~4~5"]


def test_a_lock_that_cannot_be_had_says_who_has_it_and_since_when(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder_of_lock(run).mkdir()
    (folder_of_lock(run) / "gpu7~4711~ns~1~boot~abc").touch()
    monkeypatch.setattr(lock, "LOCK_SECONDS", 0.2)
    with pytest.raises(LockHeld, match=r"process 4711 on gpu7 since \d{4}-\d\d-\d\d") as caught:
        update_record(run, global_batch=8)
    assert re.search(r"remove the folder", str(caught.value))
    assert read_record(run).global_batch is None
