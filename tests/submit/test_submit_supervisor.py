"""The command that waits for the node programs of a local run says what they wait for."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from cluster_ddp.job import JobSpec
from cluster_ddp.submit import local

PATIENCE = 60.0


def test_a_node_program_that_is_stopped_is_told_with_what_continues_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command waits for it, with all of its output."""
    monkeypatch.setattr("cluster_ddp.submit.supervisor.POLL_SECONDS", 0.01)
    stopped = subprocess.Popen(["sh", "-c", "kill -STOP $$"])
    monkeypatch.setattr(local.Supervisor, "start_node", lambda *_: stopped)
    said: list[str] = []

    def follow(message: str) -> None:
        if "SIGSTOP" in message:
            said.append(message)
            stopped.send_signal(signal.SIGCONT)

    monkeypatch.setattr("cluster_ddp.submit.supervisor.say", follow)
    in_any_case = threading.Timer(PATIENCE, stopped.send_signal, [signal.SIGCONT])
    in_any_case.start()
    try:
        spec = JobSpec(name="x", script="x.py", runs_dir=str(tmp_path))
        local.start_local(local.plan_local(spec, gpus="none"), show=sys.stdout)
    finally:
        in_any_case.cancel()
    assert len(said) == 1 and said[0].endswith(f"kill -CONT {stopped.pid}")
