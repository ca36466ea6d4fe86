"""A stage for the batch script and its keeper: a PATH with stand-ins for Slurm's commands that record their calls.

The keeper is the real one and judges a real run; only Slurm and the training are played.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from failure_causes import with_cause
from waiting import wait_for

from cluster_ddp.job import JobSpec
from cluster_ddp.run.directory import RunDirectory
from cluster_ddp.run.events import read_events
from cluster_ddp.run.runs import create_run, keep_script
from cluster_ddp.run.status.report import describe
from cluster_ddp.run.storage import Storage
from cluster_ddp.submit.quote import quote
from cluster_ddp.submit.script import render_script

PATIENCE = 120.0  # for what takes a second where nothing else runs
CHECKOUT = Path(__file__).resolve().parents[2]
# Everything that the script takes from the system. Slurm's own commands, which this machine may have, are not among it.
TOOLS = (
    "bash",
    "realpath",
    "head",
    "date",
    "sleep",
    "cat",
    "env",
    "touch",
    "grep",
    "rm",
    "tr",
    "tail",
    "timeout",
    "sort",
)

RECORD = r"""#!/bin/bash
stage=STAGE
record() { printf '%s\0' "$@" >"$stage/calls/$(date +%s%N)-$$"; }
"""

SCONTROL = (
    RECORD
    + r"""
record scontrol "$@"
case "$1 $2" in
    'show job') cat "$stage/job" ;;
    'show config') echo 'KillOnBadExit           = 0'; echo "KillWait                = $(cat "$stage/kill_wait") sec" ;;
    'show hostnames') if [[ $3 == "$SLURM_JOB_NODELIST" ]]; then cat "$stage/hostnames"; else tr , '\n' <<<"$3"; fi ;;
    requeue*) cat "$stage/requeue_words" >&2; exit "$(cat "$stage/requeue_status")" ;;
esac
"""
)

SRUN = (
    RECORD
    + r"""
record srun "$@"
env -0 >"$stage/srun_environment"
touch "$stage/training"
source "$stage/training.sh"
"""
)

PYTHON = (
    RECORD
    + r"""
record python "$@"
source "$stage/python.sh"
exec env PYTHONPATH=CHECKOUT PYTHON "$@"
"""
)

# What `scontrol show job` says of a job that ends.
TIME_LIMIT = "JobId=77 JobState=COMPLETING Reason=TimeLimit Restarts=0 PreemptTime=None X=y"
CANCELLED = "JobId=77 JobState=COMPLETING Reason=None Restarts=0 PreemptTime=None X=y"
TAKEN_BACK = "JobId=77 JobState=COMPLETING Reason=None Restarts=1 EndTime=Unknown X=y"

UNTIL_STOPPED = "until [[ -e $run/attempts/000/stop ]]; do sleep 0.05; done; exit 0"
FOR_EVER = "sleep 3600"  # what waits for it has no end before PATIENCE has


def event(name: str, *, attempt: int = 0, **fields: Any) -> str:
    """The line of bash by which training records an event."""
    known = json.dumps({"event": name, "attempt": attempt, **with_cause(name, fields)})[1:-1]
    return f"""printf '{{"time": %s, %s}}\\n' "$(date +%s)" '{known}' >>"$run/events/rank-0.jsonl\""""


DONE = event("completed", step=9)
CRASH = f"{event('started', step=0, world_size=8, total_steps=9)}\n{event('checkpoint', step=5)}\nexit 1"


def replace_file(path: Path, text: str, mode: int = 0o644) -> None:
    """Write a file that a stand-in may be reading: it finds the old one or the new one, never a part."""
    beside = path.with_name(f".{path.name}.new")
    beside.write_text(text)
    beside.chmod(mode)
    beside.replace(path)


