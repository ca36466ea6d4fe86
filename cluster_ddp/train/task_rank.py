"""Runs one rank of a run whose job names a task: from its files to a trainer, and to how the rank ended."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import NamedTuple

from cluster_ddp.job import load_resolved
from cluster_ddp.run.code import kept_search_path, kept_task
from cluster_ddp.run.directory import RunDirectory
from cluster_ddp.run.events import EventWriter, on_this_host
from cluster_ddp.train.randomness import Use, derive, seed_everything
from cluster_ddp.train.ranks.distributed import find_world
from cluster_ddp.train.session import joined_rank
from cluster_ddp.train.task import load_task
from cluster_ddp.train.trainer import Trainer


class End(NamedTuple):
    """How a rank ended."""

    status: int  # 0 if training completed or was stopped, 1 if it failed
    at_once: bool  # whether to exit without waiting for anything, such as a logger's network


def run_rank(run: RunDirectory, attempt: int) -> End:
    """Run one rank of a run whose job names a task; errors are recorded."""
    writer = EventWriter(run, on_this_host(f"rank-{find_world().rank}"))
    try:
        with joined_rank(run, attempt, lambda: load_resolved(run.job_file), writer=writer) as (job, process):
            assert job.task is not None
            seed_everything(derive(Use.BUILD, job.train.seed))
            if job.launch.snapshot:
                sys.path[:] = kept_search_path(run, [*sys.path, str(Path.cwd())])
            task = load_task(kept_task(run, job.task), job.params)
            outcome = Trainer(job, task, run, attempt, process=process).run()
    except SystemExit:
        return End(status=1, at_once=False)
    return End(status=0, at_once=outcome.at_once)
