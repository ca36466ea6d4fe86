"""The keeper under every order of events: signals, deaths, stops, and answers of Slurm that are late, torn or missing.

Whatever comes: never two attempts that count, never a requeue after a cancel or a stop, never an end without a reason,
always an end; and where Slurm answers, no requeue that is wanted is lost.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from simulated_job import KILL_WAIT, KILLS, Killed, Life, SimulatedAllocation, SimulatedHost, SimulatedStep, World, live

from cluster_ddp.job import JobSpec, load_resolved
from cluster_ddp.job.errors import ClusterDDPError, JobFileError
from cluster_ddp.launch import end_of_job, keeper, stop_requests
from cluster_ddp.launch.queueing import RequeueFailed
from cluster_ddp.run import decision
from cluster_ddp.run.directory import RunDirectory
from cluster_ddp.run.ending import Ending, outcome_of
from cluster_ddp.run.errors import RunAlive, RunEnded
from cluster_ddp.run.events import REQUEUED, on_this_host
from cluster_ddp.run.history import read_history
from cluster_ddp.run.reading import parse_lines
from cluster_ddp.run.runs import create_run
from cluster_ddp.run.status import RunStatus, describe
from cluster_ddp.run.storage import Storage

SPEC = JobSpec(name="a", task="cluster_ddp.tasks.digits:Digits", launch={"procs_per_node": 1})
# The same in each run; `make chaos` tries others.
FIRM = settings(max_examples=60, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])

seconds = st.floats(min_value=1, max_value=200).map(round)
words = st.sampled_from(sorted(KILLS))
lives = st.builds(
    Life,
    events=st.lists(st.tuples(seconds, words), max_size=3).map(lambda events: tuple(sorted(events))),
    training=st.sampled_from(["completes", "crashes", "is killed", "dies"]),
    lasts=seconds,
    saves_in=st.one_of(st.none(), st.floats(min_value=0.5, max_value=60)),
    answers=st.lists(st.sampled_from(["ok", "late", "half", "none"]), max_size=6).map(tuple),
    requeues=st.lists(st.sampled_from(["ok", "unheard", "away", "refused"]), max_size=6).map(tuple),
    silent=st.one_of(st.just((0.0, 0.0)), st.tuples(seconds, seconds)),
    limit=st.one_of(st.none(), seconds),
)


@pytest.fixture(autouse=True)
def _no_slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")


@pytest.fixture
def fast_disk() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(dir="/dev/shm" if Path("/dev/shm").is_dir() else None))
    yield folder
    shutil.rmtree(folder)


def play(folder: Path, story: list[Life]) -> tuple[RunDirectory, list[World], RunStatus]:
    """Let a job have these starts, and further calm ones as long as it is queued again; where its run stands then."""
    run = create_run(SPEC, runs_dir=folder, via="sbatch", script="#!/bin/bash\n")
    worlds: list[World] = []
    for restart, life in enumerate([*story, *[Life()] * 8]):
        worlds.append(world := World(run, restart, life))
        try:
            live(world)
        except (RunAlive, RunEnded, RequeueFailed):
            pass
        except ClusterDDPError as error:
            raise AssertionError(f"the keeper cannot begin: {error}") from error
        taken_back, cancelled = world.happened("requeue by Slurm"), world.happened("scancel")
        world.queued |= taken_back is not None and (cancelled is None or cancelled > taken_back + 1)
        world.queued &= not world.left_queue
        if not world.queued or cancelled is not None:
            return run, worlds, describe(run, {})
    raise AssertionError("it is started again and again")


@FIRM
@given(st.lists(lives, min_size=1, max_size=3))
@example([Life(((1, "warning"), (2, "second start")), lasts=1, saves_in=0.5, silent=(1, 7))])
@example([Life(((10, "warning"), (12, "scancel")), answers=("none", "none", "none"), saves_in=3.0)])
@example([Life(((10, "kill -TERM"),), answers=("half",), saves_in=3.0)])
@example([Life(((30, "stop"),), training="crashes", lasts=10, requeues=("away",) * 4)])
@example([Life(((10, "second start"),), saves_in=2.0), Life()])
@example([Life(((50, "scancel"),), limit=20, silent=(45, 90), saves_in=3.0)])
@example([Life(((10, "warning"), (22, "scancel")), silent=(5, 90), requeues=("away",), saves_in=3.0)])
@example([Life(((10, "kill -TERM"), (40, "scancel")), limit=20, silent=(15, 90), requeues=("away",), saves_in=3.0)])
@example([Life(((1, "scancel"), (2, "preemption")), lasts=1, silent=(1, 2))])
@example([Life(((2, "second start"), (2, "time limit")), training="crashes", lasts=1, silent=(1, 3)), Life()])
def test_whatever_happens(fast_disk: Path, story: list[Life]) -> None:
    check(fast_disk, story)


@pytest.mark.chaos
@settings(FIRM, max_examples=2000, derandomize=False)
@given(st.lists(lives, min_size=1, max_size=3))
def test_whatever_else_happens(fast_disk: Path, story: list[Life]) -> None:
    check(fast_disk, story)


def check(fast_disk: Path, story: list[Life]) -> None:
    run, worlds, status = play(fast_disk, story)
    assert [fault for world in worlds for fault in world.faults] == []
    assert not status.state.open, "it would be waited for, and has no job"
    assert status.state.value == "COMPLETED" or status.reason
    keepers = run.events / f"{on_this_host('batch-77')}.jsonl"  # another start judges those cut off
    said = parse_lines(keepers.read_bytes()) if keepers.exists() else []
    requeued = {event["attempt"] for event in said if event["event"] == REQUEUED}
    queued = [world for world in worlds if world.queued or world.happened("requeue by Slurm") is not None]
    assert len(requeued) <= len(queued), "an event of what was not"
    shutil.rmtree(run.path)


ending = st.sampled_from(["warning", "time limit", "preemption", "kill -TERM", "TERM to the step", "requeue by Slurm"])


@FIRM
@given(
    st.lists(
        st.builds(
            Life,
            events=st.tuples(st.tuples(seconds, ending)),
            lasts=st.just(1000.0),
            saves_in=st.floats(min_value=0.5, max_value=20),
            answers=st.lists(st.sampled_from(["ok", "late"]), max_size=4).map(tuple),
            requeues=st.lists(st.sampled_from(["ok", "unheard"]), max_size=2).map(tuple),
        ),
        min_size=1,
        max_size=3,
    )
)
def test_no_requeue_that_is_wanted_is_lost(fast_disk: Path, story: list[Life]) -> None:
    run, worlds, status = play(fast_disk, story)
    assert (status.state.value, len(worlds)) == ("COMPLETED", len(story) + 1), status.reason
    shutil.rmtree(run.path)


@pytest.mark.parametrize("word", ["time limit", "preemption"])
@pytest.mark.parametrize("answers", [(), ("late",), ("none", "half", "late")])
def test_a_save_that_takes_too_long_is_not_waited_for(fast_disk: Path, word: str, answers: tuple[str, ...]) -> None:
    """Slurm kills after KillWait: the job is queued again 3 s before."""
    world = World(create_run(SPEC, runs_dir=fast_disk, via="sbatch", script=None), 0,
                  Life(((10, word),), lasts=1000, saves_in=None, answers=answers))  # fmt: skip
    assert live(world) is not None
    assert world.queued and 10 + KILL_WAIT - 3 <= world.now <= 10 + KILL_WAIT - 2


@pytest.mark.parametrize(
    ("life", "queued"),
    [
        (Life(((10, "time limit"),), limit=10, silent=(5, 28)), True),  # killed at 40 s, so a late answer will do
        (Life(((10, "warning"),), silent=(5, 500)), True),  # no SIGTERM has come, so nobody has cancelled it
        (Life(((10, "warning"), (30, "time limit")), limit=30, silent=(5, 50), requeues=("away",)), True),
        (Life(((10, "preemption"),), saves_in=2.0, latency=10.0), True),  # a busy site, within KillWait
        (Life(((10, "scancel"),), limit=5, silent=(5, 28)), False),
        (Life(((10, "scancel"),), limit=5, silent=(5, 500)), False),
        (Life(((10, "kill -TERM"), (60, "scancel")), silent=(20, 500), requeues=("away",)), False),
    ],
)
def test_a_sigterm_is_answered_with_a_requeue_only_when_slurm_has_explained_it(
    fast_disk: Path, life: Life, queued: bool
) -> None:
    """Its limit may have been changed since it was last heard, and then it is the owner's cancel that came."""
    world = World(create_run(SPEC, runs_dir=fast_disk, via="sbatch", script=None), 0, life)
    live(world)
    assert world.queued is queued and not world.faults


