from __future__ import annotations

import json
import multiprocessing
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.queues import Queue
from typing import Any

import pytest
from run_builders import begin, begin_dead, hide
from waiting import wait_for

from cluster_ddp.run import attempt as attempt_module
from cluster_ddp.run.attempt import request_resume
from cluster_ddp.run.attempt_record import end_attempt, is_superseded, list_attempts, read_attempt
from cluster_ddp.run.directory import RunDirectory
from cluster_ddp.run.errors import RunAlive, RunEnded, RunError
from cluster_ddp.run.events import read_events
from cluster_ddp.run.history import read_history
from cluster_ddp.run.liveness import identify, is_alive
from cluster_ddp.run.record import read_record
from cluster_ddp.run.run_state import RunState
from cluster_ddp.run.status.report import describe
from cluster_ddp.run.stopfile import request_stop

Say = Callable[..., None]


def clock(monkeypatch: pytest.MonkeyPatch, *, behind: float) -> None:
    """Let this host's clock be behind from here on."""
    monkeypatch.setattr("time.time", lambda true=time.time: true() - behind)


def test_the_first_attempt_is_0_and_notes_who_began_it(run: RunDirectory) -> None:
    assert list_attempts(run) == []
    attempt = begin(run, slurm_job_id="77", restart_count=2, nodes=3, procs=4)
    assert attempt.path == run.attempts / "000" and attempt.run == run
    record = read_attempt(attempt)
    assert (record.number, record.slurm_job_id, record.restart_count, record.nodes, record.procs) == (0, "77", 2, 3, 4)
    assert record.process is not None
    assert (record.process.host, record.process.pid) == ("here", os.getpid())
    assert abs(record.begun - time.time()) < 60 and record.ended is None
    assert (read_record(run).slurm_job_ids, read_record(run).nodes, read_record(run).procs) == (("77",), 3, 4)
    assert [path.name for path in run.attempts.iterdir()] == ["000"]


def test_only_one_attempt_is_alive_at_a_time(run: RunDirectory) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as holder:
        begin(run, pid=holder.pid)
        with pytest.raises(RunAlive, match=rf"is alive: attempt 0 on host here, process {holder.pid}\. Stop it first"):
            begin(run)
        holder.communicate(b"\n", timeout=120)
    assert begin(run).number == 1


def test_an_attempt_that_said_its_end_is_over_though_its_process_is_there(run: RunDirectory) -> None:
    end_attempt(begin(run))
    assert read_attempt(run.attempt(0)).ended is not None
    assert begin(run).number == 1


def test_of_many_that_begin_at_once_one_wins(run: RunDirectory) -> None:
    context = multiprocessing.get_context("fork")
    for number in range(3):
        gate, answers, done = context.Barrier(8), context.Queue(), context.Event()
        rivals = [context.Process(target=_rival, args=(run, gate, answers, done)) for _ in range(8)]
        for process in rivals:
            process.start()
        said = [answers.get(timeout=120) for _ in rivals]
        done.set()
        for process in rivals:
            process.join(60)
        assert sorted(said) == [str(number)] + ["RunAlive"] * 7
    assert sorted(path.name for path in run.attempts.iterdir()) == ["000", "001", "002"]


