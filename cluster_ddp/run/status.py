"""Where a run stands, from its directory and, when it can be had, Slurm's word: what `cluster-ddp status` shows."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from cluster_ddp.run import events
from cluster_ddp.run.attempt import attempt_is_alive
from cluster_ddp.run.attempt_record import AttemptRecord, list_attempts, read_attempt
from cluster_ddp.run.deciding import is_being_judged, waits_for_requeue, why_delayed
from cluster_ddp.run.directory import RunDirectory
from cluster_ddp.run.ending import Ending, Outcome, RunState, outcome_of, outcome_so_far
from cluster_ddp.run.errors import RunError
from cluster_ddp.run.goodput import Goodput, goodput_of
from cluster_ddp.run.history import History, read_history
from cluster_ddp.run.lineage import last_step_that_counts
from cluster_ddp.run.metrics import LatestMetrics
from cluster_ddp.run.outlook import Outlook, outlook_of
from cluster_ddp.run.reading import as_whole
from cluster_ddp.run.record import (
    QUEUED,
    RunRecord,
    Unnoted,
    names_in_comments,
    read_record,
    run_in_comment,
    unnoted_job,
)
from cluster_ddp.run.remarks import last_failure, moment, warnings_of
from cluster_ddp.run.silence import silent_nodes
from cluster_ddp.run.starting import failed_start, not_in_queue, see_output, waits_for
from cluster_ddp.run.stopfile import TERMINATED, read_stop
from cluster_ddp.run.storage import is_mine
from cluster_ddp.slurm.reasons import in_words
from cluster_ddp.slurm.states import ACTIVE, SUSPENDED, WAITING, SlurmJob

_LEFT_NO_WORD = frozenset({"FAILED", "NODE_FAIL", "BOOT_FAIL", "OUT_OF_MEMORY", "TIMEOUT"})  # of a start
_NEVER_BEGAN = "it was to start on this machine, and has not"
# Of an attempt that ended before its first checkpoint only these, the node programs' among them, know how far it came.
_TELL_A_STEP = (events.STARTED, events.RESUMED, events.FAILED, events.RANK_FAILED, events.HANG, events.NODE_FINISHED)
_LOCAL_START_SECONDS = 60.0
_IN_JSON = (
    "run_id", "name", "state", "attempts", "step", "total_steps", "samples", "training", "last_checkpoint", "metrics",
    "slurm_job_id", "reason", "warnings", "directory", "goodput", "world_size", "samples_per_second", "seconds_left",
    "last_failure",
)  # fmt: skip


@dataclass(frozen=True)
class KnownRun:
    """What a run's folder tells of its Slurm jobs, before squeue is asked about those of many runs at once."""

    run: RunDirectory
    record: RunRecord | None  # None when run.json cannot be read
    unreadable: str | None  # why it cannot be
    attempts: tuple[AttemptRecord, ...]
    unnoted: Unnoted | None = None  # set where whoever submitted it was killed, or had no clear answer
    found: tuple[str, ...] = ()  # the jobs that squeue knows so: see `cluster_ddp.run.unnoted`

    @property
    def slurm_job_ids(self) -> list[str]:
        """Every Slurm job of the run."""
        noted = list(self.record.slurm_job_ids) if self.record else []
        begun = [attempt.slurm_job_id for attempt in self.attempts if attempt.slurm_job_id]
        return list(dict.fromkeys([*noted, *begun, *self.found]))


@dataclass(frozen=True)
class RunSummary:
    """What `list` shows of a run: all that can be told without what training has measured."""

    run_id: str
    name: str
    state: RunState
    reason: str | None  # why the run is in its state, in words for people; None when there is nothing to say
    attempts: int  # how many there were; each allocation and each local start is one
    last_checkpoint: int | None  # step of the newest checkpoint; None when there is none
    slurm_job_id: str | None
    directory: str
    record: RunRecord | None  # the run's identity, which `status --json` leaves out; None when run.json cannot be read


