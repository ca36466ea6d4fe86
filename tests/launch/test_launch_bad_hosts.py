"""Hosts that end more than one attempt: who they are, and that a job gives them back, once."""

from __future__ import annotations

import socket
import time
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from starts import attempts, begin, happened, stand_in, start

from cluster_ddp.job import JobSpec
from cluster_ddp.launch.keeper.bad_hosts import bad_hosts, enough_others, hosts_to_avoid
from cluster_ddp.run.attempt import request_resume
from cluster_ddp.run.attempt_record import end_attempt
from cluster_ddp.run.directory import RunDirectory
from cluster_ddp.run.errors import RunEnded
from cluster_ddp.run.events import EventWriter, read_events
from cluster_ddp.run.history import read_history
from cluster_ddp.run.requeue.decision import decide
from cluster_ddp.run.runs import create_run

PEER_LOST = "RuntimeError: [gloo/transport/tcp/pair.cc:537] Connection closed by peer [10.0.0.2]:3211"


# -- who they are ------------------------------------------------------------------------------------------------------


def found(run: RunDirectory, upto: int) -> list[str]:
    return bad_hosts(read_history(run), upto)


def test_a_host_that_fails_again_is_suspect_and_one_that_fails_once_is_not(fresh: RunDirectory) -> None:
    attempts(fresh, 3)
    happened(fresh, "rank-failed", 0, host="n2", rank=1, error="ended by SIGKILL", signal="SIGKILL")
    happened(fresh, "node-lost", 1, host="n3", node=1)
    assert found(fresh, 1) == []
    happened(
        fresh,
        "rank-failed",
        2,
        host="n2",
        rank=5,
        error="RuntimeError: CUDA error: uncorrectable ECC error encountered",
    )
    assert found(fresh, 2) == ["n2"]
    assert found(fresh, 1) == []


@pytest.mark.parametrize(
    ("error", "found_on"),
    [
        ("RuntimeError: DataLoader worker (pid 7) is killed by signal: Killed.", 1),
        ("RuntimeError: unable to allocate shared memory(shm) for file </torch_9_4>: No space left on device (28)", 1),
        ("OSError: [Errno 28] No space left on device: '/tmp/cache/x'", 1),
        ("OSError: [Errno 28] No space left on device: '/shared/runs/x'", 0),
    ],
)
def test_a_host_whose_own_disks_are_full_or_workers_are_killed_is_suspect(
    fresh: RunDirectory, error: str, found_on: int
) -> None:
    attempts(fresh, 2)
    for number in (0, 1):
        happened(fresh, "rank-failed", number, host="n2", rank=1, error=error)
    assert found(fresh, 1) == ["n2"] * found_on


def test_a_host_whose_workers_abort_is_not_suspect(fresh: RunDirectory) -> None:
    """As by an assertion of the program's own C++."""
    attempts(fresh, 2)
    for number in (0, 1):
        error = "RuntimeError: DataLoader worker (pid 7) is killed by signal: Aborted."
        happened(fresh, "rank-failed", number, host="n2", rank=1, error=error)
    assert found(fresh, 1) == []


def test_a_rank_may_know_its_host_by_the_full_name(fresh: RunDirectory) -> None:
    attempts(fresh, 2)
    happened(fresh, "rank-failed", 0, host="n2.cluster.org", rank=1, error="ended by SIGKILL", signal="SIGKILL")
    happened(fresh, "node-lost", 1, host="n2", node=1)
    assert found(fresh, 1) == ["n2"]


def test_who_lost_the_connection_is_no_suspect_but_who_was_lost_is(fresh: RunDirectory) -> None:
    attempts(fresh, 2)
    for number in (0, 1):
        happened(fresh, "rank-failed", number, host="n1", rank=0, error=PEER_LOST)
        happened(fresh, "node-lost", number, host="n2", node=1)
    assert found(fresh, 1) == ["n2"]


@pytest.mark.parametrize("error", ["ValueError: bad shape", PEER_LOST])
def test_an_error_of_the_program_or_the_network_is_nobodys(fresh: RunDirectory, error: str) -> None:
    attempts(fresh, 2)
    for number in (0, 1):
        happened(fresh, "rank-failed", number, host="n1", rank=0, error=error)
    assert found(fresh, 1) == []


@pytest.mark.parametrize(("step", "bad"), [(None, ["n2"]), (10, ["n2"]), (12, [])])
def test_a_host_where_a_program_that_has_trained_cannot_begin_is_suspect(
    fresh: RunDirectory, step: int | None, bad: list[str]
) -> None:
    """A package or a data set is missing there. A fault of the program shows elsewhere too, or after some steps."""
    attempts(fresh, 3)
    happened(fresh, "started", 0, step=0, total_steps=100)
    happened(fresh, "checkpoint", 0, step=10)
    for number in (1, 2):
        happened(fresh, "resumed", number, step=10)
        happened(fresh, "failed", number, host="n2", rank=1, step=step, error="FileNotFoundError: /data/a")
    assert found(fresh, 1) == []
    assert found(fresh, 2) == bad


