"""What does a trainer cost per step, on top of a loop written by hand?

The same tiny model (64-256-256-10), data (4,096 samples in memory), batch (32 per rank) and optimizer (fused AdamW) go
through a bare DDP loop, this package's Trainer with all that is on by default, Lightning Fabric, Lightning's Trainer
and Accelerate, in short rounds within one run, each round in another order, so that the machine's moods hit all alike::

    pip install -r benchmarks/requirements.txt        # the others; what is not installed is left out of the table
    python benchmarks/step_overhead.py                # one process, then two ranks; about fifteen minutes
    python benchmarks/step_overhead.py --quick        # fewer rounds, to see that it works
    python benchmarks/step_overhead.py --growth       # memory of this Trainer over 10,000 steps

Every contender has processes of its own, so that none sees another's state; only one works at a time. Every ten rounds
they are replaced by fresh ones: two processes of the same program differ by a percent for as long as they live, by
where their memory happens to lie, and no contender is to keep a lucky one. A step's time is taken between two entries
into the model's forward, the same for all. In a round of N steps a contender's figure is the time per step over the
whole round, periodic work included; the table shows the median over the rounds of that figure, of its difference to the
bare loop in the same round (with the lowest and the highest), of its ratio to it, then of the differences of the median
step, which periodic work does not touch, of the processor time, which other processes disturb least, and of the peak
memory. The bare loop runs twice in each round, in processes of their own, and all are compared with the mean of the
two: what those two lines differ from each other is noise.

Where there is a CUDA GPU, the throughput of a larger network in bf16 follows, against a bare loop
(`gpu_throughput.py`); the tables themselves are of the CPU everywhere.

To reach: at most +20 us per step in one process, a ratio of at most 1.02 with two ranks, faster than the loop with a
default DataLoader, at most 30 MiB of peak memory per rank above the bare loop, and 0.98 of its throughput in bf16.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import random
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.contenders import BATCH, CONTENDERS
from benchmarks.workers import Group, Round

BARE = "bare loop"
AGAIN = "bare loop, again"
ROUNDS_PER_PROCESS = 10
ONE_BY_ONE = ("default DataLoader", "this Trainer, sample by sample")


def is_installed(package: str | None) -> bool:
    """Whether what a contender needs is here."""
    return package is None or importlib.util.find_spec(package) is not None


def measure(names: list[str], world: int, rounds: int, steps: int) -> dict[str, list[Round]]:
    """Run all contenders in turn, `rounds` times, and give their figures in order."""
    results: dict[str, list[Round]] = {name: [] for name in names}
    while (done := len(results[BARE])) < rounds:
        measure_processes(results, world, range(done, min(done + ROUNDS_PER_PROCESS, rounds)), steps)
        print(f"  {world} rank(s): {len(results[BARE])} of {rounds} rounds", file=sys.stderr)
    return results


def measure_processes(results: dict[str, list[Round]], world: int, numbers: Sequence[int], steps: int) -> None:
    """Add the figures of these rounds, with processes of their own and a round to warm them up."""
    names = list(results)
    groups = {name: Group(name, world) for name in names}
    try:
        for group in groups.values():
            group.run(steps)
        for number in numbers:
            for name in random.Random(number).sample(names, len(names)):  # nobody always comes after the same other
                results[name].append(groups[name].run(steps))
    finally:
        for group in groups.values():
            group.end()


def mean(rounds: Sequence[Round]) -> Round:
    """Give the mean of each figure."""
    return Round(
        statistics.fmean(figures.mean_us for figures in rounds),
        statistics.fmean(figures.median_us for figures in rounds),
        statistics.fmean(figures.cpu_us for figures in rounds),
        statistics.fmean(figures.peak_mib for figures in rounds),
    )


def show(results: dict[str, list[Round]], world: int, steps: int) -> None:
    """Print the table of one world size."""
    rounds = len(results[BARE])
    bare = [mean(pair) for pair in zip(results[BARE], results[AGAIN], strict=True)]
    print(f"\n{world} process{'es' if world > 1 else ''}, {rounds} rounds of {steps} steps each, microseconds per step")
    heading = ("per step", "over bare", "lowest", "highest", "ratio", "median step", "CPU time", "peak MiB")
    print(" " * 32 + "".join(f"{word:>12}" for word in heading))
    bare_peak = statistics.median(figures.peak_mib for figures in bare)
    for name, rows in results.items():
        over = [row.mean_us - base.mean_us for row, base in zip(rows, bare, strict=True)]
        ratio = statistics.median(row.mean_us / base.mean_us for row, base in zip(rows, bare, strict=True))
        typical = statistics.median(row.median_us - base.median_us for row, base in zip(rows, bare, strict=True))
        cpu = statistics.median(row.cpu_us - base.cpu_us for row, base in zip(rows, bare, strict=True))
        columns = (
            f"{statistics.median(row.mean_us for row in rows):.1f}",
            f"{statistics.median(over):+.1f}",
            f"{min(over):+.1f}",
            f"{max(over):+.1f}",
            f"{ratio:.3f}",
            f"{typical:+.1f}",
            f"{cpu:+.1f}",
            f"{statistics.median(row.peak_mib for row in rows) - bare_peak:+.1f}",
        )
        print(f"{name:32}" + "".join(f"{column:>12}" for column in columns))
    if set(ONE_BY_ONE) <= set(results):
        plain, seeded = (results[name] for name in ONE_BY_ONE)
        cost = statistics.median(b.mean_us - a.mean_us for a, b in zip(plain, seeded, strict=True)) / BATCH
        print(f"samples fetched and seeded one by one, against the default DataLoader, unseeded: {cost:+.2f} us each")


def show_growth(steps: int) -> None:
    """Print the resident memory of this Trainer, every tenth of a long run."""
    group = Group("this Trainer", world=1)
    try:
        group.run(300)
        resident = group.run(steps, watch_memory=True).resident_mib
    finally:
        group.end()
    print(f"this Trainer, resident memory in MiB over {steps} steps: " + " ".join(f"{mib:.1f}" for mib in resident))


def show_gpu(rounds: int) -> None:
    """Print the throughput in bf16 where there is a GPU; nothing elsewhere."""
    from benchmarks import gpu_throughput

    gpu_throughput.show(rounds)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few rounds")
    parser.add_argument("--growth", action="store_true", help="memory over 10,000 steps instead of the table")
    parser.add_argument("--world", type=int, nargs="*", default=[1, 2], help="numbers of ranks (default: 1 2)")
    parser.add_argument("--rounds", type=int, help="rounds (default: 40; --quick: 3)")
    parser.add_argument("--only", nargs="*", help=f"contenders besides the two bare loops; of: {', '.join(CONTENDERS)}")
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if options.growth:
        show_growth(10_000)
        return
    rounds = options.rounds or (3 if options.quick else 40)
    names = []
    for name, contender in CONTENDERS.items():
        if options.only is not None and name not in (BARE, AGAIN, *options.only):
            continue
        if is_installed(contender.needs):
            names.append(name)
        else:
            print(f"left out, not installed: {name} (pip install -r benchmarks/requirements.txt)", file=sys.stderr)
    for world in options.world:
        steps = 400 // world
        show(measure(names, world, rounds, steps), world, steps)
    show_gpu(rounds=3 if options.quick else 7)


if __name__ == "__main__":
    main()