def test_whoever_comes_second_begins_nothing_once_the_run_is_complete(
    run: RunDirectory, say: Say, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one that was first has trained to the end while storage held the other one up."""
    publish = attempt_module.publish

    def late(*of: Any) -> bool:
        monkeypatch.setattr(attempt_module, "publish", publish)
        begin(run)
        say("completed", 0, step=9)
        end_attempt(run.attempt(0))
        return publish(*of)

    monkeypatch.setattr(attempt_module, "publish", late)
    with pytest.raises(RunEnded, match="is complete"):
        begin(run)
    assert [attempt.number for attempt in list_attempts(run)] == [0]


def _rival(run: RunDirectory, gate: object, answers: Queue[str], done: object) -> None:
    gate.wait(30)  # type: ignore[attr-defined]
    try:
        answers.put(str(begin(run).number))
    except Exception as error:
        answers.put(type(error).__name__)
    done.wait(60)  # type: ignore[attr-defined]  # the winner stays alive until all have answered


def test_the_same_allocation_gets_its_attempt_back(run: RunDirectory) -> None:
    first = begin(run, slurm_job_id="5")
    assert begin(run, slurm_job_id="5") == first
    assert list_attempts(run) == [first]


def test_a_job_whose_first_start_slurm_has_forgotten_begins_the_next_attempt(run: RunDirectory) -> None:
    """In the first one again, a script would get no `args_on_resume`, and start over."""
    begin_dead(run, slurm_job_id="5")
    assert begin(run, slurm_job_id="5").number == 1


def test_a_start_that_slurm_counts_from_an_older_state_begins_an_attempt(run: RunDirectory) -> None:
    """Its controller has lost its latest state, and with it some of the restarts."""
    end_attempt(begin(run, slurm_job_id="5", restart_count=2))
    second = begin(run, slurm_job_id="5", restart_count=2)
    assert second.number == 1
    with pytest.raises(RunAlive):
        begin(run, slurm_job_id="5", restart_count=1, is_latest_start=lambda: True)
    end_attempt(second)
    with pytest.raises(RunAlive):
        begin(run, slurm_job_id="5", restart_count=1)
    assert begin(run, slurm_job_id="5", restart_count=1, is_latest_start=lambda: True).number == 2


@pytest.mark.parametrize("stopped", [False, True])
def test_an_attempt_that_was_alive_as_its_run_was_resumed_counts_on(run: RunDirectory, say: Say, stopped: bool) -> None:
    """As where squeue has once answered with nothing, and the run's second job starts on the same node."""
    attempt = begin(run, slurm_job_id="5")
    request_resume(run, by="me")
    assert read_history(run).current_attempt is None
    if stopped:
        request_stop(attempt, reason="person", by="me")
    with pytest.raises(RunAlive):
        begin(run, slurm_job_id="6")
    assert (read_history(run).current_attempt is None) is stopped
    say("completed", 0, step=9)
    end_attempt(attempt)
    request_resume(run, by="me")
    assert begin(run, slurm_job_id="7").number == 1, "a later wish holds"


def test_a_requeued_job_begins_the_next_attempt_though_the_one_before_left_no_word(run: RunDirectory) -> None:
    begin(run, slurm_job_id="5")
    hide(run, 0)
    second = begin(run, slurm_job_id="5", restart_count=1)
    assert second.number == 1
    assert read_attempt(second).restart_count == 1
    assert read_record(run).slurm_job_ids == ("5",)
    requeued = [event for event in read_events(run) if event["event"] == "requeued"]
    assert [(event["attempt"], event["reason"]) for event in requeued] == [
        (0, "it (batch host n7) left no record of its end (killed, or its node failed)")
    ]


@pytest.mark.parametrize(("answer", "begins"), [(False, True), (True, False), (None, False)])
def test_an_attempt_on_another_machine_is_asked_of_slurm(run: RunDirectory, answer: bool | None, begins: bool) -> None:
    begin(run, slurm_job_id="5")
    hide(run, 0)
    asked = []

    def job_alive(job_id: str) -> bool | None:
        asked.append(job_id)
        return answer

    if begins:
        assert begin(run, slurm_job_id="6", job_alive=job_alive).number == 1
    else:
        with pytest.raises(RunAlive, match="is alive" if answer else "may be alive"):
            begin(run, slurm_job_id="6", job_alive=job_alive)
    assert asked == ["5"]


def test_slurm_of_another_cluster_is_not_asked_about_an_attempt(run: RunDirectory) -> None:
    begin(run, slurm_job_id="5", cluster="alpha")
    hide(run, 0)
    with pytest.raises(RunAlive, match="may be alive"):
        begin(run, slurm_job_id="6", cluster="beta", job_alive=lambda job_id: False)
    assert begin(run, slurm_job_id="6", cluster="alpha", job_alive=lambda job_id: False).number == 1


def test_an_attempt_on_another_machine_that_signed_off_is_over(run: RunDirectory, say: Say) -> None:
    begin(run, nodes=2)
    hide(run, 0)
    say("node-finished", 0, node=0)
    with pytest.raises(RunAlive):
        begin(run)
    say("node-finished", 0, node=1)
    assert begin(run).number == 1


def test_a_persons_resume_vouches_for_an_attempt_that_cannot_be_seen(run: RunDirectory) -> None:
    begin(run)
    hide(run, 0)
    request_resume(run, by="me")
    assert begin(run).number == 1
    assert [event["event"] for event in read_events(run)] == ["resume-requested"]  # it is forgiven, not judged


@pytest.mark.parametrize(
    ("events", "state"),
    [
        ([("completed", {"step": 300})], "COMPLETED"),
        ([("stalled", {"reason": "no progress"})], "STALLED"),
        ([("started", {"step": 0}), ("failed", {"step": 0, "error": "ImportError: no module named x"})], "FAILED"),
        ([("stopped", {"step": 5, "reason": "person"})], "STOPPED"),
        ([("stopped", {"step": 5, "reason": "cancel"})], "CANCELLED"),
    ],
)
def test_a_run_that_ended_starts_again_only_when_a_person_asks(
    run: RunDirectory, say: Say, events: list[tuple[str, dict[str, object]]], state: str
) -> None:
    begin_dead(run, slurm_job_id="5")
    for name, fields in events:
        say(name, 0, **fields)
    with pytest.raises(RunEnded) as caught:
        begin(run, slurm_job_id="5", restart_count=1)
    assert caught.value.state == state
    assert len(list(run.attempts.iterdir())) == 1
    request_resume(run, by="me")
    assert begin(run, slurm_job_id="5", restart_count=1).number == 1


def test_a_cancelled_run_stays_cancelled_until_a_person_resumes_it(run: RunDirectory, say: Say) -> None:
    begin_dead(run, slurm_job_id="5")
    say("checkpoint", 0, step=10)
    say("cancelled", 0, by="me@login")
    for restart in (1, 2):
        with pytest.raises(RunEnded, match="was cancelled"):
            begin(run, slurm_job_id="5", restart_count=restart)
    request_resume(run, by="me")
    begin_dead(run, slurm_job_id="6")
    say("cancelled", 1, by="me@login")
    with pytest.raises(RunEnded, match="was cancelled"):
        begin(run, slurm_job_id="6", restart_count=1)


@pytest.mark.parametrize("begun", [False, True])
def test_a_cancelled_run_is_resumed_from_a_host_whose_clock_is_behind(
    run: RunDirectory, say: Say, monkeypatch: pytest.MonkeyPatch, begun: bool
) -> None:
    if begun:
        begin_dead(run)
    say("cancelled", 0 if begun else None, by="me@login-a")
    clock(monkeypatch, behind=30)
    request_resume(run, by="me@login-b")
    assert describe(run, None).state is RunState.PENDING
    assert begin(run).number == int(begun)
    assert describe(run, None).state is RunState.RUNNING


def test_a_cancel_holds_though_the_resume_before_it_came_from_a_host_whose_clock_is_ahead(
    run: RunDirectory, say: Say, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as elsewhere:
        clock(elsewhere, behind=-60)
        request_resume(run, by="me@login-b")
    say("cancelled", None, by="me@login-a")
    with pytest.raises(RunEnded, match="was cancelled"):
        begin(run)


def test_a_stopped_run_is_resumed_again_from_a_host_whose_clock_is_behind(
    run: RunDirectory, say: Say, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(2):
        end_attempt(begin(run))
        say("stopped", number, step=5, reason="person")
        clock(monkeypatch, behind=60 * number)
        request_resume(run, by="me")
    assert begin(run).number == 2


def test_an_attempt_begun_by_a_host_whose_clock_is_behind_is_not_forgiven(
    run: RunDirectory, say: Say, monkeypatch: pytest.MonkeyPatch
) -> None:
    say("cancelled", None, by="me@login")
    request_resume(run, by="me@login")
    clock(monkeypatch, behind=60)
    begin(run)
    assert describe(run, None).state is RunState.RUNNING


def test_a_resume_by_a_version_that_did_not_count_cancels_undoes_those_before_it(run: RunDirectory, say: Say) -> None:
    say("cancelled", None, at=1, by="me@login")
    say("resume-requested", None, at=2, by="me@login")
    assert begin_dead(run).number == 0
    say("cancelled", 0, at=3, by="me@login")
    with pytest.raises(RunEnded, match="was cancelled"):
        begin(run)


def test_a_run_cancelled_in_the_queue_does_not_begin(run: RunDirectory, say: Say) -> None:
    say("cancelled", None, by="me@login")
    with pytest.raises(RunEnded):
        begin(run)


def test_the_stall_guard_holds_though_every_attempt_is_killed_before_it_could_judge(run: RunDirectory) -> None:
    for restart in range(3):
        begin_dead(run, slurm_job_id="5", restart_count=restart)
    with pytest.raises(RunEnded, match="3 attempts in a row ended without a new checkpoint") as caught:
        begin(run, slurm_job_id="5", restart_count=3)
    assert caught.value.state == "STALLED"
    assert [event["event"] for event in read_events(run)] == ["requeued", "requeued", "stalled"]
    request_resume(run, by="me")
    assert begin_dead(run, slurm_job_id="5", restart_count=3).number == 3
    assert begin_dead(run, slurm_job_id="5", restart_count=4).number == 4


def test_a_preempted_run_whose_sigterm_nobody_explained_goes_on(run: RunDirectory, say: Say) -> None:
    begin_dead(run, slurm_job_id="5")
    say("stopped", 0, step=40, reason="terminated")
    assert begin(run, slurm_job_id="5", restart_count=1).number == 1


def test_a_draft_left_by_a_process_that_died_is_no_attempt(run: RunDirectory) -> None:
    (run.attempts / ".begin-0123").mkdir()
    (run.attempts / "notes").mkdir()
    assert list_attempts(run) == []
    assert begin(run).number == 0


def test_a_process_is_told_from_another_with_its_id() -> None:
    me = identify(os.getpid())
    assert me.host == socket.gethostname()
    assert is_alive(me) is True
    assert is_alive(replace(me, started="1")) is False
    assert is_alive(replace(me, host="elsewhere")) is True  # a name is no machine
    assert is_alive(replace(me, host="elsewhere", boot_id="other")) is None
    assert is_alive(replace(me, boot_id="before the restart")) is False
    assert is_alive(replace(me, namespace="pid:[1]")) is None


def test_a_process_that_ended_is_dead_even_before_it_is_reaped() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        identity = identify(process.pid)
        assert is_alive(identity) is True
        assert process.stdin is not None
        process.stdin.close()
        wait_for(lambda: not is_alive(identity), seconds=30)
    assert is_alive(identity) is False
    assert is_alive(identify(process.pid)) is False


def test_times_in_an_attempts_record_that_are_no_times_count_as_unknown(run: RunDirectory) -> None:
    attempt = begin(run)
    record = json.loads(attempt.record_file.read_text())
    attempt.record_file.write_text(json.dumps({**record, "begun": 10**400, "ended": -(10**400)}))
    found = read_attempt(attempt)
    assert found.ended is None
    assert abs(found.begun - time.time()) < 60  # the folder's


def test_a_folder_with_the_last_number_is_named(run: RunDirectory) -> None:
    run.attempt(999_999).path.mkdir()
    run.attempt(999_999).record_file.write_text("{}")  # damaged
    with pytest.raises(RunError, match="999999 has the highest number that an attempt can have"):
        begin_dead(run)
    assert [folder.name for folder in run.attempts.iterdir()] == ["999999"]


def test_a_folder_without_a_record_is_no_attempt(run: RunDirectory) -> None:
    """A person has made it: it neither supersedes the attempt that runs, nor is in the way of the next one."""
    first = begin_dead(run)
    for number in (1, 2, 7):
        (run.attempt(number).path / "notes").mkdir(parents=True)
    assert not is_superseded(first) and list_attempts(run) == [first]
    assert [begin_dead(run).number for _ in range(2)] == [3, 4]
    assert is_superseded(first)


def test_a_record_that_cannot_be_written_is_named(run: RunDirectory) -> None:
    """As in a directory that its owner has made read-only, except for the folders in it."""
    run.path.joinpath(f".{run.record_file.name}.holder").touch()
    with pytest.raises(RunError, match=r"cannot write \S+run\.json: "):
        begin(run, slurm_job_id="7")
