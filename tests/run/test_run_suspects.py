from __future__ import annotations

from collections.abc import Callable

import pytest
from run_builders import begin_dead

from cluster_ddp.run.attempt import request_resume
from cluster_ddp.run.directory import RunDirectory
from cluster_ddp.run.history import read_history
from cluster_ddp.run.suspects import suspects
from cluster_ddp.run.verdict import judge

Say = Callable[..., None]
PEER_LOST = "RuntimeError: [gloo/transport/tcp/pair.cc:537] Connection closed by peer [10.0.0.2]:3211"


def attempts(run: RunDirectory, count: int) -> None:
    for restart in range(count):
        begin_dead(run, slurm_job_id="5", restart_count=restart)


def found(run: RunDirectory, upto: int) -> list[str]:
    return suspects(read_history(run), upto)


def test_a_host_that_fails_again_is_suspect_and_one_that_fails_once_is_not(run: RunDirectory, say: Say) -> None:
    attempts(run, 3)
    say("rank-failed", 0, host="n2", rank=1, error="ended by SIGKILL", signal="SIGKILL")
    say("node-lost", 1, host="n3", node=1)
    assert found(run, 1) == []
    say("rank-failed", 2, host="n2", rank=5, error="RuntimeError: CUDA error: uncorrectable ECC error encountered")
    assert found(run, 2) == ["n2"]
    assert found(run, 1) == []


def test_a_rank_may_know_its_host_by_the_full_name(run: RunDirectory, say: Say) -> None:
    attempts(run, 2)
    say("rank-failed", 0, host="n2.cluster.org", rank=1, error="ended by SIGKILL", signal="SIGKILL")
    say("node-lost", 1, host="n2", node=1)
    assert found(run, 1) == ["n2"]


def test_who_lost_the_connection_is_no_suspect_but_who_was_lost_is(run: RunDirectory, say: Say) -> None:
    attempts(run, 2)
    for number in (0, 1):
        say("rank-failed", number, host="n1", rank=0, error=PEER_LOST)
        say("node-lost", number, host="n2", node=1)
    assert found(run, 1) == ["n2"]


@pytest.mark.parametrize("error", ["ValueError: bad shape", PEER_LOST])
def test_an_error_of_the_program_or_the_network_is_nobodys(run: RunDirectory, say: Say, error: str) -> None:
    attempts(run, 2)
    for number in (0, 1):
        say("rank-failed", number, host="n1", rank=0, error=error)
    assert found(run, 1) == []


def test_a_persons_resume_forgives_hosts_too(run: RunDirectory, say: Say) -> None:
    attempts(run, 2)
    for number in (0, 1):
        say("node-lost", number, host="n2", node=1)
    assert found(run, 1) == ["n2"]
    request_resume(run, by="a person")
    attempts(run, 1)
    assert found(run, 2) == []


def test_a_lost_node_is_named_in_the_verdict(run: RunDirectory, say: Say) -> None:
    attempts(run, 1)
    say("node-lost", 0, host="n2", node=1, reason="node n2 failed: Slurm calls it down")
    verdict = judge(run, run.attempt(0))
    assert (verdict.action, verdict.reason) == ("requeue", "node n2 failed: Slurm calls it down")
