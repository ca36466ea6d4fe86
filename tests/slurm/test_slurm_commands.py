"""Calls of Slurm's commands, with stand-ins that answer as Slurm 22.05 does."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from cluster_ddp.slurm import commands
from cluster_ddp.slurm.commands import (
    SlurmError,
    cancel_job,
    child_environment,
    exclude_hosts,
    has_enough_others,
    kill_wait,
    parse_job_id,
    query_jobs,
    seconds_left,
    submit_script,
    termination_reason,
)

CALLS = 'printf "%s\\n" "$(basename "$0") $*" >>"$(dirname "$0")/calls"\n'


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An otherwise empty PATH, to put stand-ins in."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for tool in ("bash", "basename", "dirname", "cat", "env"):
        (folder / tool).symlink_to(
            Path("/usr/bin") / tool if (Path("/usr/bin") / tool).exists() else Path("/bin") / tool
        )
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.setattr(commands, "_PAUSES", (0.01, 0.01))
    return folder


def stand_in(folder: Path, name: str, body: str) -> None:
    program = folder / name
    program.write_text(f"#!/bin/bash\n{CALLS}{body}\n")
    program.chmod(0o755)


def calls(folder: Path) -> list[str]:
    return (folder / "calls").read_text().splitlines()


def test_sbatch_gets_options_before_the_script_and_arguments_behind(slurm: Path) -> None:
    stand_in(slurm, "sbatch", "echo '123;cluster'")
    assert submit_script(Path("/x/job.sbatch"), "/x", options=["--output=/x/o"]) == "123"
    assert calls(slurm) == ["sbatch --parsable --output=/x/o /x/job.sbatch /x"]


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


@pytest.mark.parametrize("answer", ["123\n", "123;cluster\n", "Welcome to the cluster\n123\n"])
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
    assert jobs["11"].alive and jobs["11"].active
    assert jobs["11"].run_id == "digits-20260101-000000-abcd"
    assert jobs["11"].nodes == "n[1-2]"
    assert jobs["12_3"] is jobs["15"]
    assert jobs["15"].waiting and jobs["15"].reason == "Priority" and jobs["15"].run_id is None
    assert not jobs["13"].alive
    assert "14" not in jobs


def test_no_question_no_call(slurm: Path) -> None:
    assert query_jobs([]) == {}


def test_a_job_that_slurm_has_forgotten(slurm: Path) -> None:
    stand_in(slurm, "squeue", "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1")
    assert query_jobs(["11"]) == {}


def test_a_busy_controller_is_asked_again(slurm: Path) -> None:
    stand_in(
        slurm,
        "squeue",
        'here=$(dirname "$0"); [[ -e $here/second ]] && { echo "11|11|RUNNING|n1|None|"; exit; }\n'
        'echo >"$here/second"; echo "slurm_load_jobs error: Unable to contact slurm controller" >&2; exit 1',
    )
    assert query_jobs(["11"])["11"].state == "RUNNING"


@pytest.mark.parametrize(("known", "excluded"), [("(null)", "b,d"), ("old[1-2]", "old[1-2],b,d")])
def test_hosts_are_excluded_besides_those_that_were(slurm: Path, known: str, excluded: str) -> None:
    stand_in(slurm, "scontrol", f"[[ $1 == show ]] && echo 'JobId=7 ExcNodeList={known} NodeList=a'; true")
    exclude_hosts("7", ["b", "d"])
    assert calls(slurm)[-1] == f"scontrol update JobId=7 ExcNodeList={excluded}"


@pytest.mark.parametrize(
    ("known", "nodes", "enough"), [("(null)", 2, True), ("(null)", 3, False), ("[c-d]", 1, True), ("[c-d]", 2, False)]
)
def test_whether_a_partition_has_enough_others(slurm: Path, known: str, nodes: int, enough: bool) -> None:
    stand_in(slurm, "sinfo", "printf 'a\nb\nc\nc\n'")
    stand_in(
        slurm,
        "scontrol",
        f"[[ $2 == job ]] && echo 'JobId=7 ExcNodeList={known} X=y'\n"
        "[[ $2-$3 == hostnames-'[c-d]' ]] && printf 'c\nd\n'\ntrue",
    )
    assert has_enough_others("7", ["b", "elsewhere"], partition="p", nodes=nodes) is enough


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


@pytest.mark.parametrize(
    ("job", "restarts", "reason"),
    [
        (
            "JobId=7 JobState=COMPLETING Reason=TimeLimit Requeue=1 Restarts=0 EndTime=x PreemptTime=None S=1",
            0,
            "time-limit",
        ),
        (
            "JobId=7 JobState=COMPLETING Reason=None Requeue=1 Restarts=0 PreemptTime=2026-11-20T11:08:11 S=1",
            0,
            "preemption",
        ),
        (
            "JobId=7 JobState=RUNNING Reason=None Requeue=1 Restarts=0 PreemptTime=2026-11-20T11:08:11 S=1",
            0,
            "preemption",
        ),
        ("JobId=7 JobState=COMPLETING Reason=None Requeue=1 Restarts=1 EndTime=Unknown S=1", 0, "requeued"),
        ("JobId=7 JobState=COMPLETING Reason=None Requeue=1 Restarts=1 PreemptTime=None S=1", 0, "requeued"),
        ("JobId=7 JobState=COMPLETING Reason=None Requeue=1 Restarts=1 EndTime=x PreemptTime=None S=1", 1, "cancel"),
        ("JobId=7 JobState=RUNNING Reason=None Requeue=1 Restarts=0 EndTime=x PreemptTime=None S=1", 0, "terminated"),
        ("", 0, "terminated"),
    ],
)
def test_why_slurm_ends_a_job(slurm: Path, job: str, restarts: int, reason: str) -> None:
    """The lines are Slurm 22.05's, shortened; the batch script has the same table in bash."""
    status = 0 if job else 1
    stand_in(slurm, "scontrol", f"echo '{job}'; exit {status}")
    assert termination_reason("7", restarts) == reason


