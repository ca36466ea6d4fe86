"""The defaults of a site: a file of the user's under every job file."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from cluster_ddp.job import JobFileError, load_job, load_resolved, site_file
from cluster_ddp.printing import say_if_slow
from cluster_ddp.run.runs import runs_dir_of

WriteJob = Callable[..., Path]


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's site file and the one of the group that it extends."""
    folder = tmp_path / "config" / "cluster-ddp"
    folder.mkdir(parents=True)
    (folder / "group.yaml").write_text("runs_dir: ../runs\nslurm: {account: lab, partition: cpu}\n")
    (folder / "site.yaml").write_text("extends: ./group.yaml\nslurm:\n  partition: gpu\n")
    monkeypatch.delenv("CLUSTER_DDP_CONFIG", raising=False)
    monkeypatch.delenv("CLUSTER_DDP_RUNS", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    return folder / "site.yaml"


def test_the_job_lies_over_the_users_file_and_that_over_the_groups(site: Path, job: WriteJob) -> None:
    loaded = load_job(str(job("slurm: {nodes: 2}\nlaunch:\n")), ["slurm.qos=high"])
    slurm = loaded.spec.slurm
    assert (slurm.account, slurm.partition, slurm.nodes, slurm.qos) == ("lab", "gpu", 2, "high")
    places = {origin.key: str(origin.place) for origin in loaded.origins}
    assert places["slurm.account"] == f"{site.parent / 'group.yaml'}:2"
    assert places["slurm.partition"] == f"{site}:3"
    assert places["slurm.nodes"].endswith("job.yaml:1")
    assert places["slurm.qos"] == "--set slurm.qos=..."


@pytest.mark.parametrize("text", ["slurm:\n", "slurm:\n  nodes: 1\n"], ids=["empty section", "section"])
def test_what_a_job_does_not_say_stays_the_sites(site: Path, job: WriteJob, text: str) -> None:
    assert load_job(str(job(text))).spec.slurm.partition == "gpu"


def test_a_job_takes_a_value_back(site: Path, job: WriteJob) -> None:
    assert load_job(str(job("slurm: {partition: null}"))).spec.slurm.partition is None


def test_templates_are_jobs_too(site: Path) -> None:
    assert load_job("multi-node").spec.slurm.partition == "gpu"


def test_a_run_keeps_what_it_was_submitted_with(site: Path, tmp_path: Path) -> None:
    resolved = tmp_path / "resolved.yaml"
    resolved.write_text("name: old\ntask: cluster_ddp.tasks.digits:Digits\n")
    assert load_resolved(resolved).slurm.partition is None


def test_runs_are_made_and_looked_for_in_the_sites_folder(
    site: Path, job: WriteJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = load_job(str(job())).spec
    assert runs_dir_of(spec) == runs_dir_of(None) == tmp_path / "config" / "runs"
    monkeypatch.setenv("CLUSTER_DDP_RUNS", "/exported")
    assert runs_dir_of(load_job(str(job())).spec) == runs_dir_of(None) == Path("/exported")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("slurm:\n  partitoin: gpu\n", ("site.yaml:2", "partition")),
        ("\ntrain: {lr: 1}\n", ("site.yaml:2", "train", "cannot have a default in the site file")),
        ("extends: ./nowhere.yaml\n", ("site.yaml:1", "no such file")),
        ("slurm: [", ("site.yaml:1", "not YAML")),
    ],
)
def test_errors_name_the_file_and_the_line(site: Path, job: WriteJob, text: str, said: tuple[str, ...]) -> None:
    site.write_text(text)
    with pytest.raises(JobFileError) as caught:
        load_job(str(job()))
    assert all(part in str(caught.value) for part in said), caught.value


def test_a_file_that_anybody_may_write_is_refused(site: Path, job: WriteJob) -> None:
    (site.parent / "group.yaml").chmod(0o666)
    with pytest.raises(JobFileError, match=r"chmod o-w .*group\.yaml"):
        load_job(str(job()))


def test_the_variable_names_a_file_or_none(site: Path, job: WriteJob, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLUSTER_DDP_CONFIG", "")
    assert load_job(str(job())).spec.slurm.partition is None
    monkeypatch.setenv("CLUSTER_DDP_CONFIG", str(site.parent / "missing.yaml"))
    with pytest.raises(JobFileError, match=r"missing\.yaml: no such file"):
        load_job(str(job()))


def test_a_home_that_does_not_answer_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As when its file server is down: each command looks there first, and would wait without a word."""
    monkeypatch.delenv(site_file.CONFIG_VARIABLE, raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setattr(site_file, "say_if_slow", functools.partial(say_if_slow, seconds=0.01))
    monkeypatch.setattr(os.path, "isfile", lambda _file: time.sleep(0.2))
    assert site_file.site_file() is None
    assert f"waiting for the file system of {tmp_path / 'cluster-ddp' / 'site.yaml'}" in capsys.readouterr().err