@pytest.mark.parametrize("hosts", [["n1 n2", "n1 n2"], ["n1", "n2", "n1"], ["n1", "n1", "n2"]])
def test_a_program_that_cannot_begin_on_several_hosts_is_at_fault_itself(fresh: RunDirectory, hosts: list[str]) -> None:
    """An error in its load_state_dict() cost it one good host after the other."""
    attempts(fresh, 1)
    happened(fresh, "started", 0, step=0, total_steps=100)
    happened(fresh, "checkpoint", 0, step=10)
    attempts(fresh, len(hosts))
    for number, failed in enumerate(hosts, 1):
        for rank, host in enumerate(failed.split()):
            happened(fresh, "failed", number, host=host, rank=rank, error="KeyError: 'scale'")
    assert found(fresh, len(hosts)) == []


def test_a_host_that_lacks_something_stays_suspect_once_training_has_gone_on_without_it(fresh: RunDirectory) -> None:
    for number, before, after in ((0, 1, 2), (3, 1, 1)):
        attempts(fresh, before)
        happened(fresh, "started", number, step=0, total_steps=100)
        happened(fresh, "checkpoint", number, step=10 + number)
        attempts(fresh, after)
    for number, host in ((1, "n2"), (2, "n2"), (4, "n3")):
        happened(fresh, "failed", number, host=host, rank=1, error="FileNotFoundError: /data/a")
    assert found(fresh, 4) == ["n2"]


def test_a_host_whose_local_disk_is_read_only_is_suspect(fresh: RunDirectory) -> None:
    """The workers of a DataLoader have their semaphores in /dev/shm."""
    attempts(fresh, 2)
    for number in (0, 1):
        happened(fresh, "rank-failed", number, host="n2", rank=1, error="OSError: [Errno 30] Read-only file system")
    assert found(fresh, 1) == ["n2"]


def test_a_persons_resume_forgives_suspects(fresh: RunDirectory) -> None:
    attempts(fresh, 2)
    for number in (0, 1):
        happened(fresh, "node-lost", number, host="n2", node=1)
    assert found(fresh, 1) == ["n2"]
    request_resume(fresh, by="a person")
    attempts(fresh, 1)
    assert found(fresh, 2) == []


def test_a_lost_node_is_named_in_the_verdict(fresh: RunDirectory) -> None:
    attempts(fresh, 1)
    happened(fresh, "node-lost", 0, host="n2", node=1, reason="node n2 failed: Slurm calls it down")
    decision = decide(fresh, fresh.attempt(0))
    assert (decision.action, decision.why) == ("requeue", "node n2 failed: Slurm calls it down")


@pytest.mark.parametrize(
    ("bad", "excluded", "nodes", "enough"),
    [
        (["b", "elsewhere"], [], 2, True),
        (["b", "elsewhere"], [], 3, False),
        (["b"], ["c", "d"], 1, True),
        (["b"], ["c", "d"], 2, False),
    ],
)
def test_whether_there_are_enough_others(bad: list[str], excluded: list[str], nodes: int, enough: bool) -> None:
    assert enough_others({"a", "b", "c"}, bad=bad, excluded=excluded, nodes=nodes) is enough


# -- given back at the start -------------------------------------------------------------------------------------------


@pytest.fixture
def run(fresh: RunDirectory) -> RunDirectory:
    """Two attempts of job 77, each of which was lost with node n2."""
    for number in (0, 1):
        begin(fresh, restart=number)
        happened(fresh, "checkpoint", number, step=number + 1)
        happened(fresh, "node-lost", number, host="n2", node=0)
    return fresh


def avoided(run: RunDirectory, *, restart: int = 2, nodes: str = "n[1-3]", job: str = "77") -> list[str]:
    return hosts_to_avoid(run, start(job, restart, nodes))


def suspected(run: RunDirectory) -> list[tuple[str, str]]:
    return [(event["host"], event["slurm_job_id"]) for event in read_events(run) if event["event"] == "host-suspected"]


def test_a_host_that_failed_twice_is_given_back_once(run: RunDirectory) -> None:
    assert avoided(run) == ["n2"]
    assert suspected(run) == [("n2", "77")]
    assert avoided(run) == [], "the partition had too few others"
    assert begin(run, restart=2) == 2
    assert avoided(run, restart=3) == [], "Slurm did not keep the job from it: not forever"
    assert suspected(run) == [("n2", "77")]


def test_a_host_elsewhere_troubles_nobody(run: RunDirectory) -> None:
    assert avoided(run, nodes="n[1,3-4],n22") == []
    assert suspected(run) == []


