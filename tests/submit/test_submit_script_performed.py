"""The batch script and its keeper, performed with stand-ins for Slurm: signals, and why the job ends."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
from stage import CANCELLED, DONE, FOR_EVER, TAKEN_BACK, TIME_LIMIT, UNTIL_STOPPED, Stage, event

from cluster_ddp.run.directory import AttemptDirectory
from cluster_ddp.run.stopfile import read_stop

UNTIL_CANCELLED = 'until grep -qs cancel "$run/attempts/000/stop"; do sleep 0.05; done; exit 0'


PREEMPTED = "JobId=77 JobState=COMPLETING Reason=None Restarts=0 PreemptTime=2026-11-20T11:08:11 X=y"


def reason(stage: Stage) -> str | None:
    """Why training was asked to stop, as the node programs read it."""
    request = read_stop(AttemptDirectory(stage.stop_file.parent))
    return request.reason if request else None


def wait_for_reason(stage: Stage, wanted: str) -> None:
    """Wait until training has been asked to stop for this reason."""
    stage.wait_for(lambda: reason(stage) == wanted)


def test_a_complete_run_ends_the_job(stage: Stage) -> None:
    assert stage.perform(stage.write(slurm={"nodes": 2}, launch={"procs_per_node": 4})) == 0, stage.output
    (step,) = stage.calls("srun")
    assert step == [
        "--export=ALL", "--ntasks-per-node=1", "--kill-on-bad-exit=1", "--wait=0", "--label",
        "python", "-m", "cluster_ddp.launch.node", "--run", str(stage.run), "--attempt", "0", "--", "torchrun",
        "--nnodes=2", "--nproc-per-node=4", "--rdzv-id=77.0", "--rdzv-backend=c10d", "--rdzv-endpoint=node-b:20077",
        "--rdzv-conf=is_host={is_host},join_timeout=600,last_call_timeout=30", "--local-addr={local_addr}",
        "--max-restarts=0", "--log-dir={log_dir}", "--redirects=3", "-m", "cluster_ddp.train", str(stage.run),
    ]  # fmt: skip
    assert not stage.requeues()
    assert not stage.stop_file.exists()


def test_the_process_that_slurm_signals_is_the_keeper(stage: Stage) -> None:
    stage.does(**{"training.sh": f"{UNTIL_STOPPED}"})
    process = stage.start(stage.write())
    stage.wait_for_training()
    assert b"cluster_ddp.launch.keeper" in Path(f"/proc/{process.pid}/cmdline").read_bytes()
    process.send_signal(signal.SIGUSR1)
    stage.finish(process)


@pytest.mark.parametrize("name", ["USR1", "USR2", "HUP"])
def test_the_warning_saves_and_requeues(stage: Stage, name: str) -> None:
    stage.does(**{"training.sh": UNTIL_STOPPED})
    process = stage.start(stage.write(requeue={"signal": name}))
    stage.wait_for_training()
    process.send_signal(signal.Signals[f"SIG{name}"])
    assert stage.finish(process) == 0, stage.output
    assert reason(stage) == "time-limit"
    assert stage.requeues() == ["77"]


def test_the_time_limit_saves_and_requeues(stage: Stage) -> None:
    stage.does(**{"training.sh": UNTIL_STOPPED})
    assert stage.interrupt(signal.SIGTERM, job=TIME_LIMIT) == 0, stage.output
    request = read_stop(AttemptDirectory(stage.stop_file.parent))
    assert request is not None
    assert (request.reason, request.grace, request.level) == ("time-limit", pytest.approx(30, abs=4), 1)
    assert abs(request.time - time.time()) < 60
    assert stage.requeues() == ["77"]


def test_the_requeue_does_not_wait_for_a_save_that_takes_too_long(stage: Stage) -> None:
    """Nor for a judgement that does: a node that has not signed off is asked about, and Slurm gives no answer."""
    stage.does(kill_wait="5", **{"training.sh": f"{event('node-started', node=0, host='node-b')}\n{FOR_EVER}"})
    stage.program("sinfo", FOR_EVER)
    process = stage.start(stage.write())
    stage.wait_for_training()
    stage.does(job=TIME_LIMIT)
    began = time.monotonic()
    process.send_signal(signal.SIGTERM)
    assert stage.finish(process) == 0, stage.output
    # Slurm kills after 5 s; what has to fit into them is timed in test_launch_keeper_orders, where no load disturbs.
    assert time.monotonic() - began > 1.9
    assert stage.requeues() == ["77"]


def test_slurm_may_send_term_more_than_once_and_to_everything(stage: Stage) -> None:
    training = f"trap '' TERM; {FOR_EVER}"
    stage.does(kill_wait="5", **{"training.sh": training})
    process = stage.start(stage.write())
    stage.wait_for_training()
    stage.does(job=TIME_LIMIT)
    process.send_signal(signal.SIGTERM)
    time.sleep(1)
    os.killpg(process.pid, signal.SIGTERM)
    assert stage.finish(process) == 0, stage.output
    assert stage.output.count("Slurm ends the job") == 1
    assert stage.requeues() == ["77"]


def preempted(end: float | str, *, state: str = "RUNNING") -> str:
    """What Slurm 22.05 shows of a preempted job that ends in so many seconds, or whose EndTime is so."""
    if not isinstance(end, str):
        end = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(time.time() + end))
    return (
        f"JobId=77 JobName=x JobState={state} Reason=None Dependency=(null) Requeue=1 Restarts=0 BatchFlag=1 "
        f"RunTime=00:01:04 TimeLimit=10:00:00 TimeMin=N/A StartTime=2026-11-20T18:09:05 EndTime={end} Deadline=N/A "
        "PreemptEligibleTime=2026-11-20T18:09:05 PreemptTime=2026-11-20T18:09:09 SuspendTime=None X=y"
    )


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_preemption_has_the_grace_that_slurm_gives_whoever_set_it(stage: Stage, number: signal.Signals) -> None:
    """Where Slurm has preempt_send_user_signal, the warning signal tells of a preemption."""
    stage.does(**{"training.sh": UNTIL_CANCELLED.replace("cancel", "preemption")})
    assert stage.interrupt(number, job=preempted(90)) == 0, stage.output
    request = read_stop(AttemptDirectory(stage.stop_file.parent))
    assert request is not None and request.grace is not None
    assert request.reason == "preemption"
    assert 75 <= request.grace <= 90
    assert stage.requeues() == ["77"]


@pytest.mark.parametrize("end", [10, "Unknown"])  # KILL comes KillWait after it; the job has no time limit
def test_without_a_grace_that_is_longer_there_is_killwait(stage: Stage, end: float | str) -> None:
    stage.does(**{"training.sh": UNTIL_STOPPED})
    assert stage.interrupt(signal.SIGTERM, job=preempted(end)) == 0, stage.output
    request = read_stop(AttemptDirectory(stage.stop_file.parent))
    assert request is not None
    assert (request.reason, request.grace) == ("preemption", pytest.approx(30, abs=4))


@pytest.mark.parametrize(
    ("job", "why"), [(PREEMPTED.replace("COMPLETING", "RUNNING"), "preemption"), (TIME_LIMIT, "time-limit")]
)
def test_an_end_of_which_only_the_steps_were_told(stage: Stage, job: str, why: str) -> None:
    """It shows when the step has ended."""
    stopped = event("stopped", step=5, reason="terminated")
    stage.does(**{"training.sh": f"sleep 0.5; {stopped}; echo '{job}' >{stage.folder}/job"})
    assert stage.perform(stage.write()) == 0, stage.output
    assert reason(stage) == why
    assert stage.requeues() == ["77"]


def test_a_cancelled_job_is_never_requeued(stage: Stage) -> None:
    stage.does(**{"training.sh": UNTIL_STOPPED})
    assert stage.interrupt(signal.SIGTERM, job=CANCELLED) == 0, stage.output
    assert reason(stage) == "cancel"
    assert not stage.requeues()


def test_a_scancel_after_the_warning_is_final(stage: Stage) -> None:
    stage.does(**{"training.sh": UNTIL_CANCELLED})
    process = stage.start(stage.write())
    stage.wait_for_training()
    process.send_signal(signal.SIGUSR1)
    wait_for_reason(stage, "time-limit")
    stage.does(job=CANCELLED)
    process.send_signal(signal.SIGTERM)
    assert stage.finish(process) == 0
    assert reason(stage) == "cancel"
    assert not stage.requeues()


def test_a_job_that_slurm_has_queued_again_itself(stage: Stage) -> None:
    """A node failure, a requeue by hand, the end of a preemption's grace: no scancel, and no second requeue."""
    stage.does(**{"training.sh": UNTIL_STOPPED})
    assert stage.interrupt(signal.SIGTERM, job=TAKEN_BACK) == 0, stage.output
    assert reason(stage) == "preemption"
    assert not stage.requeues()