def test_kill_wait(slurm: Path) -> None:
    assert kill_wait() == 30.0
    stand_in(slurm, "scontrol", "printf 'KillOnBadExit           = 0\\nKillWait                = 5 sec\\n'")
    assert kill_wait() == 5.0


def moment(when: float | str) -> str:
    """A moment so many seconds from now, as Slurm writes it; words stay words."""
    return when if isinstance(when, str) else time.strftime("%FT%T", time.localtime(time.time() + when))


@pytest.mark.parametrize(
    ("state", "end", "seconds"),
    [
        ("RUNNING", 300, 297.0),  # a grace, of the partition or of a QOS
        ("RUNNING", 3, 5.0),  # KILL comes KillWait after it
        ("RUNNING", "Unknown", 5.0),  # the job has no time limit
        ("RUNNING", "2026-31-31T", 5.0),
        ("COMPLETING", 7200, 5.0),  # no grace, or its end
    ],
)
def test_seconds_until_slurm_kills(slurm: Path, state: str, end: float | str, seconds: float) -> None:
    job = f"JobId=7 JobState={state} Restarts=0 EndTime={moment(end)} Deadline=N/A PreemptTime=2026-11-20T18:09:09 S=1"
    answers = f"case $2 in job) echo '{job}' ;; config) echo 'KillWait                = 5 sec' ;; esac"
    stand_in(slurm, "scontrol", answers)
    assert seconds_left("7") == pytest.approx(seconds, abs=3 if seconds > 5 else 0)


def test_a_job_that_is_not_preempted_has_killwait(slurm: Path) -> None:
    stand_in(slurm, "scontrol", f"echo 'JobId=7 JobState=RUNNING A=b EndTime={moment(300)} A=b PreemptTime=None S=1'")
    assert seconds_left("7") == 30.0


def test_a_job_inside_a_job_keeps_how_to_reach_slurm_and_nothing_of_the_parent() -> None:
    inside = {
        "SLURM_JOB_ID": "1", "SLURM_NNODES": "4", "SLURM_CONF": "/etc/x", "SLURM_MEM_PER_NODE": "1",
        "SRUN_CPUS_PER_TASK": "2", "PMI_RANK": "0", "SBATCH_ACCOUNT": "mine", "HOME": "/h",
    }  # fmt: skip
    assert child_environment(inside) == {"SLURM_CONF": "/etc/x", "SBATCH_ACCOUNT": "mine", "HOME": "/h"}


def test_outside_a_job_the_environment_stays_whole() -> None:
    login = {"SLURM_CONF": "/etc/x", "SLURM_CLUSTERS": "c", "HOME": "/h"}
    assert child_environment(login) == login