class Stage:
    """A run directory, stand-ins, and what they are to do.

    Parameters
    ----------
    folder
        An empty folder.
    scontrol
        Whether there is one.
    limits
        The run's section `requeue`.
    """

    def __init__(self, folder: Path, *, scontrol: bool = True, limits: dict[str, int] | None = None) -> None:
        self.folder = folder
        self.run = folder / "run's $(touch pwned) dir"
        self.bin = folder / "bin"
        for path in (self.bin, folder / "calls"):
            path.mkdir(parents=True)
        spec = JobSpec.model_validate({"name": "digits", "task": "pkg.mod:Task", "requeue": limits or {}})
        create_run(spec, runs_dir=folder, via="sbatch", script="").path.rename(self.run)
        for tool in TOOLS:
            (self.bin / tool).symlink_to(str(shutil.which(tool)))
        stand_ins = {"srun": SRUN, "python": PYTHON, **({"scontrol": SCONTROL} if scontrol else {})}
        for name, text in stand_ins.items():
            program = self.bin / name
            made_for = {"STAGE": str(folder), "CHECKOUT": quote(str(CHECKOUT)), "PYTHON ": f"{quote(sys.executable)} "}
            for word, value in made_for.items():
                text = text.replace(word, value, 1)
            program.write_text(text)
            program.chmod(0o755)
        self.does(job="JobId=77 JobState=RUNNING Reason=None Restarts=0 PreemptTime=None X=y")
        self.does(kill_wait="30", hostnames="node-b\nnode-a", requeue_status="0", requeue_words="")
        self.does(**{"training.sh": DONE, "python.sh": ""})

    @property
    def _quoted_run(self) -> str:
        return str(self.run).replace("$", "\\$")

    def program(self, name: str, body: str) -> None:
        """Put one more stand-in into place."""
        replace_file(self.bin / name, f"#!/bin/bash\n{body}\n", mode=0o755)

    def does(self, **files: str) -> None:
        """Say what a stand-in answers or does; training finds the run directory in $run."""
        for name, text in files.items():
            prefix = f'run="{self._quoted_run}"\n' if name.endswith(".sh") else ""
            replace_file(self.folder / name, prefix + text + "\n")

    def write(self, **job: Any) -> Path:
        """Render the script of a job."""
        spec = JobSpec.model_validate({"name": "digits", "task": "pkg.mod:Task", **job})
        script = self.run / "job.sbatch"
        keep_script(Storage(), script, render_script(spec, python="python").text, mode=0o700)
        return script

    def start(self, script: Path, **variables: str) -> subprocess.Popen[bytes]:
        """Start the script as slurmd would."""
        environment = {
            "PATH": str(self.bin),
            "SLURM_JOB_ID": "77",
            "SLURM_JOB_NUM_NODES": "2",
            "SLURM_JOB_NODELIST": "node-[b,a]",
            "SLURM_JOB_PARTITION": "p",
            "MASTER_ADDR": "left-over-from-the-login-shell",
            **variables,
        }
        with (self.folder / "output").open("wb") as output:
            return subprocess.Popen(
                ["bash", str(script), str(self.run)],
                env=environment,
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                # Whoever started the tests may ignore it (nohup), and bash cannot trap what it finds ignored.
                preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),
            )

    def perform(self, script: Path, **variables: str) -> int:
        """Run the script to its end; its status."""
        return self.finish(self.start(script, **variables))

    def interrupt(self, number: signal.Signals, *, job: str | None = None, **variables: str) -> int:
        """Send the script a signal while it trains, and let Slurm say that of the job from then on; its status."""
        process = self.start(self.write(), **variables)
        self.wait_for_training()
        if job is not None:
            self.does(job=job)
        process.send_signal(number)
        return self.finish(process)

    def finish(self, process: subprocess.Popen[bytes], timeout: float = PATIENCE) -> int:
        """Wait for the script and end what it has left behind, as Slurm does."""
        try:
            return process.wait(timeout)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)

    def wait_for_training(self) -> None:
        """Wait until srun is running."""
        self.wait_for(lambda: (self.folder / "training").exists())

    def wait_for(self, ready: Callable[[], object]) -> None:
        """Wait until something holds; otherwise say what the script has printed."""
        wait_for(ready, lambda: self.output)

    @property
    def output(self) -> str:
        """What the script has printed."""
        return (self.folder / "output").read_text(errors="replace")

    @property
    def stop_file(self) -> Path:
        """Of the first attempt."""
        return RunDirectory(self.run).attempt(0).stop_file

    def calls(self, program: str) -> list[list[str]]:
        """The arguments of each call of a stand-in, in order."""
        calls = []
        for file in sorted((self.folder / "calls").iterdir()):
            words = file.read_bytes().decode().split("\0")[:-1]
            if words[:1] == [program]:  # one that is just being recorded is still empty
                calls.append(words[1:])
        return calls

    def requeues(self) -> list[str]:
        """The job ids that a requeue was asked for."""
        return [call[1] for call in self.calls("scontrol") if call[0] == "requeue"]

    def status(self) -> dict[str, Any]:
        """What `status --json` says of the run where Slurm cannot be queried."""
        return describe(RunDirectory(self.run), None).to_json()

    def events(self) -> list[str]:
        """The names of the run's events, by time."""
        return [event["event"] for event in read_events(RunDirectory(self.run))]

    def said_by_script(self) -> str:
        """The events that the script has written without its keeper."""
        return "".join(file.read_text() for file in (self.run / "events").glob("script-*.jsonl"))

    def environment_of_ranks(self) -> dict[str, str]:
        """What srun found in its environment."""
        pairs = (self.folder / "srun_environment").read_bytes().decode().split("\0")[:-1]
        return dict(pair.split("=", 1) for pair in pairs)