def test_a_requeue_in_vain_is_told_before_the_end_that_is_heard_of_while_it_is_tried(fast_disk: Path) -> None:
    life = Life(((10, "warning"), (69, "time limit")), requeues=("away",) * 30)
    run = create_run(SPEC, runs_dir=fast_disk, via="sbatch", script=None)
    with pytest.raises(RequeueFailed, match="Unable to contact"):
        live(World(run, 0, life))


def test_a_requeue_that_slurms_silence_prevents_is_told_after_the_end_too(fast_disk: Path) -> None:
    run = create_run(SPEC, runs_dir=fast_disk, via="sbatch", script=None)
    assert live(World(run, 0, Life(((10, "time limit"),), limit=10, silent=(5, 100)))) is None
    status = describe(run, {})
    assert status.state.value == "FAILED"
    assert "requeue failed: Slurm's controller does not answer. To continue: cluster-ddp resume" in str(status.reason)


@pytest.mark.parametrize("word", ["kill -USR2", "kill -QUIT", "kill -ALRM"])
def test_a_signal_that_is_not_the_warning_loses_no_requeue(fast_disk: Path, word: str) -> None:
    """`scancel --full --signal=USR2`, where the job asks for USR1."""
    states, worlds, status = play(fast_disk, [Life(((10, word),), lasts=1000, saves_in=3.0), Life(lasts=1)])
    assert (status.state.value, len(worlds)) == ("COMPLETED", 2), states


