"""A run with launch.snapshot uses the code as it was when the run was made."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from cluster_ddp.job import load_job
from cluster_ddp.run import code
from cluster_ddp.run.code import kept_path, kept_search_path, kept_task
from cluster_ddp.run.directory import RunDirectory
from cluster_ddp.run.errors import RunError
from cluster_ddp.run.runs import create_run

SCRIPT = "import helper, sys\nopen({out!r}, 'a').write(helper.NAME + '\\n')\nsys.exit({status})\n"


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with a change, an untracked helper, an ignored file, and a link."""
    folder = tmp_path / "project"
    (folder / "code").mkdir(parents=True)
    git(folder, "init", "-q")
    (folder / ".gitignore").write_text("data\n/runs\n")
    (folder / "code" / "train.py").write_text("old\n")
    git(folder, "add", "-A")
    git(folder, "-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "first")
    (folder / "code" / "train.py").write_text(SCRIPT.format(out=str(tmp_path / "out"), status=1))
    (folder / "code" / "helper.py").write_text("NAME = 'as submitted'\n")
    (folder / "data").write_text("much")
    (folder / "link").symlink_to("/etc/passwd")
    (folder / "job.yaml").write_text("script: code/train.py\nlaunch: {snapshot: true}\nruns_dir: runs\n")
    monkeypatch.chdir(folder)
    return folder


def git(folder: Path, *arguments: str) -> None:
    subprocess.run(["git", "-C", str(folder), *arguments], check=True, capture_output=True, timeout=60)


def make(**settings: str) -> RunDirectory:
    spec = load_job("job.yaml", [f"{key}={value}" for key, value in settings.items()]).spec
    return create_run(spec, runs_dir=Path(str(spec.runs_dir)), via="local", script=None)


def test_what_git_knows_and_would_take_is_kept(repository: Path) -> None:
    make()
    run = make()  # the run before it is not part of the code
    kept = sorted(str(path.relative_to(run.code)) for path in run.code.rglob("*") if not path.is_dir())
    assert kept == [".gitignore", "code/helper.py", "code/train.py", "job.yaml", "link"]
    assert (run.code / "link").is_symlink()
    assert b"-old" in run.changes_file.read_bytes()
    assert len(json.loads(run.code_file.read_text())["revision"]) == 40


def test_paths_of_the_repository_lead_to_the_copy(repository: Path) -> None:
    run = make()
    script = repository / "code" / "train.py"
    assert kept_path(run, str(script)) == str(run.code / "code" / "train.py")
    assert kept_task(run, f"{script}:Mine") == f"{run.code}/code/train.py:Mine"
    assert kept_task(run, "package.module:Mine") == "package.module:Mine"
    assert kept_path(run, str(repository / "data")) == str(repository / "data")
    assert kept_search_path(run, ["", "/usr/lib", str(repository)]) == ["", "/usr/lib", str(run.code)]


def test_a_run_without_a_copy_uses_what_is_there(repository: Path) -> None:
    run = make(**{"launch.snapshot": "false"})
    script = str(repository / "code" / "train.py")
    assert not run.code.exists() and kept_path(run, script) == script


@pytest.mark.parametrize("wrong", ["no repository", "too large"])
def test_what_cannot_be_kept_is_refused_before_there_is_a_run(
    repository: Path, monkeypatch: pytest.MonkeyPatch, wrong: str
) -> None:
    if wrong == "too large":
        monkeypatch.setattr(code, "MAX_BYTES", 100)
    else:
        (repository / ".git").rename(repository / "git")
        monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(repository.parent))
    with pytest.raises(RunError, match=r"launch\.snapshot"):
        make()
    assert not (repository / "runs").exists()


def test_edits_between_two_starts_change_nothing(repository: Path, tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    call = [sys.executable, "-m", "cluster_ddp"]
    first = subprocess.run([*call, "local", "job.yaml", "--json"], env=environment, capture_output=True, timeout=300)
    run = json.loads(first.stdout.splitlines()[-1])["directory"]
    (repository / "code" / "train.py").write_text("raise SystemExit('edited')\n")
    (repository / "code" / "helper.py").unlink()
    subprocess.run([*call, "resume", run], env=environment, capture_output=True, timeout=300)
    assert (tmp_path / "out").read_text() == "as submitted\n" * 2
