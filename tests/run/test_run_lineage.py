"""Two attempts of one run alive at once: what the older one tells beyond the newer one's place is not the run's."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from run_builders import begin_dead

from cluster_ddp.launch.keeper.bad_hosts import bad_hosts
from cluster_ddp.run.attempt_record import AttemptRecord, list_attempts
from cluster_ddp.run.directory import RunDirectory
from cluster_ddp.run.history import read_history
from cluster_ddp.run.lineage import Lineage, Origin, read_lineage, record_origin
from cluster_ddp.run.liveness import identify
from cluster_ddp.run.run_state import RunState
from cluster_ddp.run.status.report import describe
from cluster_ddp.run.storage import Storage

Say = Callable[..., None]


def log(run: RunDirectory, attempt: int, step: int, **values: float) -> None:
    row = {"step": step, "samples": 8 * step, "epoch": 0, "attempt": attempt, "time": time.time(), **values}
    with run.metrics_file.open("a") as file:
        file.write(json.dumps(row) + "\n")


@pytest.fixture
def overtaken(run: RunDirectory, say: Say) -> RunDirectory:
    """Attempt 1 continues from step 20, while attempt 0 trains to the end. The newer one's clock is an hour behind."""
    begin_dead(run, slurm_job_id="7")
    record_origin(run.attempt(0), Origin(None), Storage())
    say("started", 0, at=5000, step=0, total_steps=50, training="lr 1")
    for step in range(10, 51, 10):
        say("checkpoint", 0, at=5000 + step, step=step, samples=8 * step)
        log(run, 0, step, **{"train/loss": 1.0, "val/accuracy": step / 100})
    say("completed", 0, at=5060, step=50)
    # Not by begin_attempt, which would find the run complete: it began before that.
    run.attempt(1).path.mkdir()
    record = AttemptRecord(1, time.time(), identify(os.getpid()), "7", 1, 1, 2)
    run.attempt(1).record_file.write_text(json.dumps(record.to_json()))
    record_origin(run.attempt(1), Origin(20, "digest"), Storage())
    say("resumed", 1, at=1000, step=20, total_steps=80, training="lr 2")
    return run


def test_status_is_that_of_the_newer_attempt(overtaken: RunDirectory, say: Say) -> None:
    status = describe(overtaken, None)
    assert (status.state, status.step, status.samples, status.total_steps) == (RunState.RUNNING, 20, 160, 80)
    assert (status.metrics["val/accuracy"], status.training) == (0.2, "lr 2")
    log(overtaken, 1, 25, **{"train/loss": 0.5})
    log(overtaken, 0, 50, **{"val/accuracy": 0.99})  # and it goes on
    status = describe(overtaken, None)
    assert (status.step, status.metrics) == (25, {"train/loss": 0.5, "val/accuracy": 0.2})
    say("completed", 1, at=1100, step=80)
    assert describe(overtaken, None).state is RunState.COMPLETED


def test_what_does_not_count_is_no_progress(overtaken: RunDirectory, say: Say) -> None:
    assert read_history(overtaken).attempts_without_progress(1) == 1
    say("checkpoint", 1, at=1050, step=30)
    assert read_history(overtaken).attempts_without_progress(1) == 0


def test_node_that_ran_on_is_named_and_left(overtaken: RunDirectory, say: Say) -> None:
    assert bad_hosts(read_history(overtaken), 1) == []
    say("node-finished", 0, node=0, host="hn1.cluster", outcome="superseded")
    (told,) = describe(overtaken, None).warnings
    assert told.startswith("node hn1.cluster still ran attempt 0 until 20")
    assert told.endswith(", cut from the controller")
    assert bad_hosts(read_history(overtaken), 1) == ["hn1"]


def test_attempt_that_has_not_begun_to_train_decides_nothing(overtaken: RunDirectory) -> None:
    overtaken.attempt(1).origin_file.unlink()
    assert describe(overtaken, None).metrics["val/accuracy"] == 0.5
    overtaken.attempt(1).origin_file.write_text('{"step": ')  # nor does a record that is torn
    assert read_lineage(overtaken).counts(0, 50)
    overtaken.attempt(1).origin_file.write_text('{"step": -3}')
    assert read_lineage(overtaken).counts(0, 50)


def test_run_of_an_older_version_is_read_as_before(run: RunDirectory, say: Say) -> None:
    begin_dead(run)
    log(run, 0, 40, **{"train/loss": 1.0})
    begin_dead(run, slurm_job_id="8")
    log(run, 1, 30, **{"train/loss": 0.5})
    status = describe(run, {})
    assert (status.step, status.metrics) == (30, {"train/loss": 0.5})
    assert [attempt.number for attempt in list_attempts(run)] == [0, 1]
    assert read_lineage(run).unsigned == 1


places = st.dictionaries(st.integers(0, 6), st.one_of(st.none(), st.integers(0, 30)), max_size=6)


@given(places, st.integers(0, 6), st.integers(0, 3), st.one_of(st.none(), st.integers(0, 30)))
def test_what_does_not_count_never_counts_again(
    origins: dict[int, int | None], number: int, later: int, place: int | None
) -> None:
    """Whatever attempt records its place later, or goes back further."""
    before = Lineage({attempt: Origin(step) for attempt, step in origins.items()})
    moved = Origin(place)
    if number in origins and before.origins[number].place <= moved.place:
        moved = before.origins[number]
    after = Lineage({**before.origins, number: moved})
    for attempt in range(8):
        for step in range(32):
            assert before.counts(attempt, step) or not after.counts(attempt, step)
            assert not before.counts(attempt, step) or before.counts(attempt, max(0, step - 1)), "a chain has no holes"
            assert not before.counts(attempt, step) or before.counts(attempt + 1, step), "an older one outlives a newer"
