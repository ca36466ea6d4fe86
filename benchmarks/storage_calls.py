"""What does a node program ask of the shared storage in a minute, while its ranks train and print?

Run it from the repository or with the package installed::

    python benchmarks/storage_calls.py                 # one minute, after a start of half a minute
    python benchmarks/storage_calls.py --seconds 300

A run of a script with two ranks that print each second is started by ``cluster-ddp local``. An audit hook in every
process counts what it opens, lists, touches, renames and removes in the run directory; ``stat`` is not
seen.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

START_SECONDS = 30
HOOK = """
import os, sys, time
words = " ".join(sys.orig_argv)
kind = "node program" if "cluster_ddp.launch.node.__main__" in words else "rank" if "RANK" in os.environ else "other"
told = os.open(f"{os.environ['COUNTED']}/{kind}-{os.getpid()}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
def note(event, arguments):
    if event in ("open", "os.listdir", "os.scandir", "os.utime", "os.rename", "os.remove", "os.mkdir"):
        os.write(told, f"{time.monotonic()} {event} {arguments[0]!r}\\n".encode())
sys.addaudithook(note)
"""
SCRIPT = "import itertools, time\nfor n in itertools.count():\n    print(n, flush=True)\n    time.sleep(1)\n"


def count(lines: list[str], runs: Path, seconds: float) -> Counter[str]:
    """What happened in a run of `runs` so long, by event and file; a file that is open is touched by its number."""
    counted: Counter[str] = Counter()
    begin = float(lines[0].split(" ", 1)[0]) + START_SECONDS
    for line in lines:
        moment, event, name = line.split(" ", 2)
        here = str(runs) in name or (event == "os.utime" and name.isdigit())
        if here and begin <= float(moment) < begin + seconds:
            counted[f"{event} {re.sub(rf'.*{re.escape(str(runs))}/[^/]*/', '', name.strip(chr(39)))}"] += 1
    return counted


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0)
    seconds = parser.parse_args().seconds
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name).resolve()
        (folder / "counted").mkdir()
        (folder / "hook").mkdir()
        (folder / "hook/sitecustomize.py").write_text(HOOK)
        (folder / "talk.py").write_text(SCRIPT)
        (folder / "job.yaml").write_text("name: talk\nscript: talk.py\nlaunch: {procs_per_node: 2}\nruns_dir: runs\n")
        search = [str(folder / "hook"), str(Path(__file__).resolve().parents[1]), os.environ.get("PYTHONPATH", "")]
        environment = {
            **os.environ,
            "COUNTED": str(folder / "counted"),
            "CLUSTER_DDP_CONFIG": "",
            "PYTHONPATH": os.pathsep.join(filter(None, search)),
        }
        null = subprocess.DEVNULL
        local = [sys.executable, "-m", "cluster_ddp", "local", "job.yaml"]
        with subprocess.Popen(local, cwd=folder, env=environment, stdout=null, stderr=null) as started:
            try:
                started.wait(2 * START_SECONDS + seconds)
            except subprocess.TimeoutExpired:
                started.send_signal(signal.SIGINT)
        for kind in ("node program", "rank"):
            for file in sorted((folder / "counted").glob(f"{kind}-*")):
                counted = count(file.read_text().splitlines(), folder / "runs", seconds)
                print(f"{kind}: {sum(counted.values())} calls in {seconds:g} s")
                for what, times in counted.most_common():
                    print(f"{times:8}   {what}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