@dataclass(frozen=True)
class RunStatus(RunSummary):
    """The contract of `status --json`, and `goodput`."""

    # step, total_steps, samples: steps finished, steps in all, samples consumed; None when not known yet
    step: int | None
    total_steps: int | None
    samples: int | None
    # What a step is, in words for people: ranks, global batch, peak learning rate; None when not known
    training: str | None
    reports_nothing: bool  # it is a script that does not tell of steps; left out of `status --json`
    metrics: dict[str, float]  # latest value of each metric
    warnings: tuple[str, ...]  # what training warned of since a person last asked to resume, each once, the latest last
    goodput: Goodput
    world_size: int | None  # ranks of the last attempt that trained; None when not known yet
    samples_per_second: float | None  # of a run that trains, if it measures them
    seconds_left: float | None  # of training, if nothing comes between; None when not known, or not training
    last_failure: str | None  # attempt, rank, host and error, for people; None when nothing has failed

    def to_json(self) -> dict[str, Any]:
        """The object that `status --json` prints."""
        metrics = {name: value if math.isfinite(value) else None for name, value in self.metrics.items()}
        told = {"state": self.state.value, "metrics": metrics, "goodput": asdict(self.goodput)}
        return {name: told[name] if name in told else getattr(self, name) for name in _IN_JSON}


def know(run: RunDirectory) -> KnownRun:
    """Read what squeue is to be asked about a run by."""
    attempts = tuple(read_attempt(attempt) for attempt in list_attempts(run))
    try:
        record = read_record(run)
    except RunError as error:
        return KnownRun(run, None, str(error), attempts)
    return KnownRun(run, record, None, attempts, unnoted_job(run, record))


def slurm_job_ids(run: RunDirectory) -> list[str]:
    """Every Slurm job of a run: what to ask squeue about before `describe`."""
    return know(run).slurm_job_ids


def describe(run: RunDirectory, slurm_jobs: Mapping[str, SlurmJob] | None) -> RunStatus:
    """Say where a run stands.

    Parameters
    ----------
    slurm_jobs
        What squeue says, by job id; jobs that it no longer knows are missing. None when Slurm could not be asked.
    """
    return describe_known(know(run), slurm_jobs)


def describe_known(known: KnownRun, slurm_jobs: Mapping[str, SlurmJob] | None) -> RunStatus:
    """Say where a run stands of which the jobs have been asked about; see `describe`."""
    history = read_history(known.run, known.attempts)
    summary = _summary(known, history, slurm_jobs)
    step, samples = _position(history, history.metrics)
    total_steps = as_whole(_latest(history, "total_steps"))
    trains = summary.state is RunState.RUNNING
    outlook = outlook_of(history, total_steps) if trains else Outlook(None, None)
    if trains and summary.reason is None:
        summary = replace(summary, reason=silent_nodes(history))
    return RunStatus(
        **vars(summary),
        step=step,
        total_steps=total_steps,
        samples=samples,
        reports_nothing=history.reports_nothing,
        training=None if (training := _latest(history, "training")) is None else str(training),
        metrics=history.metrics.values,
        warnings=warnings_of(history),
        goodput=goodput_of(
            history,
            created=known.record.created if known.record else None,
            alive=summary.state.alive and bool(history.attempts),
        ),
        world_size=as_whole(_latest(history, "world_size")),
        samples_per_second=outlook.samples_per_second,
        seconds_left=outlook.seconds_left,
        last_failure=last_failure(history),
    )


def summarize_known(known: KnownRun, slurm_jobs: Mapping[str, SlurmJob] | None) -> RunSummary:
    """Say in short where a run stands; see `describe`."""
    return _summary(known, read_history(known.run, known.attempts), slurm_jobs)


