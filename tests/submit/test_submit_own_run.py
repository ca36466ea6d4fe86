"""The run that a batch script makes when it is given none."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster_ddp.errors import ClusterDDPError
from cluster_ddp.run.directory import RunDirectory
from cluster_ddp.run.record import read_record
from cluster_ddp.slurm.start import SlurmStart, this_start
from cluster_ddp.submit.own_run import own_run

SCRIPT = "#!/bin/bash\n# with a person's edits\n"


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "slurm_script").write_text(SCRIPT)
    return tmp_path


def start(restarts: int, job: str = "5") -> SlurmStart:
    found = this_start({"SLURM_JOB_ID": job, "SLURM_RESTART_COUNT": str(restarts)})
    assert found is not None
    return found


def run_of(restarts: int, job: str = "5") -> RunDirectory:
    return own_run(start(restarts, job), Path("slurm_script"), "quickstart", ["train.epochs=3"])


def test_each_restart_finds_the_run_of_the_first_start(here: Path) -> None:
    run = run_of(0)
    assert run.path.parent == here / "runs"
    assert run.script.read_text() == SCRIPT
    assert "epochs: 3" in run.job_file.read_text()
    record = read_record(run)
    assert (record.via, record.slurm_job_ids) == ("sbatch", ("5",))
    assert run_of(0, "6") != run
    assert run_of(1) == run_of(2) == run


def test_a_job_id_that_slurm_uses_again_is_another_job() -> None:
    old = run_of(0)
    new = run_of(0)
    assert new != old


def test_a_folder_of_runs_that_cannot_be_listed_for_a_moment_hides_no_run(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, iterdir, stale = run_of(0), Path.iterdir, iter([True])

    def listed(folder: Path) -> Iterator[Path]:
        if folder == here / "runs" and next(stale, False):
            raise OSError(errno.ESTALE, "Stale file handle")
        return iterdir(folder)

    monkeypatch.setattr(Path, "iterdir", listed)
    assert run_of(1) == run


def test_a_damaged_run_hides_no_other(here: Path) -> None:
    run = run_of(0)
    run_of(0, "6").record_file.write_text("{")
    assert run_of(1) == run


def test_a_start_that_died_before_it_made_a_run_is_made_up_for() -> None:
    assert run_of(3).exists()


def test_a_job_that_is_not_there_is_named() -> None:
    with pytest.raises(ClusterDDPError, match="no-such-job"):
        own_run(start(0), Path("slurm_script"), "no-such-job.yaml", [])
