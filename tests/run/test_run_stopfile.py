from __future__ import annotations

import json
import time

import pytest
from run_builders import begin

from cluster_ddp.run import stopfile
from cluster_ddp.run.directory import RunDirectory
from cluster_ddp.run.ending import outcome_of
from cluster_ddp.run.history import read_history
from cluster_ddp.run.stopfile import StopRequest, read_stop, request_stop


def test_a_request_is_read_as_it_was_made(run: RunDirectory) -> None:
    attempt = begin(run)
    assert read_stop(attempt) is None
    request_stop(attempt, reason="time-limit", grace=120.0, by="job.sbatch")
    found = read_stop(attempt)
    assert found is not None
    assert (found.reason, found.level, found.grace, found.by) == ("time-limit", 1, 120.0, "job.sbatch")
    assert abs(found.time - time.time()) < 60
    assert attempt.stop_file.name == "stop"


@pytest.mark.parametrize(
    ("first", "second", "reason", "level"),
    [
        (("time-limit", 1), ("preemption", 2), "preemption", 2),
        (("preemption", 2), ("time-limit", 1), "time-limit", 2),
        (("person", 1), ("terminated", 2), "person", 2),
        (("person", 1), ("cancel", 2), "cancel", 2),
        (("cancel", 2), ("terminated", 1), "cancel", 2),
        (("terminated", 1), ("cancel", 2), "cancel", 2),
    ],
)
def test_a_request_is_only_ever_sharpened(
    run: RunDirectory, first: tuple[str, int], second: tuple[str, int], reason: str, level: int
) -> None:
    attempt = begin(run)
    request_stop(attempt, reason=first[0], level=first[1], by="a")
    request_stop(attempt, reason=second[0], level=second[1], by="b")
    found = read_stop(attempt)
    assert found is not None and (found.reason, found.level) == (reason, level)


@pytest.mark.parametrize("content", ["", "\n", "please", "1"])
def test_a_file_made_by_hand_is_a_persons_wish(run: RunDirectory, content: str) -> None:
    attempt = begin(run)
    attempt.stop_file.write_text(content)
    found = read_stop(attempt)
    assert found is not None and (found.reason, found.level) == ("person", 1)


@pytest.mark.parametrize("reason", ["person", "cancel"])
def test_a_persons_wish_holds_whoever_writes_in_the_same_moment(
    run: RunDirectory, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node that finds a hang looks at the file before the person's is there, and writes its own after it."""
    attempt = begin(run)
    with monkeypatch.context() as before:
        before.setattr(stopfile, "read_stop", lambda attempt: None)
        request_stop(attempt, reason=reason, by="root@login")
        request_stop(attempt, reason="hang", level=2, by="node 0 (node1)")
    found = read_stop(attempt)
    assert found is not None
    assert (found.reason, found.by, found.level) == (reason, "root@login", 2)
    assert outcome_of(read_history(run), attempt.number).ending.final


def test_a_file_that_is_half_written_is_read_at_the_next_look(run: RunDirectory) -> None:
    attempt = begin(run)
    attempt.stop_file.write_text('{"reason": "preemp')
    assert read_stop(attempt) is None


def test_the_batch_scripts_own_words_are_understood(run: RunDirectory) -> None:
    attempt = begin(run)
    attempt.stop_file.write_text('{"reason": "preemption", "level": 1, "grace": null, "by": "x", "time": 1700000000}')
    assert read_stop(attempt) == StopRequest("preemption", 1, None, "x", 1700000000.0)
    attempt.stop_file.write_text(json.dumps({"reason": "no such reason", "level": 9}))
    assert read_stop(attempt) == StopRequest("person", 2)
    attempt.stop_file.write_text(json.dumps({"reason": "preemption", "grace": 10**400, "time": float("nan")}))
    assert read_stop(attempt) == StopRequest("preemption", 1)


def test_a_reason_that_does_not_exist_is_refused(run: RunDirectory) -> None:
    with pytest.raises(ValueError, match="time-limit"):
        request_stop(begin(run), reason="boredom", by="x")