def _summary(known: KnownRun, history: History, slurm_jobs: Mapping[str, SlurmJob] | None) -> RunSummary:
    run, record, ids = known.run, known.record, known.slurm_job_ids
    job = _current_job(_own_jobs(run, record, ids, slurm_jobs or {}))
    state, reason = _state(history, record, job, answered=slurm_jobs is not None, ids=ids)
    if reason is None and state is RunState.RUNNING:
        kept = history.of_attempt(history.last_number or 0, events.REMOVAL_FAILED)
        reason = str(kept[-1].get("reason")) if kept else None
    if known.unreadable is not None:
        reason = f"{known.unreadable}; {reason}" if reason else known.unreadable
    return RunSummary(
        run_id=run.id,
        name=record.name if record else run.id,
        state=state,
        reason=reason,
        attempts=len(history.attempts),
        last_checkpoint=_last_checkpoint(history),
        slurm_job_id=job.job_id if job else _last_job_id(history, ids),
        directory=str(run.path),
        record=record,
    )


def living_jobs(run: RunDirectory, slurm_jobs: Mapping[str, SlurmJob]) -> tuple[list[SlurmJob], list[SlurmJob]]:
    """The jobs noted in a run that wait in Slurm's queue or hold nodes: those surely its own, and the others.

    What is noted in a folder proves nothing: somebody may have copied it, or written it. A job is the run's when its
    comment, which only its owner and Slurm's administrators can set, names this run.
    """
    known = know(run)
    own = names_in_comments(run, known.record if is_mine(run.record_file) else None)
    jobs = [slurm_jobs[job_id]._replace(job_id=job_id) for job_id in known.slurm_job_ids if job_id in slurm_jobs]
    living = [job for job in jobs if job.state in ACTIVE | WAITING]
    return (
        [job for job in living if run_in_comment(job.comment) in own],
        [job for job in living if run_in_comment(job.comment) not in own],
    )


def _state(
    history: History, record: RunRecord | None, job: SlurmJob | None, *, answered: bool, ids: list[str]
) -> tuple[RunState, str | None]:
    """State and reason: what is final by the run's own events, then what is alive, then how the last attempt ended."""
    outcome = outcome_so_far(history)
    if outcome is not None and outcome.settled:
        return outcome.ending.state, None if outcome.ending is Ending.COMPLETED else outcome.reason
    if job is not None and job.state in SUSPENDED:
        return RunState.SUSPENDED, "suspended by Slurm: it goes on where it is when Slurm lets it"
    if job is not None and job.state in ACTIVE:
        starting = waits_for(history, record, job.job_id) if job.state == "RUNNING" else None
        return RunState.RUNNING, waits_for_requeue(history) or _stopping(history) or starting
    if job is not None and job.held:
        return RunState.HELD, _how_to_release(job)
    if job is not None and job.state in WAITING:
        return _waiting(outcome, job, failed_start(history, record, job.job_id, queued=True))
    cancelled = job is not None and job.state == "CANCELLED"
    if ids and not cancelled and (failed := failed_start(history, record, ids[-1], queued=False)):
        return RunState.FAILED, failed
    return _without_slurm(history, record, job, answered=answered, ids=ids)


def _waiting(outcome: Outcome | None, job: SlurmJob, failed: str | None) -> tuple[RunState, str | None]:
    """State and reason of a run in the queue: why it is there again, and what Slurm says it waits for."""
    said = in_words(job.reason)
    if job.starts is not None:
        said = f"{said or 'in the queue'}; Slurm expects it to start at {moment(job.starts)}"
    state, why = (RunState.PENDING, failed) if outcome is None else (RunState.REQUEUED, failed or outcome.reason)
    if why is None:
        return state, said
    return state, f"{why} (Slurm: {said})" if said else why


