"""docs/task.md tells the truth: its task is stopped and resumed without a trace, and it names all there is to write."""

from __future__ import annotations

import json
import re
from pathlib import Path

from documented import PATIENCE, PROJECT, block
from train_ranks import rank_environments, start_whole_rank

from cluster_ddp.job import load_job
from cluster_ddp.run.directory import RunDirectory
from cluster_ddp.run.events import read_events
from cluster_ddp.run.runs import create_run
from cluster_ddp.train import Task

PAGE = "docs/task.md"
STEPS, STEPS_PER_EPOCH = 80, 1000 // 16
JOB = f"""\
name: line
task: line.py:Line
train: {{steps: {STEPS}, global_batch: 16, lr: 0.05, workers: 1}}
log: {{every_steps: 1}}
"""


# Ranks ask each other once a second: that is soon where the first steps have been slow.
STOPS_ITSELF = """

import os, signal, time
from torch.optim.optimizer import register_optimizer_step_post_hook

steps = []

def stop(*_):
    steps.append(1)
    if "STOPS" in os.environ:
        time.sleep(0.07 if len(steps) < 4 else 0)
        if len(steps) == 5:
            os.kill(os.getpid(), signal.SIGUSR1)

register_optimizer_step_post_hook(stop)
"""


def train(run: RunDirectory, attempt: int, **variables: str) -> None:
    """Be an attempt of two ranks."""
    folder = run.attempt(attempt).path
    folder.mkdir()
    environments = rank_environments(run, 2, attempt)
    ranks = [start_whole_rank(each | variables, run.path, folder / "log") for each in environments]
    for rank in ranks:
        rank.join(PATIENCE)
        rank.kill()
        rank.join()
    assert [rank.exitcode for rank in ranks] == [0, 0], (folder / "log").read_text()


def losses(run: RunDirectory) -> dict[int, float]:
    rows = map(json.loads, run.metrics_file.read_text().splitlines())
    return {row["step"]: row["train/loss"] for row in rows}


def test_the_iterable_set_is_stopped_and_resumed_exactly(tmp_path: Path) -> None:
    (tmp_path / "line.py").write_text(block(PAGE, "python") + STOPS_ITSELF)
    (tmp_path / "line.yaml").write_text(JOB)
    spec = load_job(str(tmp_path / "line.yaml")).spec
    calm, run = (create_run(spec, runs_dir=tmp_path / "runs", via="local", script=None) for _ in range(2))
    train(calm, 0)
    train(run, 0, STOPS="yes")
    (stopped,) = [event["step"] for event in read_events(run) if event["event"] == "stopped"]
    assert 5 <= stopped < STEPS_PER_EPOCH < STEPS
    train(run, 1)
    assert losses(run) == losses(calm)
    assert len(losses(calm)) == STEPS


def test_every_method_of_a_task_is_on_the_page() -> None:
    rows = re.findall(r"^\| (`.*?) \|", (PROJECT / PAGE).read_text(), re.MULTILINE)
    named = {name for row in rows for name in re.findall(r"`(\w+)\(", row)}
    assert named == {name for name, member in vars(Task).items() if callable(member) and not name.startswith("_")}
    assert "`sharded = True`" in (PROJECT / PAGE).read_text()
