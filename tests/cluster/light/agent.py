"""An agent whose ranks end well: what the node program sees of torchrun, without torch, whose import takes seconds.

For tests that start attempts and mean Slurm, the keeper or the commands. Of two nodes the first is the one that
torchrun would make the host of the rendezvous, whose port rank 0 gets. Ranks whose peer fails are ended, not restarted.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

from cluster_ddp.launch.torchrun.__main__ import handle_ignored_signals
from cluster_ddp.launch.torchrun.command import trains_a_task

last = sys.argv.index("--redirects=3")
given = dict(option.split("=", 1) for option in sys.argv[1 : last + 1])
nodes, procs = int(given["--nnodes"]), int(given["--nproc-per-node"])
assert nodes <= 2, "which of several nodes this is would be unknown"
node = 0 if nodes == 1 or "is_host=1" in given["--rdzv-conf"] else 1
if not trains_a_task(sys.argv):
    handle_ignored_signals()
command = [sys.executable, *sys.argv[last + 1 :]]
logs = Path(given["--log-dir"])
address, _, port = given["--rdzv-endpoint"].rpartition(":")
common = {
    "MASTER_ADDR": address.strip("[]"), "MASTER_PORT": port, "WORLD_SIZE": str(nodes * procs),
    "LOCAL_WORLD_SIZE": str(procs), "GROUP_RANK": str(node), "TORCHELASTIC_RESTART_COUNT": "0",
    "TORCHELASTIC_RUN_ID": given["--rdzv-id"],
}  # fmt: skip


def record(**what: object) -> None:
    """Tell the node program, as `cluster_ddp.launch.torchrun.exits` does."""
    with (logs / "exits.jsonl").open("a") as file:
        file.write(f"{json.dumps({'started': [], 'failed': [], 'left': [], 'ended_by_agent': [], **what})}\n")


folders = [logs / "light" / "attempt_0" / str(local_rank) for local_rank in range(procs)]
ranks = []
for local_rank, folder in enumerate(folders):
    folder.mkdir(parents=True)
    own = {"RANK": str(node * procs + local_rank), "LOCAL_RANK": str(local_rank)}
    own["TORCHELASTIC_ERROR_FILE"] = str(folder / "error.json")
    with (folder / "stdout.log").open("wb") as out, (folder / "stderr.log").open("wb") as err:
        environment = os.environ | common | own
        ranks.append(subprocess.Popen(command, env=environment, stdout=out, stderr=err, start_new_session=True))
record(
    started=[
        {"pid": rank.pid, "rank": node * procs + local_rank, "local_rank": local_rank, "folder": str(folder)}
        for local_rank, (rank, folder) in enumerate(zip(ranks, folders, strict=True))
    ]
)

while any(rank.poll() is None for rank in ranks) and not any(rank.returncode for rank in ranks):
    time.sleep(0.02)
failed = [
    {"pid": rank.pid, "rank": node * procs + local_rank, "local_rank": local_rank, "exit_code": rank.returncode}
    for local_rank, rank in enumerate(ranks)
    if rank.returncode
]
record(failed=failed, left=[rank.pid for rank in ranks if rank.returncode == 0])
if living := [rank for rank in ranks if rank.poll() is None]:
    record(ended_by_agent=[rank.pid for rank in living])
    for rank in living:
        rank.kill()
        rank.wait()
sys.exit(1 if failed else 0)
