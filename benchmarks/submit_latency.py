"""How long does ``cluster-ddp submit multi-node --dry-run`` take, from the prompt to the prompt?

Run it from the repository or with the package installed::

    python benchmarks/submit_latency.py             # 15 runs of each, alternating
    python benchmarks/submit_latency.py --imports   # also the dearest imports

It prints medians, the spread, and what of it is the start of Python itself. To reach: 0.20 s. A site file is
in place, and byte code is kept, as where the package is installed.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

TARGET_SECONDS = 0.20
BARE = (sys.executable, "-c", "pass")
DRY_RUN = (sys.executable, "-m", "cluster_ddp", "submit", "multi-node", "--dry-run")
SITE = """\
runs_dir: runs
slurm: {partition: gpu, account: lab}
launch: {setup: ["module load cuda"]}
network: {socket_ifname: ib0}
"""
IMPORT_LINE = re.compile(r"import time:\s+(\d+) \|\s+(\d+) \| (\s*)(\S+)")


def seconds_of(command: Sequence[str], folder: str, environment: dict[str, str]) -> float:
    """Run a command once and give the wall-clock seconds it took."""
    begin = time.perf_counter()
    subprocess.run(command, cwd=folder, env=environment, check=True, capture_output=True, timeout=60)
    return time.perf_counter() - begin


def dearest_imports(folder: str, environment: dict[str, str], count: int = 12) -> list[tuple[float, str]]:
    """Give the milliseconds, its own imports included, and the name of the packages that take longest to import."""
    command = (DRY_RUN[0], "-X", "importtime", *DRY_RUN[1:])
    done = subprocess.run(command, cwd=folder, env=environment, check=True, capture_output=True, text=True, timeout=60)
    found = (IMPORT_LINE.match(line) for line in done.stderr.splitlines())
    dear = [(int(match[2]) / 1000, match[4]) for match in found if match]
    return sorted(dear, reverse=True)[:count]


def main() -> int:
    """Measure, print, and exit with 1 when the target is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=15)
    parser.add_argument("--imports", action="store_true", help="print the dearest imports too")
    options = parser.parse_args()

    repository = str(Path(__file__).resolve().parents[1])
    search = os.pathsep.join(filter(None, (repository, os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONPATH": search}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    with tempfile.TemporaryDirectory() as folder:
        site = Path(folder, "site.yaml")
        site.write_text(SITE)
        environment |= {"CLUSTER_DDP_CONFIG": str(site), "PYTHONPYCACHEPREFIX": f"{folder}/bytecode"}
        measured: dict[str, list[float]] = {"python -c pass": [], "submit multi-node --dry-run": []}
        for run in range(options.runs + 1):
            for name, command in zip(measured, (BARE, DRY_RUN), strict=True):
                seconds = seconds_of(command, folder, environment)
                if run:  # the first of each fills caches
                    measured[name].append(seconds)
        print(f"{'':30}{'median':>9}{'fastest':>9}{'slowest':>9}   seconds, {options.runs} runs each, alternating")
        for name, values in measured.items():
            print(f"{name:30}{statistics.median(values):9.3f}{min(values):9.3f}{max(values):9.3f}")
        if options.imports:
            for milliseconds, module in dearest_imports(folder, environment):
                print(f"{milliseconds:9.1f} ms  {module}")
    median = statistics.median(measured["submit multi-node --dry-run"])
    print(f"to reach: {TARGET_SECONDS} s; {'reached' if median <= TARGET_SECONDS else 'missed'}")
    return 0 if median <= TARGET_SECONDS else 1


if __name__ == "__main__":
    sys.exit(main())
