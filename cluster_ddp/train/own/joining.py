"""`join_run`: makes a process with a custom loop a rank of a run, and does what the trainer does around its loop.

    with join_run() as run:
        model, optimizer, loader, scheduler = ...          # as before
        loader = run.resumable(loader, model=model, optimizer=optimizer, scheduler=scheduler, epochs=20)
        for epoch in loader.epochs():
            for batch in loader:
                ...                                        # as before

docs/own-code.md explains how to use it in common kinds of programs.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from cluster_ddp.job import JobSpec, load_resolved
from cluster_ddp.launch.variables import ATTEMPT_VARIABLE, RUN_VARIABLE
from cluster_ddp.run.directory import RunDirectory
from cluster_ddp.run.events import EventWriter, on_this_host
from cluster_ddp.train.errors import TrainError
from cluster_ddp.train.own.blocks import Block
from cluster_ddp.train.own.leaving import LeaveBlock
from cluster_ddp.train.own.occupied import occupied
from cluster_ddp.train.own.run import ScriptRun
from cluster_ddp.train.precision import keep_order_of_sums
from cluster_ddp.train.randomness import Use, derive, seed_everything
from cluster_ddp.train.ranks.deferred_dynamo import defer_dynamo
from cluster_ddp.train.ranks.distributed import find_world
from cluster_ddp.train.ranks.stop import handlers_put_back
from cluster_ddp.train.session import joined_rank

if RUN_VARIABLE in os.environ:  # here, because many programs build their optimizer before they join
    defer_dynamo()
_joined: list[ScriptRun] = []
# Seeds that are not the program's: torch draws a large one when a process starts. A smaller one was set before this
# package was imported.
_drawn = {torch.initial_seed()} if torch.initial_seed() >= 2**32 else set[int]()


def join_run(folder: Path | str | None = None) -> contextlib.AbstractContextManager[ScriptRun]:
    """Make this process a rank of the run that it was started for, and join the other ranks.

    If the block ends without an exception, the last step is saved and the run is recorded as completed. If the ranks
    agree to stop, the loop over `ScriptRun.resumable` or `ScriptRun.steps` leaves the block, without running what
    follows the loop in it, and the run is recorded as stopped. An exception is printed and recorded as a failure, and
    the process exits with status 1.

    Parameters
    ----------
    folder
        Where checkpoints and metrics are written if the script was not started by cluster-ddp, whose runs have their
        own directory. None: ``<script>.run``, or the notebook's name, in the working directory.

    Raises
    ------
    SystemExit
        Something failed, here or on another rank; it has been reported.
    """
    return _Joining(folder)


class _Joining(contextlib.AbstractContextManager[ScriptRun]):
    """What `join_run` returns, for a `with`."""

    def __init__(self, folder: Path | str | None) -> None:
        self._block = _block_of(folder)

    def __enter__(self) -> ScriptRun:
        return self._block.__enter__()

    def __exit__(self, *error: Any) -> bool | None:
        return self._block.__exit__(*error)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"join_run() has no {name}: the run begins in a `with`. Write `with join_run() as run:` around the loop"
        )


@contextlib.contextmanager
def _block_of(folder: Path | str | None) -> Iterator[ScriptRun]:
    place = os.environ.get(RUN_VARIABLE)
    directory = RunDirectory(Path(place or folder or f"{_name_of_program()}.run").absolute())
    attempt = int(os.environ.get(ATTEMPT_VARIABLE, "0"))
    writer = EventWriter(directory, on_this_host(f"rank-{find_world().rank}")) if place else None
    block = Block(directory.path, attempt, is_run=writer is not None)
    block.enter()

    left: SystemExit | None = None

    def read_job() -> JobSpec:
        if place:
            return load_resolved(directory.job_file)
        return JobSpec(name="script", script=_name_of_program())

    around = contextlib.nullcontext() if place else handlers_put_back()
    alone = contextlib.nullcontext() if place or not find_world().is_main else occupied(directory.path)
    joined = joined_rank(directory, attempt, read_job, writer=writer)
    with around, joined as (job, process), alone, _seeded(job.train.seed, may_run_again=block.may_run_again):
        if find_world().device.type == "cpu":
            keep_order_of_sums()
        run = ScriptRun(job, directory, attempt, process, writer, block)
        _joined.append(run)
        try:
            yield run
        except LeaveBlock:
            pass
        except GeneratorExit as error:
            run.fail()
            raise TrainError(
                "nothing holds the block of join_run() open, as after run = join_run().__enter__(): nothing is saved "
                "from now on. Write `with join_run() as run:` around the loop"
            ) from error
        except SystemExit as end:
            if end.code not in (None, 0):
                run.fail()
                raise
            left = end  # sys.exit(0) in the middle of the script ends it just like reaching its last line
            run.note_exit()
        except BaseException as error:
            run.fail(error)
            raise
        finally:
            _joined.remove(run)
        run.end()
    if left is not None:
        raise left


@contextlib.contextmanager
def _seeded(seed: int, *, may_run_again: bool) -> Iterator[None]:
    """Seed everything at the beginning of a block, if the program has not seeded torch itself.

    Parameters
    ----------
    may_run_again
        Whether the block is in a cell of a notebook, which then begins with the same numbers each time.
    """
    if has_not := torch.initial_seed() in _drawn:
        seed_everything(derive(Use.BUILD, seed))
    try:
        yield
    finally:
        if has_not and may_run_again:
            _drawn.add(torch.initial_seed())


def joined_run() -> ScriptRun | None:
    """The run of the enclosing block; None outside of one."""
    return _joined[-1] if _joined else None


def _name_of_program() -> str:
    """The name of the script or notebook, or "python" for an interpreter without a file."""
    if "ipykernel" in sys.modules:
        return Path(os.environ.get("JPY_SESSION_NAME", "notebook")).stem
    return Path(sys.argv[0].removeprefix("-c")).stem or "python"
