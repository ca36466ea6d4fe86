"""Calls of Slurm's commands, with stand-ins that answer as Slurm 22.05 does."""

from __future__ import annotations

from pathlib import Path

import pytest
from slurm_stand_ins import calls, stand_in

from cluster_ddp.slurm import commands
from cluster_ddp.slurm.commands import (
    SlurmError,
    cancel_job,
    parse_job_id,
    parse_queue,
    query_ended_jobs,
    query_jobs,
    query_own_jobs,
    submit_script,
    try_script,
)
from cluster_ddp.slurm.control import grace_time
from cluster_ddp.slurm.environment import child_environment
from cluster_ddp.slurm.partitions import ask_partitions


def test_sbatch_gets_options_before_the_script_and_arguments_behind(slurm: Path) -> None:
    stand_in(slurm, "sbatch", "echo '123;cluster'")
    assert submit_script(Path("/x/job.sbatch"), "/x", options=["--output=/x/o"]) == "123"
    assert calls(slurm) == ["sbatch --parsable --output=/x/o /x/job.sbatch /x"]


def test_what_the_site_remarks_when_it_takes_a_job_is_passed_on(
    slurm: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stand_in(slurm, "sbatch", "echo 'sbatch: Your job was moved to partition long' >&2; echo 123")
    assert submit_script(Path("/x/job.sbatch")) == "123"
    assert capsys.readouterr() == ("", "sbatch: Your job was moved to partition long\n")


def test_a_refusal_has_slurms_own_words(slurm: Path) -> None:
    stand_in(slurm, "sbatch", "echo 'sbatch: error: Batch job submission failed: Invalid account' >&2; exit 1")
    with pytest.raises(SlurmError, match="Invalid account") as caught:
        submit_script(Path("/x/job.sbatch"))
    assert caught.value.exit_status == 3


def test_a_submission_is_not_tried_twice(slurm: Path) -> None:
    """The job of the first call may be in the queue although sbatch gave up waiting for the answer."""
    stand_in(slurm, "sbatch", "echo 'sbatch: error: Socket timed out on send/recv operation' >&2; exit 1")
    with pytest.raises(SlurmError, match="timed out"):
        submit_script(Path("/x/job.sbatch"))
    assert len(calls(slurm)) == 1


def test_without_slurm_the_message_says_what_to_do(slurm: Path) -> None:
    with pytest.raises(SlurmError, match="cluster-ddp local") as caught:
        submit_script(Path("/x/job.sbatch"))
    assert caught.value.exit_status == 3


@pytest.mark.parametrize("answer", ["123\n", "123;cluster\n", "Welcome to node 7\n123\nYou have used\n9 h\n"])
def test_job_ids(answer: str) -> None:
    assert parse_job_id(answer) == "123"


@pytest.mark.parametrize("answer", ["", "\n", "Submitted batch job\n", "abc;1"])
def test_what_is_no_job_id(answer: str) -> None:
    with pytest.raises(SlurmError, match="squeue --me"):
        parse_job_id(answer)


def test_many_jobs_are_asked_about_with_one_call(slurm: Path) -> None:
    stand_in(
        slurm,
        "squeue",
        "echo '11|11|RUNNING|n[1-2]|None|cluster_ddp digits-20260101-000000-abcd'\n"
        "echo '12_3|15|PENDING||Priority|(null)'\n"
        "echo '13|13|CANCELLED||None|a|comment with bars'",
    )
    jobs = query_jobs(["13", "11", "12_3", "11", "14"])
    assert len(calls(slurm)) == 1
    assert "--jobs=11,12_3,13,14" in calls(slurm)[0]
    assert jobs["11"].state == "RUNNING"
    assert jobs["11"].comment == "cluster_ddp digits-20260101-000000-abcd"
    assert jobs["11"].nodes == "n[1-2]"
    assert jobs["12_3"] is jobs["15"]
    assert jobs["15"].state == "PENDING" and jobs["15"].reason == "Priority" and jobs["15"].comment == "(null)"
    assert jobs["13"].state == "CANCELLED"
    assert "14" not in jobs


def test_all_tries_together_take_no_longer_than_was_said(slurm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the controller down `status` would else ask for minutes."""
    monkeypatch.setattr(commands, "PAUSES", (3600.0,))
    stand_in(slurm, "squeue", "echo 'Unable to contact slurm controller (connect failure)' >&2; exit 1")
    with pytest.raises(SlurmError, match="Unable to contact"):
        query_jobs(["11"], seconds=60)
    assert len(calls(slurm)) == 1


def test_what_was_said_before_the_answer_failed_to_come_is_told(slurm: Path) -> None:
    """As where Slurm has as many jobs as it takes (MaxJobCount), for which sbatch waits for minutes."""
    stand_in(
        slurm, "squeue", "echo 'Slurm temporarily unable to accept job, sleeping and retrying' >&2; exec /bin/sleep 30"
    )
    with pytest.raises(SlurmError, match="no answer in 1 s: Slurm temporarily unable to accept job"):
        query_jobs(["11"], seconds=1)


def test_no_question_no_call(slurm: Path) -> None:
    assert query_jobs([]) == {}


def test_a_job_that_slurm_has_forgotten(slurm: Path) -> None:
    stand_in(slurm, "squeue", "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1")
    assert query_jobs(["11"]) == {}


def test_the_accounting_is_asked_with_one_call_about_what_is_over(slurm: Path) -> None:
    stand_in(
        slurm,
        "sacct",
        "echo '11|11|CANCELLED by 1000|n[1-2]|None|cluster_ddp a-run'\n"
        "echo '12|12|RUNNING|n1|None|'\n"  # a job whose end was never recorded
        "echo '13|13|NODE_FAIL|n1|None|'",
    )
    jobs = query_ended_jobs(["11", "12", "13", "14"], seconds=5)
    assert {job_id: job.state for job_id, job in jobs.items()} == {"11": "CANCELLED", "13": "NODE_FAIL"}
    assert jobs["11"].comment == "cluster_ddp a-run"
    assert len(calls(slurm)) == 1 and "--jobs=11,12,13,14" in calls(slurm)[0]


def test_without_accounting_there_is_no_answer_and_no_error(slurm: Path) -> None:
    assert query_ended_jobs(["11"], seconds=5) == {}
    stand_in(slurm, "sacct", "echo 'Slurm accounting storage is disabled' >&2; exit 1")
    assert query_ended_jobs(["11"], seconds=5) == {}


def test_a_busy_controller_is_asked_again(slurm: Path) -> None:
    stand_in(
        slurm,
        "squeue",
        'here=$(dirname "$0"); [[ -e $here/second ]] && { echo "11|11|RUNNING|n1|None|"; exit; }\n'
        'echo >"$here/second"; echo "slurm_load_jobs error: Unable to contact slurm controller" >&2; exit 1',
    )
    assert query_jobs(["11"])["11"].state == "RUNNING"


def test_a_controller_that_is_gone(slurm: Path) -> None:
    stand_in(slurm, "squeue", "echo 'slurm_load_jobs error: Unable to contact slurm controller' >&2; exit 1")
    with pytest.raises(SlurmError, match="Unable to contact"):
        query_jobs(["11"])
    assert len(calls(slurm)) == 3


@pytest.mark.parametrize("words", ["Invalid job id specified", "Job/step already completing or completed"])
def test_cancelling_what_is_over_is_no_error(slurm: Path, words: str) -> None:
    stand_in(slurm, "scancel", f"echo 'scancel: error: Kill job error on job id 7: {words}' >&2; exit 1")
    cancel_job("7")


def test_cancelling_a_strangers_job(slurm: Path) -> None:
    stand_in(
        slurm, "scancel", "echo 'scancel: error: Kill job error on job id 7: Access/permission denied' >&2; exit 1"
    )
    with pytest.raises(SlurmError, match="permission denied"):
        cancel_job("7")


def test_a_job_inside_a_job_keeps_how_to_reach_slurm_and_nothing_of_the_parent() -> None:
    inside = {
        "SLURM_JOB_ID": "1", "SLURM_NNODES": "4", "SLURM_CONF": "/etc/x", "SLURM_MEM_PER_NODE": "1",
        "SRUN_CPUS_PER_TASK": "2", "PMI_RANK": "0", "SBATCH_ACCOUNT": "mine", "HOME": "/h",
    }  # fmt: skip
    assert child_environment(inside) == {"SLURM_CONF": "/etc/x", "SBATCH_ACCOUNT": "mine", "HOME": "/h"}


def test_outside_a_job_the_environment_stays_whole() -> None:
    login = {"SLURM_CONF": "/etc/x", "SLURM_CLUSTERS": "c", "HOME": "/h"}
    assert child_environment(login) == login


def test_what_a_script_says_is_not_replaced_by_what_the_shell_holds(
    slurm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """sbatch itself would send the job to partition "theirs", once, and without a warning."""
    said = {"PARTITION": "theirs", "SIGNAL": "B:KILL@1", "NO_REQUEUE": "1"}
    said |= dict.fromkeys(("ARRAY_INX", "INPUT", "OUTPUT", "WAIT"), "1")
    kept = {"ACCOUNT": "mine", "CLUSTERS": "big"}
    for name, value in {**said, **kept}.items():
        monkeypatch.setenv(f"SBATCH_{name}", value)
    stand_in(slurm, "sbatch", f"/usr/bin/env | /usr/bin/grep ^SBATCH_ | /usr/bin/sort >>{tmp_path}/held; echo 123")
    script = tmp_path / "job.sbatch"
    script.write_text("#!/bin/bash\n#SBATCH --partition=gpu\n#SBATCH --signal=B:USR1@120\n#SBATCH --requeue\n")
    submit_script(script)
    try_script(script.read_text(), seconds=20)
    assert (tmp_path / "held").read_text() == "SBATCH_ACCOUNT=mine\nSBATCH_CLUSTERS=big\n" * 2


@pytest.mark.parametrize("name", ["squeue", "scancel"])
def test_what_a_shell_has_set_for_a_person_to_read_changes_no_answer(
    slurm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """With SQUEUE_PARTITION a run in another partition was LOST; with SLURM_TIME_FORMAT none was queued again."""
    of_the_eye = ("SQUEUE_PARTITION", "SQUEUE_USERS", "SCANCEL_STATE", "SCANCEL_BATCH", "SLURM_TIME_FORMAT")
    where_to_look = ("SLURM_CLUSTERS", "SQUEUE_ALL", "SQUEUE_FEDERATION")
    for variable in (*of_the_eye, *where_to_look):
        monkeypatch.setenv(variable, "x")
    stand_in(slurm, name, f"/usr/bin/env | /usr/bin/grep =x$ | /usr/bin/sort >{tmp_path}/held")
    query_jobs(["11"]) if name == "squeue" else cancel_job("11")
    assert (tmp_path / "held").read_text().split() == [f"{variable}=x" for variable in where_to_look]


@pytest.mark.parametrize("comment", ["cluster_ddp x mine", "a|b", "(null)", ""])
def test_whose_job_it_is(comment: str) -> None:
    job = parse_queue(f"11|11|RUNNING|n1|None@N/A|{comment}|train|1000\n")["11"]
    assert (job.comment, job.name, job.owner) == (comment, "train", 1000)


def test_hidden_partitions_are_asked_about_too(slurm: Path) -> None:
    stand_in(slurm, "squeue", "[[ $* == *--all* ]] && echo '11|11|RUNNING|n1|None|'")
    stand_in(slurm, "scontrol", "[[ $* == *--all* ]] && echo 'PartitionName=test State=UP GraceTime=60'; exit 0")
    assert "11" in query_own_jobs()
    assert [partition.name for partition in ask_partitions(seconds=5)] == ["test"]
    assert grace_time("test", "normal") == 60