@pytest.mark.parametrize(("job", "taken_out"), [(TAKEN_BACK, [["77"]]), (CANCELLED.replace("COMPLET", "RUNN"), [])])
def test_a_run_that_a_person_has_stopped_leaves_the_queue_into_which_slurm_has_put_it_again(
    stage: Stage, job: str, taken_out: list[list[str]]
) -> None:
    usual = (stage.bin / "scontrol").read_text()
    stage.program("scancel", usual.removeprefix("#!/bin/bash\n").replace("record scontrol", "record scancel"))
    stop = """stop=$run/attempts/000/stop; wish='{"reason": "person", "level": 1}'"""
    wait = "until [[ -e $stop ]]; do sleep 0.05; done"
    stage.does(**{"training.sh": f'{stop}; {wait}; echo "$wish" > "$stop.final"; echo "$wish" > "$stop"'})
    assert stage.interrupt(signal.SIGTERM, job=job) == 0, stage.output
    assert stage.status()["state"] == "STOPPED"
    assert stage.calls("scancel") == taken_out
    assert not stage.requeues()


def test_a_node_failure_is_called_that(stage: Stage) -> None:
    stage.does(**{"training.sh": UNTIL_STOPPED})
    stage.program("sinfo", "echo n2")
    assert stage.interrupt(signal.SIGTERM, job=TAKEN_BACK, SLURM_JOB_NODELIST="n[1-2]") == 0, stage.output
    assert reason(stage) == "node-failure"
    assert not stage.requeues()


