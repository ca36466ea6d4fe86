from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from run_builders import begin_dead, job

from cluster_ddp.job import load_resolved
from cluster_ddp.process import limit_umask
from cluster_ddp.run import record, runs
from cluster_ddp.run.directory import RunDirectory
from cluster_ddp.run.errors import RunError, RunNotFound
from cluster_ddp.run.events import EventWriter
from cluster_ddp.run.record import add_slurm_job, read_record, update_record
from cluster_ddp.run.runs import create_run, find_run, list_runs, runs_dir_of
from cluster_ddp.run.status.report import describe
from cluster_ddp.run.stopfile import request_stop
from cluster_ddp.run.storage import open_lines


def test_a_new_run_has_everything_that_is_known_before_it_starts(runs_dir: Path) -> None:
    spec = job(slurm={"nodes": 2})
    run = create_run(spec, runs_dir=runs_dir, via="sbatch", script="#!/bin/bash\nexit\n")
    assert re.fullmatch(r"digits-\d{8}-\d{6}-[0-9a-f]{4}", run.id)
    assert run.exists()
    assert load_resolved(run.job_file).train.steps == 300
    assert run.script.read_text() == "#!/bin/bash\nexit\n"
    assert run.script.stat().st_mode & 0o777 == 0o700
    assert run.events.is_dir() and run.attempts.is_dir() and run.checkpoints.is_dir()
    record = read_record(run)
    assert (record.id, record.name, record.via, record.nodes) == (run.id, "digits", "sbatch", 2)
    assert record.slurm_job_ids == () and record.global_batch is None
    assert abs(record.created - time.time()) < 60
    assert record.versions["python"].startswith("3.")
    assert "torch" in record.versions


def test_every_run_has_a_wandb_id_of_its_own_that_stays(runs_dir: Path) -> None:
    first, second = (create_run(job(), runs_dir=runs_dir, via="local", script=None) for _ in range(2))
    assert read_record(first).wandb_id != read_record(second).wandb_id
    before = read_record(first)
    update_record(first, global_batch=64)
    assert read_record(first).wandb_id == before.wandb_id
    assert read_record(first).global_batch == 64


def test_runs_of_the_same_second_get_folders_of_their_own(runs_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = iter(["aaaa", "aaaa", "aaaa", "bbbb"])
    urandom = os.urandom
    monkeypatch.setattr(runs.time, "strftime", lambda form: "20260101-000000")
    monkeypatch.setattr(os, "urandom", lambda size: bytes.fromhex(next(drawn)) if size == 2 else urandom(size))
    ids = [create_run(job(), runs_dir=runs_dir, via="local", script=None).id for _ in range(2)]
    assert ids == ["digits-20260101-000000-aaaa", "digits-20260101-000000-bbbb"]


def test_the_git_revision_of_the_users_code_is_noted(runs_dir: Path, tmp_path: Path) -> None:
    code = tmp_path / "code"
    code.mkdir()
    (code / "train.py").write_text("print()\n")
    git = ["git", "-C", str(code), "-c", "user.name=x", "-c", "user.email=x@y"]
    for command in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "x"]):
        subprocess.run([*git, *command], check=True)
    head = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
    spec = job(task=f"{code}/train.py:Digits")
    assert read_record(create_run(spec, runs_dir=runs_dir, via="local", script=None)).git_revision == head
    (code / "train.py").write_text("print(1)\n")
    assert read_record(create_run(spec, runs_dir=runs_dir, via="local", script=None)).git_revision == f"{head}-dirty"


def test_a_folder_that_cannot_be_made_says_which_setting_to_change(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="runs_dir"):
        create_run(job(), runs_dir=tmp_path / "file" / "runs", via="local", script=None)


def test_runs_dir_is_the_jobs_then_the_environments_then_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("CLUSTER_DDP_RUNS", raising=False)
    assert runs_dir_of(None) == tmp_path / "runs"
    monkeypatch.setenv("CLUSTER_DDP_RUNS", "/shared/me")
    assert runs_dir_of(job()) == Path("/shared/me")
    assert runs_dir_of(job(runs_dir="/shared/job")) == Path("/shared/job")


def fake_run(folder: Path, name: str) -> RunDirectory:
    (folder / name).mkdir(parents=True)
    (folder / name / "run.json").write_text("{}")
    return RunDirectory(folder / name)


def test_a_run_is_found_by_path_id_and_unique_prefix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = fake_run(tmp_path, "digits-20260101-000000-aaaa")
    second = fake_run(tmp_path, "digits-20260102-000000-bbbb")
    (tmp_path / "not-a-run").mkdir()
    assert find_run(str(first.path), tmp_path / "elsewhere") == first
    assert find_run(first.id, tmp_path) == first
    assert find_run("digits-20260102", tmp_path) == second
    monkeypatch.chdir(tmp_path)
    assert find_run(f"./{second.id}/", tmp_path / "elsewhere") == second
    assert list_runs(tmp_path) == [first, second]


@pytest.mark.parametrize("text", ["", " "])
def test_an_empty_name_is_no_run_though_it_is_the_beginning_of_all(tmp_path: Path, text: str) -> None:
    """`cluster-ddp cancel "$RUN"` with RUN unset must not end the only run there is."""
    fake_run(tmp_path, "digits-20260101-000000-aaaa")
    with pytest.raises(RunNotFound, match="no run given"):
        find_run(text, tmp_path)


