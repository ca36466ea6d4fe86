"""Copies the user's DataLoader, so that parts of it can be replaced and its workers are stopped."""

from __future__ import annotations

import copy
import multiprocessing
from collections.abc import Callable, Generator
from multiprocessing.process import BaseProcess
from typing import Any

from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter

from cluster_ddp.process import gc_paused
from cluster_ddp.train.data.fork_server import protect_fork_server
from cluster_ddp.train.data.loader import (
    see_off,
    set_up_worker,
    tell_how_they_ended,
)

_WRAPPED = ("base_dataloader", "_dataloader")  # attributes of Accelerate's and Fabric's loaders


def inside(loader: Any) -> Any:
    """The DataLoader inside a library's wrapper; the loader itself if it is not wrapped."""
    found = (getattr(loader, name, None) for name in _WRAPPED)
    return next((inner for inner in found if isinstance(inner, DataLoader)), loader)


class LoaderCopy:
    """A copy of the user's loader, with parts that can be replaced.

    Attributes
    ----------
    loader
        The copy.
    inner
        The DataLoader itself, which is inside `loader` if a library wraps it.
    """

    def __init__(self, loader: Any) -> None:
        self.loader = copy.copy(loader)
        self.inner = self.loader
        for name in _WRAPPED:
            if isinstance(getattr(loader, name, None), DataLoader):
                self.inner = copy.copy(getattr(loader, name))
                object.__setattr__(self.loader, name, self.inner)
        if _is_endless(self.inner):
            self.put(**{name: None for name, held in vars(self.inner).items() if isinstance(held, _BaseDataLoaderIter)})
            self.put(__class__=DataLoader, persistent_workers=self.inner.num_workers > 0)
        # Persistent workers that the program has already used hold its data set; they exit when it drops them.
        self.put(worker_init_fn=_WorkerInit(self.inner.worker_init_fn), _iterator=None)
        self.put(in_order=True)  # else each batch is trained on when its worker happens to be ready
        self._workers: list[BaseProcess] = []
        self._before: set[BaseProcess] = set()

    def put(self, **parts: Any) -> None:
        """Replace attributes; DataLoader itself forbids this after construction."""
        for name, part in parts.items():
            object.__setattr__(self.inner, name, part)

    def __iter__(self) -> Generator[Any, None, None]:
        if self.inner.num_workers:
            protect_fork_server(self.inner.multiprocessing_context)
        self.begin()
        with gc_paused():
            batches = iter(self.loader)
        self.note_workers()
        try:
            for batch in batches:
                self.note_workers()  # a wrapper may have started them only now
                yield batch
        except RuntimeError as error:
            tell_how_they_ended(error, self._workers)
            raise
        finally:
            self.note_workers()
            del batches
            if not self.inner.persistent_workers:
                self.close()

    def begin(self) -> None:
        """Call before a pass over `loader`, whoever makes it."""
        self._before = set(multiprocessing.active_children())
        if not self.inner.persistent_workers:
            self._workers = []

    def note_workers(self) -> None:
        """Call during a pass, so that `close` stops its workers."""
        if self.inner.num_workers and not self._workers:
            self._workers = [child for child in multiprocessing.active_children() if child not in self._before]

    def close(self) -> None:
        """Stop the workers: they ignore the signal torch would send, and a process waits for its children on exit."""
        object.__setattr__(self.inner, "_iterator", None)
        see_off(self._workers)
        self._workers = []


def _is_endless(loader: DataLoader[Any]) -> bool:
    """Whether all epochs come from one iterator over an endless sampler, as in ultralytics and timm."""
    sampler = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    return type(loader).__iter__ is not DataLoader.__iter__ and not hasattr(sampler, "__len__")


class _WorkerInit:
    def __init__(self, own: Callable[[int], None] | None) -> None:
        self._own = own

    def __call__(self, worker: int) -> None:
        set_up_worker(worker)
        if self._own is not None:
            self._own(worker)
