"""The batch script and its keeper, performed: hosts that have failed more than once, and a late scancel."""

from __future__ import annotations

from pathlib import Path

import pytest
from stage import CANCELLED, DONE, TAKEN_BACK, Stage, event

from cluster_ddp.run.attempt import begin_attempt
from cluster_ddp.run.attempt_record import list_attempts
from cluster_ddp.run.directory import RunDirectory
from cluster_ddp.run.errors import to_continue
from cluster_ddp.run.events import COMPLETED, NODE_LOST, WARNING, EventWriter, read_events
from cluster_ddp.run.record import add_slurm_job

RUNNING = "JobId=77 JobState=RUNNING Reason=None Restarts={} PreemptTime=None ExcNodeList={} X=y"


def lose(stage: Stage, *hosts: str, attempt: int, job: str = "77") -> None:
    """An attempt that Slurm ended as its hosts failed."""
    run = RunDirectory(stage.run)
    restarts = attempt if job == "77" else 0
    begin_attempt(run, slurm_job_id=job, restart_count=restarts, host="node-b", pid=0, nodes=2, procs=1)
    for node, host in enumerate(hosts):
        EventWriter(run, "test").write(NODE_LOST, attempt=attempt, host=host, node=node)


def restart(stage: Stage, number: int, **variables: str) -> int:
    """Perform that start of the job; its status."""
    given = {"SLURM_RESTART_COUNT": str(number), "SLURM_JOB_NODELIST": "node-b,node-a", **variables}
    return stage.perform(stage.write(slurm={"nodes": 2}), **given)


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    """The second start of a job that lost node-a in its first, and loses it again."""
    stage = Stage(tmp_path)
    stage.does(job=RUNNING.format(1, "old[1-2]"))
    stage.does(**{"training.sh": event("node-lost", attempt=1, host="node-a", node=1)})
    lose(stage, "node-a", attempt=0)
    return stage


def partition(stage: Stage, *nodes: str) -> None:
    """Say which nodes of the job's partition are up."""
    greeting = "echo 'Welcome to the cluster!'"
    stage.program("sinfo", f"{greeting}; [[ $* == *down* ]] || printf '%s\\n' {' '.join(nodes)}")


def exclusions(stage: Stage) -> list[list[str]]:
    return [call[1:] for call in stage.calls("scontrol") if call[0] == "update"]


def test_a_host_that_fails_again_is_excluded_besides_those_that_were(stage: Stage) -> None:
    partition(stage, "node-a", "node-b", "node-c", "node-aa")
    assert restart(stage, 1) == 0, stage.output
    assert stage.requeues() == ["77"]
    assert exclusions(stage) == [["JobId=77", "ExcNodeList=old[1-2],node-a"]]
    assert "excluded from further starts of this job: node-a" in stage.output
    assert stage.status()["warnings"][-1] == "the bad hosts are excluded from further starts of this job: node-a"


def test_a_host_that_fails_again_is_excluded_from_the_next_job_of_a_chain(tmp_path: Path) -> None:
    """All of them started on it."""
    stage = Stage(tmp_path, limits={"max_requeues": 0})
    stage.does(job=RUNNING.format(0, "(null)"))
    stage.does(**{"training.sh": event("node-lost", attempt=1, host="node-a", node=1)})
    lose(stage, "node-a", attempt=0, job="76")
    for job in ("76", "77", "78", "79"):
        add_slurm_job(RunDirectory(stage.run), job)
    partition(stage, "node-a", "node-b", "node-c")
    assert restart(stage, 0) == 0, stage.output
    assert stage.requeues() == []
    assert exclusions(stage) == [["JobId=78", "ExcNodeList=node-a"]]
    assert "excluded from Slurm job 78: node-a" in stage.output


def test_a_host_that_the_job_asks_for_by_name_stays(stage: Stage) -> None:
    """Without it Slurm would never start the job again, and nothing can be taken off the list of the excluded."""
    stage.does(job=RUNNING.format(1, "(null)") + " ReqNodeList=node-a,node-b")
    partition(stage, "node-a", "node-b", "node-c", "node-d")
    assert restart(stage, 1) == 0, stage.output
    assert stage.requeues() == ["77"]
    assert exclusions(stage) == []


def test_several_hosts(stage: Stage) -> None:
    EventWriter(RunDirectory(stage.run), "test").write(NODE_LOST, attempt=0, host="node-b", node=0)
    again = [event("node-lost", attempt=1, host=host, node=0) for host in ("node-a", "node-b")]
    stage.does(**{"training.sh": "\n".join(again)}, job=RUNNING.format(1, "(null)"))
    partition(stage, "node-a", "node-b", "node-c", "node-d")
    assert restart(stage, 1) == 0, stage.output
    assert exclusions(stage) == [["JobId=77", "ExcNodeList=node-a,node-b"]]


def test_not_where_too_few_others_are_left(stage: Stage) -> None:
    partition(stage, "node-a", "node-b")
    assert restart(stage, 1) == 0, stage.output
    assert stage.requeues() == ["77"]
    assert exclusions(stage) == []


def test_hosts_that_the_job_is_kept_from_are_no_others(stage: Stage) -> None:
    """Else the job would wait in the queue forever."""
    stage.does(job=RUNNING.format(1, "node-c,node-d"))
    partition(stage, "node-a", "node-b", "node-c", "node-d")
    assert restart(stage, 1) == 0, stage.output
    assert stage.requeues() == ["77"]
    assert exclusions(stage) == []


