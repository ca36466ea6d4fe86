"""Slurm's answers are read alike in all releases: recorded ones, of each situation that a job may be in.

tests/cluster/record_answers.py has recorded them. A situation that a release does not have is not in its file.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from slurm_stand_ins import stand_in

from cluster_ddp.slurm.commands import parse_queue, query_ended_jobs
from cluster_ddp.slurm.control import boot_times, down_nodes, kill_wait, usable_nodes
from cluster_ddp.slurm.job_info import is_ending, parse_job, why_it_ends
from cluster_ddp.slurm.partitions import NodeKind, parse_nodes, parse_partitions
from cluster_ddp.slurm.states import ACTIVE, WAITING, SlurmJob

ANSWERS: dict[str, dict[str, Any]] = {
    path.stem: json.loads(path.read_text()) for path in sorted(Path(__file__).with_name("answers").glob("*.json"))
}
every_release = pytest.mark.parametrize("release", ANSWERS)

# What the job's first start is told about its end, whether it had better ask, and where squeue has the job.
JOBS = {
    "running": ("terminated", False, "active"),
    "preempted with grace": ("preemption", True, "active"),
    "preempted without grace, not requeued": ("preemption", True, "active"),
    "preempted without grace, requeued": ("requeued", True, "active"),
    "time limit": ("time-limit", True, "active"),
    "requeued": ("requeued", False, "waiting"),
    "held by an administrator": ("cancel", False, "held"),
    "held by its user": ("cancel", False, "held"),
    "requeued and held": ("requeued", False, "held"),
    "special exit": ("requeued", False, "held"),
    "prolog failed": ("requeued", False, "held"),
    "node failed, requeued": ("requeued", True, "active"),
    "node failed, not requeued": ("node-down", False, "over"),
    "cancelled, ending": ("cancel", True, "active"),
    "cancelled": ("cancel", False, "over"),
    "array": ("terminated", False, "active"),
    "expedited, running": ("terminated", False, "active"),
    "expedited, node failed": ("requeued", False, "waiting"),
    "expedited, exit status 3": ("requeued", False, "held"),
}
# How jobs ended, as the accounting says it.
ENDED = {
    "completed": "COMPLETED", "failed": "FAILED", "time limit": "TIMEOUT", "cancelled": "CANCELLED",
    "preempted": "PREEMPTED", "node failed": "NODE_FAIL", "requeued, then completed": "COMPLETED",
    "requeued, then cancelled": "CANCELLED", "array, over": "COMPLETED",
    "array, a task cancelled where it waited": "CANCELLED",
}  # fmt: skip
NOT_OVER = "requeued, ending", "requeued, waiting", "preempted, waiting", "array, a task waits again"


def test_the_releases_that_sites_run_are_there() -> None:
    everywhere = {situation for situation in JOBS if not situation.startswith("expedited")}
    assert {"22.05": everywhere, "24.05": everywhere, "26.05": set(JOBS)} == {
        release: set(JOBS) & set(answers) for release, answers in ANSWERS.items()
    }


@pytest.mark.parametrize(
    ("release", "situation"), [(release, s) for release, answers in ANSWERS.items() for s in JOBS if s in answers]
)
def test_a_job_in_each_situation(release: str, situation: str) -> None:
    why, ending, place = JOBS[situation]
    answer = ANSWERS[release][situation]
    job = parse_job(answer["scontrol"])
    assert job is not None and job.excluded == ""
    if "held by" not in situation:  # a job that has not started asks nothing
        assert why_it_ends(job, 0) == why
    assert is_ending(job) is ending
    (queued,) = {id(queued): queued for queued in parse_queue(answer["squeue"]).values()}.values()
    assert queued.comment == "cluster_ddp a-run"
    where = "held" if queued.held else "waiting" if queued.state in WAITING else "active"
    assert (where if queued.state in ACTIVE | WAITING else "over") == place


@every_release
def test_a_task_of_an_array_is_found_by_both_ids(release: str) -> None:
    answer = ANSWERS[release]["array"]["squeue"]
    shown, plain = answer.split("|")[:2]
    assert shown.endswith("_3") and plain.isdigit()
    jobs = parse_queue(answer)
    assert jobs[shown] is jobs[plain]


@every_release
def test_partitions_and_their_nodes(release: str) -> None:
    answers = ANSWERS[release]["partitions"]
    partitions = {partition.name: partition for partition in parse_partitions(answers["scontrol"])}
    assert set(partitions) == {"debug", "cancel", "urgent"}
    debug, cancel, urgent = (partitions[name] for name in ("debug", "cancel", "urgent"))
    assert all(partition.up and partition.max_time is None and partition.qos == () for partition in partitions.values())
    assert (debug.default, cancel.default, urgent.default) == (True, False, False)
    assert (debug.grace, cancel.grace) == (10, 0)
    assert (debug.preempted, cancel.preempted, urgent.preempted) == (True, True, False)
    assert parse_nodes(answers["sinfo"]) == [NodeKind(3, 8, 64000, {"a100": 4})]


def what_the_accounting_says(slurm: Path, release: str, how: str) -> tuple[list[str], dict[str, SlurmJob]]:
    """The ids of the jobs that a recorded answer is about, and what is made of it."""
    said = ANSWERS[release]["accounting"][how]
    (slurm / "said").write_text(said)
    stand_in(slurm, "sacct", 'cat "$(dirname "$0")/said"')
    asked = [line.split("|")[0] for line in said.splitlines()]
    return asked, query_ended_jobs(asked, seconds=5)


@every_release
@pytest.mark.parametrize("how", ENDED)
def test_how_the_accounting_says_that_a_job_ended(release: str, how: str, slurm: Path) -> None:
    asked, jobs = what_the_accounting_says(slurm, release, how)
    assert set(asked) <= set(jobs)
    assert {(job.state, job.comment) for job in jobs.values()} == {(ENDED[how], "cluster_ddp a-run")}


@every_release
@pytest.mark.parametrize("how", NOT_OVER)
def test_what_waits_again_is_not_over_to_the_accounting(release: str, how: str, slurm: Path) -> None:
    asked, jobs = what_the_accounting_says(slurm, release, how)
    assert asked and jobs == {}


@every_release
def test_the_accounting_names_tasks_of_an_array_by_both_ids(release: str, slurm: Path) -> None:
    (third, fourth), jobs = what_the_accounting_says(slurm, release, "array, over")
    assert third.endswith("_3") and fourth.endswith("_4")
    assert len(jobs) == 4 and {job.job_id for job in jobs.values()} == {third, fourth}


@every_release
def test_nodes_and_configuration(release: str, slurm: Path) -> None:
    answers = ANSWERS[release]
    node = answers["a node is down"]
    (slurm / "usable").write_text(node["usable"])
    (slurm / "down").write_text(node["sinfo"])
    (slurm / "config").write_text(answers["configuration"]["scontrol"])
    stand_in(
        slurm, "sinfo", 'here=$(dirname "$0"); if [[ $* == *down* ]]; then cat $here/down; else cat $here/usable; fi'
    )
    stand_in(slurm, "scontrol", 'cat "$(dirname "$0")/config"')
    assert down_nodes(["node1", "node2", "node3"]) == [node["down"]]
    assert usable_nodes("debug") == {"node1", "node2", "node3"} - {node["down"]}
    assert kill_wait(seconds=5) == 5.0
    (slurm / "config").write_text(node["scontrol"])
    assert boot_times([node["down"]]).keys() == {node["down"]}
