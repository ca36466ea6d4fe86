"""What a page says, taken out of it to be tried, and what is needed to try it."""

from __future__ import annotations

import ast
import contextlib
import functools
import os
import re
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from waiting import wait_for

PROJECT = Path(__file__).parents[2]
PATIENCE = 120.0
_GAP = "\0"  # stands for what an f-string fills in
FINDS_RANKS = pytest.mark.skipif(
    not Path("/proc/self/environ").exists(), reason="finds the ranks in /proc, which only Linux has"
)

Call = Callable[..., "subprocess.Popen[str]"]


def block(page: str, language: str, after: str = "") -> str:
    """The first block of code in this language on a page of the project, below the heading `after` if it is given."""
    text = (PROJECT / page).read_text()
    return text[text.index(after) :].split(f"```{language}\n")[1].split("```")[0]


def is_message_of_the_program(message: str) -> bool:
    """Whether the package has a string with this in it; an ellipsis stands for what is filled in."""
    pattern = re.compile(".*".join(re.escape(part.strip()) for part in message.split("…")), re.DOTALL)
    return any(pattern.search(string) for string in _strings())


@functools.cache
def _strings() -> list[str]:
    """Every string of the package, of an f-string the parts that are always the same."""
    found = []
    for file in (PROJECT / "cluster_ddp").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.JoinedStr):
                found.append(_GAP.join(part.value for part in node.values if isinstance(part, ast.Constant)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return found


def finish(process: subprocess.Popen[str], status: int = 0) -> str:
    """Wait for a process to end as expected; what it printed."""
    out, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == status, out
    return out


def hold_rank_0(run: Path) -> int:
    """Halt rank 0 of a run when it has logged or saved, so that what comes next comes in the middle; its process."""
    metrics = run / "metrics.jsonl"
    wait_for(lambda: (metrics.exists() and metrics.stat().st_size) or list(run.glob("checkpoints/step-*")))
    rank: int = wait_for(lambda: rank_0(run))
    os.kill(rank, signal.SIGSTOP)
    return rank


def stop_in_the_middle(call: Call, running: subprocess.Popen[str], name: str, run: Path) -> None:
    """Stop a local run after some of its steps and before the last, by the command."""
    held = hold_rank_0(run)
    finish(call("cluster_ddp", "stop", name))
    wait_for(lambda: any("stop-requested" in file.read_text() for file in run.glob("events/node-*.jsonl")))
    os.kill(held, signal.SIGCONT)
    finish(running, status=5)


def rank_0(run: Path) -> int | None:
    """The process of rank 0 of a run on this machine."""
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            variables = (process / "environ").read_bytes().split(b"\0")
            if b"RANK=0" in variables and f"CLUSTER_DDP_RUN={run}".encode() in variables:
                return int(process.name)
    return None
