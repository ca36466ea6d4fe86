"""A node program as a child of the test, and what can be seen of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from light_agent import LIGHT_AGENT
from waiting import wait_for

from cluster_ddp.launch.processes import Process, marked_processes
from cluster_ddp.run.directory import AttemptDirectory
from cluster_ddp.run.events import read_events
from cluster_ddp.run.node_log import parse_line

PROJECT = Path(__file__).parents[2]
PATIENCE = 120.0


class Node:
    """A node program that runs, and what its ranks say."""

    def __init__(
        self, attempt: AttemptDirectory, procs: int, nodes: int, command: list[str], *, light: bool = False
    ) -> None:
        self.attempt = attempt
        self.procs = procs
        self.command = command
        environment = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
        path = LIGHT_AGENT if light else str(PROJECT)
        environment |= {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "CLUSTER_DDP_LOCAL_ADDR": "127.0.0.1"}
        node = [sys.executable, "-m", "cluster_ddp.launch.node", f"--run={attempt.run.path}", "--attempt=0", "--"]
        self.process = subprocess.Popen(
            [*node, *command],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    @property
    def pid(self) -> int:
        return self.process.pid

    def heartbeat(self) -> Path | None:
        """The heartbeat file's path, from the agent's environment."""
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    variables = (entry / "environ").read_bytes().split(b"\0")
                except OSError:
                    continue
                if f"CLUSTER_DDP_RUN={self.attempt.run.path}".encode() in variables:
                    found = [line for line in variables if line.startswith(b"CLUSTER_DDP_HEARTBEAT=")]
                    return Path(found[0].decode().partition("=")[2]) if found else None
        return None

    def tree(self) -> list[Process]:
        """The agent, the ranks, and all that ranks have started."""
        heartbeat = self.heartbeat()
        return marked_processes(heartbeat) if heartbeat else []

    def agent(self) -> int:
        return next(process.pid for process in self.tree() if "RANK" not in process.environment)

    def rank(self, rank: int) -> int:
        leaders = [process for process in self.tree() if process.leads_session]
        return next(process.pid for process in leaders if process.environment.get("RANK") == str(rank))

    def reaper(self) -> int:
        """The child of the node program that cleans up after it."""
        (pid,) = (
            int(pid)
            for children in Path(f"/proc/{self.pid}/task").glob("*/children")
            for pid in children.read_text().split()
            if b"cluster_ddp.launch.node.reaper" in Path(f"/proc/{pid}/cmdline").read_bytes()
        )
        return pid

    def logs(self) -> str:
        """What the ranks have printed on standard output."""
        files = [self.attempt.log_file(node) for node in range(9)]
        lines = [parse_line(line) for file in files if file.exists() for line in file.read_text().splitlines()]
        return "".join(f"{line.text}\n" for line in lines if line.rank is not None and not line.is_error)

    def wait_for(self, text: str, count: int | None = None) -> None:
        """Wait until all ranks (or `count` of them) have printed a text."""
        wait_for(lambda: self.logs().count(text) >= (count or self.procs), f"{text!r} in the logs")

    def finish(self, seconds: float = PATIENCE) -> tuple[int, str, str]:
        """Wait for the end: exit status, standard output and error."""
        out, err = self.process.communicate(timeout=seconds)
        return self.process.returncode, out, err

    def events(self, name: str) -> list[dict[str, Any]]:
        return [event for event in read_events(self.attempt.run) if event["event"] == name]

    def ended_as(self) -> str:
        (event,) = self.events("node-finished")
        return str(event["outcome"])

    def report(self) -> dict[str, Any]:
        value = json.loads(self.attempt.report_file(0).read_text())
        assert isinstance(value, dict)
        return value
