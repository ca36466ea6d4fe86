"""Running a function as several ranks of a gloo group on this machine, and small tasks to train in it."""

from __future__ import annotations

import gc
import inspect
import multiprocessing
import os
import pickle
import runpy
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing import connection, forkserver
from pathlib import Path
from typing import Any

import torch

from cluster_ddp.launch.ports import free_port
from cluster_ddp.run.directory import RunDirectory

# Before it, torch loads its compiler for the first step of any optimizer.
IS_DYNAMO_DEFERRED = "wrapping" in inspect.getsource(torch._compile)
_SECONDS = 600  # only guards against hanging
_SECONDS_AFTER_A_FAILURE = 60
# Forked from a process that has imported torch once, what its optimizers import late, and what tests import: starting
# a rank takes milliseconds instead of seconds.
_server = multiprocessing.get_context("forkserver")
_PRELOADED = [
    "gc_off", "torch._dynamo", "cluster_ddp.train", "cluster_ddp.train.trainer", "pytest", "train_tasks", "own_loops",
]  # fmt: skip
_server.set_forkserver_preload(_PRELOADED)


def preload(*modules: str, restart: bool = False) -> None:
    """Fork ranks from a process that has imported these as well; `restart` it even if it has."""
    server = forkserver._forkserver
    if server._preload_modules == [*_PRELOADED, *modules] and not restart:
        return
    _server.set_forkserver_preload([*_PRELOADED, *modules])
    if server._forkserver_pid is not None:
        # Asked to end, it would wait for whatever a killed rank has left behind.
        os.kill(server._forkserver_pid, signal.SIGKILL)
    server._stop()  # the next rank starts it again


def _wait_for(ranks: list[Any], results: list[Path]) -> None:
    """Wait until all ranks have ended; once one has without a result that is good, the others have little time left."""
    deadline = time.monotonic() + _SECONDS
    while (alive := [rank for rank in ranks if rank.is_alive()]) and (left := deadline - time.monotonic()) > 0:
        connection.wait([rank.sentinel for rank in alive], left)
        ended = [path for rank, path in zip(ranks, results, strict=True) if not rank.is_alive()]
        if not all(path.exists() and pickle.loads(path.read_bytes())[0] for path in ended):  # noqa: S301
            deadline = min(deadline, time.monotonic() + _SECONDS_AFTER_A_FAILURE)


def run_ranks(
    function: Callable[..., Any], world_size: int, *arguments: Any, gpus: bool = False, **more: Any
) -> list[Any]:
    """Call ``function(*arguments, **more)`` on every rank of a group; what it returns, by rank.

    Without `gpus` they see none.

    Raises AssertionError with the traceback of the first rank that failed, or when a rank hangs.
    """
    with tempfile.TemporaryDirectory() as folder:
        port = free_port()
        ranks = [
            _server.Process(
                target=_be_rank, args=(function, rank, world_size, port, Path(folder), arguments, more, gpus)
            )
            for rank in range(world_size)
        ]
        for rank in ranks:
            rank.start()
        _wait_for(ranks, [Path(folder) / str(number) for number in range(world_size)])
        hung = [number for number, rank in enumerate(ranks) if rank.is_alive()]
        for rank in ranks:
            rank.kill()
        paths = {number: Path(folder) / str(number) for number in range(world_size)}
        found = {number: pickle.loads(path.read_bytes()) for number, path in paths.items() if path.exists()}  # noqa: S301
        for number, (ok, value) in found.items():
            assert ok, f"rank {number} failed:\n{value}"
        assert not hung, f"ranks {hung} hang"
        for number, rank in enumerate(ranks):
            assert number in found, f"rank {number} died with status {rank.exitcode}"
        return [found[number][1] for number in range(world_size)]


def rank_environments(run: RunDirectory, world_size: int, attempt: int = 0) -> list[dict[str, str]]:
    """The environment of each rank of an attempt."""
    port = free_port()
    return [
        {
            **os.environ,
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(world_size),
            "LOCAL_WORLD_SIZE": str(world_size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "CUDA_VISIBLE_DEVICES": "",
            "CLUSTER_DDP_RUN": str(run.path),
            "CLUSTER_DDP_ATTEMPT": str(attempt),
            "CLUSTER_DDP_NODE": "3",
        }
        for rank in range(world_size)
    ]


def start_whole_rank(environment: dict[str, str], run: Path, log: Path) -> Any:
    """``python -m cluster_ddp.train RUN`` in this environment, forked from the process that has imported torch."""
    rank = _server.Process(target=_be_whole_rank, args=(environment, run, log))
    rank.start()
    return rank


def start_program(environment: dict[str, str], log: Path, program: Path, *arguments: str) -> Any:
    """``python PROGRAM ARGUMENTS`` in this environment, forked as a whole rank is."""
    rank = _server.Process(target=_be_program, args=(environment, log, program, arguments))
    rank.start()
    return rank


def _be_whole_rank(environment: dict[str, str], run: Path, log: Path) -> None:
    _become(environment, log)
    from cluster_ddp.train.__main__ import main

    main([str(run)])


def _be_program(environment: dict[str, str], log: Path, program: Path, arguments: tuple[str, ...]) -> None:
    _become(environment, log)
    sys.argv = [str(program), *arguments]
    sys.path.insert(0, str(program.parent))
    runpy.run_path(str(program), run_name="__main__")


def _become(environment: dict[str, str], log: Path) -> None:
    os.environ.clear()
    os.environ.update(environment)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    _begin()


def _begin() -> None:
    # Workers start as those of a rank that torchrun starts do, and not by a fork server of each rank's own.
    multiprocessing.set_start_method(None, force=True)
    gc.freeze()  # what the imports made is neither collected nor searched: half of the time of a short training
    gc.enable()


def _be_rank(
    function: Callable[..., Any],
    rank: int,
    world_size: int,
    port: int,
    folder: Path,
    arguments: tuple[Any, ...],
    more: dict[str, Any],
    gpus: bool,
) -> None:
    if not gpus:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        GLOO_SOCKET_IFNAME="lo",
    )
    _begin()
    import torch

    from cluster_ddp.train import cleanup_distributed, setup_distributed

    torch.set_num_threads(1)
    try:
        setup_distributed(timeout=60)
        result = (True, function(*arguments, **more))
        cleanup_distributed()
    except BaseException:
        result = (False, traceback.format_exc())
    (folder / f"{rank}.part").write_bytes(pickle.dumps(result))
    (folder / f"{rank}.part").rename(folder / str(rank))
