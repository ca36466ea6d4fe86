"""What a keeper learns from the output of a step about nodes that cannot speak for themselves."""

from __future__ import annotations

import errno
import io
import os
import resource
from pathlib import Path

import pytest

from cluster_ddp.launch.keeper.job_step_output import JobStepOutput
from cluster_ddp.launch.node.__main__ import did_not_start
from cluster_ddp.launch.sign_of_life import SIGNED_OFF_SECONDS, SILENT_SECONDS, SignOfLife, SilentNodes
from cluster_ddp.launch.torchrun.agent_failure import Meeting, agent_failure, explain
from cluster_ddp.run.directory import RunDirectory
from cluster_ddp.run.events import EventWriter, read_events


def test_people_see_the_lines_without_labels_and_the_last_of_each_task_is_kept() -> None:
    output = JobStepOutput(labelled=True)
    assert [output.note(line) for line in ("0: fine", "1: bash: no python3", "1: ")] == ["fine", "bash: no python3", ""]
    output.note("srun: error: n2: task 1: Exited with exit code 127")
    output.note("srun: error: n1: task 0: Terminated")
    (failure,) = output.failures()
    assert failure.host == "n2"
    assert failure.describe() == "Exited with exit code 127: bash: no python3"


def test_a_task_that_slurm_could_not_start_is_told_by_slurms_reason() -> None:
    output = JobStepOutput(labelled=True)
    for line in (
        "1: slurmstepd: error: run_command: TaskProlog can not be executed (/etc/prolog) No such file or directory",
        "1: slurmstepd: error: TaskProlog failed status=1",
        "1: slurmstepd: error: *** STEP 23.0 ON n2 CANCELLED AT 2026-11-23T23:37:46 ***",
        "srun: error: n2: task 1: Exited with exit code 1",
    ):
        output.note(line)
    (failure,) = output.failures()
    assert failure.describe() == "Exited with exit code 1: slurmstepd: error: TaskProlog failed status=1"


@pytest.mark.parametrize("kind", ["error", "fatal"])
def test_what_srun_says_of_itself_is_told(kind: str) -> None:
    output = JobStepOutput(labelled=True)
    output.note(f"srun: {kind}: pthread_create error Resource temporarily unavailable")
    assert output.own_error == "pthread_create error Resource temporarily unavailable"


def test_an_option_that_srun_does_not_know_is_told() -> None:
    """As on a cluster without pyxis."""
    output = JobStepOutput(labelled=True)
    output.note("srun: unrecognized option '--container-image=a.sqsh'")
    output.note('Try "srun --help" for more information')
    assert output.own_error == "unrecognized option '--container-image=a.sqsh'"


def test_a_line_that_only_looks_labelled_stays_where_nothing_labels() -> None:
    assert JobStepOutput(labelled=False).note("1: first") == "1: first"
    assert JobStepOutput(labelled=True).note("a: b") == "a: b"


@pytest.mark.parametrize(
    ("line", "hosts"),
    [
        ("srun: error: n[2-3]: tasks 1-2: Exited with exit code 1", ["n2", "n3"]),
        ("srun: error: Task launch for StepId=5.0 failed on node n7: Slurmd could not execve job", ["n7"]),
        ("srun: error: n2: task 1: Killed", []),
        ("srun: error: n2: task 1: Out Of Memory", ["n2"]),
    ],
)
def test_what_srun_says_of_its_tasks(line: str, hosts: list[str]) -> None:
    output = JobStepOutput(labelled=True)
    assert output.note(line) == line
    assert [failure.host for failure in output.failures()] == hosts


