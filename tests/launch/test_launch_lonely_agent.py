"""How long an agent is left to wait for the others when its own ranks have ended."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from cluster_ddp.launch.program import NodeProgram
from cluster_ddp.run.directory import RunDirectory
from cluster_ddp.run.events import COMPLETED, EventWriter


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    """A run that has no events yet."""
    run = RunDirectory(tmp_path)
    run.events.mkdir()
    return run


def watched(
    monkeypatch: pytest.MonkeyPatch, run: RunDirectory, *, reason: str | None, done: bool
) -> Callable[[float], list[str]]:
    """A node program whose ranks have ended at second 0; called with the second of the next look, gives its end."""
    ended: list[str] = []
    program = object.__new__(NodeProgram)
    parts = {
        "_ranks": SimpleNamespace(seen={7: "a rank"}, living=[], all_done=lambda: done),
        "_stopping": SimpleNamespace(reason=reason, waited=lambda: 0.0, tell_others=lambda: ended.append("told")),
        "_attempt": run.attempt(0),
        "_alone_since": None,
        "_end": ended.append,
    }
    for name, part in parts.items():
        setattr(program, name, part)

    def look(seconds: float) -> list[str]:
        monkeypatch.setattr("cluster_ddp.launch.program.time.monotonic", lambda: 1000.0 + seconds)
        program._note_whether_alone()
        if reason is None:
            program._leave_completed()
        else:
            program._stop_agent()
        return ended

    look(0.0)
    return look


@pytest.mark.parametrize(
    ("reason", "done", "patience"),
    [
        ("preemption", True, 10.0),
        ("agent-lost", True, 1.0),
        ("agent-lost", False, 10.0),
        ("person", False, 10.0),  # ranks were killed, and the agent waits for the others to restart them
    ],
)
def test_an_agent_waits_for_others_but_not_for_ever(
    monkeypatch: pytest.MonkeyPatch, run: RunDirectory, reason: str, done: bool, patience: float
) -> None:
    look = watched(monkeypatch, run, reason=reason, done=done)
    assert look(patience - 0.1) == []
    assert look(patience + 0.1) == ["told", "stopped"]


@pytest.mark.parametrize("done", [True, False])
def test_a_run_that_is_complete_does_not_hold_its_machines(
    monkeypatch: pytest.MonkeyPatch, run: RunDirectory, done: bool
) -> None:
    """A rank may be killed after all is saved: its agent then waits to restart it, the others for that one to end."""
    look = watched(monkeypatch, run, reason=None, done=done)
    if not done:
        assert look(1000.0) == []  # it may be restarted
        EventWriter(run, "rank-0").write(COMPLETED, attempt=0, step=5)
    else:
        assert look(59.0) == []
    assert look(1001.0) == ["done"]