@pytest.mark.parametrize("text", ["~nobody-of-that-name", "x" * 5000, "a\nb"])
def test_names_that_can_be_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    with pytest.raises(RunNotFound):
        find_run(text, tmp_path)
    monkeypatch.setenv("CLUSTER_DDP_RUNS", text)
    with pytest.raises(RunError, match="File name too long") if len(text) > 255 else contextlib.nullcontext():
        assert list_runs(runs_dir_of(None)) == []


def test_a_run_that_one_may_not_look_into_hides_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine, theirs = fake_run(tmp_path, "mine"), fake_run(tmp_path, "theirs")
    stat = os.lstat

    def refusing(path: Any, **options: Any) -> os.stat_result:
        if os.fspath(path).startswith(f"{theirs.path}/"):
            raise PermissionError(13, "Permission denied", str(path))
        return stat(path, **options)

    monkeypatch.setattr(os, "lstat", refusing)
    assert list_runs(tmp_path) == [mine]
    assert find_run("mi", tmp_path) == mine


@pytest.mark.parametrize(
    "wrong",
    [
        *({"created": value} for value in ("x", float("nan"), 10**400)),
        *({"nodes": "a"}, {"procs": -1}, {"name": 5}, {"via": None}),
    ],
)
def test_a_record_with_a_value_of_the_wrong_kind_is_damaged(runs_dir: Path, wrong: dict[str, Any]) -> None:
    run = create_run(job(), runs_dir=runs_dir, via="local", script=None)
    run.record_file.write_text(json.dumps(json.loads(run.record_file.read_text()) | wrong))
    with pytest.raises(RunError, match="cannot be read"):
        read_record(run)
    assert describe(run, None).run_id == run.id


def test_an_id_that_is_a_prefix_of_another_names_itself(tmp_path: Path) -> None:
    short, _ = fake_run(tmp_path, "digits"), fake_run(tmp_path, "digits-2")
    (tmp_path / "else").mkdir()
    assert find_run("digits", tmp_path) == short


def test_what_names_no_run_or_several_is_answered_with_what_is_there(tmp_path: Path) -> None:
    with pytest.raises(RunNotFound, match="there are no runs in"):
        find_run("x", tmp_path / "missing")
    (tmp_path / "file").touch()
    with pytest.raises(RunError, match=r"file cannot be read: Not a directory\. If .*set CLUSTER_DDP_RUNS"):
        find_run("x", tmp_path / "file")
    fake_run(tmp_path, "digits-20260101-000000-aaaa")
    fake_run(tmp_path, "digits-20260102-000000-bbbb")
    with pytest.raises(RunNotFound, match=r"(?s)matches 2 runs.*aaaa.*bbbb") as caught:
        find_run("digits", tmp_path)
    assert caught.value.exit_status == 2
    with pytest.raises(RunNotFound, match=r"(?s)no run 'other'.*bbbb.*aaaa"):
        find_run("other", tmp_path)
    with pytest.raises(RunNotFound, match="has no run"):
        find_run(str(tmp_path / "digits-2026"), tmp_path)


def test_a_damaged_record_is_said_to_be_so(run: RunDirectory) -> None:
    for content, why in (
        ("", "line 1"),
        ("[]", "not a JSON object"),
        ('{"id": "x"}', "it has no name, "),
        ("{", "line 1"),
    ):
        run.record_file.write_text(content)
        with pytest.raises(RunError, match=rf"run\.json cannot be read: .*{why}.*put a copy of it back"):
            read_record(run)


def test_nothing_heavy_is_imported() -> None:
    code = (
        "import sys, cluster_ddp.run.status.report, cluster_ddp.launch.node.heartbeat, cluster_ddp.cli.status\n"
        "print([name for name in ('torch', 'numpy', 'rich', 'submitit', 'wandb') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout == "[]\n"


@pytest.mark.parametrize(("mode", "writable"), [("owner", 0), ("group", stat.S_IWGRP)])
def test_who_may_change_a_run_is_the_jobs_to_say_and_the_same_for_all_of_it(
    tmp_path: Path, mode: str, writable: int
) -> None:
    before = os.umask(0)
    try:
        run = create_run(job(storage={"mode": mode}), runs_dir=tmp_path, via="sbatch", script="#!/bin/bash\n")
        os.umask(0o077)  # as a colleague may have it
        limit_umask(run.path)
        attempt = begin_dead(run)
        add_slurm_job(run, "7")
        request_stop(attempt, reason="person", by="me")
        EventWriter(run, "login-x").write("stop-requested", attempt=0)
        metrics, _ = open_lines(run.metrics_file)
        os.close(metrics)
    finally:
        os.umask(before)
    paths = [run.path, *run.path.rglob("*")]
    secret = {attempt.rendezvous_key}
    modes = {path: path.stat().st_mode for path in paths if path not in secret}
    assert len(modes) > 10
    assert {path for path, found in modes.items() if found & (stat.S_IWGRP | stat.S_IWOTH) != writable} == set()
    assert stat.S_IMODE(attempt.rendezvous_key.stat().st_mode) == 0o600
    assert bool(run.attempts.stat().st_mode & stat.S_ISGID) == (mode == "group")


def test_of_a_run_that_cannot_be_made_nothing_is_left(runs_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its disk was full: a folder stayed that was no run, and the advice was to take a folder one can write to."""

    def full(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(record, "write_record", full)
    with pytest.raises(RunError, match=r"No space left on device\. Free some space there"):
        create_run(job(), runs_dir=runs_dir, via="sbatch", script=None)
    assert list(runs_dir.iterdir()) == []
    with pytest.raises(RunError, match=r"^runs cannot be written to /proc/x: [^:]+\. Set runs_dir in the job file"):
        create_run(job(), runs_dir=Path("/proc/x"), via="sbatch", script=None)