def test_a_task_that_was_not_launched_has_no_last_line() -> None:
    output = JobStepOutput(labelled=True)
    output.note("0: a line of the first task")
    output.note("srun: error: Task launch for StepId=6.0 failed on node n2: Communication connection failure")
    (failure,) = output.failures()
    assert failure.describe() == "the task was not launched: Communication connection failure"


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_node_that_dies_without_a_word_is_given_up_once_another_has_signed_off(tmp_path: Path) -> None:
    attempt, clock = RunDirectory(tmp_path).attempt(0), Clock()
    attempt.path.mkdir(parents=True)
    signs = []
    for node in (0, 1, 2):
        signs.append(SignOfLife(attempt.alive_file(node)))
        signs[node].give()
    silent = SilentNodes(attempt, 3, clock=clock)

    def look_after(seconds: float) -> list[int]:
        clock.now += seconds
        return silent.look()

    assert look_after(6) == []
    assert look_after(10_000) == []  # nobody has signed off: nothing is said about time
    signs[0].end()
    assert look_after(6) == []
    assert look_after(SILENT_SECONDS - 10) == []
    later = attempt.alive_file(2).stat().st_mtime + 5
    os.utime(attempt.alive_file(2), (later, later))
    assert look_after(6) == []
    assert look_after(10) == [1]
    signs[2].end()
    assert look_after(6) == [1]


def test_a_node_that_never_came_is_given_up_too(tmp_path: Path) -> None:
    attempt, clock = RunDirectory(tmp_path).attempt(0), Clock()
    attempt.path.mkdir(parents=True)
    sign = SignOfLife(attempt.alive_file(0))
    sign.give()
    silent = SilentNodes(attempt, 2, clock=clock)
    assert silent.look() == []
    sign.end()
    for _ in range(3):
        clock.now += SILENT_SECONDS
        found = silent.look()
    assert found == [1]


def test_a_node_is_given_up_by_one_that_looks_only_when_it_has_ended_itself(tmp_path: Path) -> None:
    attempt, clock = RunDirectory(tmp_path).attempt(0), Clock()
    attempt.path.mkdir(parents=True)
    SignOfLife(attempt.alive_file(1)).give()
    silent = SilentNodes(attempt, 2, ended=[0], clock=clock)
    found = silent.look()
    for _ in range(3):
        assert found == []
        clock.now += SILENT_SECONDS / 3
        found = silent.look()
    clock.now += SILENT_SECONDS / 3
    assert silent.look() == [1]


def test_a_step_whose_nodes_have_all_signed_off_is_over(tmp_path: Path) -> None:
    """srun may wait on for Slurm's controller, which is away."""
    attempt, clock = RunDirectory(tmp_path).attempt(0), Clock()
    attempt.path.mkdir(parents=True)
    signs = []
    for node in (0, 1):
        signs.append(SignOfLife(attempt.alive_file(node)))
        signs[node].give()
    nodes = SilentNodes(attempt, 2, clock=clock)
    for sign in signs:
        nodes.look()
        sign.end()
        clock.now += 2 * SIGNED_OFF_SECONDS
        assert not nodes.all_signed_off
    nodes.look()
    clock.now += SIGNED_OFF_SECONDS - 1
    assert not nodes.all_signed_off
    clock.now += 2
    assert nodes.all_signed_off


def test_nodes_that_have_come_and_gone_between_two_looks_have_signed_off(tmp_path: Path) -> None:
    run, clock = RunDirectory(tmp_path), Clock()
    run.attempt(0).path.mkdir(parents=True)
    run.events.mkdir()
    nodes = SilentNodes(run.attempt(0), 2, clock=clock)
    assert nodes.look() == [] and not nodes.any_began
    for node in (0, 1):
        EventWriter(run, "node").write("node-finished", attempt=0, node=node)
    for _ in range(2):
        clock.now += 2 * SIGNED_OFF_SECONDS
        assert nodes.look() == [], "none of them is lost"
    assert nodes.any_began and nodes.all_signed_off


