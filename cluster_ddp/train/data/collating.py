"""Checks that the items of a stream make the same batch again, whatever batches were made before."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from torch.utils.data import default_collate, get_worker_info

from cluster_ddp.train.data.another_worker import in_copy_of_worker
from cluster_ddp.train.data.fingerprint import fingerprint, settled
from cluster_ddp.train.errors import DataError
from cluster_ddp.train.state.stateful import copied
from cluster_ddp.train.task import Task

DEFAULT_COLLATES = (default_collate, Task.collate)


def try_collate(collate: Callable[[list[Any]], Any], items: list[Any], seed: Callable[[], None]) -> None:
    """Raise a `DataError` unless copies of these items make the same batch again; `seed` is called before each.

    The task, if `collate` is its method, is given its present state before each as well, and afterwards: a resume
    restores that, except in workers. Items that cannot be copied are not tried, because `collate` may change them.
    """
    try:
        copy.deepcopy(items)
    except Exception:
        return
    task = getattr(collate, "__self__", None)
    state = copied(task.state_dict()) if isinstance(task, Task) and get_worker_info() is None else {}

    def put_back() -> None:
        if state and isinstance(task, Task):
            task.load_state_dict(copy.deepcopy(state))

    def read(order: int = 1) -> int:
        copies = copy.deepcopy(items)[::order]
        put_back()
        seed()
        return fingerprint(collate(copies))

    def after_another() -> int:
        read(-1)
        return read()

    there, found = in_copy_of_worker(after_another), settled(read)
    put_back()
    if found is None or there not in (None, found):
        raise DataError(
            "collate() makes a different batch from the same items when it is called again, so no resume could be "
            "exact: it draws from a generator that nothing seeds, counts its calls, or keeps something of earlier "
            "items, such as a running mean, leftovers, or the numbers of words in order of appearance. Use the "
            "generators of torch, random or NumPy, which are seeded, and let a batch depend only on its items. With "
            "train.workers: 0 it may also depend on what state_dict() of the task returns, which is restored"
        )
