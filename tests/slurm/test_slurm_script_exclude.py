"""The batch script, performed: what it does about hosts that have failed more than once, and about a late scancel."""

from __future__ import annotations

from pathlib import Path

import pytest
from stage import Stage
from test_slurm_script_performed import CANCELLED, TAKEN_BACK

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


def test_hosts_that_the_job_is_kept_from_are_no_others(stage: Stage) -> None:
    """Else the job would wait in the queue for ever."""
    stage.does(job=f"{RUNNING} ExcNodeList=node-c,node-d X=y")
    partition(stage, "node-a", "node-b", "node-c", "node-d")
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


# -- found at the start: nobody could exclude it when the attempt before ended -----------------------------------------


@pytest.fixture
def restarted(stage: Stage) -> Stage:
    """The job was given node-a again; `begin` says so once."""
    begin = (stage.folder / "begin.sh").read_text()
    once = f"[[ -e {stage.folder}/asked ]] || {{ touch {stage.folder}/asked; echo avoid node-a node-d; exit; }}"
    stage.does(**{"begin.sh": f"{once}\n{begin}", "end.sh": "echo done"})
    return stage


def begun(stage: Stage) -> int:
    return sum("begin" in call for call in stage.calls("python"))


def test_a_job_that_is_given_such_a_host_again_gives_it_back_before_it_trains(restarted: Stage) -> None:
    partition(restarted, "node-a", "node-b", "node-c", "node-d")
    assert restarted.perform(restarted.write(slurm={"nodes": 2})) == 0, restarted.output
    assert not restarted.calls("srun")
    assert begun(restarted) == 1
    assert restarted.requeues() == ["77"]
    assert exclusions(restarted) == [["JobId=77", "ExcNodeList=old[1-2],node-a,node-d"]]
    order = [call[0] for call in restarted.calls("scontrol") if call[0] in ("requeue", "update")]
    assert order == ["requeue", "update"], "Slurm excludes nodes of a queued job only"
    assert "failed more than once (node-a node-d): starting again without" in restarted.output


def test_with_too_few_others_it_trains_all_the_same(restarted: Stage) -> None:
    partition(restarted, "node-a", "node-b", "node-d")
    assert restarted.perform(restarted.write(slurm={"nodes": 2})) == 0, restarted.output
    assert begun(restarted) == 2
    assert len(restarted.calls("srun")) == 1
    assert not restarted.requeues()
    assert exclusions(restarted) == []
    assert "too few other nodes: going on" in restarted.output


def test_a_second_begin_that_may_not_ends_the_job(restarted: Stage) -> None:
    partition(restarted, "node-a")
    begin = (restarted.folder / "begin.sh").read_text()
    restarted.does(**{"begin.sh": f"{begin.splitlines()[1]}\nexit 76"})
    assert restarted.perform(restarted.write()) == 76
    assert not restarted.calls("srun")


def test_a_refused_requeue_at_the_start_says_what_to_do(restarted: Stage) -> None:
    partition(restarted, "node-b", "node-c")
    restarted.does(requeue_status="1")
    assert restarted.perform(restarted.write()) == 1
    assert restarted.requeues() == ["77"] * 3
    assert not restarted.calls("srun")
    assert f"cluster-ddp resume {restarted.run}" in restarted.output


def test_a_job_that_slurm_takes_back_meanwhile_is_not_requeued_a_second_time(restarted: Stage) -> None:
    partition(restarted, "node-b", "node-c")
    begin = (restarted.folder / "begin.sh").read_text()
    signalled = restarted.folder / "signalled"
    waiting = f"for ((i = 0; i < 400; i++)); do [[ -e {signalled} ]] && break; sleep 0.05; done"
    restarted.does(**{"begin.sh": f"touch {restarted.folder}/training; {waiting}\n{begin}"})
    process = restarted.start(restarted.write())
    restarted.wait_for_training()
    restarted.does(job=TAKEN_BACK)
    process.terminate()
    signalled.touch()
    assert restarted.finish(process) == 0, restarted.output
    assert not restarted.requeues()
    assert exclusions(restarted) == [["JobId=77", "ExcNodeList=node-a,node-d"]]