def test_what_follows_that_cannot_be_decided_fails_the_run_with_the_reason(fast_disk: Path) -> None:
    """A storage that went down may leave an empty file."""
    run = create_run(SPEC, runs_dir=fast_disk, via="sbatch", script=None)
    run.job_file.write_text("")
    live(World(run, 0, Life(((10, "warning"),), lasts=1000, saves_in=3.0)))
    status = describe(run, {})
    assert status.state.value == "FAILED"
    assert "job.yaml:1: the file is empty. To continue: cluster-ddp resume" in str(status.reason)


@pytest.mark.parametrize(("lasts", "queued"), [(20, True), (1000, False)])
def test_an_error_of_storage_that_passes_as_the_attempt_ends_loses_no_requeue(
    fast_disk: Path, monkeypatch: pytest.MonkeyPatch, lasts: float, queued: bool
) -> None:
    """As while an NFS server fails over. One that lasts would let the job fail in the same way again and again."""
    world = World(create_run(SPEC, runs_dir=fast_disk, via="sbatch", script=None), 0, Life(training="is killed"))

    def job_file(path: Path) -> JobSpec:
        if world.now < 100 + lasts:
            raise JobFileError("job.yaml cannot be read: Stale file handle") from OSError(errno.ESTALE, "stale")
        return load_resolved(path)

    monkeypatch.setattr(decision, "_load_resolved", lambda: job_file)
    live(world)
    assert world.queued is queued and not world.faults
    assert queued or describe(world.run, {}).state.value == "FAILED"


