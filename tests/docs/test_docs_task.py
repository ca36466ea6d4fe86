"""docs/task.md tells the truth: its task is stopped and resumed without a trace, and it names all there is to write."""

from __future__ import annotations

import json
import re
from pathlib import Path

from documented import FINDS_RANKS, PROJECT, Call, block, finish, stop_in_the_middle, wait_for

from cluster_ddp.train import Task

PAGE = "docs/task.md"
STEPS = 120
JOB = f"""\
name: line
task: line.py:Line
launch: {{procs_per_node: 2}}
train: {{steps: {STEPS}, global_batch: 16, lr: 0.05, workers: 1}}
log: {{every_steps: 1}}
"""


def losses(run: Path) -> dict[int, float]:
    rows = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return {row["step"]: row["train/loss"] for row in rows}


@FINDS_RANKS
def test_the_iterable_set_is_stopped_and_resumed_exactly(tmp_path: Path, call: Call) -> None:
    (tmp_path / "line.py").write_text(block(PAGE, "python"))
    (tmp_path / "line.yaml").write_text(JOB)
    (tmp_path / "calm.yaml").write_text(JOB.replace("name: line", "name: calm"))
    finish(call("cluster_ddp", "local", "calm.yaml"))
    (calm,) = tmp_path.glob("runs/calm*")

    running = call("cluster_ddp", "local", "line.yaml")
    run = wait_for(lambda: next(tmp_path.glob("runs/line*"), None))
    stop_in_the_middle(call, running, "line", run)
    status = json.loads(finish(call("cluster_ddp", "status", "line", "--json")))
    assert 10 <= status["step"] == status["last_checkpoint"] < STEPS
    finish(call("cluster_ddp", "resume", "line"))

    assert losses(run) == losses(calm)
    assert len(losses(calm)) == STEPS


def test_every_method_of_a_task_is_on_the_page() -> None:
    rows = re.findall(r"^\| (`.*?) \|", (PROJECT / PAGE).read_text(), re.MULTILINE)
    named = {name for row in rows for name in re.findall(r"`(\w+)\(", row)}
    assert named == {name for name, member in vars(Task).items() if callable(member) and not name.startswith("_")}
    assert "`sharded = True`" in (PROJECT / PAGE).read_text()
