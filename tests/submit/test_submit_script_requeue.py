"""The batch script and its keeper, performed with stand-ins for Slurm: whether the job is queued again."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest
from stage import CANCELLED, CRASH, DONE, TIME_LIMIT, UNTIL_STOPPED, Stage, event


def test_of_an_array_only_this_task_is_requeued(stage: Stage) -> None:
    stage.does(**{"training.sh": CRASH})
    assert stage.perform(stage.write(), SLURM_ARRAY_JOB_ID="70", SLURM_ARRAY_TASK_ID="4") == 0
    assert stage.requeues() == ["70_4"]


def test_a_requeue_that_slurm_refuses(stage: Stage) -> None:
    words = "Requested operation is presently disabled for job 77"
    stage.does(requeue_status="1", requeue_words=words, **{"training.sh": CRASH})
    assert stage.perform(stage.write()) == 1
    assert stage.requeues() == ["77"] * 3
    status = stage.status()
    assert status["state"] == "FAILED"
    assert f"queues several for one run): scontrol failed (status 1): {words}" in status["reason"]
    assert status["reason"].startswith("requeue failed: Slurm has not requeued the job (where")
    assert "`cluster-ddp submit --chain N`" in status["reason"]
    assert "cluster-ddp resume" in status["reason"]
    assert "requeued" not in stage.events()


def test_a_requeue_waits_for_the_controller(stage: Stage) -> None:
    """It is tried until the allocation is nearly over, and meanwhile `status` says what the job waits for."""
    stage.does(requeue_status="1", requeue_words="Unable to contact slurm controller", **{"training.sh": CRASH})
    process = stage.start(stage.write())
    stage.wait_for(lambda: len(stage.requeues()) >= 4)
    assert "requeued" not in stage.events()
    status = stage.status()
    assert status["state"] == "RUNNING"
    assert "trying to requeue the job" in status["reason"] and "Unable to contact" in status["reason"]
    stage.does(requeue_status="0")
    assert stage.finish(process) == 0
    assert stage.events()[-1] == "requeued"


def test_a_requeue_is_tried_beyond_a_time_limit_that_may_have_been_changed(stage: Stage) -> None:
    """While the controller is away, nobody tells of the new limit, and nobody ends the job by the old one."""
    stage.does(requeue_status="1", requeue_words="Unable to contact slurm controller", **{"training.sh": CRASH})
    process = stage.start(stage.write(), SLURM_JOB_END_TIME=str(int(time.time()) + 1))
    stage.wait_for(lambda: len(stage.requeues()) >= 3)
    stage.does(requeue_status="0")
    assert stage.finish(process) == 0, stage.output
    assert stage.events()[-1] == "requeued"


def test_a_requeue_is_given_up_when_the_allocation_is_nearly_over(stage: Stage) -> None:
    stage.does(
        kill_wait="8", requeue_status="1", requeue_words="Unable to contact slurm", **{"training.sh": UNTIL_STOPPED}
    )
    assert stage.interrupt(signal.SIGTERM, job=TIME_LIMIT) == 1, stage.output
    found = stage.status()
    assert found["state"] == "FAILED"
    assert "Unable to contact" in found["reason"] and "cluster-ddp resume" in found["reason"]


def test_the_sigterm_of_the_requeue_itself_harms_nothing(stage: Stage) -> None:
    """Slurm ends all of the job when it accepts: scontrol must live to say so, also where the warning came before."""
    usual = (stage.bin / "scontrol").read_text().removeprefix("#!/bin/bash\n")
    stage.program("scontrol", f"[[ $1 != requeue ]] || {{ kill -TERM $PPID $$; sleep 1; }}\n{usual}")
    stage.does(**{"training.sh": UNTIL_STOPPED})
    assert stage.interrupt(signal.SIGUSR1) == 0, stage.output
    assert stage.requeues() == ["77"]
    assert "trying again" not in stage.output
    assert stage.events()[-1] == "requeued"


def test_a_cancel_ends_the_waiting_for_a_requeue(stage: Stage) -> None:
    stage.does(requeue_status="1", requeue_words="Unable to contact slurm controller", **{"training.sh": CRASH})
    process = stage.start(stage.write())
    stage.wait_for(stage.requeues)
    stage.does(job=CANCELLED)
    assert stage.finish(process) == 0
    assert "not requeued: its owner has ended it meanwhile" in stage.output
    assert stage.status()["state"] == "CANCELLED"
    assert "requeued" not in stage.events()


@pytest.mark.parametrize("training", [DONE, f"{event('failed', rank=0, error='ImportError: no module x')}\nexit 1"])
@pytest.mark.parametrize(
    ("shown", "updates"),
    [
        ("Requeue=1 Restarts=3", [["update", "JobId=77", "Requeue=0"]]),
        ("Requeue=0 Restarts=3", []),
        ("Requeue=1 Restarts=4", []),  # a later start of the job has replaced this one
    ],
)
def test_a_job_that_is_over_stays_over(stage: Stage, training: str, shown: str, updates: list[list[str]]) -> None:
    """Slurm 24.05 and later would start a job once more that was once preempted with grace."""
    stage.does(job=f"JobId=77 JobState=RUNNING Reason=None {shown} PreemptTime=None X=y")
    stage.does(**{"training.sh": training})
    stage.perform(stage.write(), SLURM_RESTART_COUNT="3")
    assert [call for call in stage.calls("scontrol") if call[0] == "update"] == updates, stage.output
    assert not stage.requeues()


def test_a_start_of_a_run_that_has_ended_ends_the_job_for_good(stage: Stage) -> None:
    stage.does(job="JobId=77 JobState=RUNNING Reason=None Requeue=1 Restarts=1 PreemptTime=None X=y")
    assert stage.perform(stage.write()) == 0
    assert stage.perform(stage.write(), SLURM_RESTART_COUNT="1") == 0, stage.output
    assert len(stage.calls("srun")) == 1
    assert [call for call in stage.calls("scontrol") if call[0] == "update"] == [["update", "JobId=77", "Requeue=0"]]


def test_a_failure_at_the_start_is_judged_and_not_blindly_requeued(stage: Stage) -> None:
    stage.does(**{"training.sh": f"{event('failed', rank=0, error='ImportError: no module named x')}\nexit 1"})
    assert stage.perform(stage.write()) == 4
    assert not stage.requeues()


def test_a_run_that_has_used_up_its_requeues_stalls(tmp_path: Path) -> None:
    stage = Stage(tmp_path, limits={"max_requeues": 0})
    stage.does(**{"training.sh": CRASH})
    assert stage.perform(stage.write()) == 4
    assert not stage.requeues()
    assert "the limit of requeue.max_requeues" in stage.output


def test_an_attempt_that_cannot_be_judged_is_not_blindly_requeued(stage: Stage) -> None:
    stage.does(**{"training.sh": 'rm "$run/job.yaml"; exit 1'})
    assert stage.perform(stage.write()) == 4
    assert not stage.requeues()
    assert "cannot decide what follows" in stage.output


def test_a_crash_after_progress_is_requeued(stage: Stage) -> None:
    stage.does(job="JobId=77 JobState=RUNNING Reason=None Requeue=1 Restarts=0 PreemptTime=None X=y")
    stage.does(**{"training.sh": CRASH})
    assert stage.perform(stage.write()) == 0
    assert stage.requeues() == ["77"]
    assert not [call for call in stage.calls("scontrol") if call[0] == "update"], "Slurm could not start it again"
