"""The node program. Its ranks are small scripts without torch, which start at once.

Below it is a real torchrun, except where the test means what the node program does by itself: there the `light` agent
of one rank spares the import of torch.
"""

from __future__ import annotations

import os
import re
import signal
import stat
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from node_process import Node
from waiting import wait_for

from cluster_ddp.launch.node import node_failures
from cluster_ddp.launch.processes import is_alive
from cluster_ddp.launch.torchrun.agent_failure import AgentFailure
from cluster_ddp.run import events
from cluster_ddp.run.directory import AttemptDirectory, RunDirectory
from cluster_ddp.run.ending import outcome_of
from cluster_ddp.run.events import NODE_FAILED, NODE_STARTED, EventWriter, read_events
from cluster_ddp.run.history import read_history
from cluster_ddp.run.status.report import describe
from cluster_ddp.run.stopfile import AT_ONCE, PERSON, TERMINATED, TIME_LIMIT, request_stop

Start = Callable[..., Node]
pytestmark = pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="needs /proc (Linux)")
FOREVER = "100000"


def test_ranks_that_work_to_the_end_are_relayed_reported_shared_and_leave_nothing_behind(start_node: Start) -> None:
    # The status of a rank that has done its work tells us nothing. The run is shared, and so are the logs of its ranks.
    node = start_node("heartbeat_rank.py", "5", "abort", storage={"mode": "group"})
    wait_for(node.heartbeat, "a heartbeat file")
    heartbeat = node.heartbeat()
    status, out, _ = node.finish()
    assert (status, node.ended_as()) == (0, "done")
    assert "rank 0 begins" in out
    assert "rank 1" not in out
    assert "rank 1 begins" in node.logs()
    assert node.events("rank-failed") == []
    report = node.report()
    assert [rank["rank"] for rank in report["ranks"]] == [0, 1]
    assert report["versions"]["torch"]
    assert report["variables"]["PET_SIGNALS_TO_HANDLE"] == "SIGPROF"
    assert heartbeat is not None
    assert list(heartbeat.parent.glob(f"{heartbeat.name}*")) == []
    closed = [path for path in node.attempt.run.path.rglob("*") if not path.stat().st_mode & stat.S_IWGRP]
    assert closed == [node.attempt.rendezvous_key]


def test_signals_to_all_processes_become_one_stop_request_that_agent_and_ranks_survive(start_node: Start) -> None:
    """As Slurm's proctrack/linuxproc sends them: to every process of the step."""
    node = start_node("heartbeat_rank.py", FOREVER)
    node.wait_for("begins")
    agent = node.agent()
    everyone = [node.pid, *(process.pid for process in node.tree())]
    for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR2, signal.SIGTERM):
        for pid in everyone:
            if pid == agent or number is not signal.SIGHUP:
                os.kill(pid, number)
    status, _, _ = node.finish()
    assert (status, node.ended_as()) == (0, "stopped")
    assert node.logs().count("level 1, reason time-limit") == 2
    assert node.events("node-finished")[0]["agent_status"] == 0
    (event,) = node.events("stop-requested")
    assert (event["reason"], event["level"], event["node"]) == ("time-limit", 1, 0)


def test_a_second_signal_means_at_once_and_a_third_ends_what_is_left(start_node: Start) -> None:
    node = start_node("heartbeat_rank.py", FOREVER, "deaf", light=True)
    node.wait_for("begins")
    os.kill(node.reaper(), signal.SIGSTOP)  # the end does not wait for it
    for level in (1, 2):
        os.kill(node.pid, signal.SIGINT)
        wait_for(lambda level=level: len(node.events("stop-requested")) == level, f"level {level}")
    os.kill(node.pid, signal.SIGINT)
    status, _, _ = node.finish(10)
    assert (status, node.ended_as()) == (1, "killed")
    assert [event["level"] for event in node.events("stop-requested")] == [1, 2]
    assert node.events("rank-failed") == []


def test_the_stop_file_reaches_the_ranks_and_can_be_sharpened(start_node: Start) -> None:
    node = start_node("heartbeat_rank.py", FOREVER, "deaf", light=True)
    node.wait_for("begins")
    request_stop(node.attempt, reason=PERSON, by="test")
    wait_for(lambda: node.events("stop-requested"), "a request")
    time.sleep(1.5)
    assert node.process.poll() is None
    request_stop(node.attempt, reason=PERSON, level=AT_ONCE, grace=1.0, by="test")
    began = time.monotonic()
    status, _, _ = node.finish(10)
    assert time.monotonic() - began < 6
    assert (status, node.ended_as()) == (1, "killed")
    assert [event["level"] for event in node.events("stop-requested")] == [1, 2]