def test_the_attempt_before_is_judged_by_which_of_its_nodes_are_down_now(
    run: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The batch host died, and with it the keeper that would have said so."""
    for number in (0, 1):
        (run.events / "rank-0.jsonl").unlink(missing_ok=True)
        happened(run, "node-lost", 0, host="n2", node=0)
        EventWriter(run, "node-0").write("node-started", attempt=number, node=0, host="n2")
    stand_in(tmp_path, monkeypatch, sinfo="echo n2")
    assert avoided(run) == ["n2"]
    lost = [(event["attempt"], event["host"]) for event in read_events(run) if event["event"] == "node-lost"]
    assert lost == [(0, "n2"), (1, "n2")]


def test_a_host_that_slurm_knows_by_its_full_name_is_judged_too(
    run: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    EventWriter(run, "node-0").write("node-started", attempt=1, node=0, host="n3.cluster.org")
    (run.events / "rank-0.jsonl").unlink()
    happened(run, "node-lost", 0, host="n3", node=0)
    stand_in(tmp_path, monkeypatch, sinfo='case "$*" in *n3.cluster.org*) echo n3.cluster.org;; esac')
    assert avoided(run, nodes="n[1-3].cluster.org") == ["n3"]


@pytest.mark.parametrize(("said", "named"), [(None, [(0, 1, "n1")]), ("stop-requested", [])])
def test_a_node_that_was_restarted_while_it_trained_is_recorded_as_lost(
    fresh: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str | None, named: list[Any]
) -> None:
    """All nodes failed at once, and the job could start again only when they were back: no node is down by then."""
    begin(fresh)
    for node in (1, 2, 3):
        EventWriter(fresh, f"node-{node}").write("node-started", attempt=0, node=node, host=f"n{node}")
    if said is not None:  # how the attempt ended is known, and the node may have been restarted after that
        happened(fresh, said, 0, reason="preemption")
    after, before = (datetime.fromtimestamp(time.time() + seconds).isoformat()[:19] for seconds in (60, -60))
    nodes = "\n".join(f"NodeName=n{n} State=IDLE BootTime={t} OS=x" for n, t in ((1, after), (2, before), (3, "None")))
    stand_in(tmp_path, monkeypatch, sinfo="true", scontrol=f"[ $2 = node ] && echo '{nodes}'")
    avoided(fresh, restart=1)
    lost = [event for event in read_events(fresh) if event["event"] == "node-lost"]
    assert [(event["attempt"], event["node"], event["host"]) for event in lost] == named
    assert all(event["reason"] == "node n1 failed: it was restarted while it trained" for event in lost)


def test_all_suspects_are_named_when_one_of_them_is_given(run: RunDirectory) -> None:
    """Those of before count when the keeper asks whether enough others are left."""
    for number in (0, 1):
        EventWriter(run, "w").write("node-lost", attempt=number, host="n9", node=1)
    assert avoided(run) == ["n2", "n9"]
    assert suspected(run) == [("n2", "77")]
    assert avoided(run, nodes="n9") == ["n2", "n9"]
    assert avoided(run, nodes="n[2,9]") == []


def test_giving_back_counts_neither_as_a_requeue_nor_as_an_attempt_without_progress(tmp_path: Path) -> None:
    limits = {"max_requeues": 3, "max_without_progress": 3}
    spec = JobSpec(name="a", task="cluster_ddp.tasks.digits:Digits", requeue=limits)
    run = create_run(spec, runs_dir=tmp_path, via="sbatch", script="#!/bin/bash\n")
    for number in (0, 1):
        begin(run, restart=number)
        happened(run, "started", number, step=0, world_size=1, total_steps=9)
        happened(run, "node-lost", number, host="n2", node=0)
    assert avoided(run) == ["n2"]
    assert avoided(run, restart=3, nodes="n1") == []
    assert begin(run, restart=3) == 2


def test_a_persons_resume_forgives(run: RunDirectory) -> None:
    assert avoided(run) == ["n2"]
    request_resume(run, by="a person")
    for number in (2, 3):
        assert avoided(run, restart=number) == []
        assert begin(run, restart=number) == number
        happened(run, "checkpoint", number, step=number + 1)
        happened(run, "node-lost", number, host="n2", node=0)
    assert avoided(run, restart=4) == ["n2"], "what was asked before the resume is forgotten, too"


def test_the_same_start_and_another_job_begin_at_once(run: RunDirectory) -> None:
    assert avoided(run, restart=1, nodes="n2") == []
    end_attempt(run.attempt(1))
    assert avoided(run, job="78", restart=1, nodes="n2") == []
    assert suspected(run) == []


def test_a_run_that_is_over_is_not_queued_again(run: RunDirectory) -> None:
    happened(run, "completed", 1, step=9)
    with pytest.raises(RunEnded, match="complete"):
        avoided(run, nodes="n2")
    assert suspected(run) == []


@pytest.mark.parametrize("nodes", ["", "n[", "n2]x["])
def test_a_node_list_that_cannot_be_read_does_not_keep_the_job_from_training(run: RunDirectory, nodes: str) -> None:
    assert avoided(run, nodes=nodes) == []


def test_what_cannot_be_recorded_is_not_asked(run: RunDirectory) -> None:
    """It would be asked forever."""
    for file in run.events.glob("login-*"):
        file.unlink()
    (run.events / f"login-{socket.gethostname()}.jsonl").mkdir()
    assert avoided(run) == []