def test_of_an_array_only_this_task(stage: Stage) -> None:
    partition(stage, "node-a", "node-b", "node-c")
    assert restart(stage, 1, SLURM_ARRAY_JOB_ID="70", SLURM_ARRAY_TASK_ID="4") == 0
    assert exclusions(stage) == [["JobId=70_4", "ExcNodeList=old[1-2],node-a"]]


def test_without_suspects_nobody_is_asked(stage: Stage) -> None:
    stage.does(**{"training.sh": "exit 1"})
    assert restart(stage, 1) == 0, stage.output
    assert stage.requeues() == ["77"]
    assert exclusions(stage) == []


def test_a_scancel_while_the_attempt_is_judged_is_final(stage: Stage) -> None:
    """Judging asks Slurm about a node that has not signed off; the job is cancelled meanwhile."""
    cancelled = CANCELLED.replace("Restarts=0", "Restarts=1")
    stage.does(**{"training.sh": event("node-started", attempt=1, host="node-b", node=0)})
    stage.program("sinfo", f"echo '{cancelled}' >{stage.folder}/job")
    assert restart(stage, 1) == 0, stage.output
    assert (stage.folder / "job").read_text() == f"{cancelled}\n"
    assert not stage.requeues()


# -- found at the start: nobody could exclude it when the attempt before ended -----------------------------------------


@pytest.fixture
def restarted(stage: Stage) -> Stage:
    """The third start of the job, which has lost node-a and node-d twice, and was given node-a again."""
    lose(stage, "node-a", "node-d", attempt=1)
    EventWriter(RunDirectory(stage.run), "test").write(NODE_LOST, attempt=0, host="node-d", node=1)
    stage.does(job=RUNNING.format(2, "old[1-2]"), **{"training.sh": DONE.replace('"attempt": 0', '"attempt": 2')})
    return stage


def begun(stage: Stage) -> int:
    return len(list_attempts(RunDirectory(stage.run))) - 2


def test_a_job_that_is_given_such_a_host_again_gives_it_back_before_it_trains(restarted: Stage) -> None:
    partition(restarted, "node-a", "node-b", "node-c", "node-d")
    assert restart(restarted, 2) == 0, restarted.output
    assert not restarted.calls("srun")
    assert begun(restarted) == 0
    assert restarted.requeues() == ["77"]
    assert exclusions(restarted) == [["JobId=77", "ExcNodeList=old[1-2],node-a,node-d"]]
    order = [call[0] for call in restarted.calls("scontrol") if call[0] in ("requeue", "update")]
    assert order == ["requeue", "update"], "Slurm excludes nodes of a queued job only"
    assert "failed more than once (node-a node-d): starting again without them" in restarted.output
    warned = [event for event in read_events(RunDirectory(restarted.run)) if event["event"] == WARNING]
    assert [event["attempt"] for event in warned] == [1], "an event of no attempt is not shown once the run was resumed"


def test_with_too_few_others_it_trains_all_the_same(restarted: Stage) -> None:
    partition(restarted, "node-a", "node-b", "node-d")
    assert restart(restarted, 2) == 0, restarted.output
    assert begun(restarted) == 1
    assert len(restarted.calls("srun")) == 1
    assert not restarted.requeues()
    assert exclusions(restarted) == []
    assert "too few other nodes: continuing with them" in restarted.output


@pytest.mark.parametrize(("event_name", "status"), [(COMPLETED, 0), ("stalled", 76)])
def test_a_run_that_is_over_is_not_begun_again(restarted: Stage, event_name: str, status: int) -> None:
    EventWriter(RunDirectory(restarted.run), "test").write(event_name, attempt=1)
    partition(restarted, "node-b", "node-c")
    assert restart(restarted, 2) == status
    assert not restarted.calls("srun")
    assert not restarted.requeues()


def test_an_attempt_that_is_alive_elsewhere_ends_the_job(stage: Stage) -> None:
    import os

    begin_attempt(RunDirectory(stage.run), host="here", pid=os.getpid(), nodes=1, procs=1)
    assert restart(stage, 1) == 75
    assert not stage.calls("srun")
    assert not stage.requeues()


def test_a_refused_requeue_at_the_start_says_what_to_do(restarted: Stage) -> None:
    partition(restarted, "node-b", "node-c")
    restarted.does(requeue_status="1")
    assert restart(restarted, 2) == 1
    assert restarted.requeues() == ["77"] * 3
    assert not restarted.calls("srun")
    assert to_continue(restarted.run) in restarted.output


def test_a_job_that_slurm_takes_back_meanwhile_is_not_requeued_a_second_time(restarted: Stage) -> None:
    signalled = restarted.folder / "signalled"
    waiting = f"for ((i = 0; i < 400; i++)); do [[ -e {signalled} ]] && break; sleep 0.05; done"
    restarted.program("sinfo", f"touch {restarted.folder}/training; {waiting}; printf 'node-b\\nnode-c\\n'")
    process = restarted.start(
        restarted.write(slurm={"nodes": 2}), SLURM_RESTART_COUNT="2", SLURM_JOB_NODELIST="node-b,node-a"
    )
    restarted.wait_for_training()
    restarted.does(job=TAKEN_BACK.replace("Restarts=1", "Restarts=3"))
    process.terminate()
    signalled.touch()
    assert restarted.finish(process) == 0, restarted.output
    assert not restarted.requeues()
    assert exclusions(restarted) == [["JobId=77", "ExcNodeList=node-a,node-d"]]
