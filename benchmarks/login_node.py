"""What do commands on the login node take: ``submit --dry-run``, ``status``, ``list``, ``sweep``?

Run it from the repository or with the package installed::

    python benchmarks/login_node.py                             # 5 rounds at 10, 100 and 1,000 runs
    python benchmarks/login_node.py --counts 10000              # also of a sweep, the most elements that it may have
    python benchmarks/login_node.py --torchx ENV/bin/torchx     # alternating with `torchx run --dryrun -s slurm`
    python benchmarks/login_node.py --against ../older          # alternating with another checkout
    python benchmarks/login_node.py --make FOLDER --counts 1000  # only makes the runs, to look at or to profile

The runs are made up (`made_runs.py`) and have rested for an hour. The first round of each is not counted: caches are
filled, of the system and of the ended runs; `first look` is `status` without the latter. A site file is in place, and
byte code is kept, as where the package is installed. It prints medians of the wall-clock and of the CPU time.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.made_runs import Figures, ask, call, make_runs, make_stand_ins

TARGET_DRY_RUN = 0.20  # seconds of wall-clock time
TARGET_STATUS = 0.8  # of `TARGET_RUNS`, with one call of squeue and at most one of sacct
TARGET_SWEEP = 2.0  # of as many elements, with one submission
TARGET_RUNS = 1_000
MANY_NODES = 1_000
CONSTANT_BYTES = 100  # that scripts for one node and for many may differ by: numbers have more digits
SITE = """\
runs_dir: runs
slurm: {partition: gpu, account: lab}
launch: {setup: ["module load cuda"]}
network: {socket_ifname: ib0}
"""
SWEEP_JOB = "name: {}\ntask: cluster_ddp.tasks.digits:Digits\nslurm: {{nodes: 2}}\ntrain: {{epochs: 20}}\n"

Measured = Callable[[int], Figures]


def alternate(measured: dict[str, Measured], rounds: int, size: int) -> dict[str, Figures]:
    """Print and give the medians of commands that are called in turn; each is told the number of the round."""
    rows: dict[str, list[Figures]] = {title: [] for title in measured}
    for number in range(rounds + 1):
        for title, run in measured.items():
            rows[title].append(run(number))
    medians = {}
    for title, (_, *counted) in rows.items():  # the first of each fills caches
        wall, cpu = statistics.median(row[0] for row in counted), statistics.median(row[1] for row in counted)
        medians[title] = (wall, cpu, counted[-1][2])
        slurm = ", ".join(f"{counted[-1][2].count(name)} {name}" for name in sorted(set(counted[-1][2])))
        print(f"{size:6} {title:28}{wall:9.3f}{cpu:9.3f}   {slurm}", flush=True)
    return medians


def _calling(words: Sequence[str], checkout: Path, folder: Path) -> Measured:
    return lambda _: call(words, checkout, folder)[0]


def measure_dry_run(checkouts: list[Path], torchx: str | None, rounds: int, folder: Path) -> bool:
    """Print the rows of a dry run; whether it reaches what it has to, and the script's size is that for one node."""
    make_stand_ins(folder / "bin", [])
    (folder / "site.yaml").write_text(SITE)
    (folder / "train.py").write_text("")
    dry_run = ("submit", "multi-node", "--dry-run")
    measured: dict[str, Measured] = {
        "python -c pass": lambda _: ask((sys.executable, "-c", "pass"), repository(), folder)[0]
    }
    for checkout in checkouts:
        measured[f"submit --dry-run {checkout.name}"] = _calling(dry_run, checkout, folder)
    if torchx is not None:
        launch = (torchx, "run", "--dryrun", "-s", "slurm", "dist.ddp", "-j", "2x1", "--script", "train.py")
        measured["torchx run --dryrun"] = lambda _: ask(launch, repository(), folder)[0]
    wall, _, _ = alternate(measured, rounds, 1)[f"submit --dry-run {checkouts[0].name}"]
    few, many = (
        len(call((*dry_run, "--set", f"slurm.nodes={nodes}"), checkouts[0], folder)[1]) for nodes in (2, MANY_NODES)
    )
    print(f"{'':6} script for 2 nodes: {few:,} bytes, for {MANY_NODES:,}: {many:,}", flush=True)
    return wall <= TARGET_DRY_RUN and many - few <= CONSTANT_BYTES


