"""Nodes that could not speak for themselves: what their keeper saw of them is recorded, and who is to blame."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import pytest
from starts import attempts, happened, stand_in, start

from cluster_ddp.launch.keeper.bad_hosts import bad_hosts
from cluster_ddp.launch.keeper.job_step_output import JobStepOutput
from cluster_ddp.launch.keeper.lost_nodes import record_failed_nodes
from cluster_ddp.launch.keeper.running_job_step import RunningJobStep
from cluster_ddp.run.directory import RunDirectory
from cluster_ddp.run.ending import Ending, outcome_of
from cluster_ddp.run.events import EventWriter, read_events
from cluster_ddp.run.history import read_history
from cluster_ddp.run.requeue.decision import decide
from cluster_ddp.run.stopfile import request_stop


class Ended:
    """A step that is over, as its keeper saw it."""

    def __init__(
        self, *lines: str, lost: tuple[int, ...] = (), unstarted: bool = False, killed_by: str | None = None
    ) -> None:
        self.output = JobStepOutput(labelled=True)
        self.lost = list(lost)
        self.unstarted = unstarted
        self.killed_by = killed_by
        self.stood_still = False
        for line in lines:
            self.output.note(line)

    @property
    def cancelled(self) -> bool:
        return self.output.cancelled


def recorded(run: RunDirectory, step: Ended, *, job_ends: bool = False, nodes: str = "n[1-3]") -> list[tuple[str, str]]:
    """What is recorded of the first attempt's nodes n1, n2 and n3."""
    writer, ended = EventWriter(run, "batch"), cast(RunningJobStep, step)
    record_failed_nodes(run.attempt(0), writer, start(nodes=nodes), ended, job_ends=job_ends)
    events = [event for event in read_events(run) if event["event"] in ("node-failed", "node-lost")]
    return [(event["host"], event.get("error") or event["reason"]) for event in events if event.get("suspect", True)]


FAILED_TASK = ("1: bash: no python here", "srun: error: n2: task 1: Exited with exit code 127")


def test_a_node_that_never_started_is_named_with_its_last_words(fresh: RunDirectory) -> None:
    attempts(fresh, 2)
    happened(fresh, "node-started", 0, host="n1.cluster.org", node=0)
    happened(fresh, "stop-requested", 0, reason="terminated", node=0)
    ((host, error),) = recorded(fresh, Ended(*FAILED_TASK, "srun: error: n3: task 2: Terminated"))
    assert host == "n2"
    assert error.endswith("Exited with exit code 127: bash: no python here")
    happened(fresh, "node-failed", 1, host="n2", error="the same again", suspect=True)
    assert bad_hosts(read_history(fresh), 1) == ["n2"]


def test_a_container_image_that_is_missing_on_a_node_is_told(fresh: RunDirectory) -> None:
    attempts(fresh, 1)
    happened(fresh, "node-started", 0, host="n1", node=0)
    words = "FATAL:   could not open image /images/torch.sif: no such file or directory"
    ((host, error),) = recorded(fresh, Ended(f"1: {words}", "srun: error: n2: task 1: Exited with exit code 255"))
    assert host == "n2" and "could not open image /images/torch.sif" in error


def test_of_an_srun_that_somebody_has_stopped_no_node_is_to_blame(fresh: RunDirectory) -> None:
    attempts(fresh, 1)
    step = Ended(unstarted=True)
    step.stood_still = True
    assert recorded(fresh, step) == []
    assert "srun was stopped by a signal (SIGSTOP)" in str(outcome_of(read_history(fresh), 0).why)


def test_a_step_in_which_no_node_came_up_is_told(fresh: RunDirectory) -> None:
    attempts(fresh, 1)
    found = recorded(fresh, Ended(unstarted=True))
    assert [host for host, _ in found] == ["n1", "n2", "n3"]
    assert all("neither did any other within 60 min" in error for _, error in found)


def test_a_step_that_srun_could_not_start_is_told_in_its_words(fresh: RunDirectory) -> None:
    attempts(fresh, 1)
    lines = ("srun: error: Unable to confirm allocation for job 77: Unable to contact slurm controller",
             "srun: Check SLURM_JOB_ID environment variable. Expired or invalid job 77")  # fmt: skip
    assert recorded(fresh, Ended(*lines)) == [], "it is no fault of a node's"
    outcome = outcome_of(read_history(fresh), 0)
    assert outcome.ending is Ending.FAILED and "Unable to contact slurm controller" in outcome.why


def test_an_srun_that_was_killed_is_told(fresh: RunDirectory) -> None:
    """The ranks live on, and save when the job is queued again: "stopped: terminated", for no reason to be seen."""
    attempts(fresh, 1)
    for node in range(3):
        happened(fresh, "node-started", 0, host=f"n{node + 1}", node=node)
    assert recorded(fresh, Ended(killed_by="SIGKILL")) == [], "no node is suspected"
    happened(fresh, "stopped", 0, step=5, reason="terminated")
    assert (
        "srun was ended from outside, perhaps because memory ran out (SIGKILL)"
        in outcome_of(read_history(fresh), 0).why
    )


