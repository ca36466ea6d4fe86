"""docs/own-script.md tells the truth: its script is stopped and resumed by cluster-ddp without a trace in the bits."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file

PROJECT = Path(__file__).parents[2]
PAGE = PROJECT / "docs" / "own-script.md"
PATIENCE = 120.0

Call = Callable[..., "subprocess.Popen[str]"]


def block(language: str) -> str:
    return PAGE.read_text().split(f"```{language}\n")[1].split("```")[0]


@pytest.fixture
def call(tmp_path: Path) -> Iterator[Call]:
    """Start a Python program in a folder that holds the page's script and job file."""
    (tmp_path / "digits_by_hand.py").write_text(block("python"))
    (tmp_path / "by-hand.yaml").write_text(block("yaml"))
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "CLUSTER_DDP_"))}
    environment |= {"PYTHONPATH": str(PROJECT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    environment["GLOO_SOCKET_IFNAME"] = "lo"
    started: list[subprocess.Popen[str]] = []

    def start(*arguments: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", *arguments]
        started.append(
            subprocess.Popen(
                command, cwd=tmp_path, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
            )
        )
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()


def finish(process: subprocess.Popen[str], status: int = 0) -> str:
    out, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == status, out
    return out


def wait_for(what: Callable[[], Any]) -> Any:
    end = time.monotonic() + PATIENCE
    while not (found := what()):
        assert time.monotonic() < end
        time.sleep(0.01)
    return found


def rank_0(run: Path) -> int | None:
    """The process id of rank 0 of a run."""
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            variables = (process / "environ").read_bytes().split(b"\0")
            if b"RANK=0" in variables and f"CLUSTER_DDP_RUN={run}".encode() in variables:
                return int(process.name)
    return None


def losses(folder: Path) -> dict[int, float]:
    rows = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return {row["step"]: row["train/loss"] for row in rows}


def weights(folder: Path, step: int) -> dict[str, bytes]:
    """The bytes of all tensors of a checkpoint, whatever shards they lie in."""
    shards = (folder / "checkpoints" / f"step-{step:08d}").glob("*.safetensors")
    return {name: array.tobytes() for shard in shards for name, array in load_file(shard).items()}


# With three ranks the order of sums matters, as with one and two it does not.
@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="finds the ranks in /proc: needs Linux")
@pytest.mark.parametrize(("ranks", "steps"), [(1, 3000), (3, 600)])
def test_the_script_is_stopped_and_resumed_exactly(call: Call, tmp_path: Path, ranks: int, steps: int) -> None:
    changes = (f"--procs={ranks}", "--set", f"args=['{steps}']")
    running = call("cluster_ddp", "local", "by-hand.yaml", *changes)
    run = wait_for(lambda: next(tmp_path.glob("runs/*"), None))
    wait_for(lambda: (run / "metrics.jsonl").exists() and losses(run))
    # Rank 0 waits while the stop is on its way, so that it comes in the middle on any machine.
    pid = wait_for(lambda: rank_0(run))
    os.kill(pid, signal.SIGSTOP)
    finish(call("cluster_ddp", "stop", "by-hand"))
    node = run / "events" / "node-0.jsonl"
    wait_for(lambda: "stop-requested" in node.read_text())
    os.kill(pid, signal.SIGCONT)
    finish(running, status=5)

    status = json.loads(finish(call("cluster_ddp", "status", "by-hand", "--json")))
    assert (status["state"], status["total_steps"]) == ("STOPPED", steps)
    assert 10 <= status["step"] == status["last_checkpoint"] < steps
    finish(call("cluster_ddp", "resume", "by-hand"))
    status = json.loads(finish(call("cluster_ddp", "status", "by-hand", "--json")))
    assert (status["state"], status["step"], status["attempts"]) == ("COMPLETED", steps, 2)

    if ranks == 1:
        finish(call("digits_by_hand", str(steps)))
    else:
        finish(call("torch.distributed.run", "--nproc-per-node", str(ranks), "digits_by_hand.py", str(steps)))
    calm = tmp_path / "by-hand"
    assert losses(run) == losses(calm)
    assert weights(run, steps) == weights(calm, steps)
    assert len(losses(calm)) == steps // 10


def test_the_script_is_short() -> None:
    assert len(block("python").splitlines()) <= 60
