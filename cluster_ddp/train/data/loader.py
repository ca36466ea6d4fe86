"""Loads a rank's batches, fetched in this process or by workers."""

from __future__ import annotations

import _thread
import collections
import copy
import dataclasses
import gc
import itertools
import multiprocessing
import os
import pickle
import re
import signal
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, MutableMapping
from multiprocessing import connection, queues
from multiprocessing.process import BaseProcess
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch._utils import ExceptionWrapper
from torch.utils.data import DataLoader, Dataset, get_worker_info

from cluster_ddp.errors import Cause
from cluster_ddp.launch.processes import ASK_TO_STOP, survive
from cluster_ddp.process import gc_paused
from cluster_ddp.run.causes import cause_of_signal
from cluster_ddp.train.data.fetch import Fetcher
from cluster_ddp.train.data.fork_server import protect_fork_server
from cluster_ddp.train.data.order import Indices
from cluster_ddp.train.errors import DataError

K = TypeVar("K")
Key = tuple[int, Indices]
Pairs = Generator[tuple[K, Any], None, None]

_END = object()
_JOIN_SECONDS = 2.0
_report_as_usual = getattr(queues.Queue, "_on_queue_feeder_error", None)


class Loader(Generic[K]):
    """Fetches batches in the order of their plans; the number of workers affects only the speed.

    Parameters
    ----------
    key
        Returns the (epoch, indices) of a plan.
    workers
        Processes that fetch ahead; 0: fetch in this process.
    """

    def __init__(
        self, fetcher: Fetcher, plans: Iterable[K], key: Callable[[K], Key], *, workers: int, device: torch.device
    ) -> None:
        self.waited = 0.0  # seconds that this process has spent fetching batches or waiting for them
        self._fetcher = fetcher
        self._plans = plans
        self._key = key
        self._workers = workers
        self._device = device
        self._pairs: Pairs[K] | None = None

    def __iter__(self) -> Iterator[tuple[K, Any]]:
        """Yield each plan with its batch, on the device."""
        self._pairs = self._by_workers() if self._workers else self._here()
        if self._device.type == "cpu":
            return self._pairs
        return ((plan, to_device(batch, self._device)) for plan, batch in self._pairs)

    def close(self) -> None:
        """Stop the workers if the iteration was left early."""
        if self._pairs is not None:
            self._pairs.close()

    def _here(self) -> Pairs[K]:
        pin = self._device.type == "cuda"
        plans, group, versions_now = iter(self._plans), list[K](), self._fetcher.versions
        while group or (group := list(itertools.islice(plans, 1))):
            begun = time.perf_counter()
            more = self._fetcher.how_many_together(len(self._key(group[0])[1])) - len(group)
            group += itertools.islice(plans, max(0, more))
            versions = versions_now()
            batches = iter(self._fetcher.together([self._key(plan) for plan in group]))
            self.waited += time.perf_counter() - begun
            while group and versions_now() == versions:  # a step may have changed the rows of the next ones
                batch = next(batches)
                yield group.pop(0), pinned(batch) if pin else batch

    def _by_workers(self) -> Pairs[K]:
        under_way: collections.deque[K] = collections.deque()

        def keys() -> Iterator[Key]:
            for plan in self._plans:
                under_way.append(plan)
                yield self._key(plan)

        batches = from_workers(_Keyed(self._fetcher), _Keys(keys()), workers=self._workers, device=self._device)
        try:
            while True:
                begun = time.perf_counter()
                batch = next(batches, _END)
                self.waited += time.perf_counter() - begun
                if batch is _END:
                    break
                yield under_way.popleft(), batch
        finally:
            batches.close()


class _Keyed(Dataset[Any]):
    """A data set whose 'index' is the key of a whole batch."""

    def __init__(self, fetcher: Fetcher) -> None:
        self._fetcher = fetcher

    def __getitem__(self, key: Key) -> Any:
        try:
            return self._fetcher(*key)
        except DataError as error:
            return error
        except Exception as error:
            make_sendable(error)
            raise


def make_sendable(error: Exception) -> None:
    """Raise an error in other words if torch could not send it from a worker; the rank would wait for it forever."""
    try:
        pickle.dumps(type(error))
    except Exception:  # AttributeError or PicklingError: a class within a function
        raise RuntimeError(f"{type(error).__name__}: {error}") from error


class _Keys:
    """A sampler that creates keys as they are needed."""

    def __init__(self, keys: Iterator[Key]) -> None:
        self._keys = keys

    def __iter__(self) -> Iterator[Key]:
        return self._keys


def from_workers(data: Dataset[Any], sampler: Any, *, workers: int, device: torch.device) -> Generator[Any, None, None]:
    """Yield the elements of a data set in order, as fetched by workers; closing the generator stops the workers.

    An element that is a DataError is raised here: raised in a worker, it would carry the worker's traceback.
    """
    protect_fork_server()
    before = set(multiprocessing.active_children())
    loader = DataLoader(
        data,
        batch_size=None,
        sampler=sampler,
        num_workers=workers,
        collate_fn=as_it_is,
        pin_memory=device.type == "cuda",
        worker_init_fn=set_up_worker,
    )
    # `set_up_worker` turns it on again. The rank's garbage may hold tensors on a GPU: a forked worker that frees one is
    # aborted.
    with gc_paused():
        batches = iter(loader)
    processes = [child for child in multiprocessing.active_children() if child not in before]
    try:
        for batch in batches:
            if isinstance(batch, DataError):
                raise batch
            yield batch
    except RuntimeError as error:
        tell_how_they_ended(error, processes)
        raise
    finally:
        del batches  # asks them to exit
        see_off(processes)


