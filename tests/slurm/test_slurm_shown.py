"""What `scontrol show job` says about a job's end. The lines are those of Slurm 22.05, shortened."""

from __future__ import annotations

import time

import pytest

from cluster_ddp.slurm.job_info import (
    JobInfo,
    grace_end,
    is_ending,
    parse_job,
    seconds_until_kill,
    unseen_grace_end,
    why_it_ends,
)


@pytest.mark.parametrize(
    ("line", "restarts", "reason"),
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
        # The newer start, elsewhere, of a job whose node was cut off: what ends it is not what ended this one.
        ("JobId=7 JobState=COMPLETING Reason=TimeLimit Restarts=1 EndTime=x PreemptTime=None S=1", 0, "requeued"),
        ("JobId=7 JobState=RUNNING Reason=None Restarts=1 PreemptTime=2026-11-20T11:08:11 S=1", 0, "requeued"),
        ("JobId=7 JobState=COMPLETING Reason=None Requeue=1 Restarts=1 EndTime=x PreemptTime=None S=1", 1, "cancel"),
        (
            "JobId=7 JobState=COMPLETING Reason=NodeDown Requeue=0 Restarts=0 EndTime=x PreemptTime=None S=1",
            0,
            "node-down",
        ),
        # Its partition was removed, in Slurm 26.05; older versions say NodeDown then, too.
        ("JobId=7 JobState=NODE_FAIL Reason=PartitionDown Requeue=1 Restarts=0 PreemptTime=None S=1", 0, "node-down"),
        ("JobId=7 JobState=COMPLETING Reason=NodeDown Requeue=1 Restarts=1 EndTime=x S=1", 0, "requeued"),
        ("JobId=7 JobState=RUNNING Reason=None Requeue=1 Restarts=0 EndTime=x PreemptTime=None S=1", 0, "terminated"),
        ("JobId=7 JobState=SIGNALING Reason=None Requeue=1 Restarts=0 EndTime=x PreemptTime=None S=1", 0, "terminated"),
        (
            "JobId=7 JobState=RUNNING Reason=None Restarts=0 PreemptTime=None Comment=x Reason=TimeLimit S=1",
            0,
            "terminated",
        ),
    ],
)
def test_why_slurm_ends_a_job(line: str, restarts: int, reason: str) -> None:
    assert why_it_ends(shown(line), restarts) == reason


@pytest.mark.parametrize(
    ("state", "end", "reason"),
    [
        ("RUNNING", "12:00:30", "preemption"),
        ("COMPLETING", "12:00:31", "preemption"),  # the grace is over
        ("COMPLETING", "12:00:12", "cancel"),  # before that, somebody has ended it
        ("CANCELLED", "12:00:12", "cancel"),
        ("PREEMPTED", "12:00:31", "preemption"),
    ],
)
def test_a_cancel_within_the_grace_of_a_preemption(state: str, end: str, reason: str) -> None:
    """What Slurm 22.05 shows then: Reason and PreemptTime stay, and EndTime alone tells."""
    line = (
        f"JobId=7 JobState={state} Reason=None Restarts=0 EndTime=2026-11-20T{end} PreemptTime=2026-11-20T12:00:00 S=1"
    )
    assert why_it_ends(shown(line), 0, "2026-11-20T12:00:30") == reason


def test_the_grace_of_a_job_without_a_time_limit_has_no_end_to_see() -> None:
    """Slurm 26.05 shows EndTime=Unknown then; the job's end would lie before that for whoever compares the words."""
    assert grace_end(shown("JobId=7 Restarts=0 JobState=RUNNING EndTime=Unknown PreemptTime=2026-11-20T12:00:00")) == ""
    assert grace_end(shown("JobId=7 Restarts=0 JobState=RUNNING EndTime=2026-11-20T12:00:30 PreemptTime=None")) == ""


