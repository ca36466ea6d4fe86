"""The batch script, performed: what it does about hosts that have failed more than once, and about a late scancel."""

from __future__ import annotations

from pathlib import Path

import pytest
from stage import Stage
from test_slurm_script_performed import CANCELLED

RUNNING = "JobId=77 JobState=RUNNING Reason=None Restarts=0 PreemptTime=None"


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    stage = Stage(tmp_path)
    stage.does(**{"end.sh": "echo requeue node-a"}, job=f"{RUNNING} ExcNodeList=old[1-2] X=y")
    return stage


def partition(stage: Stage, *nodes: str) -> None:
    """Say which nodes of the job's partition are up."""
    program = stage.bin / "sinfo"
    program.write_text(f"#!/bin/bash\nprintf '%s\\n' {' '.join(nodes)}\n")
    program.chmod(0o755)


def exclusions(stage: Stage) -> list[list[str]]:
    return [call[1:] for call in stage.calls("scontrol") if call[0] == "update"]


def test_a_host_that_fails_again_is_excluded_besides_those_that_were(stage: Stage) -> None:
    partition(stage, "node-a", "node-b", "node-c", "node-aa")
    assert stage.perform(stage.write(slurm={"nodes": 2})) == 0, stage.output
    assert stage.requeues() == ["77"]
    assert exclusions(stage) == [["JobId=77", "ExcNodeList=old[1-2],node-a"]]
    assert "node-a failed more than once" in stage.output


def test_several_hosts(stage: Stage) -> None:
    stage.does(**{"end.sh": "echo requeue node-a node-b"}, job=f"{RUNNING} ExcNodeList=(null) X=y")
    partition(stage, "node-a", "node-b", "node-c", "node-d")
    assert stage.perform(stage.write(slurm={"nodes": 2})) == 0, stage.output
    assert exclusions(stage) == [["JobId=77", "ExcNodeList=node-a,node-b"]]


def test_not_where_too_few_others_are_left(stage: Stage) -> None:
    partition(stage, "node-a", "node-b")
    assert stage.perform(stage.write(slurm={"nodes": 2})) == 0, stage.output
    assert stage.requeues() == ["77"]
    assert exclusions(stage) == []


def test_of_an_array_only_this_task(stage: Stage) -> None:
    partition(stage, "node-a", "node-b", "node-c")
    assert stage.perform(stage.write(), SLURM_ARRAY_JOB_ID="70", SLURM_ARRAY_TASK_ID="4") == 0
    assert exclusions(stage) == [["JobId=70_4", "ExcNodeList=old[1-2],node-a"]]


def test_without_suspects_nobody_is_asked(stage: Stage) -> None:
    stage.does(**{"end.sh": "echo requeue"})
    assert stage.perform(stage.write()) == 0, stage.output
    assert stage.requeues() == ["77"]
    assert exclusions(stage) == []


def test_a_scancel_while_the_attempt_is_judged_is_final(stage: Stage) -> None:
    stage.does(**{"end.sh": f"echo '{CANCELLED}' >{stage.folder}/job; echo requeue"})
    assert stage.perform(stage.write()) == 0, stage.output
    assert not stage.requeues()
