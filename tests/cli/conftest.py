"""The command line called in this process, and a cluster's commands as stand-ins."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from cli_stage import JOB, Call, Said, Slurm

from cluster_ddp.cli import app


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Call:
    """Call ``cluster-ddp``."""

    def called(*arguments: str) -> Said:
        monkeypatch.setattr(sys, "argv", ["cluster-ddp", *arguments])
        status = app.main()
        said = capfd.readouterr()
        return Said(status, said.out, said.err)

    return called


@pytest.fixture
def imported() -> None:
    """`submit` imports the task before it submits, which takes seconds."""


@pytest.fixture(autouse=True)
def without_imports(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the tests that are about it import the task before they submit."""
    if "imported" not in request.fixturenames:
        monkeypatch.setattr("cluster_ddp.submit.check_program.ProgramCheck.begin", lambda check, spec: None)
        monkeypatch.setattr("cluster_ddp.submit.check_program.ProgramCheck.result", lambda check, remark: None)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder with a job file in it, as the current one; runs go to its folder `runs`."""
    folder = tmp_path / "here"
    folder.mkdir()
    (folder / "job.yaml").write_text(JOB)
    monkeypatch.chdir(folder)
    monkeypatch.setenv("CLUSTER_DDP_RUNS", str(folder / "runs"))
    monkeypatch.setenv("COLUMNS", "120")
    return folder


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Slurm:
    """A login node with Slurm's commands."""
    folder = tmp_path / "slurm"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    return Slurm(folder)


@pytest.fixture
def no_slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without Slurm."""
    folder = tmp_path / "no-slurm"
    folder.mkdir()
    for tool in ("bash", "env", "cat", "git"):
        for place in ("/usr/bin", "/bin"):
            if (Path(place) / tool).exists() and not (folder / tool).exists():
                (folder / tool).symlink_to(Path(place) / tool)
    monkeypatch.setenv("PATH", str(folder))