def measure_runs(count: int, checkouts: list[Path], rounds: int, folder: Path) -> bool:
    """Print the rows for so many runs; whether this checkout reaches what it has to."""
    make_stand_ins(folder / "bin", make_runs(folder / "runs", count))

    def first_look(_: int) -> Figures:
        shutil.rmtree(folder / "cache", ignore_errors=True)
        return call(("status",), checkouts[0], folder)[0]

    measured: dict[str, Measured] = {"status, first look": first_look}
    for checkout in checkouts:
        for command in ("status", "list"):
            measured[f"{command} {checkout.name}"] = _calling((command,), checkout, folder)
    wall, _, slurm = alternate(measured, rounds, count)[f"status {checkouts[0].name}"]
    return count != TARGET_RUNS or (wall <= TARGET_STATUS and slurm.count("squeue") <= 1 and slurm.count("sacct") <= 1)


def measure_sweep(count: int, rounds: int, folder: Path) -> bool:
    """Print the rows for a sweep of so many elements; whether it reaches what it has to."""
    make_stand_ins(folder / "bin", [])
    seeds = "train.seed=" + ",".join(map(str, range(count)))

    def sweep(number: int, *options: str) -> Figures:
        (folder / "job.yaml").write_text(SWEEP_JOB.format(f"round-{number}{''.join(options)}"))  # another each time
        return call(("sweep", "job.yaml", "--grid", seeds, *options), repository(), folder)[0]

    measured = {
        "import torch": lambda _: ask((sys.executable, "-c", "import torch"), repository(), folder)[0],
        "sweep, which imports the task": sweep,
        "sweep --no-check": lambda number: sweep(number, "--no-check"),
        "sweep --dry-run": lambda number: sweep(number, "--no-check", "--dry-run"),
    }
    wall, _, slurm = alternate(measured, rounds, count)["sweep, which imports the task"]
    return count != TARGET_RUNS or (wall <= TARGET_SWEEP and slurm.count("sbatch") == 1)


def repository() -> Path:
    """The checkout that this program is a part of."""
    return Path(__file__).resolve().parents[1]


def main() -> int:
    """Measure, print, and exit with 1 when a target is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--counts", type=int, nargs="+", default=[10, 100, TARGET_RUNS], metavar="RUNS")
    parser.add_argument("--against", type=Path, nargs="*", default=[], metavar="CHECKOUT")
    parser.add_argument("--torchx", default=shutil.which("torchx"), help="the program, where it is not in $PATH")
    parser.add_argument("--make", type=Path, metavar="FOLDER", help="make the runs and the stand-ins there, no more")
    options = parser.parse_args()

    sys.path.insert(0, str(repository()))
    if options.make:
        make_stand_ins(options.make / "bin", make_runs(options.make / "runs", options.counts[-1]))
        return 0
    checkouts = [repository(), *(checkout.resolve() for checkout in options.against)]
    print(f"{'runs':>6} {'command':28}{'wall':>9}{'CPU':>9}   medians in seconds of {options.rounds} rounds")
    reached = True
    with tempfile.TemporaryDirectory() as folder:
        reached &= measure_dry_run(checkouts, options.torchx, options.rounds, Path(folder))
    for count in options.counts:
        with tempfile.TemporaryDirectory() as folder:
            reached &= measure_runs(count, checkouts, options.rounds, Path(folder))
        with tempfile.TemporaryDirectory() as folder:
            reached &= measure_sweep(count, options.rounds, Path(folder))
    print(f"to reach: dry run {TARGET_DRY_RUN} s, script of constant size; at {TARGET_RUNS:,} runs: ", end="")
    print(f"status {TARGET_STATUS} s, sweep {TARGET_SWEEP} s; {'reached' if reached else 'missed'}")
    return 0 if reached else 1


if __name__ == "__main__":
    sys.exit(main())