def test_an_attempt_ends_without_saving_when_a_newer_one_has_begun(start_node: Start) -> None:
    """The node was cut from Slurm's controller, which has started the job elsewhere."""
    node = start_node("heartbeat_rank.py", FOREVER, light=True)
    node.wait_for("begins")
    began = time.monotonic()
    newer = node.attempt.run.attempt(node.attempt.number + 1)
    newer.path.mkdir()
    newer.record_file.write_text("{}")
    node.finish(15)
    assert time.monotonic() - began < 10
    assert node.ended_as() == "superseded"
    assert node.events("stop-requested") == [] and node.events("rank-failed") == []


def test_a_hang_leaves_stacks_and_ends_the_attempt(start_node: Start) -> None:
    node = start_node("heartbeat_rank.py", FOREVER, "hang1", launch={"hang_timeout": 3, "max_restarts": 3})
    status, _, err = node.finish()
    assert (status, node.ended_as()) == (1, "hang")
    (event,) = node.events("hang")
    assert (event["rank"], event["step"], event["phase"]) == (1, 10, "training")
    assert "time.sleep(600)" not in err
    stacks = (node.attempt.path / "stacks-rank1.txt").read_text()
    assert "heartbeat_rank.py" in stacks
    assert (node.attempt.path / "stacks-rank0.txt").read_text()
    assert '"hang"' in node.attempt.stop_file.read_text()  # for the other nodes


def test_of_a_hang_the_rank_is_named_whose_process_was_stopped(start_node: Start) -> None:
    """Rank 1 waits for rank 0, and may be the first that is missed."""
    node = start_node("heartbeat_rank.py", FOREVER, "hang1", "rank0", launch={"hang_timeout": 3})
    assert node.finish()[0] == 1
    why = outcome_of(read_history(node.attempt.run), 0).why
    assert why.startswith("rank 0 on ") and "a signal (SIGSTOP) has stopped its process" in why


def test_of_a_hang_torchrun_is_named_if_it_was_stopped(start_node: Start) -> None:
    node = start_node("heartbeat_rank.py", FOREVER, "hang1", "agent", launch={"hang_timeout": 3})
    assert node.finish()[0] == 1
    why = outcome_of(read_history(node.attempt.run), 0).why
    assert why.startswith("torchrun on ") and "a signal (SIGSTOP) has stopped it" in why


def test_of_a_hang_the_worker_is_named_that_was_stopped(start_node: Start) -> None:
    node = start_node("heartbeat_rank.py", FOREVER, "worker1", launch={"hang_timeout": 3})
    assert node.finish()[0] == 1
    why = outcome_of(read_history(node.attempt.run), 0).why
    assert re.match(r"rank 1 on .* hangs: a signal \(SIGSTOP\) has stopped its worker \d+ \(sleep\)", why)


def test_ranks_whose_agent_was_killed_save_and_end(start_node: Start) -> None:
    node = start_node("heartbeat_rank.py", FOREVER)
    node.wait_for("begins")
    os.kill(node.agent(), signal.SIGKILL)
    status, _, _ = node.finish()
    assert (status, node.ended_as()) == (0, "stopped")
    assert node.logs().count("level 1, reason agent-lost") == 2
    assert '"agent-lost"' in node.attempt.stop_file.read_text()


def test_a_rank_that_fails_is_named_with_its_error(start_node: Start) -> None:
    node = start_node("heartbeat_rank.py", "300", "crash1")
    status, _, err = node.finish()
    assert (status, node.ended_as()) == (1, "failed")
    (event,) = node.events("rank-failed")
    assert (event["rank"], event["node"], event["step"], event["exit_code"]) == (1, 0, 10, 1)
    assert event["host"]
    assert event["error"].endswith("ValueError: the failure of the test")
    assert "ValueError: the failure of the test" in err


def test_a_rank_that_is_killed_is_restarted_inside_the_allocation(start_node: Start) -> None:
    node = start_node("heartbeat_rank.py", "60", "crash", launch={"max_restarts": 1})
    node.wait_for("begins")
    time.sleep(1)  # the relay reads the log a few times a second
    os.kill(node.rank(1), signal.SIGKILL)
    status, out, _ = node.finish()
    assert (status, node.ended_as()) == (0, "done")
    (event,) = node.events("rank-failed")
    assert (event["rank"], event["signal"], event["exit_code"]) == (1, "SIGKILL", -9)
    assert "rank 0 begins, restart 0" in out
    assert "rank 0 begins, restart 1" in out


