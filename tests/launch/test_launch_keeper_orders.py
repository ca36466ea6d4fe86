"""The keeper under every order of events: signals, deaths, stops, and answers of Slurm that are late, torn or missing.

Whatever comes: never two attempts that count, never a requeue after a cancel or a stop, never an end without a reason,
always an end; and where Slurm answers, no requeue that is wanted is lost.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from simulated_job import live
from simulated_world import KILL_WAIT, KILLS, Life, World
from story import SPEC, play

from cluster_ddp.launch.keeper.requeueing import RequeueFailed
from cluster_ddp.run.ending import Ending, outcome_of
from cluster_ddp.run.events import REQUEUED, on_this_host
from cluster_ddp.run.history import read_history
from cluster_ddp.run.reading import parse_lines
from cluster_ddp.run.runs import create_run
from cluster_ddp.run.status.report import describe

pytestmark = pytest.mark.usefixtures("no_slurm")
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
        (Life(((10, "warning"), (40, "time limit")), limit=40, saves_in=2.0, latency=40.0), True),  # each call
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


def test_an_interrupt_is_a_persons_stop(fast_disk: Path) -> None:
    """`scancel --full --signal=INT`; the ranks have it, too."""
    _, worlds, status = play(fast_disk, [Life(((10, "kill -INT"),), lasts=1000, saves_in=3.0)])
    assert (status.state.value, len(worlds)) == ("STOPPED", 1)
    assert "SIGINT to the keeper" in str(status.reason)


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
    assert kept is not None and kept.job_action == "end" and not world.queued
    assert world.now <= at + 9 + 1, "one call of scontrol, and a look"
