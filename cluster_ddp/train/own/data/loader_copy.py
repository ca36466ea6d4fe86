"""A DataLoader like the user's own, whose parts can be exchanged and whose workers end."""

from __future__ import annotations

import copy
import multiprocessing
from collections.abc import Callable, Generator
from multiprocessing.process import BaseProcess
from typing import Any

from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter

from cluster_ddp.train.data.loader import protect_fork_server, see_off, set_up_worker

_WRAPPED = ("base_dataloader", "_dataloader")  # in Accelerate's loader, and in that of Lightning's Fabric


def inside(loader: Any) -> Any:
    """The DataLoader in a loader that a library has made of it; else the loader itself."""
    found = (getattr(loader, name, None) for name in _WRAPPED)
    return next((inner for inner in found if isinstance(inner, DataLoader)), loader)


class LoaderCopy:
    """A loader like the user's, whose parts can be exchanged.

    Attributes
    ----------
    loader
        The copy.
    inner
        The DataLoader itself; inside `loader` where a library wraps it.
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
        # Persistent workers that the program has used already have its data set, and end when it lets go of them.
        self.put(worker_init_fn=_WorkerInit(self.inner.worker_init_fn), _iterator=None)
        self._workers: list[BaseProcess] = []

    def put(self, **parts: Any) -> None:
        """Exchange parts, which DataLoader itself allows for no loader that has been made."""
        for name, part in parts.items():
            object.__setattr__(self.inner, name, part)

    def __iter__(self) -> Generator[Any, None, None]:
        if self.inner.num_workers:
            protect_fork_server(self.inner.multiprocessing_context)
        before = set(multiprocessing.active_children())
        batches = iter(self.loader)
        try:
            for batch in batches:
                self._note_workers(before)
                yield batch
        finally:
            self._note_workers(before)
            del batches
            if not self.inner.persistent_workers:
                self.close()

    def close(self) -> None:
        """End the workers: they ignore the signal by which torch would, and a process waits for its children."""
        object.__setattr__(self.inner, "_iterator", None)
        see_off(self._workers)
        self._workers = []

    def _note_workers(self, before: set[Any]) -> None:
        if self.inner.num_workers and not self._workers:
            self._workers = [child for child in multiprocessing.active_children() if child not in before]


def _is_endless(loader: DataLoader[Any]) -> bool:
    """Whether it takes all epochs from one iterator over a sampler without an end, as ultralytics' and timm's do."""
    sampler = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    return type(loader).__iter__ is not DataLoader.__iter__ and not hasattr(sampler, "__len__")


class _WorkerInit:
    def __init__(self, own: Callable[[int], None] | None) -> None:
        self._own = own

    def __call__(self, worker: int) -> None:
        set_up_worker(worker)
        if self._own is not None:
            self._own(worker)
