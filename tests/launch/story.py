"""A job's whole story in simulated worlds: the starts that a test describes, then calm ones until the run is over."""

from __future__ import annotations

from pathlib import Path

from simulated_job import live
from simulated_world import Life, World

from cluster_ddp.errors import ClusterDDPError
from cluster_ddp.job import JobSpec
from cluster_ddp.launch.keeper.requeueing import RequeueFailed
from cluster_ddp.run.directory import RunDirectory
from cluster_ddp.run.errors import RunAlive, RunEnded
from cluster_ddp.run.runs import create_run
from cluster_ddp.run.status.report import RunStatus, describe

SPEC = JobSpec(name="a", task="cluster_ddp.tasks.digits:Digits", launch={"procs_per_node": 1})


def play(folder: Path, story: list[Life]) -> tuple[RunDirectory, list[World], RunStatus]:
    """Let a job have these starts, and further calm ones as long as it is queued again; where its run stands then."""
    run = create_run(SPEC, runs_dir=folder, via="sbatch", script="#!/bin/bash\n")
    worlds: list[World] = []
    for restart, life in enumerate([*story, *[Life()] * 8]):
        worlds.append(world := World(run, restart, life))
        try:
            live(world)
        except (RunAlive, RunEnded, RequeueFailed):
            pass
        except ClusterDDPError as error:
            raise AssertionError(f"the keeper cannot begin: {error}") from error
        taken_back, cancelled = world.happened("requeue by Slurm"), world.happened("scancel")
        world.queued |= taken_back is not None and (cancelled is None or cancelled > taken_back + 1)
        world.queued &= not world.left_queue
        if not world.queued or cancelled is not None:
            return run, worlds, describe(run, {})
    raise AssertionError("it is started again and again")
