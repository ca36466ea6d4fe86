"""A run in which anybody may have written anything, a healthy neighbour, and the commands that a person calls there."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Any

from run_builders import begin_dead, job

from cluster_ddp.run.directory import RunDirectory
from cluster_ddp.run.runs import create_run
from cluster_ddp.run.sweep import SweepDirectory, change_sweep, with_elements

SECONDS = 2.0  # of work
PATIENCE = 20.0  # in addition, where the machine is busy: what hangs does so for longer
LIMIT = 2 << 30  # bytes of address space: a reader that takes in a whole sparse file does not get that far

# Calls one command after the other, and answers with what each has said and how long it took. `logs -f` ends where it
# would wait for more.
PROGRAM = f"""
import json, os, resource, sys, tempfile, time
import cluster_ddp.cli.list, cluster_ddp.cli.status, cluster_ddp.cli.stop, cluster_ddp.cli.checkpoints, rich.console
import rich.table, cluster_ddp.checkpoint.verify, cluster_ddp.cli.logs, cluster_ddp.cli.clean, cluster_ddp.cli.export
import cluster_ddp.cli.cancel, cluster_ddp.cli.resume, cluster_ddp.job, cluster_ddp.submit.script
from cluster_ddp.cli.app import main

def follow_no_longer(seconds):
    raise KeyboardInterrupt

resource.setrlimit(resource.RLIMIT_AS, ({LIMIT}, {LIMIT}))
answers, sleep = os.fdopen(os.dup(1), "w"), time.sleep
print("ready", file=answers, flush=True)
for request in sys.stdin:
    words = json.loads(request)
    with tempfile.TemporaryFile() as said:
        os.dup2(said.fileno(), 1)
        os.dup2(said.fileno(), 2)
        sys.argv = ["cluster-ddp", *words]
        time.sleep = follow_no_longer if "-f" in words else sleep
        began, worked = time.monotonic(), time.process_time()
        status = main()
        took, worked = time.monotonic() - began, time.process_time() - worked
        said.seek(0)
        text = said.read().decode(errors="replace")
    print(json.dumps([status, text, took, worked]), file=answers, flush=True)
