"""How long an agent is left to wait for the others when its own ranks have ended."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from cluster_ddp.launch.program import NodeProgram


@pytest.mark.parametrize(("reason", "ends_after"), [("preemption", 10.0), ("agent-lost", 1.0)])
def test_an_agent_waits_for_others_but_not_for_one_that_is_gone(
    monkeypatch: pytest.MonkeyPatch, reason: str, ends_after: float
) -> None:
    ended: list[str] = []
    program = object.__new__(NodeProgram)
    parts = {
        "_ranks": SimpleNamespace(seen={7: "a rank"}, all_done=lambda: True),
        "_stopping": SimpleNamespace(reason=reason, waited=lambda: 0.0),
        "_alone_since": None,
        "_end": ended.append,
    }
    for name, part in parts.items():
        setattr(program, name, part)
    for seconds, outcome in ((0.0, []), (ends_after - 0.1, []), (ends_after + 0.1, ["stopped"])):
        monkeypatch.setattr("cluster_ddp.launch.program.time.monotonic", lambda now=1000.0 + seconds: now)
        program._stop_agent()
        assert ended == outcome
