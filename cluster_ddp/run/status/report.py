"""The status of a run, as shown by `cluster-ddp status`: from its directory and, if Slurm answers, from Slurm."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from cluster_ddp.run import events
from cluster_ddp.run.directory import RunDirectory
from cluster_ddp.run.history import History, read_history
from cluster_ddp.run.jobs import KnownRun, current_job, read_known
from cluster_ddp.run.lineage import last_step_that_counts
from cluster_ddp.run.reading import as_whole
from cluster_ddp.run.record import RunRecord
from cluster_ddp.run.run_state import RunState
from cluster_ddp.run.status.facts import Facts
from cluster_ddp.run.status.goodput import Goodput, goodput_of
from cluster_ddp.run.status.keeper_at_work import nodes_have_ended
from cluster_ddp.run.status.outlook import Outlook, outlook_of
from cluster_ddp.run.status.remarks import last_failure, warnings_of
from cluster_ddp.run.status.silence import silent_nodes
from cluster_ddp.run.status.state import state_of
from cluster_ddp.run.storage import owner_of
from cluster_ddp.slurm.control import cluster_name, hides_jobs_of_others
from cluster_ddp.slurm.states import SlurmJob

# The only events, besides checkpoints, that say how far an attempt got; some are written by the node programs.
_TELL_A_STEP = (events.STARTED, events.RESUMED, events.FAILED, events.RANK_FAILED, events.HANG, events.NODE_FINISHED)
_IN_JSON = (
    "run_id", "name", "state", "attempts", "step", "total_steps", "samples", "training", "last_checkpoint", "metrics",
    "slurm_job_id", "reason", "warnings", "directory", "goodput", "world_size", "samples_per_second", "seconds_left",
    "last_failure",
)  # fmt: skip


@dataclass(frozen=True)
class RunSummary:
    """What `list` shows of a run: everything known without reading the metrics."""

    run_id: str
    name: str
    state: RunState
    reason: str | None  # why the run is in its state, in plain words; None if there is nothing to say
    attempts: int  # how many there were; each allocation or local start is one
    last_checkpoint: int | None  # step of the newest checkpoint; None if there is none
    slurm_job_id: str | None
    directory: str
    record: RunRecord | None  # the run's identity, omitted by `status --json`; None if run.json cannot be read
    is_damaged: bool  # whether run.json or job.yaml is; `reason` says how. Omitted by `status --json`


@dataclass(frozen=True)
class RunStatus(RunSummary):
    """The fields of `status --json`, and `goodput`."""

    # step, total_steps, samples: finished steps, all steps, consumed samples; None if not known yet
    step: int | None
    total_steps: int | None
    samples: int | None
    # What a step is, in plain words: ranks, global batch, peak learning rate; None if not known
    training: str | None
    # Unix seconds when a step was last reported, or training began, while it trains; omitted by `status --json`
    reported: float | None
    reports_nothing: bool  # whether it is a script that does not report its steps; omitted by `status --json`
    metrics: dict[str, float]  # latest value of each metric
    warnings: tuple[str, ...]  # what training warned about since the last `resume`, each text once, the latest last
    goodput: Goodput
    world_size: int | None  # ranks of the last attempt that trained; None if not known yet
    samples_per_second: float | None  # while the run trains, if it measures them
    seconds_left: float | None  # of training, if nothing interrupts it; None if not known, or not training
    last_failure: str | None  # attempt, rank, host and error, for people; None if nothing has failed

    def to_json(self) -> dict[str, Any]:
        """The object that `status --json` prints."""
        metrics = {name: value if math.isfinite(value) else None for name, value in self.metrics.items()}
        told = {"state": self.state.value, "metrics": metrics, "goodput": asdict(self.goodput)}
        return {name: told[name] if name in told else getattr(self, name) for name in _IN_JSON}


def describe(run: RunDirectory, slurm_jobs: Mapping[str, SlurmJob] | None) -> RunStatus:
    """Return the status of a run.

    Parameters
    ----------
    slurm_jobs
        What squeue says, by job id; jobs that it no longer knows are missing. None if Slurm could not be queried.
    """
    return describe_known(read_known(run), slurm_jobs)


def describe_known(known: KnownRun, slurm_jobs: Mapping[str, SlurmJob] | None) -> RunStatus:
    """Return the status of a run whose jobs have been looked up already; see `describe`."""
    history = read_history(known.run, known.attempts)
    summary = _summary(known, history, slurm_jobs)
    step, samples = _position(history)
    total_steps = as_whole(_latest(history, "total_steps"))
    trains = summary.state is RunState.RUNNING
    outlook = outlook_of(history, total_steps) if trains else Outlook(None, None)
    if trains and summary.reason is None:
        summary = replace(summary, reason=silent_nodes(history) or nodes_have_ended(history))
    return RunStatus(
        **vars(summary),
        step=step,
        total_steps=total_steps,
        samples=samples,
        reported=_last_report(history) if trains else None,
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
    """Return the short status of a run; see `describe`."""
    return _summary(known, read_history(known.run, known.attempts), slurm_jobs)


def _summary(known: KnownRun, history: History, slurm_jobs: Mapping[str, SlurmJob] | None) -> RunSummary:
    run, record, ids = known.run, known.record, known.slurm_job_ids
    job = current_job(known, history, slurm_jobs or {})
    answered = slurm_jobs is not None and (job is not None or _would_be_shown(history))
    state, reason = state_of(Facts(history, record, job, answered=answered, job_ids=ids))
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
        is_damaged=known.unreadable is not None,
    )


def _would_be_shown(history: History) -> bool:
    """Whether Slurm here would show this person the run's job.

    Several clusters may share a file system, and many show people only their own jobs.
    """
    last, owner, me = history.current_attempt, owner_of(history.run.record_file), os.geteuid()
    if me not in (0, owner) and hides_jobs_of_others():
        return False
    return last is None or last.cluster is None or cluster_name() in (None, last.cluster.lower())


def _last_job_id(history: History, ids: list[str]) -> str | None:
    began = history.last.slurm_job_id if history.last else None
    return began or (ids[-1] if ids else None)


def _position(history: History) -> tuple[int | None, int | None]:
    """Return steps and samples according to the latest attempt that reported any."""
    metrics = history.metrics
    for record in reversed(history.attempts):
        logged = [metrics.step] if record.number == metrics.attempt and metrics.step is not None else []
        steps = [*_steps_in(history, record.number, events.CHECKPOINT, events.STOPPED, events.COMPLETED), *logged]
        steps = steps or _steps_in(history, record.number, *_TELL_A_STEP)
        if steps:
            return max(steps), _samples_at(max(steps), history)
    return metrics.step, metrics.samples


def _last_report(history: History) -> float | None:
    """Return when the last attempt reported a step, or that it trains: in its metrics, or by an event."""
    number = history.last_number or 0
    told = history.of_attempt(number, events.STARTED, events.RESUMED, events.CHECKPOINT)
    times = [float(event["time"]) for event in told[-1:]]
    return max([*times, *([history.metrics.times[number]] if number in history.metrics.times else [])], default=None)


def _steps_in(history: History, number: int, *names: str) -> list[int]:
    counted = filter(history.counts, history.of_attempt(number, *names))
    return [step for event in counted if (step := as_whole(event.get("step"))) is not None]


def _last_checkpoint(history: History) -> int | None:
    try:
        return last_step_that_counts(history.run.checkpoints, history.lineage)
    except OSError:
        return None


def _samples_at(step: int, history: History) -> int | None:
    metrics = history.metrics
    if step == metrics.step and metrics.samples is not None:
        return metrics.samples
    counts = (as_whole(event.get("samples")) for event in reversed(history.events) if event.get("step") == step)
    return next((count for count in counts if count is not None), None)


def _latest(history: History, name: str) -> Any:
    """Return the latest value with that name in an event of the latest attempt: the clocks of two hosts may differ."""
    told = (event for event in reversed(history.events) if event.get(name) is not None)
    latest = max(told, key=lambda event: as_whole(event.get("attempt")) or 0, default=None)
    return None if latest is None else latest[name]
