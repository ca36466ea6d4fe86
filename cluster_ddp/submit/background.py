"""``python -m cluster_ddp.submit.background RUN``: the first attempt of a local run, in the background.

`cluster-ddp local` runs in the foreground; here the same start is a way to submit.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from cluster_ddp.launch.variables import SAFE_PATH_VARIABLE
from cluster_ddp.process import limit_umask
from cluster_ddp.run.directory import LOCAL_OUTPUT, RunDirectory
from cluster_ddp.run.storage import open_append
from cluster_ddp.run.via import LOCAL
from cluster_ddp.submit import local
from cluster_ddp.submit.base import SubmitError, as_program

if TYPE_CHECKING:
    from cluster_ddp.job import JobSpec

_started: list[subprocess.Popen[bytes]] = []  # kept because Python warns about a discarded process that still runs


class LocalSubmission:
    """A job to run on this machine in the background; a `Submission`."""

    via = LOCAL
    to_slurm = False
    batch_script = ""  # there is none

    def __init__(self, spec: JobSpec) -> None:
        self._start = local.plan_local(spec)
        self.remarks = self._start.network.remarks

    def check(self) -> None:
        """See `Submission`: planning has already found everything that can be known."""

    def send(self, run: RunDirectory) -> None:
        """Start the run's first attempt in a new session, with its output in the run directory."""
        command = [sys.executable, "-m", "cluster_ddp.submit.background", str(run.path)]
        try:
            with os.fdopen(open_append(run.path / LOCAL_OUTPUT), "ab") as out:
                process = subprocess.Popen(
                    command,
                    env={**os.environ, SAFE_PATH_VARIABLE: "1"},
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=out,
                    start_new_session=True,
                )
            _started.append(process)
        except OSError as error:
            raise SubmitError(f"the run {run.id} cannot be started on this machine: {error.strerror}") from error


@as_program
def main(arguments: Sequence[str]) -> None:
    """Entry point of ``python -m cluster_ddp.submit.background``."""
    from cluster_ddp.job import load_resolved

    parser = argparse.ArgumentParser(prog="python -m cluster_ddp.submit.background")
    parser.add_argument("run", type=Path)
    run = RunDirectory(parser.parse_args(arguments).run)
    limit_umask(run.path)
    local.run_attempt(run, local.plan_local(load_resolved(run.job_file)), show=sys.stdout)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
