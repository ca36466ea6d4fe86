"""The life of one rank: join, train, leave, and say what went wrong."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import traceback

import torch.distributed as dist

from cluster_ddp.network import resolve
from cluster_ddp.run import events
from cluster_ddp.run.directory import RunDirectory
from cluster_ddp.run.events import EventWriter
from cluster_ddp.spec import ClusterDDPError, JobSpec, load_resolved
from cluster_ddp.train.distributed import World, cleanup_distributed, find_world, setup_distributed
from cluster_ddp.train.explain import explain
from cluster_ddp.train.randomness import Use, derive, seed_everything
from cluster_ddp.train.rank import RankProcess, become_rank
from cluster_ddp.train.task import load_task
from cluster_ddp.train.trainer import Trainer

_FIRST_FAILURE = "cluster_ddp/first-failure"


def run_rank(run: RunDirectory, attempt: int) -> int:
    """Train as the run's job says.

    Returns
    -------
    0 when training was completed or stopped, 1 when it failed.
    """
    process: RankProcess | None = None
    trainer: Trainer | None = None
    world = find_world()
    try:
        job = load_resolved(run.job_file)
        process = become_rank(world, run.attempt(attempt), job.requeue.signal)
        trainer = _make_trainer(job, run, attempt, process)
        trainer.run()
    except BaseException as error:
        _record_failure(error, run, attempt, world, process, trainer)
        return 1
    cleanup_distributed()
    return 0


def _make_trainer(job: JobSpec, run: RunDirectory, attempt: int, process: RankProcess) -> Trainer:
    network = resolve(job.network)
    backend = None if job.network.backend == "auto" else job.network.backend
    setup_distributed(backend, timeout=network.timeout)
    assert job.task is not None
    seed_everything(derive(Use.BUILD, job.train.seed))
    task = load_task(job.task, job.params)
    return Trainer(job, task, run, attempt, process=process)


def _record_failure(
    error: BaseException,
    run: RunDirectory,
    attempt: int,
    world: World,
    process: RankProcess | None,
    trainer: Trainer | None,
) -> None:
    """Say what happened, on the rank where it happened: the others fail too, because they wait for this one in vain."""
    cause = None if _is_first(world) else _first_failure()
    if cause is not None:
        print(f"cluster_ddp: rank {world.rank} ends because {cause}", file=sys.stderr, flush=True)
        return
    text = explain(error)
    if isinstance(error, ClusterDDPError):
        print(f"cluster_ddp: rank {world.rank}: {text}", file=sys.stderr, flush=True)
    else:
        traceback.print_exception(error)
        print(f"cluster_ddp: rank {world.rank}: {text}", file=sys.stderr, flush=True)
    EventWriter(run, f"rank-{world.rank}").write(
        events.FAILED,
        attempt=attempt,
        step=trainer.step if trainer is not None else None,
        rank=world.rank,
        node=int(os.environ.get("CLUSTER_DDP_NODE", "0")),
        host=socket.gethostname(),
        phase=(process.beat.phase.name if process is not None else "STARTING").lower(),
        error=text,
    )


def _is_first(world: World) -> bool:
    """Whether no other rank has failed before; the store that the ranks met through decides."""
    if not dist.is_initialized():
        return True
    with contextlib.suppress(Exception):
        store = dist.distributed_c10d._get_default_store()
        if store.add(_FIRST_FAILURE, 1) > 1:
            return False
        store.set(f"{_FIRST_FAILURE}-rank", str(world.rank))
    return True  # the store went with rank 0, and what it died of may be anything


def _first_failure() -> str | None:
    with contextlib.suppress(Exception):
        store = dist.distributed_c10d._get_default_store()
        return f"rank {store.get(f'{_FIRST_FAILURE}-rank').decode()} failed"
    return None