@pytest.mark.parametrize(
    ("script", "args"), [("heartbeat_rank.py", (FOREVER, "helper")), ("plain_rank.py", ("titled",))]
)
def test_nothing_survives_the_node_program(start_node: Start, script: str, args: tuple[str, ...]) -> None:
    light = "titled" in args  # which shows no mark
    node = start_node(script, *args, light=light)
    node.wait_for("begins")
    pids = [process.pid for process in node.tree()]
    assert len(pids) == (1 if light else 5)  # the agent, and two ranks with a helper each
    pids += [int(node.logs().rpartition("begins as ")[2])] if light else []
    os.kill(node.pid, signal.SIGKILL)
    wait_for(lambda: not any(map(is_alive, pids)), "all gone", 8)


@pytest.mark.parametrize(
    ("handles", "reason", "by"),
    [
        (("handles", "helper"), PERSON, "SIGTERM"),
        (("usr1", "fails"), PERSON, "SIGUSR1"),  # it ends with a status of its own, which is no failure
        (("handles", "usr1"), TIME_LIMIT, "SIGUSR1"),  # the signal that Slurm would send
    ],
)
def test_a_script_is_asked_by_the_signal_that_it_handles(
    start_node: Start, handles: tuple[str, ...], reason: str, by: str
) -> None:
    node = start_node("plain_rank.py", *handles, light="usr1" in handles)  # the first shows that every rank is asked
    node.wait_for("begins")
    request_stop(node.attempt, reason=reason, by="test")
    status, out, _ = node.finish()
    assert (status, node.ended_as(), node.events("rank-failed")) == (0, "stopped", [])
    assert node.logs().count(f"saved and ends by {by}") == node.procs
    assert node.logs().count("its helper ended with -15") == node.procs * ("helper" in handles)
    assert "saved and ends" in out


@pytest.mark.parametrize("handles", [("handles", "fails"), ()], ids=["its handler", "the default"])
def test_a_script_that_ends_by_slurms_own_signal_was_stopped(start_node: Start, handles: tuple[str, ...]) -> None:
    """Slurm signals all processes of a step at once: such ranks are gone before the node program looks for them."""
    node = start_node("plain_rank.py", *handles, light=not handles)
    node.wait_for("begins")
    for pid in (node.pid, node.agent(), *map(node.rank, range(node.procs))):
        os.kill(pid, signal.SIGTERM)
    status, _, _ = node.finish()
    (asked,) = node.events("stop-requested")
    assert asked["reason"] == TERMINATED
    assert (status, node.ended_as(), node.events("rank-failed")) == (0, "stopped", [])


def test_a_script_that_handles_no_signal_is_not_waited_for_when_it_is_to_end_at_once(start_node: Start) -> None:
    node = start_node("plain_rank.py", "titled", light=True)
    node.wait_for("begins as ")
    pid = int(node.logs().rpartition("begins as ")[2])
    request_stop(node.attempt, reason=PERSON, level=AT_ONCE, by="test")
    status, _, _ = node.finish(8)
    assert (status, node.ended_as()) == (0, "stopped")
    assert not is_alive(pid), "a rank is found even if it has changed the title of its process"


def test_a_torch_that_refuses_its_environment_says_so(start_node: Start) -> None:
    node = start_node("plain_rank.py", network={"env": {"TORCH_DISTRIBUTED_DEBUG": "BOGUS"}})
    assert node.finish()[0] == 1
    (event,) = node.events("node-failed")
    assert "TORCH_DISTRIBUTED_DEBUG must be OFF, INFO, or DETAIL" in event["error"]


def test_a_stop_before_the_nodes_have_met_ends_the_waiting(start_node: Start) -> None:
    node = start_node("heartbeat_rank.py", FOREVER, nodes=2)
    wait_for(lambda: node.events("node-started"), "the start")
    os.kill(node.pid, signal.SIGTERM)
    status, _, _ = node.finish(12)
    assert (status, node.ended_as()) == (0, "stopped")


def test_warnings_of_the_ranks_are_shown_once_and_recorded(start_node: Start) -> None:
    node = start_node("warning_rank.py", light=True)
    status, out, _ = node.finish()
    assert status == 0
    expected = ["the save of step 7 failed; training continues", "BatchNorm stays"]
    for text in expected:
        assert out.count(text) == 1
    assert "some library" not in out
    assert "another one did" not in out
    assert [event["message"] for event in node.events("warning")] == expected
    assert list(describe(node.attempt.run, None).warnings) == expected


def test_a_port_that_is_taken_is_the_nodes_failure_and_says_so(start_node: Start) -> None:
    node = start_node("warning_rank.py", busy_port=True)
    status, _, err = node.finish()
    assert status == 1
    assert node.events("node-failed"), err
    (failed,) = node.events("node-failed")
    assert "is in use on this node" in failed["error"]
    assert failed["suspect"] is True
    assert "is in use on this node" in outcome_of(read_history(node.attempt.run), 0).why


