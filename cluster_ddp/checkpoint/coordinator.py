"""Coordinates saves and restores between ranks through the process group's store, without collectives.

A background thread cannot use collectives, because the training loop issues them meanwhile. The process group's store
is a plain key-value server. A client handles one request at a time, so each thread here has its own: waiting on the
process group's client would block the process group.

The store is lost with the agent that hosts it. A save after the end of the training loop may use collectives instead.
"""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

from torch._C._distributed_c10d import HashStore, PrefixStore, Store, TCPStore

from cluster_ddp.checkpoint.folders import this_process

# Seconds between two requests to the store; longer with many ranks, because all of them poll the same server.
_MIN_PAUSE, _MAX_PAUSE, _PAUSE_PER_RANK = 0.001, 0.05, 0.0005
_EXCHANGES_KEPT = 16  # ranks do these in lockstep, so none is ever this far behind
_instances = itertools.count()  # all ranks create their checkpointers in the same order


class Abandoned(Exception):
    """This process gives up a save because it is ending."""


class SaveCoordinator:
    """The messages between the ranks about saves and restores.

    Parameters
    ----------
    writing
        ``all``, ``node`` or ``one``: which ranks write.
    """

    def __init__(self, store: Store | None, *, rank: int, world_size: int, local_rank: int, writing: str) -> None:
        shared: Store = store if store is not None and world_size > 1 else HashStore()
        number = next(_instances)
        prefix = f"cluster_ddp/checkpoint/{number}"
        self.rank, self.world_size = rank, world_size
        shared.set(f"{prefix}/rank/{rank}", str(local_rank))
        if rank == 0:
            local = [int(shared.get(f"{prefix}/rank/{other}")) for other in range(world_size)]
            writers = {
                "all": list(range(world_size)),
                "node": [other for other in range(world_size) if local[other] == 0 or other == 0],
                "one": [0],
            }[writing]
            deputy = next((other for other in range(1, world_size) if local[other] == 0), None)
            session = {"owner": str(this_process()), "writers": writers, "deputy": deputy}
            shared.set(f"{prefix}/session", json.dumps(session))
        session = json.loads(shared.get(f"{prefix}/session"))
        # owner: identifies rank 0's process in the names of unfinished folders; writers: ascending, always including 0
        self.owner: str = session["owner"]
        self.writers: tuple[int, ...] = tuple(session["writers"])
        self.deputy: int | None = session["deputy"]  # a rank on a node other than rank 0's; None if there is one node
        self._prefix = f"{prefix}/{self.owner}"
        self._background = _own_client(shared)
        self._foreground = _own_client(shared)
        # Rank 0 may host the store, and in a program that only evaluates it waits for nobody: it waits here, because
        # once it has exited the others would have no store to connect to.
        shared.set(f"{prefix}/connected/{rank}", "")
        if rank == 0:
            for other in range(world_size):
                shared.get(f"{prefix}/connected/{other}")
        self._giving_up = threading.Event()
        self._exchanges = 0
        self._gather: Callable[[Any], list[Any]] | None = None

    def use_collectives(self, gather: Callable[[Any], list[Any]]) -> None:
        """Use collectives instead of the store from now on. Call it on all ranks, which issue no others beside a save.

        Parameters
        ----------
        gather
            Called on all ranks together; returns their values in order.
        """
        self._gather = gather

    def send(self, save: int, receipt: dict[str, Any]) -> None:
        """Send rank 0 this rank's result of a save: the receipt for its shard, or what went wrong."""
        if self._gather is not None:
            self._gather(receipt)
        else:
            self._put(self._background, f"save/{save}/receipt/{self.rank}", receipt)

    def collect(self, save: int, ranks: Iterable[int]) -> dict[int, dict[str, Any]]:
        """Rank 0: wait for the receipts of these ranks."""
        if self._gather is not None:
            receipts = self._gather(None)
            return {rank: receipts[rank] for rank in ranks}
        keys = {rank: f"save/{save}/receipt/{rank}" for rank in ranks}
        self._wait(self._background, list(keys.values()))
        return {rank: self._get(self._background, key) for rank, key in keys.items()}

    def announce(self, save: int, outcome: dict[str, Any]) -> None:
        """Rank 0: announce the outcome of a save, and delete the messages of the previous one."""
        if self._gather is not None:
            self._gather(outcome)
            return
        self._put(self._background, f"save/{save}/outcome", outcome)
        if self.world_size > 1:
            old = save - 1  # all ranks are done with it: each has sent its receipt for this one
            for key in ("outcome", *(f"receipt/{rank}" for rank in range(1, self.world_size))):
                self._background.delete_key(f"{self._prefix}/save/{old}/{key}")

    def outcome(self, save: int) -> dict[str, Any]:
        """Wait for rank 0 to announce the outcome of a save."""
        outcome: dict[str, Any]
        if self._gather is not None:
            outcome = self._gather(None)[0]
        else:
            outcome = self._get(self._background, f"save/{save}/outcome")
        return outcome

    def from_rank_0(self, value: Any) -> Any:
        """Return rank 0's value on all ranks. Call it on all, in the same order, never from the background thread."""
        if self.world_size == 1:
            return value
        if self._gather is not None:
            return self._gather(value)[0]
        self._exchanges += 1
        if self.rank != 0:
            return self._get(self._foreground, f"exchange/{self._exchanges}")
        self._put(self._foreground, f"exchange/{self._exchanges}", value)
        self._foreground.delete_key(f"{self._prefix}/exchange/{self._exchanges - _EXCHANGES_KEPT}")
        return value

    def to_rank_0(self, value: Any) -> list[Any]:
        """Return all ranks' values on rank 0, only their own on the others. Call it on all, in the same order."""
        if self.world_size == 1:
            return [value]
        self._exchanges += 1
        if self.rank != 0:
            self._put(self._foreground, f"exchange/{self._exchanges}/{self.rank}", value)
            return [value]
        others = range(1, self.world_size)
        return [value, *(self._get(self._foreground, f"exchange/{self._exchanges}/{rank}") for rank in others)]

    def give_up(self) -> None:
        """End every wait of this process, now and later, with `Abandoned`."""
        self._giving_up.set()

    def check_given_up(self) -> None:
        """Raise `Abandoned` once `give_up` was called."""
        if self._giving_up.is_set():
            raise Abandoned("the process ends before the save is complete")

    def _put(self, client: Store, key: str, value: Any) -> None:
        client.set(f"{self._prefix}/{key}", json.dumps(value))

    def _get(self, client: Store, key: str) -> Any:
        self._wait(client, [key])
        return json.loads(client.get(f"{self._prefix}/{key}"))

    def _wait(self, client: Store, keys: list[str]) -> None:
        """Wait until all keys exist, by polling: the store's own wait logs a warning at each timeout."""
        paths = [f"{self._prefix}/{key}" for key in keys]
        pause = _MIN_PAUSE
        while paths and not client.check(paths):
            self.check_given_up()
            time.sleep(pause)
            pause = min(2 * pause, _MAX_PAUSE + _PAUSE_PER_RANK * self.world_size)
        self.check_given_up()


def _own_client(store: Store) -> Store:
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    if isinstance(store, TCPStore):
        return TCPStore(store.host, store.port, None, False, wait_for_workers=False)
    return store
