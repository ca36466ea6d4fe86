"""What the agent records of the ends of its ranks, with the torch that is installed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.distributed.elastic.multiprocessing import MultiprocessContext, PContext, SubprocessContext

from cluster_ddp.launch.ports import free_port
from cluster_ddp.launch.torchrun.exits import RankExit, RankExits
from cluster_ddp.run.directory import RunDirectory

# Rank 2 is killed in its first life, rank 0 leaves and rank 1 fails in its second; the others would go on.
RANKS = """
import os, signal, sys, time
rank, life = int(os.environ["RANK"]), os.environ["TORCHELASTIC_RESTART_COUNT"]
open(f"pid-{rank}-{life}-{os.getpid()}", "w").close()
while len([name for name in os.listdir() if name.startswith("pid-") and f"-{life}-" in name[5:]]) < 3:
    time.sleep(0.02)
if life == "0" and rank == 2:
    os.kill(os.getpid(), signal.SIGKILL)
if life == "1" and rank == 0:
    open("left", "w").close()
    sys.exit(0)
if life == "1" and rank == 1:
    while not os.path.exists("left"):
        time.sleep(0.02)
    time.sleep(1)
    sys.exit(7)
time.sleep(600)
"""
CHANGED = (
    f"torch {torch.__version__} no longer ends its ranks through PContext.wait and PContext.close: the exit codes of "
    "ranks are lost (launch/torchrun/exits.py)"
)


@pytest.mark.parametrize("context", [SubprocessContext, MultiprocessContext])
def test_torchs_agent_waits_for_its_ranks_and_ends_them_through_the_methods_that_are_listened_to(
    context: type[PContext],
) -> None:
    assert context.wait is PContext.wait and context.close is PContext.close, CHANGED


def test_exit_codes_are_recorded_each_time_the_ranks_are_started(tmp_path: Path) -> None:
    attempt = RunDirectory(tmp_path).attempt(0)
    attempt.path.mkdir(parents=True)
    attempt.rendezvous_key.write_bytes(b"k" * 32)
    (tmp_path / "ranks.py").write_text(RANKS)
    exits = RankExits(tmp_path)
    options = ["--nnodes=1", "--nproc-per-node=3", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{free_port()}"]
    options += [
        "--rdzv-id=x",
        "--rdzv-conf=is_host=1",
        "--local-addr=127.0.0.1",
        "--max-restarts=1",
        f"--log-dir={tmp_path}",
        "--redirects=3",
    ]
    command = [sys.executable, "-m", "cluster_ddp.launch.torchrun", *options, "ranks.py", "--log", "--local"]
    known = {"CLUSTER_DDP_RUN": str(tmp_path), "CLUSTER_DDP_ATTEMPT": "0"}
    done = subprocess.run(
        command, cwd=tmp_path, env=os.environ | known, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 1, done.stderr
    exits.read()
    pids = {path.name[4:7]: int(path.name[8:]) for path in tmp_path.glob("pid-*")}
    cause = {pid: known for pid, known in exits.failed.items() if pid not in exits.ended_by_agent}
    first, second = pids["2-0"], pids["1-1"]
    assert cause == {first: RankExit(first, 2, 2, -9), second: RankExit(second, 1, 1, 7)}, f"{CHANGED}\n{done.stderr}"
    assert exits.left == {pids["0-1"]}, CHANGED
    assert exits.started.keys() == set(pids.values()) and exits.started[first].rank == 2, CHANGED
    assert all(Path(started.folder, "stdout.log").is_file() for started in exits.started.values()), CHANGED
    assert not exits.unended(), CHANGED
    assert exits.ended_by_agent == set(pids.values()) - {first, second, pids["0-1"]}, CHANGED
    records = map(json.loads, (tmp_path / "exits.jsonl").read_text().splitlines())
    known = [entry["pid"] for record in records if record["ended_by_agent"] for entry in record["failed"]]
    assert known == [first, second], f"known before the others have exited. {CHANGED}"


def test_what_a_full_disk_left_of_a_record_is_passed_over(tmp_path: Path) -> None:
    exits = RankExits(tmp_path)
    (tmp_path / "exits.jsonl").write_text('{"failed": [{"pid": 1}], "left": [], "ended_by_agent": []}\n{"failed"\n[]\n')
    exits.read()
    assert (exits.failed, exits.ended_by_agent) == ({}, set())