def _without_slurm(
    history: History, record: RunRecord | None, job: SlurmJob | None, *, answered: bool, ids: list[str]
) -> tuple[RunState, str | None]:
    """The state of a run of which Slurm knows no living job, or could not be asked, or has no part in."""
    last = history.last
    if last is None or last.number < history.first_number:
        if not ids and _should_have_begun(history, record):
            return _ended(history, last.number, job, answered=answered) if last else (RunState.LOST, _NEVER_BEGAN)
        return _never_began(record, job, answered=answered, ids=ids)
    if not answered and last.slurm_job_id and (delayed := waits_for_requeue(history)):
        return RunState.RUNNING, delayed  # its nodes have signed off, its keeper has not
    if not answered and last.slurm_job_id and is_being_judged(history):
        return RunState.RUNNING, "its nodes have ended; what follows is being decided, and Slurm cannot be asked here"
    alive = attempt_is_alive(history, last)
    if alive or (alive is None and not (answered and last.slurm_job_id)):
        if delayed := waits_for_requeue(history):
            return RunState.RUNNING, delayed
        remark = None if alive else _unseen(last.slurm_job_id, last.process.host if last.process else "?")
        said_to_be_over = history.of_attempt(last.number, events.STOPPED, events.FAILED, events.REQUEUED)
        if alive or not said_to_be_over:
            return RunState.RUNNING, _stopping(history) or remark
    return _ended(history, last.number, job, answered=answered)


def _should_have_begun(history: History, record: RunRecord | None) -> bool:
    """Whether a local run was to start a while ago: who started it begins the attempt in the next moment, or never."""
    if record is None or record.via != "local":
        return False
    wished = max((float(event["time"]) for event in history.resume_requests), default=record.created)
    return time.time() - wished > _LOCAL_START_SECONDS


def _never_began(
    record: RunRecord | None, job: SlurmJob | None, *, answered: bool, ids: list[str]
) -> tuple[RunState, str | None]:
    if job is not None:  # Slurm has ended it
        state = RunState.CANCELLED if job.state == "CANCELLED" else RunState.LOST
        where = see_output(record, job.job_id)
        return state, f"Slurm job {job.job_id} ended as {job.state} before an attempt began {where}"
    if record is not None and record.submitting is not None:
        return not_in_queue(record, answered=answered)
    if ids and answered:
        return RunState.LOST, f"Slurm no longer knows job {ids[-1]}, and it has not begun an attempt since"
    if ids:
        return RunState.PENDING, f"Slurm cannot be asked about job {ids[-1]} from here"
    if record is not None and record.via in QUEUED:
        return RunState.PENDING, "not submitted yet"
    if record is not None and record.via == "launch":
        return RunState.PENDING, "its nodes wait for each other, or have to be started"
    return RunState.PENDING, None


def _ended(history: History, number: int, job: SlurmJob | None, *, answered: bool) -> tuple[RunState, str | None]:
    """State and reason once the last attempt is over, as it ended and as Slurm has taken it."""
    outcome: Outcome = outcome_of(history, number)
    cancelled = job is not None and job.state == "CANCELLED"
    if not cancelled and (delayed := why_delayed(history)):  # killed while it tried
        return RunState.FAILED, f"requeue failed: {delayed}. To go on: cluster-ddp resume {history.run.id}"
    requeued = history.of_attempt(number, events.REQUEUED)
    if requeued and not answered and history.attempts[-1].slurm_job_id:
        return RunState.REQUEUED, str(requeued[-1].get("reason") or outcome.reason)
    if job is not None and cancelled and requeued:
        return RunState.CANCELLED, f"Slurm job {job.job_id} was cancelled while it waited to go on"
    last = history.attempts[-1]
    came_to_nothing = job is not None and job.job_id == last.slurm_job_id and job.state in _LEFT_NO_WORD
    if job is not None and requeued and came_to_nothing and not outcome.ending.final:
        return RunState.LOST, (
            f"{outcome.reason}; its job was queued again, and ended as {job.state} (Slurm: {job.reason}) before an "
            f"attempt began. The batch host may not have been able to use the run directory. To go on: cluster-ddp "
            f"resume {history.run.id}"
        )
    if outcome.stop_reason == TERMINATED and not cancelled and last.slurm_job_id and last.ended is None:
        # Slurm ends the step of a batch process that is gone; whether training can still save is a race.
        return RunState.LOST, f"its keeper was killed before it had the job queued again; training {outcome.reason}"
    unexplained = outcome.ending is Ending.UNKNOWN or (cancelled and outcome.stop_reason == TERMINATED)
    if job is None or not unexplained:
        return outcome.ending.state, outcome.reason
    if cancelled:
        return RunState.CANCELLED, f"Slurm job {job.job_id} was cancelled"
    return RunState.LOST, f"Slurm job {job.job_id} ended as {job.state}, and training left no record of its end"


