"""The layout of a run on shared storage. All file names in a run's folder are defined here, except those
of jobs' output, which depend on how it was submitted (via.py)."""

from __future__ import annotations

import contextlib
import os
import re
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster_ddp.run.errors import RunError

MANIFEST = "manifest.json"  # of a checkpoint, in its folder
KEY_BYTES = 32  # of the key with which the nodes of an attempt authenticate each other
SWEEP_RECORD = "sweep.json"  # of a sweep, in the folder that contains its runs
START_FAILED = "start-failed.sh"  # beside a batch script, which calls it if a start fails before its keeper runs
SETUP_GUARD = "setup-guard.sh"  # beside a batch script with lines of launch.setup, which it guards
LOCAL_OUTPUT = "local.out"  # the output of a local run that no terminal shows
STEP_PATTERN = r"step-(?P<step>\d{8,18})"  # the name of a complete checkpoint's folder
_CHECKPOINT = re.compile(STEP_PATTERN)


class Inside:
    """A path inside a folder, as an attribute of the class for that folder; computed once."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __set_name__(self, _: type, attribute: str) -> None:
        self._attribute = attribute

    def __get__(self, folder: Any, _: object) -> Path:
        path: Path = folder.path / self._name
        vars(folder)[self._attribute] = path
        return path


@dataclass(frozen=True)
class AttemptDirectory:
    """The folder of an attempt, that is of one allocation or one local start of a run: `<run>/attempts/NNN`."""

    path: Path

    record_file = Inside("attempt.json")  # who began it, where and when
    origin_file = Inside("origin.json")  # the checkpoint that it continues from, written before it trains
    stop_file = Inside("stop")  # exists when training should save and end
    final_stop_file = Inside("stop.final")  # exists as well when a person has asked for it
    nodes_file = Inside("nodes.json")  # which arrivals it began with, and the port they meet at
    steps_file = Inside("steps.jsonl")  # numbers of the steps that follow its checkpoints, to compare after a resume
    rendezvous_key = Inside("rendezvous.key")  # with which its nodes authenticate each other; readable by its owner

    @property
    def run(self) -> RunDirectory:
        return RunDirectory(self.path.parent.parent)

    @property
    def number(self) -> int:
        """The attempt's number; 0 for the first."""
        return int(self.path.name)

    def stacks_file(self, rank: int) -> Path:
        """The stacks of a rank's threads, if they were requested."""
        return self.path / f"stacks-rank{rank}.txt"

    def report_file(self, node: int | str) -> Path:
        return self.path / f"environment-{node}.json"

    def log_file(self, node_rank: int) -> Path:
        """Everything that one node printed, each line with the rank that printed it."""
        return self.path / f"node-{node_rank}.log"

    def alive_file(self, node_rank: int) -> Path:
        """Touched by the node program as long as it lives, and removed when it signs off."""
        return self.path / f"node-{node_rank}.alive"

    def old_logs(self, node_rank: int) -> Path:
        """The folder in which older versions kept two files for each rank of a node."""
        return self.path / f"node-{node_rank}"

    def samples_file(self, rank: int) -> Path:
        """The sample ids that one rank trained on, when `log.sample_ids` is set."""
        return self.path / f"samples-rank{rank}.jsonl"


@dataclass(frozen=True)
class RunDirectory:
    """A run's folder on shared storage and the paths in it."""

    path: Path

    job_file = Inside("job.yaml")  # the resolved job
    script = Inside("job.sbatch")  # exactly what was submitted to Slurm
    resume_file = Inside("resume.json")  # who resumed it last; changed by one call of `resume` at a time
    record_file = Inside("run.json")  # the run's identity; a folder is a run when this file exists
    events = Inside("events")  # one file per writer
    digest_file = Inside("events/digest.json")  # the events of ended attempts that matter
    metrics_file = Inside("metrics.jsonl")  # written by rank 0
    attempts = Inside("attempts")
    arrivals = Inside("arrivals")  # the nodes that wait for the others, in a start without Slurm
    checkpoints = Inside("checkpoints")
    tensorboard = Inside("tensorboard")  # TensorBoard's own files
    wandb = Inside("wandb")  # wandb's own files
    code = Inside("code")  # the user's code as it was when the run was made (launch.snapshot)
    code_file = Inside("code.json")  # what that is a copy of
    changes_file = Inside("changes.diff")  # what had changed since its revision

    @property
    def id(self) -> str:
        """`<name>-<yyyymmdd-hhmmss>-<4 hex>`."""
        return self.path.name

    @property
    def sweep_id(self) -> str | None:
        """The sweep that the run is an element of; None for a separate run."""
        folder = self.path.parent
        return folder.name if os.path.lexists(folder / SWEEP_RECORD) else None

    def attempt(self, number: int) -> AttemptDirectory:
        """Return the attempt with that number, whether or not it exists."""
        return AttemptDirectory(self.attempts / f"{number:03d}")

    def script_mode(self) -> int:
        """The mode of the batch script: executable by its owner, and by the group if that shares the run."""
        return 0o770 if self.path.stat().st_mode & stat.S_IWGRP else 0o700

    def refuse_links(self) -> None:
        """Make sure that what is written to the run, or removed from it, is inside it.

        Raises
        ------
        RunError
            One of its folders, or of an attempt's, is a link.
        """
        links = [folder for folder in (self.events, self.attempts, self.checkpoints) if folder.is_symlink()]
        if not links:
            with contextlib.suppress(OSError), os.scandir(self.attempts) as entries:
                links = [Path(entry.path) for entry in entries if entry.is_symlink()]
        if links:
            raise RunError(
                f"{links[0]} is a link, and runs are not read or written through links: replace it with the folder "
                "itself"
            )

    def job_file_problem(self) -> str | None:
        """Say that the job is missing or empty, and what to do; None if it is there."""
        try:
            what = None if self.job_file.stat().st_size else "is empty"
        except FileNotFoundError:
            what = "is missing"
        except OSError:  # perhaps somebody else's run
            return None
        return what and (
            f"{self.job_file} {what}, and the run cannot be resumed without it: put a copy of it back, such as that of "
            "another run of the same job"
        )

    def exists(self) -> bool:
        """Whether this folder contains a run, even one whose record cannot be read."""
        return os.path.lexists(self.record_file)


def copied_from(record_file: Path, made_in: str | None) -> Path | None:
    """Return the folder that the one with this record is a copy of, by where it was made; None if it is no copy.

    If nothing is left where it was made, it was moved, and is the original.
    """
    original = Path(made_in or record_file.parent)
    if original == record_file.parent or not os.path.lexists(original / record_file.name):
        return None
    try:
        return None if original.samefile(record_file.parent) else original
    except OSError:
        return None


def step_name(step: int) -> str:
    """The name of a complete checkpoint's folder; nothing else in ``<run>/checkpoints`` begins with ``step-``."""
    return f"step-{step:08d}"


def step_of(name: str) -> int | None:
    """Return the step of a complete checkpoint from its folder's name; None for any other name."""
    found = _CHECKPOINT.fullmatch(name)
    return int(found.group(1)) if found and name == step_name(int(found.group(1))) else None


def steps_in(checkpoints: Path) -> list[int]:
    """Return the steps of the complete checkpoints in a folder, ascending; empty if the folder does not exist."""
    try:
        names = os.listdir(checkpoints)
    except FileNotFoundError:
        return []
    return sorted(step for name in names if (step := step_of(name)) is not None)