def test_a_node_that_did_not_come_is_recorded_by_the_first_to_notice(start_node: Start) -> None:
    def has_started(attempt: AttemptDirectory) -> None:
        writer = EventWriter(attempt.run, "node-n2")
        writer.write(NODE_STARTED, attempt=0, node=2, host="n3")
        writer.write(NODE_FAILED, attempt=0, node=2, host="n3", error="it did not come", suspect=True)

    node = start_node("plain_rank.py", procs=1, nodes=3, launch={"join_timeout": 1}, prepare=has_started)
    assert node.finish()[0] == 1
    assert [event["host"] for event in node.events("node-failed") if event["suspect"]].count("n3") == 1


def test_a_node_that_fails_after_another_is_not_suspected(start_node: Start) -> None:
    """The agents of healthy nodes lose their connections; if their clocks are behind, they seem to be the first."""

    def has_failed(attempt: AttemptDirectory) -> None:
        writer = EventWriter(attempt.run, "node-n2")
        writer.write(NODE_FAILED, attempt=0, node=2, host="n3", error="it did not come", suspect=True)

    node = start_node("warning_rank.py", busy_port=True, prepare=has_failed)
    assert node.finish()[0] == 1
    assert [event["host"] for event in node.events("node-failed") if event["suspect"]] == ["n3"]


def failures_of_node(
    attempt: AttemptDirectory, host: str, rank: int, monkeypatch: pytest.MonkeyPatch, **output: Any
) -> node_failures.NodeFailures:
    monkeypatch.setattr(node_failures, "host_name", lambda: host)
    writer, found = EventWriter(attempt.run, f"node-{host}"), SimpleNamespace(folder=attempt.run.path, **output)
    return node_failures.NodeFailures(
        attempt,
        writer,
        found,  # type: ignore[arg-type]
        node_rank=rank,
        endpoint="n1:29000",
        join_timeout=1.0,
    )


@pytest.mark.parametrize("came", [("n1", "n2"), ("n2",)])
def test_a_node_that_did_not_come_is_recorded_once_by_those_that_did(
    came: tuple[str, ...], fresh: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They give up within the same few milliseconds, and do not see yet what the others record.

    The first of them may be lost itself before it has recorded anything.
    """
    (attempt := fresh.attempt(0)).path.mkdir(parents=True)
    hosts = ("n1", "n2", "n3")
    for rank, host in enumerate(hosts):
        EventWriter(fresh, f"node-{host}").write(NODE_STARTED, attempt=0, node=rank, host=host)
    seen = read_events(fresh)
    failure = AgentFailure("not all came", suspect=False, came=frozenset(hosts[:2]))
    monkeypatch.setattr(node_failures, "agent_failure", lambda *_: failure)
    for rank, host in enumerate(hosts):
        if host not in came:
            continue
        stale = iter([seen])
        late = lambda run, stale=stale: next(stale, None) or read_events(run)  # noqa: E731
        monkeypatch.setattr(events, "read_events", late)
        failures_of_node(attempt, host, rank, monkeypatch).record_agent_failure(1)
    monkeypatch.undo()
    assert [event["host"] for event in read_events(fresh) if event.get("suspect")] == ["n3"]


@pytest.mark.parametrize("elsewhere", [(), ("rank-failed",)])
def test_an_agent_that_lost_the_others_is_the_cause_unless_something_failed(
    fresh: RunDirectory, monkeypatch: pytest.MonkeyPatch, elsewhere: tuple[str, ...]
) -> None:
    (attempt := fresh.attempt(0)).path.mkdir(parents=True)
    monkeypatch.setattr(node_failures, "FIRST_TO_RECORD_SECONDS", 0.0)
    writer = EventWriter(fresh, "node-n2")
    for name in ("stopped", *elsewhere):  # by torchrun's SIGTERM
        writer.write(name, attempt=0, step=3, reason=TERMINATED, error="Connection reset by peer", host="n1", rank=0)
    (fresh.path / "agent.log").write_text("torch.distributed.DistNetworkError: Connection timed out\n")
    exits = SimpleNamespace(failed={}, ended_by_agent={7})
    failures = failures_of_node(attempt, "n2", 1, monkeypatch, exits=exits)
    recorded = failures.record_lost_connection(unless=lambda: False)
    assert not failures.record_lost_connection(unless=lambda: True)
    why = outcome_of(read_history(fresh), 0).why
    if elsewhere:
        assert not recorded and "torchrun" not in why
    else:
        assert recorded
        assert why.startswith("node n2 failed: torchrun gave up") and "Connection timed out; the network between" in why
