"""An agent of one rank of a script: what the node program sees of torchrun, without torch, whose import takes seconds.

For tests that start an attempt ten times over, and mean Slurm.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

last = sys.argv.index("--redirects=3")
given = dict(option.split("=", 1) for option in sys.argv[1 : last + 1])
assert given["--nnodes"] == given["--nproc-per-node"] == "1", "a light agent has no one to meet"
command = [sys.executable, *sys.argv[last + 1 :]]
logs = Path(given["--log-dir"])
folder = logs / "light" / "attempt_0" / "0"
folder.mkdir(parents=True)
rank = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "TORCHELASTIC_RESTART_COUNT": "0"}
rank["TORCHELASTIC_ERROR_FILE"] = str(folder / "error.json")


def record(**what: object) -> None:
    """Tell the node program, as `cluster_ddp.launch.exits` does."""
    with (logs / "exits.jsonl").open("a") as file:
        file.write(f"{json.dumps({'folders': {}, 'failed': [], 'left': [], 'ended_by_agent': [], **what})}\n")


with (folder / "stdout.log").open("wb") as out, (folder / "stderr.log").open("wb") as err:
    process = subprocess.Popen(command, env={**os.environ, **rank}, stdout=out, stderr=err, start_new_session=True)
    record(folders={str(folder): 0})
    status = process.wait()
if status:
    record(failed=[{"pid": process.pid, "rank": 0, "local_rank": 0, "exit_code": status}])
else:
    record(left=[process.pid])
sys.exit(1 if status else 0)
