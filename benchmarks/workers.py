"""Processes that stand ready to run one contender of `benchmarks/step_overhead.py`, as often as they are told to."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import resource
import socket
import statistics
import sys
import time
from dataclasses import dataclass, replace
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path

SETTLING_STEPS = 60
"""Steps at the start of a round that are not counted: warm-up passes, first allocations."""
CPU_EVERY = 50
"""Steps between two looks at the processor time, which cost more than looks at the clock."""
TIME_LIMIT = 300.0


@dataclass(frozen=True)
class Round:
    """One round of one contender on rank 0.

    Attributes
    ----------
    mean_us, median_us : float
        Microseconds per step: over the whole round, and of the typical step.
    cpu_us : float
        Microseconds of processor time per step, of all threads of the process; little disturbed by other processes.
    peak_mib : float
        Peak resident memory of the process so far, MiB, largest over the ranks.
    resident_mib : tuple of float
        Resident memory at each tenth of the round, MiB; empty unless it was asked for.
    """

    mean_us: float
    median_us: float
    cpu_us: float
    peak_mib: float
    resident_mib: tuple[float, ...] = ()


class Stopwatch:
    """Takes the time at each entry into the model's forward; the contenders call `tick` from there."""

    def __init__(self) -> None:
        self.ticks: list[int] = []
        self.cpu: list[int] = []
        self.resident: list[float] = []
        self.memory_every = 0

    def tick(self) -> None:
        """Take the time, and now and then the memory."""
        self.ticks.append(time.perf_counter_ns())
        if len(self.ticks) % CPU_EVERY == 0:
            self.cpu.append(time.process_time_ns())
        if self.memory_every and len(self.ticks) % self.memory_every == 0:
            self.resident.append(resident_mib())

    def start(self, memory_every: int) -> None:
        """Forget what was before."""
        self.ticks.clear()
        self.cpu.clear()
        self.resident.clear()
        self.memory_every = memory_every

    def figures(self) -> Round:
        """Sum up the round, without its first steps."""
        ticks = self.ticks[SETTLING_STEPS:]
        gaps = [later - earlier for earlier, later in pairwise(ticks)]
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        mean = (ticks[-1] - ticks[0]) / len(gaps)
        cpu = (self.cpu[-1] - self.cpu[1]) / (CPU_EVERY * (len(self.cpu) - 2))
        return Round(mean / 1000, statistics.median(gaps) / 1000, cpu / 1000, peak, tuple(self.resident))


def resident_mib() -> float:
    """Resident memory of this process, MiB."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


class Group:
    """The processes of one contender, one per rank; they start at once and wait for orders."""

    def __init__(self, name: str, world: int) -> None:
        context = multiprocessing.get_context("spawn")
        self.name = name
        self.processes = []
        self.lines: list[Connection] = []
        for rank in range(world):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(name, rank, world, theirs), daemon=True)
            process.start()
            theirs.close()
            self.processes.append(process)
            self.lines.append(ours)

    def run(self, steps: int, watch_memory: bool = False) -> Round:
        """Have the contender train for so many steps and give the figures of rank 0, with the peak memory of all.

        Raises
        ------
        RuntimeError
            When a rank fails or does not answer in time.
        """
        order = {"port": _free_port(), "steps": steps, "memory_every": steps // 10 if watch_memory else 0}
        for line in self.lines:
            line.send(order)
        rounds = [self._answer(line) for line in self.lines]
        return replace(rounds[0], peak_mib=max(figures.peak_mib for figures in rounds))

    def _answer(self, line: Connection) -> Round:
        if not line.poll(TIME_LIMIT):
            raise RuntimeError(f"{self.name}: no answer after {TIME_LIMIT:.0f} s")
        answer = line.recv()
        if not isinstance(answer, Round):
            raise RuntimeError(f"{self.name} failed:\n{answer}")
        return answer

    def end(self) -> None:
        """Send the processes home."""
        for line in self.lines:
            with contextlib.suppress(OSError):
                line.send(None)
        for process in self.processes:
            process.join(10)
            if process.is_alive():
                process.kill()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _serve(name: str, rank: int, world: int, orders: Connection) -> None:
    """Be one rank of a contender until told to stop."""
    for variable, value in {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "GROUP_RANK": 0,
        "WORLD_SIZE": world,
        "LOCAL_WORLD_SIZE": world,
        "MASTER_ADDR": "127.0.0.1",
        "TORCHELASTIC_RUN_ID": "benchmark",  # the others take it that torchrun has started them
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",  # the table is the CPU's, on every machine
    }.items():
        os.environ[variable] = str(value)
    with Path(os.environ.get("BENCHMARK_LOG", os.devnull)).open("a") as log:  # the table has standard output for itself
        os.dup2(log.fileno(), sys.stdout.fileno())
        os.dup2(log.fileno(), sys.stderr.fileno())

    import torch

    from benchmarks.contenders import CONTENDERS

    torch.set_num_threads(1)
    stopwatch = Stopwatch()
    contender = CONTENDERS[name].make(rank, world)
    while (order := orders.recv()) is not None:
        os.environ["MASTER_PORT"] = str(order["port"])
        stopwatch.start(order["memory_every"])
        try:
            contender(order["steps"], stopwatch.tick)
            figures = stopwatch.figures()
            gc.collect()  # what one round left must not count as the memory of the next
            orders.send(figures)
        except Exception:
            import traceback

            orders.send(traceback.format_exc())
