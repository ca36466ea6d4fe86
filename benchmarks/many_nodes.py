"""What do hundreds of nodes ask of each other: torchrun's agents at their store, and ranks that agree when to stop?

Run it from the repository or with the package installed::

    python benchmarks/many_nodes.py                     # 64 and 128 agents; 8, 32, 64 and 128 ranks
    python benchmarks/many_nodes.py --agents 512        # more agents: it takes a core for a few of them

Simulated on this machine: agents are threads of a few processes that meet by the real rendezvous, at one real store, on
the loopback device; ranks are threads that reduce the four numbers of the agreement over Gloo. All share the cores of
this machine, which nodes do not, and the network takes no time.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import socket
import statistics
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.queues import Queue
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # each connection warns of a host without a name

import torch
import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import (
    RendezvousParameters,
    RendezvousTimeoutError,
    rendezvous_handler_registry,
)

from cluster_ddp.launch.torchrun.rendezvous import SIGNED, SignedBackend, sign_rendezvous
from cluster_ddp.run.directory import KEY_BYTES

THREADS = 64  # agents of a process
WATCHED_SECONDS = 30.0  # for which agents only keep each other informed that they live
JOIN_SECONDS = 300
EXCHANGES = 50


@dataclass
class Asked:
    """What the agents of a process have asked of the store."""

    requests: int = 0
    written: int = 0  # bytes

    def count(self) -> None:
        """Count from now on what goes through the backend of this process."""
        read, write = SignedBackend.get_state, SignedBackend.set_state

        def get_state(backend: SignedBackend) -> Any:
            self.requests += 1
            return read(backend)

        def set_state(backend: SignedBackend, state: bytes, token: Any = None) -> Any:
            self.requests += 1
            self.written += len(state)
            return write(backend, state, token)

        SignedBackend.get_state, SignedBackend.set_state = get_state, set_state  # type: ignore[method-assign,assignment]


def join(numbers: range, agents: int, port: int, key_file: Path, told: Queue[Any], go_on: Any) -> None:
    """Be the agents of these numbers: meet all others, wait, and tell what it took."""
    asked = Asked()
    asked.count()
    sign_rendezvous(["--rdzv-backend=c10d"], key_file)
    joined: list[float] = []
    handlers = []

    def agent(number: int) -> None:
        conf: dict[str, Any] = {
            "is_host": number == 0,
            "local_addr": "127.0.0.1",
            "join_timeout": JOIN_SECONDS,
            "last_call_timeout": 30,
        }
        parameters = RendezvousParameters(SIGNED, f"127.0.0.1:{port}", "simulated", agents, agents, **conf)
        handler = rendezvous_handler_registry.create_handler(parameters)
        handlers.append(handler)  # what it holds is closed at the end
        with contextlib.suppress(RendezvousTimeoutError):
            handler.next_rendezvous()
            joined.append(time.monotonic())

    threads = [threading.Thread(target=agent, args=(number,)) for number in numbers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    told.put((max(joined, default=0.0), asked.requests, asked.written, time.process_time(), len(joined)))
    go_on.wait()
    asked.requests = asked.written = 0
    before = time.process_time()
    time.sleep(WATCHED_SECONDS)
    told.put((time.monotonic(), asked.requests, asked.written, time.process_time() - before, len(joined)))
    told.close()
    told.join_thread()
    os._exit(0)  # the others are not told: none of them is to start a new round


def measure_agents(agents: int, folder: Path) -> None:
    """Print what it takes so many agents to meet, and to stay in touch."""
    key_file = folder / "key"
    key_file.write_bytes(os.urandom(KEY_BYTES))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = multiprocessing.get_context("fork")
    told, go_on = context.Queue(), context.Event()
    parts = [range(first, min(agents, first + THREADS)) for first in range(0, agents, THREADS)]
    begin = time.monotonic()
    for part in parts:
        context.Process(target=join, args=(part, agents, port, key_file, told, go_on), daemon=True).start()
    for what, scale in (("meet", 1.0), ("stay in touch, a minute", 60 / WATCHED_SECONDS)):
        rows = [told.get(timeout=2 * JOIN_SECONDS) for _ in parts]
        requests, written, cpu = (scale * sum(row[column] for row in rows) for column in (1, 2, 3))
        met = sum(row[4] for row in rows)
        seconds = f"{max(row[0] for row in rows) - begin:8.1f}" if what == "meet" and met == agents else f"{'':8}"
        print(f"{agents:6} agents {what:24}{seconds}{cpu:9.1f}{requests:12,.0f}{written / 2**20:10,.1f}", flush=True)
        if met < agents:
            print(f"{'':14}not all have met within {JOIN_SECONDS} s on these {os.cpu_count()} cores", flush=True)
            return
        go_on.set()


def measure_agreement(ranks: int) -> None:
    """Print what an agreement of so many ranks takes from the first to the last of them."""
    store = HashStore()
    seconds: list[float] = []
    together = threading.Barrier(ranks)

    def rank(number: int) -> None:
        group = dist.ProcessGroupGloo(PrefixStore("gloo", store), number, ranks, timedelta(seconds=120))
        votes = torch.zeros(4, dtype=torch.float64)
        for _ in range(EXCHANGES):
            together.wait()
            begin = time.monotonic()
            options = dist.AllreduceOptions()
            options.reduceOp = dist.ReduceOp.MAX  # type: ignore[assignment]
            group.allreduce([votes], options).wait()  # type: ignore[attr-defined]
            if number == 0:
                seconds.append(time.monotonic() - begin)
        together.wait()

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print(f"{ranks:6} ranks  agree: {1000 * statistics.median(seconds):.1f} ms", flush=True)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--agents", type=int, nargs="*", default=[64, 128])
    parser.add_argument("--ranks", type=int, nargs="*", default=[8, 32, 64, 128])
    options = parser.parse_args()
    print(f"{'':38}{'seconds':>8}{'CPU s':>9}{'requests':>12}{'MiB':>10}")
    for agents in options.agents:
        with tempfile.TemporaryDirectory() as folder:
            measure_agents(agents, Path(folder))
    for ranks in options.ranks:
        measure_agreement(ranks)


if __name__ == "__main__":
    main()
