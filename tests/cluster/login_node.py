"""What a person can do on the login node of the tests' cluster: Slurm's commands and ours, and waiting for jobs."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

# The states of a job that has ended. It may still be queued again.
OVER = frozenset(
    {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "OUT_OF_MEMORY", "BOOT_FAIL"}
)


class LoginNode(ABC):
    """Commands with the environment that a person's shell would have there.

    Attributes
    ----------
    env
        That environment.
    accounting
        Whether preemption goes by QOS, not by partition.
    """

    env: dict[str, str]
    accounting: bool

    @abstractmethod
    def logs(self, lines: int = 30) -> str:
        """The end of each daemon's log."""

    # -- Slurm's commands ----------------------------------------------------------------------------------------

    def run(
        self, *command: str, check: bool = True, timeout: float = 60, cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
    ) -> str:  # fmt: skip
        """Run a command as on the login node; returns its standard output, or raises with its standard error."""
        done = self.call(*command, timeout=timeout, cwd=cwd, env=env)
        if check and done.returncode:
            raise RuntimeError(f"{' '.join(command)} gave {done.returncode}\n{done.stdout}\n{done.stderr}")
        return done.stdout

    def call(
        self, *command: str, timeout: float = 60, cwd: Path | None = None, env: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Like `run`, but whatever the exit status, with all the outcome."""
        env = {**self.env, **(env or {})}
        return subprocess.run(command, capture_output=True, text=True, timeout=timeout, cwd=cwd, check=False, env=env)

    def cli(
        self, *arguments: str, check: bool = True, timeout: float = 60, cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
    ) -> subprocess.CompletedProcess[str]:  # fmt: skip
        """Run ``cluster-ddp`` on the login node."""
        done = self.call(sys.executable, "-m", "cluster_ddp", *arguments, timeout=timeout, cwd=cwd, env=env)
        if check and done.returncode:
            call = f"cluster-ddp {' '.join(arguments)}"
            raise RuntimeError(f"{call} gave {done.returncode}\n{done.stdout}\n{done.stderr}")
        return done

    def sbatch(self, *lines: str, nodes: int = 1, options: tuple[str, ...] = (), output: Path | None = None) -> int:
        """Submit a script given as its lines; returns the job's id. Its output goes to `output` or the void."""
        script = "\n".join(lines if lines[0].startswith("#!") else ("#!/bin/bash", *lines)) + "\n"
        command = ["sbatch", "--parsable", f"--nodes={nodes}", f"--output={output or '/dev/null'}", *options]
        done = subprocess.run(
            command, input=script, capture_output=True, text=True, timeout=60, env=self.env, check=False
        )
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)} gave {done.returncode}: {done.stderr}")
        return int(done.stdout.split(";")[0])

    def job_info(self, job: int) -> dict[str, str]:
        """What ``scontrol show job`` tells; empty when Slurm has forgotten the job."""
        for _ in range(5):
            done = self.call("scontrol", "show", "job", "-o", str(job))
            if done.returncode == 0:
                pairs = re.split(r"\s(?=[A-Z][\w/:]*=)", done.stdout.splitlines()[0])
                return dict(pair.split("=", 1) for pair in pairs if "=" in pair)
            if "Invalid job id" in done.stderr:
                return {}
            time.sleep(1)  # a busy controller may not answer in time
        raise RuntimeError(f"scontrol show job {job} gave {done.returncode}: {done.stderr}\n{self.logs()}")

    def state(self, job: int) -> str:
        """RUNNING, PENDING, COMPLETED, ..., or "" when Slurm has forgotten the job."""
        return self.job_info(job).get("JobState", "")

    def queue(self) -> list[int]:
        """The jobs that are not over yet."""
        return [int(word) for word in self.run("squeue", "--noheader", "--format=%A").split()]

    def cancel(self, job: int) -> None:
        self.run("scancel", str(job))

    def send_signal(self, job: int, name: str, *, batch: bool = False) -> None:
        """Send a signal to the job's steps, or to its batch shell only."""
        self.run("scancel", f"--signal={name}", *(["--batch"] if batch else []), str(job))

    def preempt(self, job: int, *, seconds: float = 1) -> int:
        """Take all the job's nodes for a job of a higher priority that lasts so long; returns that job's id."""
        nodes = self.job_info(job)["NodeList"]
        count = len(self.run("scontrol", "show", "hostnames", nodes).split())
        options = ("--partition=urgent", "--exclusive", f"--nodelist={nodes}", "--job-name=urgent")
        if self.accounting:
            options = ("--qos=urgent", *options[1:])
        return self.sbatch(f"sleep {seconds}", nodes=count, options=options)

    # -- waiting -------------------------------------------------------------------------------------------------

    def wait_for(self, ready: Callable[[], T | None], timeout: float, what: str, every: float | None = None) -> T:
        """Poll until `ready` gives something true, and return that.

        Without `every`, in seconds, the pauses grow with the wait: to ask Slurm costs time that the runs need.

        Raises
        ------
        TimeoutError
            After `timeout` seconds, with `what` was awaited, the queue, and the end of the daemons' logs.
        """
        began = time.monotonic()
        while True:
            if value := ready():
                return value
            waited = time.monotonic() - began
            if waited > timeout:
                queue = self.run("squeue", "--format=%i %P %j %T %M %r %N", check=False)
                raise TimeoutError(f"not within {timeout:g} s: {what}\n{queue}\n{self.logs()}")
            time.sleep(every or min(1.0, max(0.2, waited / 10)))

    def wait_for_state(self, job: int, *states: str, timeout: float = 60) -> dict[str, str]:
        """Wait until the job is in one of the states, and return what Slurm tells of it then.

        Raises
        ------
        AssertionError
            At once, when the job is over in another state.
        """

        def reached() -> dict[str, str] | None:
            info = self.job_info(job)
            state = info.get("JobState", "")
            assert state in states or state not in OVER, f"job {job} is {state}, not {'/'.join(states)}: {info}"
            return info if state in states else None

        return self.wait_for(reached, timeout, f"job {job} is {'/'.join(states)}")