@pytest.mark.parametrize(
    ("state", "end", "reason"),
    [
        ("COMPLETING", "12:00:12", "cancel"),
        ("COMPLETING", "12:00:30", "preemption"),  # the grace is over
        ("COMPLETING", "12:00:29", "preemption"),
        ("COMPLETING", "12:00:00", "preemption"),  # as newer Slurms show the end of a grace
        ("RUNNING", "12:00:30", "preemption"),
    ],
)
def test_a_cancel_within_a_grace_that_nobody_has_seen(state: str, end: str, reason: str) -> None:
    """Slurm signals only the steps when a grace begins: the batch host may ask for the first time at the end."""
    job = shown(f"JobId=7 JobState={state} Restarts=0 EndTime=2026-11-20T{end} PreemptTime=2026-11-20T12:00:00 S=1")
    assert why_it_ends(job, 0, unseen_grace_end(job, lambda: 30)) == reason
    assert why_it_ends(job, 0, unseen_grace_end(job, lambda: 0)) == "preemption", "the partition gives no grace"


def shown(line: str) -> JobInfo:
    job = parse_job(line)
    assert job is not None
    return job


def moment(when: float | str) -> str:
    """A moment so many seconds from now, as Slurm writes it; words stay words."""
    return when if isinstance(when, str) else time.strftime("%FT%T", time.localtime(time.time() + when))


@pytest.mark.parametrize(
    ("state", "end", "seconds"),
    [
        ("RUNNING", 300, 297.0),  # a grace, of the partition or of a QOS
        ("SIGNALING", 300, 297.0),  # while its signals are delivered
        ("RUNNING", 3, 5.0),  # KILL comes KillWait after it
        ("RUNNING", -20, 5.0),  # Slurm ends it up to 30 s late
        ("RUNNING", "Unknown", 5.0),  # the job has no time limit
        ("RUNNING", "2026-31-31T", 5.0),
        ("RUNNING", "", 5.0),
        ("COMPLETING", 7200, 5.0),  # no grace, or its end
    ],
)
def test_seconds_until_slurm_kills(state: str, end: float | str, seconds: float) -> None:
    preempted = moment(-3)
    line = f"JobId=7 JobState={state} Restarts=0 EndTime={moment(end)} Deadline=N/A PreemptTime={preempted} S=1"
    assert seconds_until_kill(shown(line), 5.0, 3.0) == pytest.approx(seconds, abs=3 if seconds > 5 else 0)


def test_a_grace_is_no_longer_because_the_clock_of_the_batch_host_is_behind() -> None:
    """The job was killed while it still waited for a save, before it had been queued again."""
    line = f"JobId=7 JobState=RUNNING Restarts=0 EndTime={moment(360)} PreemptTime={moment(300)} S=1"
    assert seconds_until_kill(shown(line), 30.0, 0.0) == 60.0
    assert seconds_until_kill(shown(line), 20.0, 10.0) == 50.0


def test_a_job_that_is_not_preempted_has_killwait() -> None:
    line = f"JobId=7 Restarts=0 JobState=RUNNING A=b EndTime={moment(300)} A=b PreemptTime=None S=1"
    assert seconds_until_kill(shown(line), 30.0, 0.0) == 30.0


@pytest.mark.parametrize(
    ("line", "ending"),
    [
        ("JobId=7 JobState=RUNNING Restarts=0 StartTime=2026-11-20T18:00:00 PreemptTime=None", False),
        ("JobId=7 JobState=RUNNING Restarts=0 StartTime=2026-11-20T18:00:00", False),
        (
            "JobId=7 JobState=RUNNING Restarts=0 StartTime=2026-11-20T18:00:00 PreemptTime=2026-11-20T18:01:00",
            True,
        ),
        (
            "JobId=7 JobState=RUNNING Restarts=0 StartTime=2026-11-20T18:00:00 PreemptTime=2026-11-20T17:01:00",
            False,
        ),
        ("JobId=7 Restarts=0 JobState=COMPLETING Reason=TimeLimit PreemptTime=None", True),
        ("JobId=7 Restarts=0 JobState=COMPLETING Reason=None PreemptTime=None", True),
        ("", False),
    ],
)
def test_whether_a_signal_may_have_been_missed(line: str, ending: bool) -> None:
    """A wrong yes would stop a healthy start: a preemption that an earlier start suffered is none of this one."""
    assert is_ending(parse_job(line)) is ending


@pytest.mark.parametrize(("shown", "excluded"), [("(null)", ""), ("old[1-2]", "old[1-2]"), ("", "")])
def test_excluded_nodes(shown: str, excluded: str) -> None:
    job = parse_job(f"JobId=7 JobState=RUNNING Restarts=0 ReqNodeList=(null) ExcNodeList={shown} NodeList=a")
    assert job is not None and job.excluded == excluded
