"""Resuming a run: which settings may change, and starting it the way it was started before."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TextIO

from cluster_ddp.errors import ClusterDDPError
from cluster_ddp.printing import one_line
from cluster_ddp.run.attempt import attempt_is_alive, request_resume, take_back_resume
from cluster_ddp.run.directory import RunDirectory
from cluster_ddp.run.events import caller
from cluster_ddp.run.history import History, read_history
from cluster_ddp.run.lock import change_file
from cluster_ddp.run.reading import as_whole, read_json_object
from cluster_ddp.run.record import RunRecord, announce_submission, read_record
from cluster_ddp.run.run_state import RunState
from cluster_ddp.run.runs import keep_script, name_for_commands
from cluster_ddp.run.status.report import RunStatus
from cluster_ddp.run.stopfile import FINAL_REASONS
from cluster_ddp.run.storage import Storage, replace_file
from cluster_ddp.run.via import LAUNCH, LOCAL, QUEUED
from cluster_ddp.slurm.commands import SubmissionUnclear
from cluster_ddp.submit import local
from cluster_ddp.submit.base import Submission, SubmitError, note_submitted, withdraw_if_cancelled
from cluster_ddp.submit.ways import submission

if TYPE_CHECKING:
    from cluster_ddp.job import JobSpec, RunJob, TrainSpec

# Settings of training that do not change the weights of an uninterrupted run.
_FREE = frozenset({"train.evaluate_every", "train.workers", "train.max_bad_steps", "train.profile"})
_LENGTH = frozenset({"train.epochs", "train.steps"})  # nor do these, unless the schedule depends on the end
# Nor do these, as long as the batches of a step are divided as before.
_BATCHES = frozenset({"train.batch_size", "train.global_batch", "train.accumulation_steps"})


@dataclass(frozen=True)
class ResumePlan:
    """How a run continues: everything that is read and decided about it, once, before anything is changed."""

    # seen, record: the run as it was before anybody made sure that nothing of it is alive
    seen: History
    record: RunRecord
    # spec, changed: the job, and whether it differs from the run's job file
    spec: JobSpec
    changed: bool
    remarks: tuple[str, ...]  # for the user, about the settings
    # What to start, here or by a batch system. None if the run is complete, has no further work to do, and its last
    # checkpoint is intact
    start: local.LocalStart | Submission | None


def plan_resume(
    run: RunDirectory,
    seen: History,
    status: RunStatus,
    settings: Sequence[str],
    nodes: int | None,
    procs: int | None,
    gpus: str | None = None,
) -> ResumePlan:
    """Decide how a run continues; nothing is written.

    Parameters
    ----------
    gpus
        For a run on this machine: as for `plan_local`.

    Raises
    ------
    ClusterDDPError
        Something of the run is alive or in the queue, a setting is wrong or would be ignored (a run keeps its global
        batch), the run cannot continue on that many ranks, or resume does not start runs of its kind.
    """
    from cluster_ddp.job import load_run_job

    _refuse_unless_over(run, status)
    record = status.record or read_record(run)
    here = record.via == LOCAL
    if gpus is not None and not here:
        raise SubmitError(
            f"--gpus is for runs on this machine, and run {run.id} was started via {one_line(record.via)}"
        )
    size = {} if here else {"slurm.nodes": nodes, "launch.procs_per_node": procs}
    sizes = [f"{key}={value}" for key, value in size.items() if value is not None]
    if (problem := run.job_file_problem()) is not None:
        raise SubmitError(problem)
    job = load_run_job(run.job_file, [*settings, *sizes])
    _check_directory(job)
    _check_global_batch(record, job)
    _check_average(status, job)
    if _is_finished(run, status, job):
        return ResumePlan(seen, record, job.spec, changed=False, remarks=job.remarks, start=None)
    start: local.LocalStart | Submission
    if here:
        nodes, procs = nodes or record.nodes, procs or record.procs
        start = local.plan_local(job.spec, nodes=nodes, procs=procs, gpus=gpus, global_batch=record.global_batch)
        ranks = start.nodes * start.procs
    else:
        start = _submission(run, record.via, job.spec)
        ranks = job.spec.world_size
    changed = job.spec != job.before
    return ResumePlan(seen, record, job.spec, changed, (*job.remarks, *_weights_remarks(job, record, ranks)), start)


def resume_here(plan: ResumePlan, start: local.LocalStart, *, show: TextIO) -> RunStatus:
    """Continue a local run in the foreground; return how it ended."""
    run = plan.seen.run
    _claim(plan, script=None)
    return local.run_attempt(run, start, show=show)


def resubmit(plan: ResumePlan, again: Submission) -> str | None:
    """Submit a run again to the same run directory, as it was first submitted; return the new Slurm job id.

    The run's batch script is sent as it is, including edits by a person; only changed settings create a new one.
    """
    run = plan.seen.run
    again.check()
    _claim(plan, script=again.batch_script)
    try:
        job_id = again.send(run)
    except SubmissionUnclear:
        raise
    except ClusterDDPError:
        take_back_resume(run, plan.seen.last_number)  # `status` goes on saying how the last attempt ended
        raise
    note_submitted(run, again.via, job_id)
    withdraw_if_cancelled(run, job_id, cancels=len(plan.seen.cancels))
    return job_id


def _submission(run: RunDirectory, via: str, spec: JobSpec) -> Submission:
    if via in QUEUED:
        return submission(spec, via)
    if via == LAUNCH:
        raise SubmitError(
            f"run {run.id} was started on each node by launch, and continues the same way.\n{_again(run)}"
        )
    raise SubmitError(
        f"run {run.id} was started via {one_line(via)}, which this version of cluster_ddp does not support.\n"
        f"Resume it with the version that started it: {run.path}\n"
        f"To export its weights, if it has saved any: cluster-ddp export {name_for_commands(run)} "
        f"-o {run.id}.safetensors"
    )


def _again(run: RunDirectory) -> str:
    last = read_history(run).last
    nodes = last.nodes if last else None
    procs = f" --procs {last.procs}" if last and last.procs else ""
    host = last.process.host if last and last.process else "HOST"
    command = f"cluster-ddp launch {shlex.quote(str(run.job_file))} --run {shlex.quote(str(run.path))}"
    last_node = nodes - 1 if nodes else "N - 1"
    return (
        f"Start the same commands again; or on every node, with R from 0 to {last_node}:\n"
        f"{command} --nnodes {nodes or 'N'}{procs} --master-addr {shlex.quote(host)} --node-rank R"
    )


def _refuse_unless_over(run: RunDirectory, status: RunStatus) -> None:
    in_queue = status.state in (RunState.PENDING, RunState.REQUEUED) and status.slurm_job_id is not None
    if status.state is RunState.HELD:
        raise SubmitError(
            f"run {run.id} is HELD: {status.reason}\n"
            "To start it in another job instead, remove this one from the queue first: cluster-ddp cancel "
            f"{name_for_commands(run)}"
        )
    if status.record is not None and status.record.busy:
        who = status.record.submitting or {}
        raise SubmitError(
            f"run {run.id} is being submitted by process {who['pid']} on {who['host']}; another resume is not "
            "possible now.\n"
            f"Check on it: cluster-ddp status {name_for_commands(run)}"
        )
    history = read_history(run)  # as it was when the status was found, or later
    if status.state.alive or in_queue or _lives_here(history):
        job = f" (Slurm job {status.slurm_job_id})" if status.slurm_job_id else ""
        by = _asked_to_stop(history)
        if not in_queue and (by is not None or not status.state.alive):
            asked = f": {by} has asked it to stop" if by is not None else ""
            raise SubmitError(
                f"run {run.id} is still ending{job}{asked}.\n"
                f"Resume it once it has ended; see: cluster-ddp status {name_for_commands(run)}{_if_gone(history)}"
            )
        raise SubmitError(
            f"run {run.id} is {status.state.value}{job} and continues by itself.\n"
            f"To start it again, end it first: cluster-ddp {'cancel' if in_queue else 'stop'} {name_for_commands(run)}"
            f"{_if_gone(history)}"
        )


def _lives_here(history: History) -> bool:
    """Whether the last attempt of a run without Slurm lives on this machine: it saves after its run is CANCELLED."""
    last = history.current_attempt
    return last is not None and last.slurm_job_id is None and attempt_is_alive(history, last) is True


def _if_gone(history: History) -> str:
    """Say how to resume a run without Slurm whose machine is down, which nothing here can tell from one at work."""
    last = history.current_attempt
    if last is None or last.slurm_job_id or last.process is None or attempt_is_alive(history, last) is not None:
        return ""
    name = name_for_commands(history.run)
    return f"\nIf {last.process.host} is down, or nothing of the run is left there: cluster-ddp cancel {name}"


def _asked_to_stop(history: History) -> str | None:
    """Return who has asked the current attempt to stop for good; None if nobody has."""
    request = history.stop_request if history.current_attempt is not None else None
    return request.by if request is not None and request.reason in FINAL_REASONS else None


def _claim(plan: ResumePlan, *, script: str | None) -> None:
    """Record new settings and that a person wants the run to continue; of several calls only one succeeds."""
    run = plan.seen.run
    by: str | None = None

    def change() -> bytes:
        nonlocal by
        if by is None:  # else the lock was lost meanwhile: what was written stays
            _refuse_overtaken(plan.seen, plan.record)
            if plan.changed:
                _write_job(run, plan.spec)
                if script is not None:
                    keep_script(Storage(), run.script, script, mode=run.script_mode())
            if not isinstance(plan.start, local.LocalStart):
                announce_submission(run)  # first: whoever sees the request also sees that somebody acts on it
            wanted_by = caller()
            request_resume(run, by=wanted_by, seen=plan.seen)
            by = wanted_by
        return json.dumps({"by": by, "requests": len(plan.seen.resume_requests) + 1}).encode()

    try:
        change_file(Storage(), run.resume_file, change)
    except OSError as error:
        raise SubmitError(f"{run.id} cannot be resumed: {run.resume_file}: {error.strerror}") from error


def _refuse_overtaken(seen: History, record: RunRecord) -> None:
    """Raise if the run has been resumed, or has continued, since it was looked at.

    Between looking at a run and acting on it there is a second of planning, in which a second call of `resume` would
    see no sign of life either, and a call that was seen submitting may have noted its job and ended. A listing of the
    events may be stale on network storage; the files are not.
    """
    now, claimed = read_history(seen.run), read_json_object(seen.run.resume_file) or {}
    overtaken = (as_whole(claimed.get("requests")) or 0) > len(seen.resume_requests)
    noted = read_record(seen.run)
    then = (seen.last_number, len(seen.resume_requests), record.slurm_job_ids, record.submitting)
    has_changed = then != (now.last_number, len(now.resume_requests), noted.slurm_job_ids, noted.submitting)
    if overtaken or has_changed:
        by = f" ({claimed['by']})" if overtaken and isinstance(claimed.get("by"), str) else ""
        lost = f"If nobody has, some of its events are lost: remove {seen.run.resume_file}, and repeat the command."
        raise SubmitError(
            f"run {seen.run.id} was just resumed by another command{by}, and this one changed nothing.\n"
            f"Check on it: cluster-ddp status {name_for_commands(seen.run)}" + ("" if has_changed else f"\n{lost}")
        )


def _check_directory(job: RunJob) -> None:
    """Raise if a setting by which the run directory was made changes: it would have no effect now, or half of it."""
    old, new = job.before, job.spec
    for key, before, after in (
        ("runs_dir", old.runs_dir, new.runs_dir),
        ("launch.snapshot", old.launch.snapshot, new.launch.snapshot),
        ("storage.mode", old.storage.mode, new.storage.mode),
    ):
        if before != after:
            raise SubmitError(
                f"{key}: this takes effect when a run's directory is made, and this run has one.\n"
                "Leave it as it is, or submit a new run."
            )


def _check_global_batch(record: RunRecord, job: RunJob) -> None:
    kept, wanted = record.global_batch, job.spec.train.global_batch
    if kept is not None and wanted not in (None, job.before.train.global_batch, kept):
        raise SubmitError(
            f"train.global_batch: the global batch of this run is {kept}, and cannot change: "
            f"with {wanted} it would be a different run.\nSubmit a new one for that."
        )


def _check_average(status: RunStatus, job: RunJob) -> None:
    """Raise if the average of the weights, which the checkpoints of a task contain or not, is switched on or off."""
    before, after = job.before.train.ema_decay, job.spec.train.ema_decay
    if job.spec.task is None or status.last_checkpoint is None or (before is None) == (after is None):
        return
    how = (
        "this run has trained without an average of the weights, and none can begin in the middle"
        if before is None
        else f"the checkpoints of this run contain an average of the weights (decay {before:g}), so it cannot be "
        "switched off in the middle"
    )
    raise SubmitError(f"train.ema_decay: {how}.\nLeave it as it is, or submit a new run.")


def _is_finished(run: RunDirectory, status: RunStatus, job: RunJob) -> bool:
    """Whether a run is complete, has no further work to do, and has an intact last checkpoint."""
    if status.state is not RunState.COMPLETED:
        return False
    before, after = job.before.train, job.spec.train
    grown = any((getattr(after, key) or 0) > (getattr(before, key) or 0) for key in ("epochs", "steps"))
    grown |= (job.before.args, job.before.args_on_resume) != (job.spec.args, job.spec.args_on_resume)
    saves = status.last_checkpoint is not None  # a user's script may keep its own checkpoints
    return not grown and not (saves and _last_is_damaged(run))


def _weights_remarks(job: RunJob, record: RunRecord, ranks: int) -> tuple[str, ...]:
    old, new = _flat(job.before), _flat(job.spec)
    differing = sorted(key for key in old.keys() | new.keys() if old.get(key) != new.get(key) and key not in _FREE)
    remarks = []
    for key in differing:
        change = f"{key} changes from {old.get(key)!r} to {new.get(key)!r}"
        if key == "train.scaler.initial":
            remarks.append(f"{change}; it takes effect only if fp16 begins now: otherwise the saved scale continues.")
        elif key in _LENGTH:
            if new[key] is not None and _goes_by_the_end(job.spec.train):
                remarks.append(
                    f"{change}, and train.schedule: {job.spec.train.schedule} depends on it: the weights will not be "
                    "those of a run that had this value from the start."
                )
        elif key not in _BATCHES or not _divide_alike(job, record, ranks):
            remarks.append(f"{change}; the weights will differ from here on.")
    return tuple(remarks)


def _goes_by_the_end(train: TrainSpec) -> bool:
    return train.schedule in ("cosine", "linear") or (train.schedule == "step" and train.decay_every is None)


def _divide_alike(job: RunJob, record: RunRecord, ranks: int) -> bool:
    """Whether the batches of a step are divided as before; true of a run that has not begun."""
    from cluster_ddp.job import plan_batch

    if record.global_batch is None:
        return True
    before, after = (plan_batch(train, ranks, record.global_batch) for train in (job.before.train, job.spec.train))
    return before == after


def _write_job(run: RunDirectory, spec: JobSpec) -> None:
    """Replace the run's job file; the old one is kept as job.yaml.1, job.yaml.2, ..."""
    from cluster_ddp.job import dump_resolved

    number = 1
    while os.path.lexists(kept := run.path / f"{run.job_file.name}.{number}"):
        number += 1
    try:
        replace_file(Storage(), kept, run.job_file.read_bytes())
        replace_file(Storage(), run.job_file, dump_resolved(spec).encode())
    except OSError as error:
        raise SubmitError(f"the settings of {run.id} cannot be changed: {run.job_file}: {error.strerror}") from error


def _flat(spec: JobSpec) -> dict[str, Any]:
    dumped = spec.model_dump(include={"task", "params", "script", "args", "args_on_resume", "train"})
    train = dumped.pop("train")
    scaler = {f"scaler.{key}": value for key, value in train.pop("scaler").items()}
    return dumped | {f"train.{key}": value for key, value in (train | scaler).items()}


def _last_is_damaged(run: RunDirectory) -> bool:
    from cluster_ddp.checkpoint.errors import CheckpointError
    from cluster_ddp.checkpoint.verify import newest_intact, run_id_of

    try:
        _, _, passed_over = newest_intact(run.checkpoints, run_id_of(run))
    except CheckpointError:
        return True
    return any(listed.state == "damaged" for listed in passed_over)
