"""Rehearsing a resume on this machine: some steps at a stretch, the same with a stop in between, and a comparison."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import TextIO

from cluster_ddp.checkpoint.compare import Comparison, compare
from cluster_ddp.checkpoint.verify import newest_intact, run_id_of
from cluster_ddp.errors import ClusterDDPError
from cluster_ddp.exit_statuses import RUN_FAILED, RUN_STOPPED
from cluster_ddp.run.directory import RunDirectory
from cluster_ddp.run.history import read_history
from cluster_ddp.run.metrics import values_by_step
from cluster_ddp.run.run_state import RunState
from cluster_ddp.run.runs import runs_dir_of
from cluster_ddp.run.status.report import RunStatus, describe
from cluster_ddp.submit.base import check_writable
from cluster_ddp.submit.local import LocalStart, start_local
from cluster_ddp.submit.resume import plan_resume, resume_here


class RehearsalFailed(ClusterDDPError):
    """A part of the rehearsal did not get to its end, so there is nothing to compare."""

    exit_status = RUN_FAILED


class RehearsalStopped(ClusterDDPError):
    """A person stopped the rehearsal."""

    exit_status = RUN_STOPPED


@dataclass(frozen=True)
class LoggedDifference:
    """The first logged value that differs."""

    name: str
    step: int
    straight: float | None  # None: not finite
    resumed: float | None


@dataclass(frozen=True)
class Finding:
    """What a rehearsal has found."""

    step: int  # after which the states were compared
    compared: Comparison
    first: LoggedDifference | None  # None if no logged value tells
    # What differs between two runs without a stop, which is tried only if the resumed one differs from the first
    different_anyway: tuple[str, ...] = ()
    repeats: bool = True  # whether the tensors do not

    @property
    def different(self) -> tuple[str, ...]:
        """What differs; of a program that repeats itself without the numbers that differ anyway, such as times."""
        anyway = self.different_anyway if self.repeats else ()
        return tuple(name for name in self.compared.different if name not in anyway)

    @property
    def is_exact(self) -> bool:
        """Whether the resumed run has the bits of the one without a stop."""
        return self.repeats and not self.different


@dataclass(frozen=True)
class _Part:
    """A run of the rehearsal that has ended."""

    run: RunDirectory
    status: RunStatus

    def checkpoint(self, step: int) -> Path:
        """Its checkpoint of this step."""
        return newest_intact(self.run.checkpoints, run_id_of(self.run), step)[0]


class Rehearsal:
    """Runs the parts of a rehearsal in a folder of its own.

    Parameters
    ----------
    start
        The job as it starts here.
    steps, stop_after
        Steps to train, and after how many of them to stop and resume.
    show
        Where the output of the ranks goes.
    announce
        Called with a line before each part.

    Attributes
    ----------
    folder
        The runs folder of the rehearsal; removed if the resume is exact, or if a person stops the rehearsal.
    """

    def __init__(
        self, start: LocalStart, *, steps: int, stop_after: int, show: TextIO, announce: Callable[[str], None]
    ) -> None:
        runs_dir = runs_dir_of(start.spec)
        check_writable(runs_dir)
        runs_dir.mkdir(parents=True, exist_ok=True)
        self.folder = Path(tempfile.mkdtemp(prefix="rehearsal-", dir=runs_dir))
        # Nobody waits for this run: no wandb, no notice. All steps are logged, to name the first that differs.
        log = start.spec.log.model_copy(update={"every_steps": 1, "wandb": None})
        spec = start.spec.model_copy(update={"runs_dir": str(self.folder), "log": log, "notify": None})
        self._start = replace(start, spec=spec)
        self._steps, self._stop_after, self._show, self._announce = steps, stop_after, show, announce

    def run(self) -> Finding:
        """Run all parts and compare them.

        Raises
        ------
        RehearsalFailed
            A part failed, does not save by this package, or has too few steps.
        RehearsalStopped
            A person stopped it.
        CheckpointError
            A part has no intact checkpoint of its last step.
        """
        straight = self._run_straight("without a stop")
        if straight.status.reports_nothing:
            raise RehearsalFailed(
                "the script neither reports its steps nor saves by this package, so there is nothing to compare: add "
                "the lines of docs/own-code.md to it"
            )
        if (total := straight.status.step or 0) <= self._stop_after:
            raise RehearsalFailed(
                f"the job has ended after {total} steps, so a stop after {self._stop_after} never came: give "
                f"--stop-after less than {total}"
            )
        resumed = self._run_resumed(total)
        finding = Finding(total, compare(straight.checkpoint(total), resumed.checkpoint(total)), None)
        if finding.different:
            again = self._run_straight("once more without a stop, to see what differs anyway")
            anyway = compare(straight.checkpoint(total), again.checkpoint(total))
            first = _first_difference(straight.run, resumed.run, self._stop_after)
            finding = Finding(total, finding.compared, first, anyway.different, not anyway.different_tensors)
        if finding.is_exact:
            self._remove()
        return finding

    def _run_straight(self, how: str) -> _Part:
        self._announce(f"{self._steps} steps {how}")
        return self._ended(*start_local(replace(self._start, stop_after=self._steps), show=self._show), self._steps)

    def _run_resumed(self, total: int) -> _Part:
        self._announce(f"{self._stop_after} steps, then a stop")
        stopping = replace(self._start, stop_after=self._stop_after)
        part = self._ended(*start_local(stopping, show=self._show), self._stop_after)
        self._announce(f"resumed in new processes, until step {total}")
        gpus = ",".join(chain.from_iterable(self._start.gpus)) or "none"
        plan = plan_resume(part.run, read_history(part.run), describe(part.run, None), (), None, None, gpus)
        status = resume_here(plan, replace(self._start, stop_after=self._steps), show=self._show)
        return self._ended(part.run, status, total)

    def _ended(self, run: RunDirectory, status: RunStatus, wanted: int) -> _Part:
        """A part, unless it did not end as it should."""
        if status.state is RunState.STOPPED and (status.step or 0) < wanted:
            self._remove()
            raise RehearsalStopped(f"the rehearsal was stopped in step {status.step or 0}; nothing of it is kept")
        if status.state not in (RunState.STOPPED, RunState.COMPLETED):
            reason = f": {status.reason}" if status.reason else ""
            raise RehearsalFailed(
                f"this part of the rehearsal ended as {status.state.value}{reason}\n"
                f"Its output: cluster-ddp logs {run.path}\nIts folder, to be removed: {self.folder}"
            )
        return _Part(run, status)

    def _remove(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)


def _first_difference(straight: RunDirectory, resumed: RunDirectory, stop_after: int) -> LoggedDifference | None:
    """The first logged value that differs, of those that agreed until the stop: times and rates never do."""
    calm, stopped = values_by_step(straight.metrics_file), values_by_step(resumed.metrics_file)
    pairs = {step: (calm[step], stopped[step]) for step in sorted(calm.keys() & stopped.keys())}
    before = [pair for step, pair in pairs.items() if step <= stop_after]
    for step, (mine, theirs) in pairs.items():
        for name in sorted(mine.keys() & theirs.keys()):
            agreed = bool(before) and all(name in a and a[name] == b.get(name) for a, b in before)
            if step > stop_after and agreed and mine[name] != theirs[name]:
                return LoggedDifference(name, step, mine[name], theirs[name])
    return None