@pytest.mark.parametrize(
    ("word", "queued"),
    [("preemption", True), ("time limit", True), ("warning", True), ("kill -TERM", True), ("scancel", False)],
)
def test_a_job_that_is_ended_while_it_waits_for_room_to_begin_loses_no_requeue(
    fast_disk: Path, monkeypatch: pytest.MonkeyPatch, word: str, queued: bool
) -> None:
    """The keeper looked only for room, until Slurm killed it: LOST."""

    def full(*arguments: object, **named: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    run = create_run(SPEC, runs_dir=fast_disk, via="sbatch", script=None)
    monkeypatch.setattr(Storage, "mkdir", full)
    world = World(run, 0, Life(((40, word),)))
    kept = live(world)
    assert kept is not None and world.queued is queued and not world.faults
    assert world.now < 100


def test_storage_that_does_not_answer_as_the_attempt_ends_loses_no_requeue(
    fast_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def within(host: SimulatedHost, seconds: float, do: Callable[[], object], **_: object) -> object:
        return None if seconds == 60 else do()  # what is waited for longest is the decision

    monkeypatch.setattr(SimulatedHost, "within", within)
    world = World(create_run(SPEC, runs_dir=fast_disk, via="sbatch", script=None), 0, Life(training="is killed"))
    live(world)
    assert world.queued


@pytest.mark.parametrize(("word", "queued"), [("preemption", True), ("time limit", True), ("scancel", False)])
def test_a_job_that_is_ended_while_storage_holds_up_the_decision_loses_no_requeue(
    fast_disk: Path, monkeypatch: pytest.MonkeyPatch, word: str, queued: bool
) -> None:
    """The keeper heard of it only when it had been killed."""

    def within(host: SimulatedHost, seconds: float, do: Callable[[], object], *, unless: Any = None) -> object:
        if host.now() < 10:
            return do()
        until = host.now() + seconds
        while host.now() < until and not (unless and unless()):
            host.sleep(1)
        return None

    monkeypatch.setattr(SimulatedHost, "within", within)
    monkeypatch.setattr(SimulatedHost, "glance", lambda host, do: None if host.now() > 12 else do())
    run = create_run(SPEC, runs_dir=fast_disk, via="sbatch", script=None)
    world = World(run, 0, Life(((40, word),), training="is killed", lasts=10))
    with contextlib.suppress(ClusterDDPError):
        live(world)
    assert world.queued is queued and not world.faults


@pytest.mark.parametrize(("word", "queued"), [("preemption", True), ("time limit", True), ("scancel", False)])
def test_storage_that_blocks_before_the_job_is_ended_loses_no_requeue(
    fast_disk: Path, monkeypatch: pytest.MonkeyPatch, word: str, queued: bool
) -> None:
    """The keeper waited for it until Slurm killed it: LOST."""

    def given_up(host: SimulatedHost, do: Callable[[], object]) -> object:
        return None if host.now() >= 10 else do()

    def block(*arguments: object, **named: object) -> None:
        raise Killed

    monkeypatch.setattr(SimulatedHost, "glance", given_up)
    monkeypatch.setattr(SimulatedHost, "within", lambda host, seconds, do, **_: given_up(host, do))
    for module, name in ((stop_requests, "request_stop"), (end_of_job, "read_stop"), (keeper, "is_superseded")):
        monkeypatch.setattr(module, name, block)
    run = create_run(SPEC, runs_dir=fast_disk, via="sbatch", script=None)
    world = World(run, 0, Life(((10, "TERM to the step"), (10, word)), lasts=1000, saves_in=3.0))
    live(world)
    assert world.queued is queued and not world.faults


@pytest.mark.parametrize("training", ["is killed", "crashes"])
def test_a_step_that_has_ended_is_not_waited_for_until_the_time_limit_if_storage_hides_how(
    fast_disk: Path, monkeypatch: pytest.MonkeyPatch, training: str
) -> None:
    """Its nodes idled for as long as storage did not answer on the batch host."""

    def within(host: SimulatedHost, seconds: float, do: Callable[[], object], **_: object) -> object:
        if host.now() < 5:
            return do()
        host.sleep(seconds)
        return None

    monkeypatch.setattr(SimulatedHost, "within", within)
    monkeypatch.setattr(SimulatedHost, "glance", lambda host, do: within(host, 0.0, do))
    run = create_run(SPEC, runs_dir=fast_disk, via="sbatch", script=None)
    world = World(run, 0, Life(training=training, lasts=10))
    live(world)
    assert world.queued and not world.faults
    assert world.now < 120


@pytest.mark.parametrize("word", ["preemption", "time limit"])
def test_storage_that_blocks_once_training_has_saved_loses_no_requeue(
    fast_disk: Path, monkeypatch: pytest.MonkeyPatch, word: str
) -> None:
    """The keeper waited for it for longer than Slurm's grace."""

    seen: list[bool] = []

    def within(host: SimulatedHost, seconds: float, do: Callable[[], object], **_: object) -> object:
        if not any(seen):
            return do()
        host.sleep(seconds)
        return None

    has_ended = SimulatedStep.has_ended
    monkeypatch.setattr(SimulatedStep, "has_ended", lambda step: seen.append(has_ended(step)) or seen[-1])
    monkeypatch.setattr(SimulatedHost, "within", within)
    monkeypatch.setattr(SimulatedHost, "glance", lambda host, do: within(host, 0.0, do))
    run = create_run(SPEC, runs_dir=fast_disk, via="sbatch", script=None)
    world = World(run, 0, Life(((10, word),), lasts=1000, saves_in=3.0))
    live(world)
    assert world.queued and not world.faults


def test_what_came_while_storage_did_not_answer_is_heard_before_the_nodes_are_judged(
    fast_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node program that Slurm has ended with the job was blamed."""
    told: list[bool] = []
    monkeypatch.setattr(keeper, "record_failed_nodes", lambda *_, job_ends: told.append(job_ends))

    def has_ended(step: SimulatedStep) -> bool:
        hosts[0].sleep(max(0.0, 20.0 - hosts[0].now()))
        return True

    hosts: list[SimulatedHost] = []
    start = SimulatedHost.start_job_step

    def start_on(host: SimulatedHost, *of: Any, **named: Any) -> Any:
        hosts.append(host)
        return start(host, *of, **named)

    monkeypatch.setattr(SimulatedHost, "start_job_step", start_on)
    monkeypatch.setattr(SimulatedStep, "has_ended", has_ended)
    run = create_run(SPEC, runs_dir=fast_disk, via="sbatch", script=None)
    live(World(run, 0, Life(((10, "requeue by Slurm"),), lasts=1000)))
    assert told == [True]


def test_an_interrupt_is_a_persons_stop(fast_disk: Path) -> None:
    """`scancel --full --signal=INT`; the ranks have it, too."""
    _, worlds, status = play(fast_disk, [Life(((10, "kill -INT"),), lasts=1000, saves_in=3.0)])
    assert (status.state.value, len(worlds)) == ("STOPPED", 1)
    assert "SIGINT to the keeper" in str(status.reason)


def test_an_interrupt_is_a_persons_stop_even_if_storage_is_slow(
    fast_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The attempt ended before the keeper had asked for it again, and was requeued."""
    monkeypatch.setattr(SimulatedHost, "glance", lambda host, do: None if 5 < host.now() < 30 else do())
    life = Life(((10, "kill -INT"),), training="is killed", lasts=15, saves_in=None)
    _, worlds, status = play(fast_disk, [life])
    assert (status.state.value, len(worlds)) == ("STOPPED", 1)


@pytest.mark.parametrize("word", ["warning", "time limit", "preemption", "kill -TERM"])
def test_what_comes_once_the_attempt_is_over_is_not_why_it_has_ended(fast_disk: Path, word: str) -> None:
    life = Life(((40, word),), training="is killed", lasts=10, requeues=("away",) * 4)
    world = World(create_run(SPEC, runs_dir=fast_disk, via="sbatch", script=None), 0, life)
    run = world.run
    live(world)
    assert world.queued
    outcome = outcome_of(read_history(run), 0)
    assert (outcome.ending, outcome.stop_reason) == (Ending.FAILED, None)
    assert "ended by SIGKILL" in outcome.why


def test_a_node_that_fails_is_no_cancel_where_slurm_may_not_queue_the_job_again(fast_disk: Path) -> None:
    """With requeue.max_requeues 0, as for a chain, whose next job is to go on."""
    _, worlds, status = play(fast_disk, [Life(((10, "node down"),), lasts=1000, saves_in=3.0)])
    assert (status.state.value, len(worlds)) == ("FAILED", 1)
    assert "requeue failed" in str(status.reason)


def test_a_batch_host_that_loses_the_run_directory_is_left(fast_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It can judge nothing, and Slurm could not even open the job's output there."""
    run, left = create_run(SPEC, runs_dir=fast_disk, via="sbatch", script=None), list[str]()
    monkeypatch.setattr(SimulatedStep, "_end", lambda step: run.path.rename(fast_disk / "elsewhere"))
    monkeypatch.setattr(SimulatedAllocation, "has_enough_others", lambda allocation, bad: True)
    monkeypatch.setattr(SimulatedAllocation, "keep_from", lambda allocation, bad: bool(left.extend(bad) or left))
    world = World(run, 0, Life(lasts=10))
    kept = live(world)
    assert kept is not None and kept.follows == "start again" and world.queued
    assert left == [socket.gethostname()]


@pytest.mark.parametrize(("word", "queued"), [("preemption", True), ("time limit", True), ("scancel", False)])
def test_a_full_disk_that_takes_no_stop_file_loses_no_requeue(
    fast_disk: Path, monkeypatch: pytest.MonkeyPatch, word: str, queued: bool
) -> None:
    """The ranks have had their SIGTERM, and say no more than that; the keeper knows what it meant."""

    def full(*arguments: object, **named: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(stop_requests, "request_stop", full)
    life = Life(((10, "TERM to the step"), (10, word)), lasts=1000, saves_in=3.0)
    world = World(create_run(SPEC, runs_dir=fast_disk, via="sbatch", script=None), 0, life)
    live(world)
    assert world.queued is queued and not world.faults


def test_a_stop_for_which_there_is_no_room_is_asked_for_again(fast_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the warning: nothing else would tell training of the end before Slurm's SIGTERM."""
    asked, ask = list[float](), stop_requests.request_stop

    def full_for_a_while(*arguments: Any, **named: Any) -> Any:
        if world.now < 20:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        asked.append(world.now)
        return ask(*arguments, **named)

    monkeypatch.setattr(stop_requests, "request_stop", full_for_a_while)
    life = Life(((10, "warning"), (100, "time limit")), lasts=1000, saves_in=60.0)
    world = World(create_run(SPEC, runs_dir=fast_disk, via="sbatch", script=None), 0, life)
    live(world)
    assert world.queued and not world.faults
    assert len(asked) == 1 and asked[0] <= 30 and world.now < 100


def test_a_run_that_is_stopped_while_slurm_queues_it_again_leaves_the_queue(fast_disk: Path) -> None:
    _, worlds, status = play(fast_disk, [Life(((10, "requeue by Slurm"), (12, "stop")), saves_in=5.0)])
    assert (status.state.value, len(worlds)) == ("STOPPED", 1)


@pytest.mark.parametrize("silent", [(5, 12), (5, 150)])
def test_why_only_the_steps_were_told_to_end_is_waited_for(fast_disk: Path, silent: tuple[float, float]) -> None:
    """Slurm sends its SIGTERM to the steps when the grace of a preemption begins, and it may be slow to answer then."""
    _, worlds, status = play(fast_disk, [Life(((10, "TERM to the step"),), lasts=1000, silent=silent)])
    assert (status.state.value, len(worlds)) == ("COMPLETED", 2), status.reason


@pytest.mark.parametrize("word", ["scancel", "stop"])
def test_an_end_that_a_person_wants_is_not_waited_out_while_slurm_is_silent(fast_disk: Path, word: str) -> None:
    life = Life(((10, "TERM to the step"), (30, word)), lasts=1000, silent=(5, 50))
    _, worlds, status = play(fast_disk, [life])
    assert (status.state.value, len(worlds)) == ("CANCELLED" if word == "scancel" else "STOPPED", 1), status.reason


@pytest.mark.parametrize("word", ["scancel", "stop"])
@pytest.mark.parametrize("at", range(40, 75, 5))
def test_an_end_that_a_person_wants_is_not_waited_out_while_the_requeue_fails(
    fast_disk: Path, word: str, at: int
) -> None:
    life = Life(((at, word),), training="crashes", lasts=10, requeues=("away",) * 9)
    world = World(create_run(SPEC, runs_dir=fast_disk, via="sbatch", script=None), 0, life)
    kept = live(world)
    assert kept is not None and kept.follows == "end" and not world.queued
    assert world.now <= at + 9 + 1, "one call of scontrol, and a look"
