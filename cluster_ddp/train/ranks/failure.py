"""Reports an error on the rank where it happened."""

from __future__ import annotations

import contextlib
import errno
import os
import time
import traceback
from pathlib import Path
from types import FrameType, TracebackType

import torch
from torch.optim import Optimizer

from cluster_ddp.errors import Cause
from cluster_ddp.job import ClusterDDPError
from cluster_ddp.launch.logs import if_disk_is_full
from cluster_ddp.launch.variables import NODE_VARIABLE
from cluster_ddp.printing import say
from cluster_ddp.process import host_name
from cluster_ddp.run import events
from cluster_ddp.run.causes import cause_of_message, shortened
from cluster_ddp.run.directory import RunDirectory
from cluster_ddp.run.events import EventWriter, read_events_of
from cluster_ddp.run.phase import Phase
from cluster_ddp.train.checks.remedies import FIND_UNUSED
from cluster_ddp.train.checks.unsuited_optimizers import SECOND_DERIVATIVES, other_settings
from cluster_ddp.train.objects.whose_code import is_library_file, is_our_file
from cluster_ddp.train.ranks.distributed import World, store_of_ranks
from cluster_ddp.train.ranks.process import RankProcess

_FIRST_FAILURE = "cluster_ddp/first-failure"
_ASKING_SECONDS = 1.0
_NO_MORE_PROCESSES = ("Resource temporarily unavailable", "can't start new thread")
_UNUSED = ("Expected to have finished reduction", "did not receive grad")


def record_failure(
    error: BaseException,
    writer: EventWriter | None,
    *,
    attempt: int,
    world: World,
    process: RankProcess | None,
) -> None:
    """Print an error, and record it as this rank's event, but only on the rank where it happened first.

    The other ranks fail too, because they wait for this one; they only print its number.
    """
    earlier = _earlier_failure(error, world, writer, attempt)
    if earlier is not None:
        say(f"cluster-ddp: rank {world.rank} ends because {earlier}")
        if process is not None:
            process.beat.fail(Cause.FOLLOWS)
        return
    phase = process.beat.phase if process is not None else Phase.STARTING
    text, cause = explain(error), cause_of(error)
    if process is not None:
        process.beat.fail(cause)
    if "TORCHELASTIC_ERROR_FILE" in os.environ and isinstance(error, Exception):
        from torch.distributed.elastic.multiprocessing.errors import get_error_handler  # a rank that works needs none

        get_error_handler().record_exception(error)
    if not isinstance(error, ClusterDDPError):
        traceback.print_exception(type(error), error, _from_program(error))
    say(f"cluster-ddp: rank {world.rank}: {text}")
    if writer is not None:
        comes_back = isinstance(error, ClusterDDPError) and error.comes_back
        writer.write(
            events.FAILED,
            attempt=attempt,
            step=process.beat.steps if process is not None and phase is not Phase.STARTING else None,
            rank=world.rank,
            node=int(os.environ.get(NODE_VARIABLE, "0")),
            host=host_name(),
            phase=phase.word,
            error=shortened(text),
            cause=cause.value,
            **({"comes_back": True} if comes_back else {}),
        )
    _let_others_ask(world)


def _earlier_failure(error: BaseException, world: World, writer: EventWriter | None, attempt: int) -> str | None:
    """Return how another rank failed before, if this error is only a consequence of that; None if this rank was first.

    The store that the ranks met through records who was first. A store that is not hosted by torchrun's agent is gone
    once rank 0 is; then rank 0 was first if it has recorded an error, whatever has failed here.
    """
    if (store := store_of_ranks()) is None:
        return None
    try:
        if store.add(_FIRST_FAILURE, 1) == 1:
            store.set(f"{_FIRST_FAILURE}-rank", str(world.rank))
            return None
        return f"rank {store.get(f'{_FIRST_FAILURE}-rank').decode()} failed"
    except RuntimeError:  # the connection is gone
        if world.rank == 0:
            return None
        if writer is not None and _rank_0_has_recorded(writer.run, attempt):
            return "rank 0 failed"
        is_echo = isinstance(error, RuntimeError) and not isinstance(error, torch.OutOfMemoryError)
        return "rank 0 failed or was killed" if is_echo else None


def _rank_0_has_recorded(run: RunDirectory, attempt: int) -> bool:
    return any(event.get("rank") == 0 for event in read_events_of(run.attempt(attempt), events.FAILED))


def _let_others_ask(world: World) -> None:
    """Keep rank 0, and so the store, alive until the ranks that fail for the same reason have asked who was first."""
    if world.rank != 0 or (store := store_of_ranks()) is None:
        return
    end = time.monotonic() + _ASKING_SECONDS
    with contextlib.suppress(RuntimeError):
        while store.add(_FIRST_FAILURE, 0) < world.world_size and time.monotonic() < end:
            time.sleep(0.02)