def test_restarts_are_counted_from_this_start(stage: Stage) -> None:
    running = "JobId=77 JobState=RUNNING Reason=None Restarts=4 PreemptTime=None X=y"
    stage.does(**{"training.sh": UNTIL_STOPPED, "job": running})
    job = CANCELLED.replace("Restarts=0", "Restarts=4")
    assert stage.interrupt(signal.SIGTERM, job=job, SLURM_RESTART_COUNT="4") == 0
    assert reason(stage) == "cancel"
    assert not stage.requeues()


def test_a_sigterm_that_is_none_of_slurms(stage: Stage) -> None:
    """``scancel --signal=TERM``, or ``kill``: Slurm lets the job run, so it may be queued again."""
    stage.does(**{"training.sh": UNTIL_STOPPED})
    assert stage.interrupt(signal.SIGTERM) == 0
    assert reason(stage) == "terminated"
    assert stage.requeues() == ["77"]


@pytest.mark.parametrize(("job", "requeues"), [(CANCELLED, []), (TIME_LIMIT, ["77"])], ids=["cancel", "time-limit"])
@pytest.mark.parametrize(("ends_in", "word"), [(3600, "terminated"), (0, "time-limit")])
def test_slurm_may_take_its_time_to_explain_a_sigterm(
    stage: Stage, job: str, requeues: list[str], ends_in: int, word: str
) -> None:
    """Until then training saves, and nothing is decided: a cancelled job must not come back.

    That the time limit is over as it was last heard explains nothing: it may have been changed.
    """
    stage.does(**{"training.sh": UNTIL_STOPPED})
    process = stage.start(stage.write(), SLURM_JOB_END_TIME=str(int(time.time()) + ends_in))
    stage.wait_for_training()
    stage.does(job="")
    process.send_signal(signal.SIGTERM)
    wait_for_reason(stage, word)
    time.sleep(3)
    assert process.poll() is None
    assert not stage.requeues()
    stage.does(job=job)
    assert stage.finish(process) == 0, stage.output
    assert stage.requeues() == requeues


def test_the_warning_is_enough_where_slurm_explains_nothing(stage: Stage) -> None:
    """No SIGTERM has come, so nobody has cancelled the job."""
    stage.does(**{"training.sh": UNTIL_STOPPED})
    stage.program("scontrol", stage_scontrol_without_answers(stage))
    process = stage.start(stage.write())
    stage.wait_for_training()
    process.send_signal(signal.SIGUSR1)
    assert stage.finish(process) == 0, stage.output
    assert reason(stage) == "time-limit"
    assert stage.requeues() == ["77"]


def stage_scontrol_without_answers(stage: Stage) -> str:
    """An scontrol that answers no question about jobs, and does as it is told."""
    usual = (stage.bin / "scontrol").read_text().removeprefix("#!/bin/bash\n")
    return f"[[ $1-$2 != show-job ]] || exec {FOR_EVER}\n{usual}"


def test_what_a_person_decided_stays_decided(stage: Stage) -> None:
    signalled = stage.folder / "signalled"
    stage.does(**{"training.sh": f"until [[ -e {signalled} ]]; do sleep 0.05; done"})
    process = stage.start(stage.write())
    stage.wait_for_training()
    stage.stop_file.write_text('{"reason": "person", "level": 1}')
    process.send_signal(signal.SIGUSR1)
    signalled.touch()
    assert stage.finish(process) == 0
    assert reason(stage) == "person"
    assert not stage.requeues()


@pytest.mark.parametrize("moment", ["setup", "python"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR2, signal.SIGALRM])
def test_a_signal_before_the_keeper_runs_is_made_up_for(stage: Stage, moment: str, number: signal.Signals) -> None:
    """The setup lines run, or Python starts, when it comes: Slurm says what was missed."""
    wait = f"touch {stage.folder}/training; sleep 1"
    setup = [wait] if moment == "setup" else []
    stage.does(**{"python.sh": wait if moment == "python" else "", "training.sh": UNTIL_STOPPED})
    process = stage.start(stage.write(launch={"setup": setup}))
    stage.wait_for_training()
    stage.does(job=TIME_LIMIT)
    process.send_signal(number)
    assert stage.finish(process) == 0, stage.output
    assert reason(stage) == "time-limit"
    assert stage.requeues() == ["77"]


def test_a_preemption_of_an_earlier_start_is_none_of_this_one(stage: Stage) -> None:
    stage.does(job=preempted(7200).replace("StartTime=2026-11-20T18:09:05", "StartTime=2026-11-20T19:00:00"))
    stage.does(**{"training.sh": f"sleep 1; {DONE}"})
    assert stage.perform(stage.write()) == 0
    assert "Slurm ends the job" not in stage.output