"""


class Commands:
    """Calls commands in a folder of runs, one after the other in one process, and sees to it that they keep the limits.

    Slurm has answers for them, and knows no job.
    """

    def __init__(self, folder: Path) -> None:
        self.runs, programs = folder / "runs", folder / "slurm"
        programs.mkdir()
        for name, answer in {"sbatch": "7", "squeue": "", "sacct": "", "scontrol": "", "sinfo": ""}.items():
            (programs / name).write_text(f"#!/bin/sh\necho {answer}\n")
            (programs / name).chmod(0o755)
        paths = {"PATH": f"{programs}:{os.environ['PATH']}", "CLUSTER_DDP_RUNS": str(self.runs), "COLUMNS": "400"}
        paths["XDG_CACHE_HOME"] = str(folder / "cache")
        self._process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM], env={**os.environ, **paths}, cwd=folder, text=True, errors="replace",
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        assert self._answer(100.0) == "ready\n"

    def call(self, *words: str) -> str:
        """What a command says; to take too long, or to fail in a way that it did not foresee, is an error."""
        assert self._process.stdin
        print(json.dumps(words), file=self._process.stdin, flush=True)
        answer = self._answer(SECONDS + PATIENCE)
        assert answer, f"no answer to {' '.join(words)}"
        status, said, took, worked = json.loads(answer)
        assert worked < SECONDS and took < SECONDS + PATIENCE, (words, worked, took)
        assert 0 <= status <= 5 and "This is a bug" not in said and "Traceback" not in said, (words, status, said)
        return str(said)

    def end(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate()

    def _answer(self, seconds: float) -> str:
        assert self._process.stdout
        return self._process.stdout.readline() if select.select([self._process.stdout], [], [], seconds)[0] else ""


def check(commands: Commands, bad: str = "bad", *, listed_by: Collection[str] = ("list", "status")) -> str:
    """Call what shows runs, and what stops one; the neighbour is in every listing."""
    listings = {command: commands.call(command) for command in ("list", "status")}
    assert all("neighbour" in listing for listing in listings.values())
    assert all(bad in listings[command] for command in listed_by)
    others = (("status", bad), ("status", "--json"), ("stop", bad), ("checkpoints", bad))
    return "".join([*listings.values(), *(commands.call(*words) for words in others)])


def use(commands: Commands, bad: str = "bad") -> str:
    """Call all that does something else with one run."""
    calls = (
        ("logs", bad),
        ("logs", bad, "-f"),
        ("logs", bad, "--errors"),
        ("clean", "--older", "1s", "--resumable"),
        ("export", bad, "-o", "weights", "--force"),
        ("export", bad, "-o", "weights", "--force", "--best"),
        ("cancel", bad),
        ("resume", bad),
    )
    return "".join(commands.call(*words) for words in calls)


def make_neighbour(runs: Path) -> None:
    made = create_run(job(name="neighbour"), runs_dir=runs, via="local", script=None)
    made.path.rename(runs / "neighbour")


def make_bad_run(runs: Path, *, name: str = "bad", via: str = "sbatch") -> RunDirectory:
    """A run that has done something, with all files that a run may have."""
    made = create_run(job(name="bad"), runs_dir=runs, via=via, script="#!/bin/bash\n" if via == "sbatch" else None)
    bad = RunDirectory(made.path.rename(runs / name))
    begin_dead(bad)
    bad.code.mkdir()
    for file, content in {**FILES, **OTHERS}.items():
        path = bad.path / file
        path.parent.mkdir(exist_ok=True)
        if content is not None:
            path.write_text(json.dumps(content) + "\n")
    return bad


def make_bad_sweep(runs: Path) -> RunDirectory:
    """A sweep of two elements; the run of the one that has begun."""
    sweep = SweepDirectory(runs / "bad-sweep")
    sweep.path.mkdir()
    change_sweep(sweep, lambda before: with_elements(sweep, before, [("train.lr=0.1",), ("train.lr=0.2",)]))
    for file in (sweep.job_file, sweep.script):
        file.write_text("{}\n")
    return make_bad_run(sweep.path, name="0000-lr=0.1")


# By the file that holds it: what a run has done, as most commands read it; None for what is there already.
FILES: dict[str, Any] = {
    "run.json": None,
    "attempts/000/attempt.json": None,
    "metrics.jsonl": {"step": 1, "attempt": 0, "time": 1e9, "train/loss": 1.0},
    "events/rank-0.jsonl": {"time": 1e9, "event": "started", "attempt": 0, "step": 0, "total_steps": 300},
    "attempts/000/stop": {"reason": "person"},
    "checkpoints/step-00000001/manifest.json": {},
}
# What few commands read.
OTHERS: dict[str, Any] = {
    "job.yaml": {
        "name": "bad",
        "task": "cluster_ddp.tasks.digits:Digits",
        "launch": {"procs_per_node": 1},
        "train": {"steps": 300},
        "checkpoint": {"keep_best": {"metric": "val/loss", "mode": "min"}},
    },
    "resume.json": {"by": "me", "requests": 0},
    "code.json": {"root": "/nowhere", "revision": "0", "files": 1},
    "attempts/000/origin.json": {"step": 1, "digest": "00"},
    "attempts/000/nodes.json": {"port": 1, "arrivals": ["0"]},
    "attempts/000/environment-0.json": {"host": "here", "node_rank": 0, "ranks": [{"rank": 0}], "variables": {}},
    "attempts/000/node-0.alive": {"time": 1.0},
    "attempts/000/node-0.log": {"time": 1.0},
    "attempts/000/node-1/agent.log": {"time": 1.0},
    "events/digest.json": {"format": 1, "places": {"rank-0.jsonl": 10}, "events": []},
}
FOLDERS = ("events", "attempts", "attempts/000", "checkpoints", "checkpoints/step-00000001", "code", "arrivals")
