from __future__ import annotations

import json

import pytest

from cluster_ddp.job import JobSpec
from cluster_ddp.run.runs import create_run
from cluster_ddp.train import Trainer, load_task

TASKS = [
    ("digits:Digits", {"width": 4}, {"val/accuracy", "val/loss"}),
    ("charlm:CharLM", {"context": 16, "layers": 1, "width": 16}, {"val/accuracy", "val/loss"}),
    ("crowd_bt:CrowdBT", {"items": 50, "annotators": 4, "comparisons": 600}, {"val/agreement", "val/loss"}),
]


@pytest.mark.parametrize(("name", "params", "metrics"), TASKS)
def test_a_task_trains_evaluates_saves_and_resumes_by_its_name(tmp_path, name, params, metrics):
    target = f"cluster_ddp.tasks.{name}"
    run = None
    for attempt, steps in enumerate((4, 7)):
        train = {"steps": steps, "batch_size": 8, "evaluate_every": "end"}
        job = JobSpec.model_validate({"name": "task", "task": target, "params": params, "train": train})
        run = run or create_run(job, runs_dir=tmp_path, via="local", script=None)
        outcome = Trainer(job, load_task(target, params), run, attempt).run()
        assert outcome.completed and outcome.step == steps
    rows = [json.loads(line) for line in run.metrics_file.read_text().splitlines()]
    assert [row["attempt"] for row in rows if metrics <= row.keys()] == [0, 1]
    assert min(row["step"] for row in rows if row["attempt"] == 1) > 4  # it went on, it did not begin again