def _stopping(history: History) -> str | None:
    last = history.last
    request = read_stop(history.run.attempt(last.number)) if last and last.ended is None else None
    return f"stopping: {request.reason}" if request else None


def _unseen(job_id: str | None, host: str) -> str:
    if job_id:
        return f"Slurm cannot be asked about job {job_id} from here; this is the last that is known"
    return f"begun on {host}, which cannot be seen from here; this is the last that is known"


def _how_to_release(job: SlurmJob) -> str:
    why = job.state if job.reason in ("", "None") else job.reason
    if job.reason == "JobHeldAdmin":
        return f"an administrator holds Slurm job {job.job_id} ({why}); ask them for: scontrol release {job.job_id}"
    return f"Slurm holds job {job.job_id} ({why}); release it with: scontrol release {job.job_id}"


def _own_jobs(
    run: RunDirectory, record: RunRecord | None, ids: list[str], slurm_jobs: Mapping[str, SlurmJob]
) -> list[SlurmJob]:
    """The run's own jobs that Slurm knows; a job id that Slurm has given to another run since is not one."""
    own = {None, *names_in_comments(run, record)}  # no run: submitted by hand
    known = ((job_id, slurm_jobs[job_id]) for job_id in ids if job_id in slurm_jobs)
    return [job._replace(job_id=job_id) for job_id, job in known if run_in_comment(job.comment) in own]


def _current_job(jobs: list[SlurmJob]) -> SlurmJob | None:
    """Of several jobs of one run (a chain): the one that runs, else the next to start, else the latest."""
    for states in (ACTIVE, WAITING):
        for job in jobs:
            if job.state in states:
                return job
    return jobs[-1] if jobs else None


def _last_job_id(history: History, ids: list[str]) -> str | None:
    began = history.last.slurm_job_id if history.last else None
    return began or (ids[-1] if ids else None)


def _position(history: History, metrics: LatestMetrics) -> tuple[int | None, int | None]:
    """Steps and samples as the latest attempt that tells of any has them."""
    for record in reversed(history.attempts):
        logged = [metrics.step] if record.number == metrics.attempt and metrics.step is not None else []
        steps = [*_steps_in(history, record.number, events.CHECKPOINT, events.STOPPED, events.COMPLETED), *logged]
        steps = steps or _steps_in(history, record.number, *_TELL_A_STEP)
        if steps:
            return max(steps), _samples_at(max(steps), history, metrics)
    return metrics.step, metrics.samples


def _steps_in(history: History, number: int, *names: str) -> list[int]:
    counted = filter(history.counts, history.of_attempt(number, *names))
    return [step for event in counted if (step := as_whole(event.get("step"))) is not None]


def _last_checkpoint(history: History) -> int | None:
    try:
        return last_step_that_counts(history.run.checkpoints, history.lineage)
    except OSError:
        return None


def _samples_at(step: int, history: History, metrics: LatestMetrics) -> int | None:
    if step == metrics.step and metrics.samples is not None:
        return metrics.samples
    counts = (as_whole(event.get("samples")) for event in reversed(history.events) if event.get("step") == step)
    return next((count for count in counts if count is not None), None)


def _latest(history: History, name: str) -> Any:
    """The latest value of that name in an event, as the latest attempt has it: the clocks of two hosts may differ."""
    told = (event for event in reversed(history.events) if event.get(name) is not None)
    latest = max(told, key=lambda event: as_whole(event.get("attempt")) or 0, default=None)
    return None if latest is None else latest[name]