ABORTED = "srun: Job step aborted: Waiting up to 32 seconds for job step to finish."
KILLED = "srun: error: n2: task 1: Killed"


@pytest.mark.parametrize(("lines", "suspected"), [((ABORTED, KILLED), False), ((KILLED, ABORTED), True)])
def test_of_a_cancelled_step_no_node_is_suspected(fresh: RunDirectory, lines: tuple[str, ...], suspected: bool) -> None:
    attempts(fresh, 1)
    for node in range(3):
        happened(fresh, "node-started", 0, host=f"n{node + 1}", node=node)
    assert bool(recorded(fresh, Ended(*lines))) is suspected
    why = outcome_of(read_history(fresh), 0).why
    assert ("the job step was cancelled from outside, for example by scancel" in why) is not suspected
    assert ("node n2 failed" in why) is suspected


def test_a_node_program_that_ended_by_itself_is_told_and_not_the_connections_that_others_lost(
    fresh: RunDirectory,
) -> None:
    attempts(fresh, 1)
    for node in range(3):
        happened(fresh, "node-started", 0, host=f"n{node + 1}", node=node)
    happened(fresh, "rank-failed", 0, host="n1", node=0, rank=0, error="RuntimeError: Connection closed by peer")
    words = (
        "1: cluster-ddp: the storage of /runs/r has been unavailable for 15 min: ending, as nothing can be saved there"
    )
    assert recorded(fresh, Ended(words, "srun: error: n2: task 1: Exited with exit code 1")) == [], (
        "it may be all nodes'"
    )
    why = outcome_of(read_history(fresh), 0).why
    assert why.startswith("node n2 failed: ") and "has been unavailable for 15 min" in why


def test_who_could_speak_is_not_named_again(fresh: RunDirectory) -> None:
    attempts(fresh, 1)
    happened(fresh, "node-started", 0, host="n2", node=1)
    assert recorded(fresh, Ended(*FAILED_TASK)) == []


def test_a_node_that_others_waited_for_is_named(fresh: RunDirectory) -> None:
    attempts(fresh, 1)
    for node in ("n1", "n3"):
        happened(fresh, "node-started", 0, host=node)
    happened(fresh, "node-failed", 0, host="n1", error="not all nodes came", suspect=False)
    happened(fresh, "stop-requested", 0, reason="terminated")
    assert [host for host, _ in recorded(fresh, Ended())] == ["n2"]


@pytest.mark.parametrize("event", ["node-finished", "rank-failed"])
def test_a_node_that_trained_and_could_record_nothing_is_named(fresh: RunDirectory, event: str) -> None:
    """The runs folder was full there. Nobody was named where srun told first of the node that ended because of it."""
    attempts(fresh, 1)
    for node in ("n1", "n3"):
        happened(fresh, "node-started", 0, host=node)
    happened(fresh, "started", 0, step=0, world_size=3)
    happened(fresh, event, 0, host="n1", rank=0, error="the checkpoint could not be written", cause="outside")
    lines = ("srun: error: n1: task 0: Exited with exit code 1", "srun: error: n2: task 1: Terminated")
    ((host, error),) = [told for told in recorded(fresh, Ended(*lines)) if told[0] != "n1"]
    assert host == "n2" and error.startswith("its node program could not record that it had started: see")


@pytest.mark.parametrize("reason", ["preemption", "terminated", "cancel"])
def test_a_stop_before_all_had_come_up_is_nobodys_fault(fresh: RunDirectory, reason: str) -> None:
    attempts(fresh, 1)
    happened(fresh, "node-started", 0, host="n1")
    happened(fresh, "stop-requested", 0, reason=reason)
    assert recorded(fresh, Ended("srun: error: n2: task 1: Terminated")) == []


def test_a_node_that_was_given_up_is_lost(fresh: RunDirectory) -> None:
    attempts(fresh, 1)
    for node in ("n1", "n2", "n3"):
        happened(fresh, "node-started", 0, host=node)
    ((host, reason),) = recorded(fresh, Ended(lost=(2,)))
    assert host == "n3"
    assert reason == "node 2 (n3) was lost: no sign of life while others had finished"


KILLED_TASK = ("srun: error: n2: task 1: Killed", "srun: error: n1: task 0: Exited with exit code 5")


@pytest.fixture
def trained(fresh: RunDirectory) -> RunDirectory:
    """A run of which all nodes have started, and the one on n1 has signed off."""
    fresh.attempt(0).path.mkdir()
    for number, host in enumerate(("n1.site", "n2.site", "n3.site")):
        EventWriter(fresh, f"node-{number}").write("node-started", attempt=0, node=number, host=host)
    EventWriter(fresh, "node-0").write("node-finished", attempt=0, node=0, host="n1.site", status=5)
    return fresh