@pytest.mark.parametrize(
    ("log", "words", "suspect"),
    [
        (
            "torch.distributed.DistNetworkError: The server socket has failed to listen on any local network address. "
            "port: 20077, useIpv6: false, code: -98, name: EADDRINUSE, message: address already in use\n"
            "torch.distributed.elastic.rendezvous.api.RendezvousConnectionError: The connection has failed.\n",
            "port 20077 is in use",
            True,
        ),
        (
            "[W1122 05:46:32.6 socket.cpp:764] [c10d] The IPv6 network addresses of (n1, 20077) cannot be retrieved "
            "(gai error: -2 - Name or service not known).\ntorch.distributed.DistNetworkError: timed out\n",
            "n1, does not resolve",
            True,
        ),
        ("torch.distributed.elastic.rendezvous.api.RendezvousTimeoutError\n", "20 s (launch.join_timeout)", False),
        ("ModuleNotFoundError: No module named 'torch'\n", "No module named 'torch'", True),
        ("", "its log is empty", True),
    ],
)
def test_why_an_agent_gave_up(tmp_path: Path, log: str, words: str, suspect: bool) -> None:
    (tmp_path / "agent.log").write_text(log)
    found = agent_failure(tmp_path / "agent.log", 1, "n1:20077", 20)
    assert words in found.error
    assert found.suspect is suspect


@pytest.mark.parametrize(("meeting", "came", "words"), [
    (Meeting(came=("n1", "n2")), {"n1", "n2"}, "not all nodes reached"),
    (Meeting(too_few=True), set(), "went on without this node"),
])  # fmt: skip
def test_how_a_meeting_failed_is_read_from_the_agents_record(
    tmp_path: Path, meeting: Meeting, came: set[str], words: str
) -> None:
    error = "RendezvousTimeoutError" if meeting.came else "RendezvousStateError: 1 of 2"
    (tmp_path / "agent.log").write_text(f"torch.distributed.elastic.rendezvous.api.{error}\n")
    meeting.record(tmp_path)
    found = agent_failure(tmp_path / "agent.log", 1, "n1:20077", 20)
    assert (found.came, found.suspect) == (came, False) and words in found.error


@pytest.mark.parametrize(("more", "suspect"), [(0, False), (1, True)])
def test_a_node_that_may_open_as_few_files_as_the_job_is_not_suspected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: int, suspect: bool
) -> None:
    allowed = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    monkeypatch.setenv("CLUSTER_DDP_OPEN_FILES", str(allowed + more))
    error = OSError(errno.EMFILE, os.strerror(errno.EMFILE), "/tmp/0/stdout.log")
    (tmp_path / "agent.log").write_text(f"OSError: {error}\n")
    run = RunDirectory(tmp_path / "runs" / "a")
    run.events.mkdir(parents=True)
    run.record_file.touch()
    found = agent_failure(tmp_path / "agent.log", 1, "n1:20077", 20)
    did_not_start(run, 0, 0, error)
    told = read_events(run)[-1]
    assert "ulimit -n" in found.error and "ulimit -n" in told["error"]
    assert (found.suspect, told["suspect"]) == (suspect, suspect)


def test_what_a_node_says_that_cannot_use_the_runs_folder(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "runs" / "a")
    assert "the same and writable on every node" in explain(ValueError("no job"), run)
    run.path.mkdir(parents=True)
    run.record_file.touch()
    read_only = OSError(errno.EROFS, os.strerror(errno.EROFS), str(run.attempts))
    assert "the same and writable on every node" in explain(read_only, run)
    for place, helps in (("/var/tmp/x", True), ("/dev/shm/x", False)):
        said = explain(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), place), run)
        assert ("make room there" if helps else "free some space there") in said and ("TMPDIR" in said) == helps


def test_what_an_encoding_lacks_does_not_end_the_output() -> None:
    """Nobody would read on what srun prints: once the pipe is full, everything that prints stands still."""
    read, write = os.pipe()
    os.write(write, "caf\u00e9 \u2588\nthe end\n".encode())
    os.close(write)
    stream = io.TextIOWrapper(io.BytesIO(), encoding="latin-1")
    output = JobStepOutput(labelled=False)
    with os.fdopen(read, "rb") as pipe:
        output.follow(pipe, stream)
        output.finish()
    stream.seek(0)
    assert stream.read() == "caf\u00e9 \\u2588\nthe end\n"
