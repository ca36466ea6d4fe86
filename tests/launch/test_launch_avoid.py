"""A job that Slurm has started again on a host that failed it more than once: `begin` asks to give it back, once."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest
from test_launch_attempt import call, happened, stand_in

from cluster_ddp.launch.attempt import main
from cluster_ddp.run.attempt import end_attempt, list_attempts, request_resume
from cluster_ddp.run.directory import RunDirectory, create_run
from cluster_ddp.run.events import EventWriter, read_events
from cluster_ddp.spec import JobSpec


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    """Two attempts of job 77, each of which was lost with node n2."""
    spec = JobSpec(name="a", task="cluster_ddp.tasks.digits:Digits")
    run = create_run(spec, runs_dir=tmp_path, via="sbatch", script="#!/bin/bash\n")
    for number in (0, 1):
        call("begin", run.path, restart=number)
        happened(run, "checkpoint", number, step=number + 1)
        happened(run, "node-lost", number, host="n2", node=0)
    return run


def begin(run: RunDirectory, *, restart: int = 2, nodes: str = "n[1-3]", **variables: str) -> str:
    return call("begin", run.path, restart=restart, SLURM_JOB_NODELIST=nodes, **variables).stdout


def suspected(run: RunDirectory) -> list[tuple[str, str]]:
    return [(event["host"], event["slurm_job_id"]) for event in read_events(run) if event["event"] == "host-suspected"]


def test_a_host_that_failed_twice_is_given_back_once_and_no_attempt_begins(run: RunDirectory) -> None:
    assert begin(run) == "avoid n2\n"
    assert len(list_attempts(run)) == 2
    assert suspected(run) == [("n2", "77")]
    assert begin(run) == "2\n", "the partition had too few others"
    assert begin(run) == "2\n"
    assert begin(run, restart=3) == "3\n", "Slurm did not keep the job from it: not for ever"
    assert suspected(run) == [("n2", "77")]


def test_a_host_elsewhere_troubles_nobody(run: RunDirectory) -> None:
    assert begin(run, nodes="n[1,3-4],n22") == "2\n"
    assert suspected(run) == []


def test_the_attempt_before_is_judged_by_which_of_its_nodes_are_down_now(run: RunDirectory, tmp_path: Path) -> None:
    """The batch host died, and with it the script that would have said so."""
    for number in (0, 1):
        (run.events / "rank-0.jsonl").unlink(missing_ok=True)
        happened(run, "node-lost", 0, host="n2", node=0)
        EventWriter(run, "node-0").write("node-started", attempt=number, node=0, host="n2")
    path = stand_in(tmp_path, sinfo="echo n2")
    assert begin(run, PATH=path) == "avoid n2\n"
    lost = [(event["attempt"], event["host"]) for event in read_events(run) if event["event"] == "node-lost"]
    assert lost == [(0, "n2"), (1, "n2")]


def test_all_suspects_are_named_when_one_of_them_is_given(run: RunDirectory) -> None:
    """Those of before count when the script looks whether enough others are left."""
    for number in (0, 1):
        EventWriter(run, "w").write("node-lost", attempt=number, host="n9", node=1)
    assert begin(run) == "avoid n2 n9\n"
    assert suspected(run) == [("n2", "77")]
    assert begin(run, nodes="n9") == "avoid n2 n9\n"
    assert begin(run, nodes="n[2,9]") == "2\n"


def test_giving_back_counts_neither_as_a_requeue_nor_as_an_attempt_without_progress(tmp_path: Path) -> None:
    limits = {"max_requeues": 3, "max_without_progress": 3}
    spec = JobSpec(name="a", task="cluster_ddp.tasks.digits:Digits", requeue=limits)
    run = create_run(spec, runs_dir=tmp_path, via="sbatch", script="#!/bin/bash\n")
    for number in (0, 1):
        call("begin", run.path, restart=number)
        happened(run, "started", number, step=0, world_size=1, total_steps=9)
        happened(run, "node-lost", number, host="n2", node=0)
    assert begin(run) == "avoid n2\n"
    assert begin(run, restart=3, nodes="n1") == "2\n"


def test_a_persons_resume_forgives(run: RunDirectory) -> None:
    assert begin(run) == "avoid n2\n"
    request_resume(run, by="a person")
    for number in (2, 3):
        assert begin(run, restart=number) == f"{number}\n"
        happened(run, "checkpoint", number, step=number + 1)
        happened(run, "node-lost", number, host="n2", node=0)
    assert begin(run, restart=4) == "avoid n2\n", "what was asked before the resume is forgotten, too"


def test_the_same_start_another_job_and_a_shell_without_slurm_begin_at_once(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert begin(run, restart=1, nodes="n2") == "1\n"
    end_attempt(run.attempt(1))
    assert call("begin", run.path, job="78", restart=1, SLURM_JOB_NODELIST="n2").stdout == "2\n"
    end_attempt(run.attempt(2))
    for name in [name for name in os.environ if name.startswith("SLURM_")]:
        monkeypatch.delenv(name)
    assert main(["begin", str(run.path)]) == 0
    assert capsys.readouterr().out == "3\n"
    assert suspected(run) == []


def test_a_run_that_is_over_is_not_queued_again(run: RunDirectory) -> None:
    happened(run, "completed", 1, step=9)
    done = call("begin", run.path, restart=2, SLURM_JOB_NODELIST="n2")
    assert (done.returncode, done.stdout) == (0, "")
    assert "complete" in done.stderr
    assert suspected(run) == []


@pytest.mark.parametrize("nodes", ["", "n[", "n2]x["])
def test_a_node_list_that_cannot_be_read_does_not_keep_the_job_from_training(run: RunDirectory, nodes: str) -> None:
    assert begin(run, nodes=nodes) == "2\n"


def test_what_cannot_be_recorded_is_not_asked(run: RunDirectory) -> None:
    """It would be asked for ever."""
    for file in run.events.glob("login-*"):
        file.unlink()
    (run.events / f"login-{socket.gethostname()}.jsonl").mkdir()
    assert begin(run) == "2\n"
