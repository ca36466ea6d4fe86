"""Starts ranks from a running program, for scripts that are not started by torchrun."""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch.multiprocessing.spawn import spawn

from cluster_ddp.launch.address import LOOPBACK
from cluster_ddp.launch.ports import NoFreePort, free_port
from cluster_ddp.printing import say
from cluster_ddp.train.errors import DistributedError
from cluster_ddp.train.ranks.distributed import cleanup_distributed, setup_distributed

TrainFunction = Callable[..., None]


def launch_distributed_training(
    train_fn: TrainFunction, world_size: int | None = None, *, backend: str | None = None, **arguments: Any
) -> None:
    """Run ``train_fn(rank, world_size, **arguments)`` on this machine, in one process per rank, joined in a group.

    With one rank, or if the ranks cannot be joined (no free port, a missing backend), it runs in this process alone, as
    rank 0 of 1.

    Parameters
    ----------
    train_fn
        A function at the top level of an importable module: the processes import it by name.
    world_size
        Number of ranks; None: one per GPU, or one.
    backend
        nccl or gloo; None: by platform.

    Raises
    ------
    DistributedError
        Other processes cannot import `train_fn`, because it is a lambda, or defined inside a function or a notebook.
    Exception
        What `train_fn` raised, as reported by torch.multiprocessing.
    """
    count = world_size or max(1, torch.cuda.device_count())
    if count > 1 and _in_notebook():
        raise DistributedError(
            "ranks cannot be started from a notebook: other processes cannot import a function that is defined in it. "
            "Put the training into a file and run it with torchrun, or use world_size=1 here."
        )
    port = _meeting_port(backend) if count > 1 else None
    if port is None:
        train_fn(0, 1, **arguments)
        return
    _expect_importable(train_fn, arguments)
    spawn(_run_rank, args=(train_fn, count, backend, port, arguments), nprocs=count)  # type: ignore[no-untyped-call]


def _run_rank(
    rank: int, train_fn: TrainFunction, world_size: int, backend: str | None, port: int, arguments: dict[str, Any]
) -> None:
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_WORLD_SIZE=str(world_size),
        MASTER_ADDR=LOOPBACK,
        MASTER_PORT=str(port),
    )
    setup_distributed(backend)
    try:
        train_fn(rank, world_size, **arguments)
    finally:
        cleanup_distributed()


def _meeting_port(backend: str | None) -> int | None:
    """The port where the ranks can meet; None, after printing the reason, if they cannot be joined here."""
    missing = _missing(backend)
    if missing is None:
        try:
            return free_port()
        except NoFreePort as error:
            missing = str(error)
    say(f"cluster-ddp: training in one process: {missing}")
    return None


def _missing(backend: str | None) -> str | None:
    if not torch.distributed.is_available():
        return "this torch is built without torch.distributed"
    if backend == "nccl" and not (torch.cuda.is_available() and torch.distributed.is_nccl_available()):
        return "NCCL needs CUDA, which is not here"
    if backend == "mpi" and not torch.distributed.is_mpi_available():
        return "this torch is built without MPI"
    return None


def _expect_importable(train_fn: TrainFunction, arguments: dict[str, Any]) -> None:
    try:
        ForkingPickler.dumps((train_fn, arguments))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise DistributedError(
            f"the ranks cannot be given {getattr(train_fn, '__name__', train_fn)} and its arguments ({error}): define "
            "the function at the top level of a module, not as a lambda or inside another function, and give it "
            "arguments that can be pickled"
        ) from error


def _in_notebook() -> bool:
    shell = sys.modules.get("IPython")
    return shell is not None and "IPKernelApp" in getattr(shell.get_ipython(), "config", {})