def explain(error: BaseException) -> str:
    """Describe the error and, where known, the setting to change."""
    said, line_break, more = str(error).partition("\n")
    text = "; ".join(filter(None, [said, *_notes(error)])) + line_break + more  # `status` shows the first line
    if any(sign in text for sign in _NO_MORE_PROCESSES):
        text += "; perhaps you have reached the limit on processes and threads there (ulimit -u), including other jobs"
    if _is_of_output(error):
        text += if_disk_is_full()
    if isinstance(error, ClusterDDPError):
        return f"{text or type(error).__name__}{_place(error)}"
    named = ": ".join(filter(None, [type(error).__name__, text]))
    if inside := getattr(error, "exceptions", None):  # a group; the class is new in Python 3.11
        named += f"; the first: {explain(inside[0])}"
    advice = _advice(error, text)
    return f"{advice}\n    ({named})" if advice else named


def _is_of_output(error: BaseException) -> bool:
    """Whether a disk without space is that of no named file, as after print()."""
    return isinstance(error, OSError) and error.errno == errno.ENOSPC and error.filename is None


def cause_of(error: BaseException) -> Cause:
    """Return what an error was caused by: as it says itself, or as the one that it was raised from does."""
    seen: set[int] = set()  # an error can be raised from itself
    following: object = error
    while isinstance(following, BaseException) and id(following) not in seen:
        seen.add(id(following))
        cause = _cause_of_one(following)
        if cause is not None:
            return cause
        within = getattr(following, "exceptions", None)  # of a group
        following = within[0] if isinstance(within, tuple) and within else following.__cause__
    return Cause.PROGRAM


def _cause_of_one(error: BaseException) -> Cause | None:
    """What an error itself shows of its cause; None if it looks like the program's own."""
    said = getattr(error, "cause", None)  # torch's errors about workers also have one: see `tell_how_they_ended`
    if isinstance(said, Cause):
        return said
    if _is_of_output(error) and if_disk_is_full():
        return Cause.HOST
    if isinstance(error, ClusterDDPError):  # our own words do not decide
        return None
    cause = cause_of_message(f"{type(error).__name__}: {error}")
    return None if cause is Cause.PROGRAM else cause


def _notes(error: BaseException) -> list[str]:
    """Return what code on the error's way has added to it (`add_note`, new in Python 3.11), each in one line."""
    return [" ".join(str(note).split()) for note in getattr(error, "__notes__", ())]


def _place(error: BaseException) -> str:
    """For an error without a traceback: the line of the program that led to it; empty if only libraries ran."""
    lines = [
        (frame.f_code.co_filename, line)
        for frame, line in traceback.walk_tb(error.__traceback__)
        if _is_of_program(frame)
    ]
    return f"\n    ({Path(lines[-1][0]).name}, line {lines[-1][1]})" if lines else ""


def _from_program(error: BaseException) -> TracebackType | None:
    """The traceback from the program's first line on; all of it if only libraries ran."""
    found = error.__traceback__
    while found is not None and not _is_of_program(found.tb_frame):
        found = found.tb_next
    return found or error.__traceback__


def _is_of_program(frame: FrameType) -> bool:
    file = frame.f_code.co_filename
    return not (file.startswith("<") or is_library_file(file) or is_our_file(file))


def _advice(error: BaseException, text: str) -> str | None:
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "can't allocate memory" in text:
        return (
            "a batch does not fit in memory: lower the batch size (of a task by train.batch_size; with "
            "train.global_batch the accumulation adapts), or set train.grad_checkpointing or a lower train.precision"
        )
    if any(sign in text for sign in _UNUSED):
        return f"some parameters take no part in the loss: {FIND_UNUSED}"
    if "Expected more than 1 value per channel when training" in text:
        return (
            "a BatchNorm got a single sample: leave out the last batch (a task: train.drop_last: true; a "
            "DataLoader: drop_last=True), or choose the batch size so that no rank gets a single sample"
        )
    if "default process group twice" in text:
        return (
            "the program creates the process group a second time: call init_process_group() before the block of "
            "join_run(), or leave it out, as join_run() creates a group if there is none"
        )
    if "create_graph" in text:
        return f"the optimizer {SECOND_DERIVATIVES}"
    if isinstance(error, SystemExit) and not isinstance(error.code, str):
        return f"the program called sys.exit({error.code}) before its training was over"
    if isinstance(error, KeyError):
        return _advice_for_step(error)
    return None


def _advice_for_step(error: KeyError) -> str | None:
    """Explain an error of an optimizer's own code; a closure that it called may have missed any other key."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    optimizer = frame.f_locals.get("self")
    if not isinstance(optimizer, Optimizer) or not optimizer.state or not isinstance(next(iter(error.args), None), str):
        return None
    return other_settings(optimizer, error)
