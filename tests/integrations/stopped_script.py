"""A script with no line of this package, stopped as the launcher stops it."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from own_loops import new_run
from train_ranks import start_program
from waiting import wait_for

from cluster_ddp.launch.node.forced_end import ForcedEnd
from cluster_ddp.launch.node.heartbeat import HeartbeatFile
from cluster_ddp.launch.node.ranks import LocalRanks, Rank
from cluster_ddp.launch.node.stopping import Stopping
from cluster_ddp.run.events import EventWriter
from cluster_ddp.run.stopfile import PERSON

_PATIENCE = 60.0


def stop_and_resume(folder: Path, text: str) -> list[str]:
    """What both attempts of a script printed: stopped by a person once it has printed "trains", and resumed.

    Raises AssertionError when it does not end in time with status 0, or would be killed.
    """
    program = folder / "plain.py"
    program.write_text(text)
    run, log = new_run(folder), folder / "log"
    attempt = run.attempt(0)
    attempt.path.mkdir(parents=True)
    process = _start(folder, log, program)
    wait_for(lambda: "trains" in log.read_text())
    rank = Rank(process.pid, 0, 0, None, None, None)
    ranks = cast(LocalRanks, SimpleNamespace(living=[rank], unregistered=lambda: [rank]))
    warned: list[str] = []
    heartbeat = HeartbeatFile.create(folder / "heartbeat", slots=1)
    stopping = Stopping(
        attempt, heartbeat, EventWriter(run, "node-0"), node_rank=0, warning=signal.SIGUSR1, share=False
    )
    ending = ForcedEnd(ranks, stopping, attempt, trains_a_task=False, join_timeout=600.0, warn=warned.append)
    stopping.ask(PERSON)
    wait_for(lambda: ending.after_stop() is not None or not process.is_alive())
    heartbeat.close()
    for ended in process, _start(folder, log, program, "--resume"):
        ended.join(_PATIENCE)
        ended.kill()
        assert ended.exitcode == 0, log.read_text()
    assert ending.has_stopped_script and not warned
    return log.read_text().splitlines()


def _start(folder: Path, log: Path, program: Path, *arguments: str) -> Any:
    log.touch()
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PLACE": str(folder)}
    return start_program(environment, log, program, *arguments)
