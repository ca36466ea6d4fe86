"""What tests of the command line are made of."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from cluster_ddp.run.attempt import begin_attempt
from cluster_ddp.run.attempt_record import end_attempt
from cluster_ddp.run.directory import RunDirectory
from cluster_ddp.run.events import EventWriter
from cluster_ddp.run.stopfile import request_stop
from cluster_ddp.run.sweep import SweepDirectory

JOB = """\
name: small
task: cluster_ddp.tasks.digits:Digits
slurm: {nodes: 2, time: "00:10:00"}
train: {steps: 20}
"""


PARTITION = (
    "PartitionName=gpu AllowAccounts=lab,phys AllowQos=ALL Default=YES GraceTime=0 MaxNodes=5 MaxTime=1-00:00:00 "
    "MinNodes=0 MaxCPUsPerNode=UNLIMITED PreemptMode=OFF State=UP MaxMemPerNode=UNLIMITED"
)


class Said(NamedTuple):
    """What a command has said, and its exit status."""

    status: int
    out: str
    err: str


Call = Callable[..., Said]


class Slurm:
    """Stand-ins for sbatch, squeue, scancel, scontrol and sinfo.

    sbatch gives out the ids 101, 102, ... and keeps its arguments; squeue prints the file `queue`.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.queue = folder / "queue"
        self.queue.write_text("")
        count = 'n=$(($(cat "$here/count" 2>/dev/null || echo 100) + 1)); echo $n >"$here/count"'
        self.program("sbatch", f'{count}; printf "%s\\0" "$@" >"$here/sbatch.$n"; env -0 >"$here/environment"; echo $n')
        self.program("squeue", 'cat "$here/queue"')
        self.program("scontrol", f"echo '{PARTITION}'")
        self.program("sinfo", "echo '4|64|256000|gpu:a100:4(S:0-1)'; echo '2|128|512000|(null)'")
        self.program("scancel", 'echo "$@" >>"$here/cancelled"')

    def program(self, name: str, body: str) -> None:
        """Put a stand-in into place."""
        file = self.folder / name
        if name == "sbatch":  # which answers the trial of a script as if all were well
            body = f'[[ $1 == --test-only ]] && {{ cat >"$here/tried"; exit 0; }}\n{body}'
        file.write_text(f'#!/bin/bash\nhere=$(dirname "$0")\n{body}\n')
        file.chmod(0o755)

    def put_in_queue(self, run: RunDirectory, state: str) -> None:
        """Let squeue tell of a run's first job."""
        self.queue.write_text(f"101|101|{state}|n[1-2]|None|cluster_ddp {run.id}\n")

    def submissions(self) -> list[list[str]]:
        """The arguments of each call of sbatch."""
        files = sorted(self.folder.glob("sbatch.*"))
        return [file.read_bytes().decode().split("\0")[:-1] for file in files]


def stopped_run(call: Call) -> RunDirectory:
    """A run that was submitted as Slurm job 101, which Slurm no longer knows, with one attempt that is over."""
    submitted = RunDirectory(Path(json.loads(call("submit", "job.yaml", "--json").out)["directory"]))
    attempt = begin_attempt(submitted, slurm_job_id="101", host="n1", pid=0, nodes=2, procs=1)
    request_stop(attempt, reason="person", by="test")
    EventWriter(submitted, "rank-0").write("stopped", attempt=0, step=7, reason="person")
    end_attempt(attempt)
    return submitted


def the_sweep(here: Path) -> SweepDirectory:
    """The only sweep that there is."""
    (folder,) = (here / "runs").iterdir()
    return SweepDirectory(folder)
