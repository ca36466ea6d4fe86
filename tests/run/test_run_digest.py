"""The digest of ended attempts: small, and whatever is asked of a run is answered the same with it."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from run_builders import begin_dead

from cluster_ddp.launch.keeper.bad_hosts import bad_hosts
from cluster_ddp.run.attempt_record import end_attempt
from cluster_ddp.run.causes import failures_of, root_failure
from cluster_ddp.run.condense import condense, write_digest
from cluster_ddp.run.directory import RunDirectory
from cluster_ddp.run.ending import outcome_of
from cluster_ddp.run.events import read_events
from cluster_ddp.run.history import read_history
from cluster_ddp.run.requeue.decision import decide
from cluster_ddp.run.status.report import describe

NODES = 40
Say = Callable[..., None]


def train(run: RunDirectory, say: Say, number: int, *, failing: bool = False) -> None:
    """An attempt of many nodes that is preempted, or of which every rank fails."""
    attempt, at = begin_dead(run, nodes=NODES), 1_000.0 * number
    for node in range(NODES):
        say("node-started", number, at=at + node / 100, writer=f"node-{node}", node=node, host=f"n{node}")
    say("resumed" if number else "started", number, at=at + 1, step=10 * number, total_steps=1_000, world_size=NODES)
    say("checkpoint", number, at=at + 5, step=10 * number + 10, samples=7, seconds=1.0)
    for node in range(NODES):
        about: dict[str, Any] = {"writer": f"node-{node}", "node": node, "host": f"n{node}", "step": 10 * number + 12}
        say("warning", number, at=at + 6, rank=node, message="BatchNorm stays", **about)
        if failing:
            error = "Traceback\n  File x\nValueError: it" if node == 30 else "RuntimeError: Connection closed by peer"
            say("rank-failed", number, at=at + 7 + (40 - node) / 100, rank=node, error=error, **about)
        else:
            say("stop-requested", number, at=at + 8, reason="preemption", grace=30.0, by="the keeper", **about)
        if node != 3:
            outcome = "failed" if failing else "stopped"
            say("node-finished", number, at=at + 9 + node / 100, outcome=outcome, **about)
    if not failing:
        say("stopped", number, at=at + 8.5, step=10 * number + 12, reason="preemption")
    say("requeued", number, at=at + 10, reason="stopped: preemption")
    end_attempt(attempt)


def answers(run: RunDirectory) -> list[Any]:
    """What others ask of a run."""
    history = read_history(run)
    last = run.attempt(history.attempts[-1].number)
    found: list[Any] = [describe(run, {}).to_json(), bad_hosts(history, 9), decide(run, last)]
    for record in history.attempts:
        failures = failures_of(history, record.number)
        found += [outcome_of(history, record.number), root_failure(failures) if failures else None]
        found.append(history.attempts_without_progress(record.number))
        ended = {event["node"] for event in history.of_attempt(record.number, "node-finished")}
        started = {event["node"] for event in history.of_attempt(record.number, "node-started")}
        found.append(3 in started - ended)
    return found


def test_the_same_is_known_of_a_run_with_and_without_its_digest(run: RunDirectory, say: Say) -> None:
    for number, failing in enumerate((False, True, True, False)):
        train(run, say, number, failing=failing)
    before, count = answers(run), len(read_events(run))
    write_digest(run)
    assert answers(run) == before
    assert len(read_events(run)) < count / 3
    size = run.digest_file.stat().st_size
    write_digest(run)  # what is condensed already stays
    assert run.digest_file.stat().st_size == size
    train(run, say, 4)  # not in it
    later = answers(run)
    run.digest_file.unlink()
    assert answers(run) == later


def test_what_is_appended_to_an_older_attempt_later_is_not_lost(run: RunDirectory, say: Say) -> None:
    train(run, say, 0)
    write_digest(run)
    say("node-finished", 0, writer="node-3", node=3, host="n3", outcome="superseded")
    assert [event["outcome"] for _, event in read_history(run).ran_on()] == ["superseded"]
    write_digest(run)
    assert len(read_history(run).ran_on()) == 1


def test_nothing_of_an_attempt_that_goes_on_is_left_out(run: RunDirectory, say: Say) -> None:
    train(run, say, 0)
    events = read_events(run)
    assert list(condense(events, set())) == events


@pytest.mark.parametrize("damage", ["shorter", "gone", "other", "torn", "strange"])
def test_a_digest_that_does_not_fit_the_files_is_passed_over(run: RunDirectory, say: Say, damage: str) -> None:
    train(run, say, 0)
    write_digest(run)
    file = run.events / "node-7.jsonl"
    if damage == "shorter":
        file.write_text("")
    elif damage == "gone":
        file.unlink()
    elif damage == "other":
        file.write_bytes(b"x" * (file.stat().st_size + 5))
    elif damage == "torn":
        run.digest_file.write_bytes(run.digest_file.read_bytes()[:-50])
    else:
        run.digest_file.write_text(json.dumps({"format": 1, "events": [3], "places": {"a": -1}}))
    found = read_events(run)
    run.digest_file.unlink()
    assert found == read_events(run)


def test_a_line_without_an_end_is_counted_once(run: RunDirectory, say: Say) -> None:
    say("submitted")
    with (run.events / "w.jsonl").open("a") as file:
        file.write('{"time": 5.0, "event": "hang", "attempt": 0}')
    write_digest(run)
    assert [event["event"] for event in read_events(run)].count("hang") == 1
    with (run.events / "w.jsonl").open("a") as file:
        file.write("\n")
    assert [event["event"] for event in read_events(run)].count("hang") == 1
