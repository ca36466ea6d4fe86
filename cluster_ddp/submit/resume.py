"""Going on with a run: what may be changed on the way, and handing it to where it was started."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from cluster_ddp.run.directory import RunDirectory
from cluster_ddp.run.history import History, read_history
from cluster_ddp.run.record import read_record
from cluster_ddp.run.state import RunState, RunStatus, last_checkpoint
from cluster_ddp.run.storage import Storage, replace_file
from cluster_ddp.submit.base import SubmitError

if TYPE_CHECKING:
    from cluster_ddp.spec import JobSpec

_FREE = frozenset({
    "train.epochs", "train.steps", "train.batch_size", "train.global_batch", "train.accumulation_steps",
    "train.evaluate_every", "train.workers", "train.max_bad_steps", "train.profile",
})  # fmt: skip
"""Settings of training that leave the weights of an uninterrupted run as they are, or that are checked elsewhere."""


def refuse_alive(run: RunDirectory, status: RunStatus) -> None:
    """Raise when something of the run is alive or in the queue.

    Raises
    ------
    SubmitError
        With what to do about it.
    """
    in_queue = status.state in (RunState.PENDING, RunState.REQUEUED) and status.slurm_job_id is not None
    if status.state is RunState.RUNNING or in_queue:
        job = f" (Slurm job {status.slurm_job_id})" if status.slurm_job_id else ""
        raise SubmitError(
            f"run {run.id} is {status.state.value}{job} and goes on by itself.\n"
            f"To start it anew, end it first: cluster-ddp {'cancel' if in_queue else 'stop'} {run.id}"
        )


def refuse_overtaken(seen: History) -> None:
    """Raise when the run has been resumed, or has gone on, since it was seen.

    Between the look at a run and what follows from it lies a second of planning, in which a second call of `resume`
    would see no sign of life either.

    Raises
    ------
    SubmitError
        Nothing may be changed any more: another call does what was wanted.
    """
    now = read_history(seen.run)
    if (now.last_number, len(now.resume_requests)) != (seen.last_number, len(seen.resume_requests)):
        raise SubmitError(
            f"run {seen.run.id} was resumed a moment ago by another call, and this one has changed nothing.\n"
            f"See how it goes on: cluster-ddp status {seen.run.id}"
        )


def changed_job(run: RunDirectory, overrides: Sequence[str]) -> tuple[JobSpec, tuple[str, ...], bool]:
    """The run's job with settings laid over it; nothing is written yet.

    Returns
    -------
    tuple
        The job, remarks for people, and whether it differs from the run's job file.

    Raises
    ------
    JobFileError
        A setting is wrong.
    SubmitError
        A setting would be ignored without a word: the global batch is the run's for life.
    """
    from cluster_ddp.spec import load_job, load_resolved

    before = load_resolved(run.job_file)
    if not overrides:
        return before, (), False
    after = load_job(str(run.job_file), overrides, check_target=False, resolved=True).spec
    _check_global_batch(run, before, after)
    old, new = _flat(before), _flat(after)
    exact = sorted(key for key in old.keys() | new.keys() if old.get(key) != new.get(key) and key not in _FREE)
    remarks = [
        f"{key} changes from {old.get(key)!r} to {new.get(key)!r}; the run's weights will differ from here on."
        for key in exact
    ]
    return after, tuple(remarks), after != before


def check_size(run: RunDirectory, spec: JobSpec, nodes: int | None, procs: int | None) -> None:
    """Raise, before anything is changed, when a local run cannot go on with so many ranks.

    Raises
    ------
    ClusterDDPError
        The global batch or the GPUs cannot be divided among them.
    """
    from cluster_ddp.submit.local import plan_local

    record = read_record(run)
    plan_local(spec, nodes=nodes or record.nodes, procs=procs or record.procs, global_batch=record.global_batch)


def write_job(run: RunDirectory, spec: JobSpec) -> None:
    """Replace the run's job file; the old one stays as job.yaml.1, job.yaml.2, ...

    Raises
    ------
    SubmitError
        The run directory cannot be written.
    """
    from cluster_ddp.spec import dump_resolved

    number = 1
    while os.path.lexists(kept := run.path / f"{run.job_file.name}.{number}"):
        number += 1
    try:
        replace_file(Storage(), kept, run.job_file.read_bytes())
        replace_file(Storage(), run.job_file, dump_resolved(spec).encode())
    except OSError as error:
        raise SubmitError(f"the settings of {run.id} cannot be changed: {run.job_file}: {error.strerror}") from error


def nothing_to_do(run: RunDirectory, status: RunStatus, before: JobSpec, after: JobSpec) -> bool:
    """Whether a run is complete, was given nothing more to do, and has a last checkpoint that is sound."""
    if status.state is not RunState.COMPLETED:
        return False
    grown = any((getattr(after.train, key) or 0) > (getattr(before.train, key) or 0) for key in ("epochs", "steps"))
    return not grown and not _last_is_damaged(run)


def send_again(seen: History, spec: JobSpec, *, changed: bool) -> str | None:
    """Submit a run again, the way it was submitted first, to the same run directory; the new Slurm job id.

    The batch script of the run is sent as it lies there, with whatever a person has edited; only changed settings make
    a new one.

    Parameters
    ----------
    seen
        The run as it was before anybody made sure that nothing of it is alive.
    spec, changed
        The job, and whether it is another than the run's.

    Raises
    ------
    ClusterDDPError
        The batch system refuses, or the run was started by hand.
    """
    from cluster_ddp.submit.base import Submission, note_submitted
    from cluster_ddp.submit.sbatch import SbatchSubmission
    from cluster_ddp.submit.submitit import SubmititSubmission

    run = seen.run
    via = read_record(run).via
    submission: Submission
    if via == SbatchSubmission.via:
        submission = SbatchSubmission(spec)
    elif via == SubmititSubmission.via:
        submission = SubmititSubmission(spec)
    else:
        raise SubmitError(
            f"run {run.id} was started by hand on each node; resume starts only what submit or local has started.\n"
            f"It can be started again only by hand, with its run directory: {run.path}\n"
            f"Its weights, if it has saved any, for use elsewhere: cluster-ddp export {run.id} -o {run.id}.safetensors"
        )
    submission.check()
    refuse_overtaken(seen)
    if changed:
        write_job(run, spec)
        replace_file(Storage(), run.script, submission.text.encode(), mode=0o700)
    _record_wish(seen)
    job_id = submission.send(run)
    note_submitted(run, via, job_id)
    return job_id


def resume_here(
    seen: History, spec: JobSpec, nodes: int | None, procs: int | None, *, changed: bool, quiet: bool
) -> int:
    """Go on with a local run in the foreground; its exit status.

    Parameters
    ----------
    seen
        The run as it was before anybody made sure that nothing of it is alive.
    spec, changed
        The job, and whether it is another than the run's.
    nodes, procs
        Default: those of the last attempt.
    quiet
        Show progress on standard error.

    Raises
    ------
    ClusterDDPError
        It cannot go on with so many ranks, or another call is going on with it.
    """
    import sys

    from cluster_ddp.submit.local import resume_local

    run = seen.run
    check_size(run, spec, nodes, procs)
    refuse_overtaken(seen)
    if changed:
        write_job(run, spec)
    _record_wish(seen)
    return resume_local(run, nodes, procs, show=sys.stderr if quiet else sys.stdout)


def _record_wish(seen: History) -> None:
    from cluster_ddp.run.attempt import request_resume
    from cluster_ddp.run.events import caller

    request_resume(seen.run, by=caller(), seen=seen)


def _check_global_batch(run: RunDirectory, before: JobSpec, after: JobSpec) -> None:
    kept = read_record(run).global_batch
    if kept is not None and after.train.global_batch not in (None, before.train.global_batch, kept):
        raise SubmitError(
            f"train.global_batch: this run has trained with {kept} samples a step and keeps to it; "
            f"{after.train.global_batch} would be another training.\nSubmit a new run for it."
        )


def _flat(spec: JobSpec) -> dict[str, Any]:
    dumped = spec.model_dump(include={"task", "params", "script", "args", "train"})
    train = dumped.pop("train")
    return dumped | {f"train.{key}": value for key, value in train.items()}


def _last_is_damaged(run: RunDirectory) -> bool:
    from cluster_ddp.train.checkpoint.errors import CheckpointError
    from cluster_ddp.train.checkpoint.inspect import newest_sound, owner_of

    if last_checkpoint(run) is None:
        return False  # a script of the user's keeps its checkpoints itself
    try:
        _, _, passed_over = newest_sound(run.checkpoints, owner_of(run))
    except CheckpointError:
        return True
    return any(listed.state == "damaged" for listed in passed_over)