def tell_how_they_ended(error: RuntimeError, workers: list[BaseProcess]) -> None:
    """Add to torch's error about workers that are gone how they ended, where it names only their process ids."""
    codes = sorted({worker.exitcode for worker in workers if worker.exitcode is not None})
    if re.fullmatch(r"DataLoader worker \(pid.*\) exited unexpectedly", str(error)) and codes:
        error.args = (f"{error}: {', '.join(map(_in_words, codes))}",)
        causes = {cause_of_signal(_name(code)) if code < 0 else Cause.PROGRAM for code in codes}
        found = next(cause for cause in (Cause.HOST, Cause.OUTSIDE, Cause.PROGRAM) if cause in causes)
        error.cause = found  # type: ignore[attr-defined]


def _in_words(exit_code: int) -> str:
    if exit_code >= 0:
        return f"exit status {exit_code}"
    name = _name(exit_code)
    known = {"SIGKILL": ", killed from outside, perhaps because the node ran out of memory", "SIGBUS": ", perhaps "
             "because /dev/shm (shared memory) is full"}  # fmt: skip
    return f"ended by {name}{known.get(name, '')}"


def _name(exit_code: int) -> str:
    return next((known.name for known in signal.Signals if known == -exit_code), f"signal {-exit_code}")


def see_off(workers: list[BaseProcess]) -> None:
    """Wait for workers to exit, and kill those that do not: they ignore the signal by which DataLoader stops them."""
    for worker in workers:
        worker.join(_JOIN_SECONDS)
        if worker.is_alive():
            worker.kill()
            worker.join()


def as_it_is(batch: Any) -> Any:
    """Collates nothing: the worker has made the batch."""
    return batch


def set_up_worker(worker: int) -> None:
    """Make a worker live as long as its rank, and no longer.

    A signal to the whole process group is meant for the rank; a worker killed by it would take the rank with it. And a
    worker started by a fork server would outlive a rank that is killed: torch checks for its parent, which is the
    server, and that exits only after its last worker. What it has of the rank is never collected.
    """
    gc.freeze()
    gc.enable()
    survive(ASK_TO_STOP)
    queues.Queue._on_queue_feeder_error = send_instead  # type: ignore[attr-defined]
    rank = multiprocessing.parent_process()
    if rank is not None and rank.pid != os.getppid():
        _thread.start_new_thread(_end_with, (rank,))  # not by `threading`: the set's threads are counted


def send_instead(queue: queues.Queue[Any], error: Exception, batch: Any) -> None:
    """Send an error in place of a batch that could not be sent: Python's queue prints it, and the rank would wait.

    Such as one that cannot be pickled, or for which /dev/shm is full.
    """
    is_batch = type(batch) is tuple and len(batch) == 2 and type(batch[0]) is int
    if is_batch and (info := get_worker_info()) is not None:
        try:
            make_sendable(error)
        except RuntimeError as other:
            error = other
        where = f"in DataLoader worker process {info.id}, which could not send a batch"
        wrapped = ExceptionWrapper((type(error), error, error.__traceback__), where)  # type: ignore[no-untyped-call]
        queue.put((batch[0], wrapped))
    elif _report_as_usual is not None:  # of a queue of the set's own
        _report_as_usual(error, batch)


def _end_with(rank: BaseProcess) -> None:
    connection.wait([rank.sentinel])
    os._exit(1)


def to_device(batch: Any, device: torch.device) -> Any:
    """Move a batch without making the host wait: its tensors, and anything with a `to`, such as a packed sequence."""

    def move(part: Any) -> Any:
        try:
            return part.to(device, non_blocking=True)
        except TypeError:
            if isinstance(part, Tensor):
                raise
            return part.to(device)  # a custom one without non_blocking

    return _map(batch, move)


def pinned(batch: Any) -> Any:
    """Copy a batch to pinned memory, as far as its parts support it."""

    def pin(part: Any) -> Any:
        on_device = isinstance(part, Tensor) and not part.is_cpu
        return part if on_device or not hasattr(part, "pin_memory") else part.pin_memory()

    return _map(batch, pin)


def _map(batch: Any, change: Callable[[Any], Any]) -> Any:
    """Apply `change` to the parts of a batch that can be moved, preserving the containers' types."""
    if isinstance(batch, type):
        return batch
    if callable(getattr(batch, "to", None)):
        return change(batch)
    if isinstance(batch, Mapping):
        parts = {name: _map(part, change) for name, part in batch.items()}
        if not isinstance(batch, MutableMapping):
            return parts
        made = copy.copy(batch)
        made.update(parts)
        return made
    if dataclasses.is_dataclass(batch):
        twin = copy.copy(batch)
        for field in dataclasses.fields(batch):
            object.__setattr__(twin, field.name, _map(getattr(batch, field.name), change))  # it may be frozen
        return twin
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(_map(part, change) for part in batch))
    if isinstance(batch, (list, tuple)):
        return type(batch)(_map(part, change) for part in batch)
    return batch