def test_a_node_program_that_was_killed_is_named_and_the_run_goes_on(trained: RunDirectory) -> None:
    EventWriter(trained, "rank-0").write("stopped", attempt=0, step=9, reason="agent-lost")
    ((host, error),) = recorded(trained, Ended(*KILLED_TASK))
    assert host == "n2" and "killed from outside" in error and "srun: Killed" in error
    outcome = outcome_of(read_history(trained), 0)
    assert outcome.ending is Ending.FAILED and "node n2 failed: its node program was killed" in outcome.why
    assert bad_hosts(read_history(trained), 0) == []
    EventWriter(trained, "batch").write("node-failed", attempt=1, node=1, host="n2", error=error, suspect=True)
    assert bad_hosts(read_history(trained), 1) == ["n2"]


def test_a_node_program_with_an_error_of_its_own_is_told(trained: RunDirectory) -> None:
    EventWriter(trained, "node-1").write("stop-requested", attempt=0, node=0, reason="terminated", by="SIGTERM")
    last_words = "1: OSError: [Errno 5] Input/output error"
    assert recorded(trained, Ended(last_words, "srun: error: n2: task 1: Exited with exit code 1")) == []
    outcome = outcome_of(read_history(trained), 0)
    assert outcome.ending is Ending.FAILED
    assert outcome.why == (
        "node n2 failed: its node program ended without signing off: Exited with exit code 1: OSError: [Errno 5] "
        "Input/output error"
    )
    assert decide(trained, trained.attempt(0)).action == "requeue"


@pytest.mark.parametrize(
    "lines",
    [
        ("srun: error: n[2-3]: tasks 1-2: Killed",),  # nobody knows which was first
        ("srun: error: n1: task 0: Killed", KILLED_TASK[0]),  # it has signed off: what was left of it was ended
        (KILLED_TASK[1], KILLED_TASK[0]),  # srun ends the others after the first
        ("srun: error: n2: task 1: Exited with exit code 1",),
    ],
)
def test_a_node_program_that_was_ended_because_of_another_is_not_blamed(
    trained: RunDirectory, lines: tuple[str, ...]
) -> None:
    assert recorded(trained, Ended(*lines)) == []


def test_a_node_program_that_ends_with_its_job_is_not_blamed(trained: RunDirectory) -> None:
    """Slurm kills what has not ended KillWait after its SIGTERM, a node whose save takes long first of all."""
    assert recorded(trained, Ended(*KILLED_TASK), job_ends=True) == []
    request_stop(trained.attempt(0), reason="person", grace=None, by="me")
    assert recorded(trained, Ended(*KILLED_TASK)) == []


@pytest.mark.parametrize("domain", ["", ".cluster.org"])
def test_a_node_that_was_taken_from_the_job_is_told_and_not_blamed(
    trained: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, domain: str
) -> None:
    """`scontrol update NumNodes=`: Slurm kills the node program there, and then the step."""
    shown = f"JobId=77 JobState=RUNNING Restarts=0 ReqNodeList=(null) NodeList=n[1,3]{domain}"
    stand_in(tmp_path, monkeypatch, scontrol=f"echo '{shown}'")
    for attempt in (0, 1):
        EventWriter(trained, "rank").write("rank-failed", attempt=attempt, rank=1, host="n2", signal="SIGKILL")
    assert recorded(trained, Ended(*KILLED_TASK), nodes=f"n[1-3]{domain}") == []
    outcome = outcome_of(read_history(trained), 0)
    assert outcome.ending is Ending.FAILED and outcome.why.startswith("node n2 was taken from the job while it ran")
    assert bad_hosts(read_history(trained), 1) == []


def test_of_a_step_that_srun_ended_for_want_of_a_connection_the_node_is_named_that_it_lost(fresh: RunDirectory) -> None:
    attempts(fresh, 1)
    for node in range(3):
        happened(fresh, "node-started", 0, host=f"n{node + 1}", node=node)
    lost = "srun: error: step_launch_notify_io_failure: aborting, io error with slurmstepd on node 2"
    ((host, error),) = recorded(fresh, Ended(lost, ABORTED, "srun: error: n1: task 0: Killed"))
    assert host == "n3" and error.startswith("srun lost its connection to it")


@pytest.mark.parametrize(
    ("job_ends", "reason"), [(True, "node-failure"), (True, "preemption"), (False, "node-failure")]
)
def test_a_node_that_somebody_has_set_down_is_named_though_it_has_saved_and_signed_off(
    fresh: RunDirectory, job_ends: bool, reason: str
) -> None:
    attempts(fresh, 1)
    for node in range(3):
        happened(fresh, "node-started", 0, host=f"n{node + 1}", node=node)
        happened(fresh, "node-finished", 0, host=f"n{node + 1}", node=node)
    happened(fresh, "stopped", 0, step=5, reason=reason)
    step = Ended("srun: error: Node failure on n[2-3]", ABORTED, "srun: error: n1: task 0: Killed")
    assert [host for host, _ in recorded(fresh, step, job_ends=job_ends)] == ["n2", "n3"]
    assert outcome_of(read_history(fresh), 0).why == (
        "node n2 failed: Slurm calls it down; node n3 failed: Slurm calls it down"
    )
