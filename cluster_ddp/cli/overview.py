"""Everything in a runs folder: its runs, and for its sweeps how many elements are in which state.

Slurm is asked once for all of them, however many sweeps there are.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

from cluster_ddp.cli.run_states import SlurmJobs
from cluster_ddp.printing import say_if_storage_is_slow
from cluster_ddp.run.errors import RunError
from cluster_ddp.run.runs import list_runs
from cluster_ddp.run.status.cache import EndedRuns, Known
from cluster_ddp.run.status.report import RunStatus, RunSummary
from cluster_ddp.run.status.sweep import NotBegun, SweepCounts, read_known_elements
from cluster_ddp.run.sweep import SweepDirectory, list_sweeps, read_sweep

S = TypeVar("S", bound=RunSummary)


class Overview:
    """Looks at a runs folder repeatedly."""

    def __init__(self, runs_dir: Path) -> None:
        self._runs_dir = runs_dir
        self._ended = {runs_dir: EndedRuns(runs_dir)}
        self._sweeps: dict[SweepDirectory, str | None] = {}  # with why one cannot be read

    @say_if_storage_is_slow
    def read_known(self) -> list[Known]:
        """What to ask squeue about for the runs and the elements of sweeps."""
        known: list[Known] = [self._ended[self._runs_dir].read_known(run) for run in list_runs(self._runs_dir)]
        self._sweeps = dict.fromkeys(list_sweeps(self._runs_dir))
        for sweep in self._sweeps:
            if sweep.path not in self._ended:
                self._ended[sweep.path] = EndedRuns(sweep.path)
            try:
                known += read_known_elements(sweep, read_sweep(sweep), self._ended[sweep.path].read_known)
            except RunError as error:
                self._sweeps[sweep] = str(error)
        return known

    def describe(self, known: Known, jobs: SlurmJobs) -> RunStatus:
        """Where one of them stands."""
        return self._ended[_folder(known)].describe(known, jobs)

    def summarize(self, known: Known, jobs: SlurmJobs) -> RunSummary:
        """Where one of them stands, in short."""
        return self._ended[_folder(known)].summarize(known, jobs)

    def divide(self, known: Sequence[Known], found: Sequence[S]) -> tuple[list[S], list[SweepCounts]]:
        """What was found, divided into runs and the counts of each sweep."""
        of: dict[Path, list[S]] = {folder: [] for folder in self._ended}
        for entry, status in zip(known, found, strict=True):
            of[_folder(entry)].append(status)
        counts = [SweepCounts.of(sweep, of[sweep.path], wrong) for sweep, wrong in self._sweeps.items()]
        return of[self._runs_dir], counts

    def save(self, known: Sequence[Known]) -> None:
        """Remember the ended runs for the next look."""
        for folder, ended in self._ended.items():
            ended.save([entry.run for entry in known if not isinstance(entry, NotBegun) and _folder(entry) == folder])


def _folder(known: Known) -> Path:
    return known.sweep.path if isinstance(known, NotBegun) else known.run.path.parent
