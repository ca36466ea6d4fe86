"""Of the time since a run was made: what of it trained, what was lost, what was spent in the queue."""

from __future__ import annotations

import json
import time
from collections.abc import Callable

import pytest
from run_builders import begin, begin_dead, slurm_job

from cluster_ddp.run.directory import RunDirectory
from cluster_ddp.run.events import login_writer
from cluster_ddp.run.status.report import RunStatus, describe

Say = Callable[..., None]


def seconds(status: RunStatus) -> tuple[float, float, float]:
    found = status.goodput
    return round(found.productive_seconds), round(found.lost_seconds), round(found.waiting_seconds)


def test_goodput_counts_start_up_and_work_done_twice_as_lost_and_the_queue_as_waiting(
    run: RunDirectory, say: Say
) -> None:
    origin = time.time() - 10_000
    spans = (100.0, 400.0, 1000.0)  # each attempt begun so long after the run was made
    record = json.loads(run.record_file.read_text())
    run.record_file.write_text(json.dumps({**record, "created": origin}))
    paths = [begin_dead(run).record_file for _ in spans]
    for path, begun in zip(paths, spans, strict=True):
        path.write_text(json.dumps({**json.loads(path.read_text()), "begun": origin + begun, "ended": None}))
    (run.events / f"{login_writer()}.jsonl").unlink()  # what beginning them just now said about those before
    # Preempted: 20 s of start-up, 80 s of training, saved to the last step.
    say("started", 0, at=120, step=0)
    say("stopped", 0, at=200, step=80, reason="preemption")
    # Killed: 30 s of start-up, 100 s until the last checkpoint, 70 s of work lost.
    say("resumed", 1, at=430, step=80)
    say("checkpoint", 1, at=530, step=180)
    run.metrics_file.write_text(json.dumps({"step": 250, "attempt": 1, "time": origin + 600}) + "\n")
    # A rank was restarted inside the allocation: 10 s start-up, 40 s kept, 15 s lost, 50 s kept, 5 s to tear down.
    say("resumed", 2, at=1010, step=180)
    say("checkpoint", 2, at=1050, step=220)
    say("resumed", 2, at=1065, step=220)
    say("completed", 2, at=1115, step=300)
    say("node-finished", 2, at=1120, node=0)
    found = describe(run, {})
    assert seconds(found) == (80 + 100 + 90, 20 + 100 + 30, 100 + 200 + 400)
    assert found.goodput.ratio == pytest.approx(270 / 420, abs=1e-3)


def test_training_that_is_still_going_on_is_not_lost_yet(
    run: RunDirectory, say: Say, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = time.time()
    attempt = begin(run)
    path = attempt.record_file
    path.write_text(json.dumps({**json.loads(path.read_text()), "begun": now - 100}))
    say("started", 0, step=0)
    line = json.loads((run.events / "w.jsonl").read_text())
    (run.events / "w.jsonl").write_text(json.dumps({**line, "time": now - 90}) + "\n")
    monkeypatch.setattr(time, "time", lambda: now)
    assert seconds(describe(run, {}))[:2] == (90, 10)


def test_the_setup_lines_of_the_next_start_are_no_training(run: RunDirectory, say: Say) -> None:
    """Slurm runs the job again already, as the next of a chain or after a requeue, but the attempt has not begun."""
    origin = time.time() - 1000
    path = begin_dead(run, slurm_job_id="7").record_file
    path.write_text(json.dumps({**json.loads(path.read_text()), "begun": origin, "ended": origin + 60}))
    say("started", 0, step=0)
    say("stopped", 0, step=50, reason="time-limit")
    events = [json.loads(line) for line in (run.events / "w.jsonl").read_text().splitlines()]
    lines = [json.dumps({**event, "time": origin + after}) for event, after in zip(events, (10, 60), strict=True)]
    (run.events / "w.jsonl").write_text("\n".join(lines) + "\n")
    found = describe(run, {"7": slurm_job("RUNNING")})
    assert found.state == "RUNNING" and seconds(found)[:2] == (50, 10)
