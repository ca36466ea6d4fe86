"""The life of one rank: join, train, leave, and say what went wrong."""

from __future__ import annotations

from typing import NamedTuple

from cluster_ddp.run.directory import RunDirectory
from cluster_ddp.run.events import EventWriter
from cluster_ddp.spec import JobSpec, load_resolved
from cluster_ddp.train.distributed import cleanup_distributed, find_world
from cluster_ddp.train.failure import record_failure
from cluster_ddp.train.randomness import Use, derive, seed_everything
from cluster_ddp.train.rank import RankProcess, become_rank, join_ranks
from cluster_ddp.train.task import load_task
from cluster_ddp.train.trainer import Trainer


class End(NamedTuple):
    """How a rank ended.

    Attributes
    ----------
    status
        0 when training was completed or stopped, 1 when it failed.
    at_once
        Whether nothing is to be waited for any more, such as a logger's network.
    """

    status: int
    at_once: bool


def run_rank(run: RunDirectory, attempt: int) -> End:
    """Train as the run's job says."""
    process: RankProcess | None = None
    trainer: Trainer | None = None
    world = find_world()
    try:
        job = load_resolved(run.job_file)
        process = become_rank(world, run.attempt(attempt), job.requeue.signal)
        trainer = _make_trainer(job, run, attempt, process)
        outcome = trainer.run()
    except BaseException as error:
        record_failure(
            error,
            EventWriter(run, f"rank-{world.rank}"),
            attempt=attempt,
            world=world,
            process=process,
            step=trainer.step if trainer is not None else None,
        )
        return End(status=1, at_once=False)
    cleanup_distributed()
    return End(status=0, at_once=outcome.at_once)


def _make_trainer(job: JobSpec, run: RunDirectory, attempt: int, process: RankProcess) -> Trainer:
    join_ranks(job)
    assert job.task is not None
    seed_everything(derive(Use.BUILD, job.train.seed))
    task = load_task(job.task, job.params)
    return Trainer(job, task, run, attempt, process=process)
