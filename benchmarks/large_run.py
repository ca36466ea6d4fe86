"""What does a large run cost: files in an attempt, and the time that ``cluster-ddp status`` and ``logs`` take?

Run it from the repository or with the package installed::

    python benchmarks/large_run.py                                # 1, 64, 512 and 4,096 nodes, 50 attempts
    python benchmarks/large_run.py --nodes 512 --attempts 1       # one of a single attempt
    python benchmarks/large_run.py --against ../older             # alternating with another checkout

The run is made up, in the state that a real one leaves: 8 ranks on each node, attempts that were preempted and queued
again, the last of them running; each node program has its own events, log and environment report. squeue is a stand-in
that answers at once. To reach: ``status`` in 0.4 s with 512 nodes and 50 attempts, and three files for each node of an
attempt.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.made_runs import Figures, call, make_large_run, make_stand_ins

TARGET_SECONDS = 0.4
TARGET_NODES = 512
COMMANDS = ("status", "logs --errors")


def measure(nodes: int, attempts: int, checkouts: list[Path], rounds: int, folder: Path) -> bool:
    """Print the rows for a run of so many nodes; whether this checkout reaches what it has to."""
    make_stand_ins(folder / "bin", [make_large_run(folder / "runs", nodes, attempts)])
    (run,) = (folder / "runs").iterdir()
    files = sum(1 for _ in (run / "attempts/000").iterdir())
    reached = files <= 3 * nodes + 10
    print(f"{nodes:6} {attempts:8}   {files} files in an attempt", flush=True)
    measured: dict[tuple[str, Path], list[Figures]] = {}
    for number in range(rounds + 1):
        for command in COMMANDS:
            for checkout in checkouts:
                name, *options = command.split()
                figures, _ = call((name, run.name, *options), checkout, folder)
                if number:  # the first of each fills caches
                    measured.setdefault((command, checkout), []).append(figures)
    for (command, checkout), rows in measured.items():
        wall, cpu = statistics.median(row[0] for row in rows), statistics.median(row[1] for row in rows)
        print(f"{nodes:6} {attempts:8}   {command:14}{wall:9.3f}{cpu:9.3f}   {checkout.name}", flush=True)
        if command == "status" and nodes <= TARGET_NODES and checkout == checkouts[0]:
            reached &= wall <= TARGET_SECONDS
    return reached


def main() -> int:
    """Measure, print, and exit with 1 when the target is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--nodes", type=int, nargs="+", default=[1, 64, TARGET_NODES, 4_096])
    parser.add_argument("--attempts", type=int, default=50)
    parser.add_argument("--against", type=Path, nargs="*", default=[], metavar="CHECKOUT")
    parser.add_argument("--make", type=Path, metavar="FOLDER", help="make the run there, no more")
    options = parser.parse_args()
    repository = Path(__file__).resolve().parents[1]
    sys.path.insert(0, str(repository))
    if options.make:
        make_stand_ins(
            options.make / "bin", [make_large_run(options.make / "runs", options.nodes[-1], options.attempts)]
        )
        return 0
    checkouts = [repository, *(checkout.resolve() for checkout in options.against)]
    print(f"{'nodes':>6} {'attempts':>8}   {'command':14}{'wall':>9}{'CPU':>9}   medians of {options.rounds} rounds, s")
    reached = True
    for nodes in options.nodes:
        with tempfile.TemporaryDirectory() as folder:
            reached &= measure(nodes, options.attempts, checkouts, options.rounds, Path(folder))
    print(f"to reach with {TARGET_NODES} nodes: {TARGET_SECONDS} s; {'reached' if reached else 'missed'}")
    return 0 if reached else 1


if __name__ == "__main__":
    sys.exit(main())
