"""A DataLoader like the user's own, whose parts can be exchanged and whose workers end."""

from __future__ import annotations

import copy
import multiprocessing
from collections.abc import Callable, Generator
from multiprocessing.process import BaseProcess
from typing import Any

from torch.utils.data import DataLoader

from cluster_ddp.train.data.loader import protect_fork_server, see_off, set_up_worker


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
        if isinstance(getattr(loader, "base_dataloader", None), DataLoader):
            self.inner = copy.copy(loader.base_dataloader)
            object.__setattr__(self.loader, "base_dataloader", self.inner)
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


class _WorkerInit:
    def __init__(self, own: Callable[[int], None] | None) -> None:
        self._own = own

    def __call__(self, worker: int) -> None:
        set_up_worker(worker)
        if self._own is not None:
            self._own(worker)
