"""What is known of an allocation, with a stand-in for Slurm's commands."""

from __future__ import annotations

import time
from datetime import datetime
from pathlib import Path

import pytest

from cluster_ddp.launch.keeper.allocation import SlurmAllocation
from cluster_ddp.slurm.start import this_start


def test_a_question_that_gets_no_answer_takes_no_earlier_answer_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slurm's SIGTERM may end a call of scontrol while another one has told how long SIGKILL waits."""
    start = this_start({"SLURM_JOB_ID": "77"})
    assert start is not None
    allocation = SlurmAllocation(start)
    scontrol = tmp_path / "scontrol"
    scontrol.write_text("#!/bin/bash\necho 'KillWait                = 5 sec'\n")
    scontrol.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    allocation.ask_ahead()
    scontrol.write_text("#!/bin/bash\nkill -TERM $$\n")
    allocation.ask_ahead()
    assert allocation.kill_wait == 5


def test_a_kill_wait_that_the_site_changes_while_the_job_runs_is_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A keeper that waits for the old one is killed before it has the job queued again."""
    start = this_start({"SLURM_JOB_ID": "77"})
    assert start is not None
    allocation = SlurmAllocation(start)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    shown = "JobId=77 JobState=COMPLETING Reason=TimeLimit Restarts=0 EndTime=2026-11-20T18:00:00 PreemptTime=None"
    left = []
    for seconds in (30, 5):
        answer = f"echo 'KillWait                = {seconds} sec'; echo '{shown}'"
        (tmp_path / "scontrol").write_text(f"#!/bin/bash\n{answer}\n")
        (tmp_path / "scontrol").chmod(0o755)
        allocation.ask_ahead()
        left.append(allocation.kill_wait)
        answer = answer.replace(f" {seconds} ", f" {seconds + 1} ")
        (tmp_path / "scontrol").write_text(f"#!/bin/bash\n{answer}\n")
        allocation.end(time.monotonic() + 1, 10)
        left.append(allocation.kill_wait)
    assert left == [30, 31, 5, 6]


def test_a_time_limit_that_is_changed_while_the_job_runs_is_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But of a job that Slurm ends, EndTime is when that ends; and no answer is no news."""
    start = this_start({"SLURM_JOB_ID": "77"})
    assert start is not None
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setenv("SLURM_JOB_END_TIME", "tomorrow")  # by a line of launch.setup
    assert SlurmAllocation(start).ends_at is None
    monkeypatch.setenv("SLURM_JOB_END_TIME", "1")
    allocation = SlurmAllocation(start)
    ends = []
    for answer in (
        "JobState=RUNNING Reason=None Restarts=0 EndTime=2026-11-20T18:00:00 PreemptTime=None",
        "JobState=RUNNING Reason=None Restarts=0 EndTime=2026-11-20T19:00:00 PreemptTime=None",
        "",
        "JobState=COMPLETING Reason=None Restarts=0 EndTime=2026-11-20T18:30:00 PreemptTime=None",
    ):
        (tmp_path / "scontrol").write_text(f"#!/bin/bash\n[[ '{answer}' ]] && echo 'JobId=77 {answer}'\n")
        (tmp_path / "scontrol").chmod(0o755)
        allocation.why_it_ends(10)
        ends.append(allocation.ends_at)
    six = datetime(2026, 11, 20, 18).timestamp()
    assert ends == [six, *[six + 3600] * 3]


def test_a_job_that_was_given_no_grace_is_not_asked_how_much(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that a busy site answers late takes from the 30 s in which the job has to be queued again."""
    start = this_start({"SLURM_JOB_ID": "77", "SLURM_JOB_PARTITION": "p"})
    assert start is not None
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    shown = "JobState=COMPLETING Reason=None Restarts=0 PreemptTime=2026-11-20T11:08:11 EndTime=2026-11-20T11:08:11"
    scontrol = f"#!/bin/bash\necho \"$@\" >>{tmp_path}/calls\n[[ $2 != job ]] || echo 'JobId=77 {shown}'\n"
    (tmp_path / "scontrol").write_text(scontrol)
    (tmp_path / "scontrol").chmod(0o755)
    answer = SlurmAllocation(start).end(time.monotonic(), 10)
    assert answer is not None and answer[0] == "preemption"
    assert "partition" not in (tmp_path / "calls").read_text()


def test_hosts_that_slurm_knows_by_full_names_are_excluded_by_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = this_start({"SLURM_JOB_ID": "77", "SLURM_JOB_NUM_NODES": "1", "SLURM_JOB_NODELIST": "n1.cluster.org"})
    assert start is not None
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    answers = {
        "sinfo": "[[ $* == *states* ]] || { printf 'n%s.cluster.org|x|x|1|1\\n' 1 2 3; exit; }; echo n2.cluster.org",
        "scontrol": f"[[ $1 != update ]] || echo \"$@\" >{tmp_path}/said\necho 'JobId=77 JobState=PENDING X=y'",
    }
    for name, answer in answers.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{answer}\n")
        (tmp_path / name).chmod(0o755)
    allocation = SlurmAllocation(start)
    bad = ["n1", "n3"]  # n3 failed in an earlier attempt, and is down
    assert allocation.has_enough_others(bad)
    assert allocation.exclude(bad)
    assert "ExcNodeList=n1.cluster.org,n3.cluster.org" in (tmp_path / "said").read_text()


def test_restarts_that_slurms_controller_has_forgotten_are_not_taken_for_a_requeue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was started with an older state: the job was not queued again at its end, as it seemed to be already."""
    start = this_start({"SLURM_JOB_ID": "77", "SLURM_RESTART_COUNT": "2"})
    assert start is not None
    allocation = SlurmAllocation(start)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    scontrol, found = tmp_path / "scontrol", []
    for shown in ("RUNNING Reason=None Restarts=0", "COMPLETING Reason=TimeLimit Restarts=0", "PENDING Restarts=1"):
        scontrol.write_text(f"#!/bin/bash\necho 'JobId=77 JobState={shown} PreemptTime=None'\n")
        scontrol.chmod(0o755)
        found.append(allocation.why_it_ends(10))
    assert found == ["terminated", "time-limit", "requeued"]
