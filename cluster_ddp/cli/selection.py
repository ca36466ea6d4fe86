"""The runs that the arguments of a command name, for commands that look at them repeatedly."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cluster_ddp.cli.overview import Overview
from cluster_ddp.cli.run_states import K, SlurmJobs, ask_slurm, describe_with
from cluster_ddp.printing import one_line
from cluster_ddp.run.jobs import read_known
from cluster_ddp.run.runs import find_run, runs_dir_of
from cluster_ddp.run.status.cache import EndedRuns, Known
from cluster_ddp.run.status.report import RunStatus
from cluster_ddp.run.status.sweep import NotBegun, SweepCounts, best_of, read_known_elements
from cluster_ddp.run.sweep import find_sweep, read_sweep
from cluster_ddp.slurm.states import SlurmJob

# Many people watching at once must not slow Slurm's controller down: the run directories tell most of what changes.
_ASK_SLURM_SECONDS = 15.0


@dataclass(frozen=True)
class Snapshot:
    """The states of a selection at one time."""

    runs: list[RunStatus]
    sweeps: list[SweepCounts]  # besides the runs, where all there is is shown

    @property
    def open(self) -> bool:
        """Whether anything in it will change by itself."""
        return any(status.state.open for status in self.runs) or any(sweep.open for sweep in self.sweeps)


class Selection:
    """The runs and sweeps that the arguments of a command name; everything if they name nothing.

    However often it is looked at, Slurm is asked only every so often.
    """

    def __init__(self, names: list[str]) -> None:
        self.runs_dir = runs_dir_of(None)
        self._names = names
        self._asked_at = -float("inf")
        self._jobs: Mapping[str, SlurmJob] | None = None
        self.sweep = find_sweep(names[0], self.runs_dir) if len(names) == 1 else None
        self.single = len(names) == 1 and self.sweep is None
        self._overview = None if names else Overview(self.runs_dir)
        self._ended = EndedRuns(self.runs_dir if self.sweep is None else self.sweep.path)

    def snapshot(self) -> Snapshot:
        """The states now."""
        if self._overview is not None:
            everything = self._overview.read_known()
            found = self._describe(everything, self._overview.describe)
            self._overview.save(everything)
            return Snapshot(*self._overview.divide(everything, found))
        known = self._known()
        snapshot = Snapshot(self._describe(known, self._ended.describe), [])
        if self.sweep is not None:  # all runs of the folder
            self._ended.save([run.run for run in known if not isinstance(run, NotBegun)])
        return snapshot

    def json(self, snapshot: Snapshot) -> Any:
        """An object for one run that was named, a list for several."""
        values = [status.to_json() for status in snapshot.runs]
        values += [{**sweep.as_run().to_json(), "elements": sweep.to_json()} for sweep in snapshot.sweeps]
        return values[0] if self.single else values

    def best(self, found: list[RunStatus]) -> list[str]:
        """The line below a sweep's table that names the best element."""
        best = best_of(found, read_sweep(self.sweep)) if self.sweep is not None else None
        if best is None:
            return []
        status, metric = best
        return ["", f"best by {one_line(metric)}: {one_line(status.run_id)}  {status.metrics[metric]:.4g}"]

    def _describe(self, known: Sequence[K], describe: Callable[[K, SlurmJobs], RunStatus]) -> list[RunStatus]:
        if time.monotonic() - self._asked_at >= _ASK_SLURM_SECONDS:
            self._jobs = ask_slurm(known)
            self._asked_at = time.monotonic()
        return describe_with(known, self._jobs, describe)

    def _known(self) -> Sequence[Known]:
        if self.sweep is not None:
            return read_known_elements(self.sweep, read_sweep(self.sweep), self._ended.read_known)
        return [read_known(run) for run in dict.fromkeys(find_run(name, self.runs_dir) for name in self._names)]
