"""`init` writes files that submit as they are, and overwrites none."""

from __future__ import annotations

from pathlib import Path

import pytest
from cli_stage import PARTITION, Call, Slurm

from cluster_ddp.job import load_job


@pytest.fixture
def login(slurm: Slurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A login node with accounting, and an empty folder of a person who has never used this."""
    config = "echo 'ClusterName             = ourcluster'"
    slurm.program("scontrol", f"[[ $2 == config ]] && {{ {config}; exit; }}; echo '{PARTITION}'")
    slurm.program("sacctmgr", "echo lab")
    folder = tmp_path / "new"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.delenv("CLUSTER_DDP_CONFIG")
    monkeypatch.delenv("CLUSTER_DDP_RUNS", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("SCRATCH", str(tmp_path / "scratch"))
    return folder


def test_the_files_submit_as_they_are(call: Call, login: Path, slurm: Slurm, tmp_path: Path) -> None:
    said = call("init")
    assert said.status == 0, said.err
    spec = load_job("job.yaml").spec
    assert (spec.slurm.partition, spec.slurm.account, spec.slurm.gpus_per_node) == ("gpu", "lab", 4)
    assert spec.runs_dir == str(tmp_path / "scratch" / "cluster_ddp_runs")
    assert "partition gpu of ourcluster, 4 nodes of 64 CPUs and 4 GPUs" in (login / "job.yaml").read_text()
    assert call("submit", "job.yaml").status == 0
    assert len(slurm.submissions()) == 1


def test_nothing_is_overwritten(call: Call, login: Path, tmp_path: Path) -> None:
    (login / "job.yaml").write_text("mine")
    assert call("init").status == 0
    site = tmp_path / "config" / "cluster-ddp" / "site.yaml"
    site.write_text("slurm: {partition: other}\n")
    said = call("init")
    assert said.err.count("kept ") == 2
    assert (login / "job.yaml").read_text() == "mine"
    assert site.read_text() == "slurm: {partition: other}\n"


def test_without_slurm_nothing_is_written(call: Call, here: Path, no_slurm: None) -> None:
    (here / "job.yaml").unlink()
    said = call("init")
    assert said.status == 3 and "scontrol is not on PATH" in said.err
    assert not (here / "job.yaml").exists()
