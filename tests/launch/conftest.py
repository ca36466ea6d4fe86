from __future__ import annotations

import os
import shutil
import signal
import socket
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from node_process import Node

from cluster_ddp.job import JobSpec
from cluster_ddp.launch.ports import free_port
from cluster_ddp.launch.processes import is_alive, kill_all
from cluster_ddp.launch.torchrun.command import torchrun_command
from cluster_ddp.run.attempt import begin_attempt
from cluster_ddp.run.directory import AttemptDirectory, RunDirectory
from cluster_ddp.run.runs import create_run

HERE = Path(__file__).parent


@pytest.fixture
def fresh(tmp_path: Path) -> RunDirectory:
    """A run that nothing has happened to."""
    job = JobSpec(name="a", task="cluster_ddp.tasks.digits:Digits")
    return create_run(job, runs_dir=tmp_path, via="sbatch", script="#!/bin/bash\n")


@pytest.fixture
def fast_disk() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(dir="/dev/shm" if Path("/dev/shm").is_dir() else None))
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def no_slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")


@pytest.fixture
def start_node(tmp_path: Path) -> Iterator[Callable[..., Node]]:
    """Start a node program whose ranks run a script of this folder; `light`: one rank, with an agent without torch."""
    started: list[Node] = []
    taken = socket.create_server(("", 0))

    def start(
        script: str,
        *args: str,
        procs: int = 2,
        nodes: int = 1,
        light: bool = False,
        busy_port: bool = False,
        prepare: Callable[[AttemptDirectory], object] = lambda _: None,
        **sections: Any,
    ) -> Node:
        procs = 1 if light else procs
        launch = {"procs_per_node": procs, **sections.pop("launch", {})}
        spec = JobSpec(name="launched", script=str(HERE / script), args=args, launch=launch, **sections)
        run = create_run(spec, runs_dir=tmp_path / "runs", via="launch", script=None)
        attempt = begin_attempt(run, host="here", pid=os.getpid(), nodes=nodes, procs=procs)
        prepare(attempt)
        command = torchrun_command(
            spec,
            run_directory=str(run.path),
            nodes=nodes,
            procs=procs,
            rdzv_id=run.id,
            endpoint=f"127.0.0.1:{taken.getsockname()[1] if busy_port else free_port()}",
        )
        started.append(Node(attempt, procs, nodes, command, light=light))
        return started[-1]

    yield start
    taken.close()
    for node in started:
        heartbeat = node.heartbeat()
        if is_alive(node.pid):
            os.kill(node.pid, signal.SIGKILL)
        node.process.wait()
        if heartbeat is not None:
            kill_all(heartbeat)
            heartbeat.unlink(missing_ok=True)
