"""The state of a run, from its directory and, when it can be had, Slurm's word: what `cluster-ddp status` tells."""

from __future__ import annotations

import enum
import re
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from cluster_ddp.run.attempt import AttemptRecord, attempt_is_alive, list_attempts, read_attempt
from cluster_ddp.run.directory import RunDirectory
from cluster_ddp.run.errors import RunError
from cluster_ddp.run.events import (
    CHECKPOINT,
    COMPLETED,
    FAILED,
    REQUEUED,
    RESUMED,
    STALLED,
    STARTED,
    STOPPED,
)
from cluster_ddp.run.goodput import Goodput, goodput_of
from cluster_ddp.run.history import History, as_step, read_history
from cluster_ddp.run.metrics import LatestMetrics, read_latest
from cluster_ddp.run.outcome import Ending, outcome_of
from cluster_ddp.run.record import RunRecord, read_record
from cluster_ddp.run.stopfile import read_stop

# Slurm's words for a job that will start (again), and for one that holds nodes.
_WAITING = frozenset(
    {"PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT", "RESV_DEL_HOLD"}
)
_ACTIVE = frozenset({"RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "SIGNALING", "STAGE_OUT", "RESIZING"})
_NEVER_BEGAN = "it was to start on this machine, and has not"
_LOCAL_START_SECONDS = 60.0
_STEP_FOLDER = re.compile(r"step-(\d{8,})")


class RunState(str, enum.Enum):
    """Where a run stands."""

    PENDING = "PENDING"
    RUNNING = "RUNNING"
    REQUEUED = "REQUEUED"
    STOPPED = "STOPPED"
    COMPLETED = "COMPLETED"
    FAILED = "FAILED"
    STALLED = "STALLED"
    CANCELLED = "CANCELLED"
    LOST = "LOST"

    @property
    def open(self) -> bool:
        """Whether something of the run will still happen by itself."""
        return self in (RunState.PENDING, RunState.RUNNING, RunState.REQUEUED)


class SlurmJobLike(Protocol):
    """What is needed of a line of squeue."""

    @property
    def state(self) -> str:
        """Slurm's long state word, such as RUNNING."""

    @property
    def reason(self) -> str:
        """Why the job waits or ended."""

    @property
    def run_id(self) -> str | None:
        """The run that the job was submitted for, when it says so; Slurm uses job ids again."""


@dataclass(frozen=True)
class RunStatus:
    """The contract of `status --json`, and `goodput`.

    Attributes
    ----------
    attempts
        How many there were; each allocation and each local start is one.
    step, total_steps, samples
        Steps finished, steps in all, samples consumed; None when not known yet.
    last_checkpoint
        Step of the newest checkpoint; None when there is none.
    metrics
        Latest value of each metric.
    reason
        Why the run is in its state, in words for people; None when there is nothing to say.
    """

    run_id: str
    name: str
    state: RunState
    attempts: int
    step: int | None
    total_steps: int | None
    samples: int | None
    last_checkpoint: int | None
    metrics: dict[str, float]
    slurm_job_id: str | None
    reason: str | None
    directory: str
    goodput: Goodput

    def to_json(self) -> dict[str, Any]:
        """The object that `status --json` prints."""
        return {**asdict(self), "state": self.state.value}


@dataclass(frozen=True)
class _Job:
    id: str
    state: str
    reason: str | None


def describe(run: RunDirectory, slurm_jobs: Mapping[str, SlurmJobLike] | None) -> RunStatus:
    """Tell where a run stands.

    Parameters
    ----------
    run
        The run.
    slurm_jobs
        What squeue says, by job id; jobs that it no longer knows are missing. None when Slurm could not be asked.
    """
    history, metrics, record = read_history(run), read_latest(run.metrics_file), _record_of(run)
    ids = _job_ids(record, history.attempts)
    known = _jobs(run, ids, slurm_jobs)
    chosen = _telling(known)
    state, reason = _state(history, record, chosen, answered=slurm_jobs is not None, ids=ids)
    step, samples = _position(history, metrics)
    return RunStatus(
        run_id=run.id,
        name=record.name if record else run.id,
        state=state,
        attempts=len(history.attempts),
        step=step,
        total_steps=_latest_total(history),
        samples=samples,
        last_checkpoint=last_checkpoint(run),
        metrics=metrics.values,
        slurm_job_id=chosen.id if chosen else _last_job_id(history, ids),
        reason=reason,
        directory=str(run.path),
        goodput=goodput_of(
            history,
            metrics,
            created=record.created if record else None,
            alive=state is RunState.RUNNING and bool(history.attempts),
        ),
    )


def slurm_job_ids(run: RunDirectory) -> list[str]:
    """Every Slurm job of a run: what to ask squeue about before `describe`."""
    return _job_ids(_record_of(run), [read_attempt(attempt) for attempt in list_attempts(run)])


def living_jobs(run: RunDirectory, slurm_jobs: Mapping[str, SlurmJobLike]) -> list[str]:
    """The run's jobs that wait in Slurm's queue or hold nodes."""
    jobs = _jobs(run, slurm_job_ids(run), slurm_jobs)
    return [job.id for job in jobs if job.state in _ACTIVE or job.state in _WAITING]


def last_checkpoint(run: RunDirectory) -> int | None:
    """Step of the newest checkpoint; a checkpoint is there when its folder has its final name."""
    try:
        names = [path.name for path in run.checkpoints.iterdir()]
    except OSError:
        return None
    return max((int(match.group(1)) for name in names if (match := _STEP_FOLDER.fullmatch(name))), default=None)


def telling_first(metric: str) -> tuple[bool, bool, str]:
    """Sorts metrics for people: what validation says, then training, then the rest."""
    return not metric.startswith("val/"), not metric.startswith("train/"), metric


def _state(
    history: History, record: RunRecord | None, job: _Job | None, *, answered: bool, ids: list[str]
) -> tuple[RunState, str | None]:
    """State and reason: what is final by the run's own events, then what is alive, then how the last attempt ended."""
    if history.cancelled is not None:
        return RunState.CANCELLED, f"cancelled by {history.cancelled.get('by', 'its owner')}"
    if history.current(COMPLETED):
        return RunState.COMPLETED, None
    if stalled := history.current(STALLED):
        return RunState.STALLED, str(stalled.get("reason") or "no progress")
    if job is not None and job.state in _ACTIVE:
        return RunState.RUNNING, _stopping(history)
    if job is not None and job.state in _WAITING:
        tried = history.last is not None and history.last.number >= history.first_number
        return (RunState.REQUEUED if tried else RunState.PENDING), job.reason
    return _without_slurm(history, record, job, answered=answered, ids=ids)


def _without_slurm(
    history: History, record: RunRecord | None, job: _Job | None, *, answered: bool, ids: list[str]
) -> tuple[RunState, str | None]:
    """The state of a run of which Slurm knows no living job, or could not be asked, or has no part in."""
    last = history.last
    if last is None or last.number < history.first_number:
        if not ids and _should_have_begun(history, record):
            return _ended(history, last.number, job, answered=answered) if last else (RunState.LOST, _NEVER_BEGAN)
        return _never_began(record, job, answered=answered, ids=ids)
    alive = attempt_is_alive(history, last)
    if alive or (alive is None and not (answered and last.slurm_job_id)):
        remark = None if alive else _unseen(last.slurm_job_id, last.process.host if last.process else "?")
        if alive or not _has_ended(history, last.number):
            return RunState.RUNNING, _stopping(history) or remark
    return _ended(history, last.number, job, answered=answered)


def _should_have_begun(history: History, record: RunRecord | None) -> bool:
    """Whether a local run was to start a while ago: who started it begins the attempt in the next moment, or never."""
    if record is None or record.via != "local":
        return False
    wished = max((float(event["time"]) for event in history.resume_requests), default=record.created)
    return time.time() - wished > _LOCAL_START_SECONDS


def _never_began(
    record: RunRecord | None, job: _Job | None, *, answered: bool, ids: list[str]
) -> tuple[RunState, str | None]:
    if job is not None:  # Slurm has ended it
        state = RunState.CANCELLED if job.state == "CANCELLED" else RunState.LOST
        return state, f"Slurm job {job.id} ended as {job.state} before an attempt began"
    if ids and answered:
        return RunState.LOST, f"Slurm no longer knows job {ids[-1]}, and it has not begun an attempt since"
    if ids:
        return RunState.PENDING, f"Slurm cannot be asked about job {ids[-1]} from here"
    if record is not None and record.via in ("sbatch", "submitit"):
        return RunState.PENDING, "not submitted yet"
    return RunState.PENDING, None


def _ended(history: History, number: int, job: _Job | None, *, answered: bool) -> tuple[RunState, str | None]:
    outcome = outcome_of(history, number)
    requeued = history.of_attempt(number, REQUEUED)
    if requeued and not answered and history.attempts[-1].slurm_job_id:
        return RunState.REQUEUED, str(requeued[-1].get("reason") or outcome.reason)
    if requeued and job is not None and job.state == "CANCELLED":
        return RunState.CANCELLED, f"Slurm job {job.id} was cancelled while it waited to go on"
    if outcome.ending is Ending.CANCELLED:
        return RunState.CANCELLED, outcome.reason
    if outcome.ending in (Ending.STOPPED, Ending.STOPPED_BY_PERSON):
        return RunState.STOPPED, outcome.reason
    if outcome.ending in (Ending.FAILED, Ending.FAILED_AT_START, Ending.HUNG):
        return RunState.FAILED, outcome.reason
    if job is not None and job.state == "CANCELLED":
        return RunState.CANCELLED, f"Slurm job {job.id} was cancelled"
    if job is not None:
        return RunState.LOST, f"Slurm job {job.id} ended as {job.state}, and training has left no word of its end"
    return RunState.LOST, outcome.reason


def _has_ended(history: History, number: int) -> bool:
    """Whether training itself has said that it ended, for an attempt that cannot be seen from here."""
    return bool(history.of_attempt(number, STOPPED, FAILED, REQUEUED))


def _stopping(history: History) -> str | None:
    request = read_stop(history.run.attempt(history.last.number)) if history.last else None
    return f"stopping: {request.reason}" if request else None


def _unseen(job_id: str | None, host: str) -> str:
    if job_id:
        return f"Slurm cannot be asked about job {job_id} from here; this is the last that is known"
    return f"begun on {host}, which cannot be seen from here; this is the last that is known"


def _jobs(run: RunDirectory, ids: list[str], slurm_jobs: Mapping[str, SlurmJobLike] | None) -> list[_Job]:
    """The run's own jobs that Slurm knows; a job id that Slurm has given to another run since is not one."""
    known = [(job_id, slurm_jobs[job_id]) for job_id in ids if job_id in slurm_jobs] if slurm_jobs else []
    record = _record_of(run)
    own = {None, run.id, record.id if record else run.id}  # a person may have renamed the folder since
    return [
        _Job(job_id, job.state.upper(), None if job.reason in ("", "None") else job.reason)
        for job_id, job in known
        if job.run_id in own
    ]


def _telling(jobs: list[_Job]) -> _Job | None:
    """Of several jobs of one run (a chain): the one that runs, else the next to start, else the latest."""
    for states in (_ACTIVE, _WAITING):
        for job in jobs:
            if job.state in states:
                return job
    return jobs[-1] if jobs else None


def _job_ids(record: RunRecord | None, attempts: Iterable[AttemptRecord]) -> list[str]:
    noted = list(record.slurm_job_ids) if record else []
    begun = [one.slurm_job_id for one in attempts if one.slurm_job_id]
    return list(dict.fromkeys([*noted, *begun]))


def _last_job_id(history: History, ids: list[str]) -> str | None:
    began = history.last.slurm_job_id if history.last else None
    return began or (ids[-1] if ids else None)


def _position(history: History, metrics: LatestMetrics) -> tuple[int | None, int | None]:
    """Steps and samples as the latest attempt that tells of any has them."""
    for record in reversed(history.attempts):
        events = history.of_attempt(record.number, STARTED, RESUMED, CHECKPOINT, STOPPED, COMPLETED)
        steps = [step for event in events if (step := as_step(event.get("step"))) is not None]
        if record.number == metrics.attempt and metrics.step is not None:
            steps.append(metrics.step)
        if steps:
            return max(steps), _samples_at(max(steps), history, metrics)
    return metrics.step, metrics.samples


def _samples_at(step: int, history: History, metrics: LatestMetrics) -> int | None:
    if step == metrics.step and metrics.samples is not None:
        return metrics.samples
    counts = (as_step(event.get("samples")) for event in reversed(history.events) if event.get("step") == step)
    return next((count for count in counts if count is not None), None)


def _latest_total(history: History) -> int | None:
    totals = (as_step(event.get("total_steps")) for event in reversed(history.events))
    return next((total for total in totals if total is not None), None)


def _record_of(run: RunDirectory) -> RunRecord | None:
    try:
        return read_record(run)
    except RunError:
        return None
