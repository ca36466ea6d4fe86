"""The batch script, performed by bash with stand-ins for Slurm: signals, waiting, the verdict, the requeue."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
from stage import FOR_EVER, UNTIL_STOPPED, Stage

from cluster_ddp.run.directory import AttemptDirectory
from cluster_ddp.run.stopfile import read_stop

UNTIL_CANCELLED = 'for ((i = 0; i < 200; i++)); do grep -qs cancel "$run/attempts/003/stop" && exit 0; sleep 0.05; done'
TIME_LIMIT = "JobId=77 JobState=COMPLETING Reason=TimeLimit Restarts=0 PreemptTime=None X=y"
PREEMPTED = "JobId=77 JobState=COMPLETING Reason=None Restarts=0 PreemptTime=2026-11-20T11:08:11 X=y"
CANCELLED = "JobId=77 JobState=COMPLETING Reason=None Restarts=0 PreemptTime=None X=y"
TAKEN_BACK = "JobId=77 JobState=COMPLETING Reason=None Restarts=1 EndTime=Unknown X=y"


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    return Stage(tmp_path)


def reason(stage: Stage) -> str | None:
    """Why training was asked to stop, as the node programs read it."""
    request = read_stop(AttemptDirectory(stage.stop_file.parent))
    return request.reason if request else None


def interrupt(stage: Stage, number: signal.Signals, *, job: str | None = None, **variables: str) -> int:
    """Send the script a signal while it trains; its status."""
    process = stage.start(stage.write(), **variables)
    stage.wait_for_training()
    if job is not None:
        stage.does(job=job)
    process.send_signal(number)
    return stage.finish(process)


def test_a_complete_run_ends_the_job(stage: Stage) -> None:
    assert stage.perform(stage.write(slurm={"nodes": 2}, launch={"procs_per_node": 4})) == 0, stage.output
    (step,) = stage.calls("srun")
    assert step == [
        "--export=ALL", "--ntasks-per-node=1", "--kill-on-bad-exit=1", "--wait=0",
        "python", "-m", "cluster_ddp.launch.node", "--run", str(stage.run), "--attempt", "3", "--", "torchrun",
        "--nnodes=2", "--nproc-per-node=4", "--rdzv-id=77.3", "--rdzv-backend=c10d", "--rdzv-endpoint=node-b:20077",
        "--rdzv-conf=is_host={is_host},join_timeout=600,last_call_timeout=30", "--local-addr={local_addr}",
        "--max-restarts=0", "--log-dir={log_dir}", "--redirects=3", "-m", "cluster_ddp.train", str(stage.run),
    ]  # fmt: skip
    assert stage.calls("python")[-1] == ["-m", "cluster_ddp.launch.attempt", "end", str(stage.run), "3"]
    assert not stage.requeues()
    assert not stage.stop_file.exists()


def test_ranks_inherit_the_meeting_point_and_the_cpus(stage: Stage) -> None:
    script = stage.write(network={"profile": "ethernet", "env": {"NCCL_IB_HCA": "mlx5_0,mlx5_1"}})
    assert stage.perform(script, SLURM_CPUS_PER_TASK="6") == 0
    environment = stage.environment_of_ranks()
    assert environment["MASTER_ADDR"] == "node-b"
    assert environment["MASTER_PORT"] == "20077"
    assert environment["SRUN_CPUS_PER_TASK"] == "6"
    assert environment["NCCL_IB_DISABLE"] == "1"
    assert environment["NCCL_IB_HCA"] == "mlx5_0,mlx5_1"


@pytest.mark.parametrize(("job_id", "port"), [("1", 20001), ("12767", 32767), ("12768", 20000), ("4294901760", 21920)])
def test_the_port_stays_below_the_ephemeral_ones(stage: Stage, job_id: str, port: int) -> None:
    assert stage.perform(stage.write(), SLURM_JOB_ID=job_id) == 0
    assert stage.environment_of_ranks()["MASTER_PORT"] == str(port)


@pytest.mark.parametrize("name", ["USR1", "USR2", "HUP"])
def test_the_warning_saves_and_requeues(stage: Stage, name: str) -> None:
    stage.does(**{"training.sh": UNTIL_STOPPED, "end.sh": "echo requeue"})
    process = stage.start(stage.write(requeue={"signal": name}))
    stage.wait_for_training()
    process.send_signal(signal.Signals[f"SIG{name}"])
    assert stage.finish(process) == 0, stage.output
    assert reason(stage) == "time-limit"
    assert stage.requeues() == ["77"]


def test_the_time_limit_saves_and_requeues(stage: Stage) -> None:
    stage.does(**{"training.sh": UNTIL_STOPPED, "end.sh": "echo requeue"})
    assert interrupt(stage, signal.SIGTERM, job=TIME_LIMIT) == 0, stage.output
    request = read_stop(AttemptDirectory(stage.stop_file.parent))
    assert request is not None
    assert (request.reason, request.grace, request.level) == ("time-limit", 30.0, 1)
    assert abs(request.time - time.time()) < 60
    assert stage.requeues() == ["77"]


def test_the_requeue_does_not_wait_for_a_save_that_takes_too_long(stage: Stage) -> None:
    stage.does(kill_wait="5", **{"training.sh": FOR_EVER, "end.sh": "sleep 60"})
    process = stage.start(stage.write())
    stage.wait_for_training()
    stage.does(job=TIME_LIMIT)
    began = time.monotonic()
    process.send_signal(signal.SIGTERM)
    assert stage.finish(process) == 0, stage.output
    # Slurm kills after 5 s: 2 s for training, at most 2 for a verdict.
    assert 1.9 < time.monotonic() - began < 5.0
    assert stage.requeues() == ["77"]


def test_slurm_may_send_term_more_than_once_and_to_everything(stage: Stage) -> None:
    training = f"trap '' TERM; {FOR_EVER}"
    stage.does(kill_wait="5", **{"training.sh": training, "end.sh": "echo requeue"})
    process = stage.start(stage.write())
    stage.wait_for_training()
    stage.does(job=TIME_LIMIT)
    began = time.monotonic()
    process.send_signal(signal.SIGTERM)
    time.sleep(1)
    os.killpg(process.pid, signal.SIGTERM)
    assert stage.finish(process) == 0, stage.output
    assert time.monotonic() - began < 4.0
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
    stage.does(**{"training.sh": UNTIL_STOPPED, "end.sh": "echo requeue"})
    assert interrupt(stage, number, job=preempted(90)) == 0, stage.output
    request = read_stop(AttemptDirectory(stage.stop_file.parent))
    assert request is not None and request.grace is not None
    assert request.reason == "preemption"
    assert 80 <= request.grace <= 90
    assert stage.requeues() == ["77"]


@pytest.mark.parametrize(
    ("end", "state"),
    [
        (7200, "COMPLETING"),  # no grace, or its end
        (-20, "RUNNING"),  # Slurm ends it up to 30 s late
        (10, "RUNNING"),  # KILL comes KillWait after it
        ("Unknown", "RUNNING"),  # the job has no time limit
        ("31-31-2026T", "RUNNING"),
        ("", "RUNNING"),
    ],
)
def test_without_a_grace_that_is_longer_there_is_killwait(stage: Stage, end: float | str, state: str) -> None:
    stage.does(**{"training.sh": UNTIL_STOPPED, "end.sh": "echo requeue"})
    assert interrupt(stage, signal.SIGTERM, job=preempted(end, state=state)) == 0, stage.output
    request = read_stop(AttemptDirectory(stage.stop_file.parent))
    assert request is not None
    assert (request.reason, request.grace) == ("preemption", 30.0)


def test_a_preemption_of_which_only_the_steps_were_told(stage: Stage) -> None:
    stage.does(job=PREEMPTED.replace("COMPLETING", "RUNNING"), **{"end.sh": "echo requeue"})
    assert stage.perform(stage.write()) == 0
    assert reason(stage) == "preemption"
    assert stage.requeues() == ["77"]


def test_a_cancelled_job_is_never_requeued(stage: Stage) -> None:
    stage.does(**{"training.sh": UNTIL_STOPPED, "end.sh": "echo requeue"})
    assert interrupt(stage, signal.SIGTERM, job=CANCELLED) == 0, stage.output
    assert reason(stage) == "cancel"
    assert not stage.requeues()


def test_a_scancel_after_the_warning_is_final(stage: Stage) -> None:
    stage.does(**{"training.sh": UNTIL_CANCELLED, "end.sh": "echo requeue"})
    process = stage.start(stage.write())
    stage.wait_for_training()
    process.send_signal(signal.SIGUSR1)
    deadline = time.monotonic() + 20
    while reason(stage) != "time-limit":
        assert time.monotonic() < deadline, stage.output
        time.sleep(0.02)
    stage.does(job=CANCELLED)
    process.send_signal(signal.SIGTERM)
    assert stage.finish(process) == 0
    assert reason(stage) == "cancel"
    assert not stage.requeues()


def test_a_job_that_slurm_has_queued_again_itself(stage: Stage) -> None:
    """A node failure, a requeue by hand, the end of a preemption's grace: no scancel, and no second requeue."""
    stage.does(**{"training.sh": UNTIL_STOPPED, "end.sh": "echo requeue"})
    assert interrupt(stage, signal.SIGTERM, job=TAKEN_BACK) == 0, stage.output
    assert reason(stage) == "preemption"
    assert not stage.requeues()


def test_restarts_are_counted_from_this_start(stage: Stage) -> None:
    stage.does(**{"training.sh": UNTIL_STOPPED, "end.sh": "echo requeue"})
    job = CANCELLED.replace("Restarts=0", "Restarts=4")
    assert interrupt(stage, signal.SIGTERM, job=job, SLURM_RESTART_COUNT="4") == 0
    assert reason(stage) == "cancel"
    assert not stage.requeues()


def test_a_sigterm_that_slurm_knows_nothing_of(stage: Stage) -> None:
    stage.does(**{"training.sh": UNTIL_STOPPED, "end.sh": "echo stop"})
    assert interrupt(stage, signal.SIGTERM) == 0
    assert reason(stage) == "terminated"
    assert not stage.requeues()


def test_a_sigterm_when_the_controller_does_not_answer(stage: Stage) -> None:
    stage.does(**{"training.sh": UNTIL_STOPPED, "end.sh": "echo stop"})
    assert interrupt(stage, signal.SIGTERM, job="") == 0
    assert reason(stage) == "terminated"


def test_what_a_person_decided_stays_decided(stage: Stage) -> None:
    stage.does(**{"training.sh": "sleep 0.7", "end.sh": "echo stop"})
    process = stage.start(stage.write())
    stage.wait_for_training()
    stage.stop_file.write_text('{"reason": "person", "level": 1}')
    process.send_signal(signal.SIGUSR1)
    assert stage.finish(process) == 0
    assert reason(stage) == "person"


def test_a_signal_while_the_attempt_begins(stage: Stage) -> None:
    begin = (stage.folder / "begin.sh").read_text()
    stage.does(**{"begin.sh": f"touch {stage.folder}/training; sleep 0.5\n{begin}", "end.sh": "echo requeue"})
    stage.does(**{"training.sh": UNTIL_STOPPED})
    assert interrupt(stage, signal.SIGTERM, job=TIME_LIMIT) == 0, stage.output
    assert reason(stage) == "time-limit"
    assert stage.requeues() == ["77"]


def test_of_an_array_only_this_task_is_requeued(stage: Stage) -> None:
    stage.does(**{"end.sh": "echo requeue"})
    assert stage.perform(stage.write(), SLURM_ARRAY_JOB_ID="70", SLURM_ARRAY_TASK_ID="4") == 0
    assert stage.requeues() == ["70_4"]


def test_a_requeue_that_slurm_refuses(stage: Stage) -> None:
    stage.does(requeue_status="1", **{"end.sh": "echo requeue"})
    assert stage.perform(stage.write()) == 1
    assert stage.requeues() == ["77"] * 3
    assert f"cluster-ddp resume {stage.run}" in stage.output


@pytest.mark.parametrize("verdict", ["fail", "stall", ""])
def test_a_failing_step_is_judged_and_not_blindly_requeued(stage: Stage, verdict: str) -> None:
    stage.does(**{"training.sh": "exit 1", "end.sh": f"echo {verdict}"})
    assert stage.perform(stage.write()) == 4
    assert not stage.requeues()


def test_a_crash_after_progress_is_requeued(stage: Stage) -> None:
    stage.does(**{"training.sh": "exit 1", "end.sh": "echo requeue"})
    assert stage.perform(stage.write()) == 0
    assert stage.requeues() == ["77"]


@pytest.mark.parametrize(("begin", "status"), [("exit 0", 0), ("exit 75", 75), ("exit 76", 76)])
def test_an_attempt_that_may_not_begin(stage: Stage, begin: str, status: int) -> None:
    stage.does(**{"begin.sh": begin})
    assert stage.perform(stage.write()) == status
    assert not stage.calls("srun")
    assert not stage.requeues()


def test_without_scontrol_clustershell_reads_the_node_list(tmp_path: Path) -> None:
    stage = Stage(tmp_path, scontrol=False)
    assert stage.perform(stage.write(), SLURM_JOB_NODELIST="rack[2-3]n[07,01]") == 0, stage.output
    assert stage.environment_of_ranks()["MASTER_ADDR"] == "rack2n07"


def test_without_scontrol_and_clustershell_the_job_fails_clearly(tmp_path: Path) -> None:
    stage = Stage(tmp_path, scontrol=False)
    stage.does(**{"nodelist.sh": "exit 1"})
    assert stage.perform(stage.write()) == 1
    assert "cannot tell the first node of node-[b,a]" in stage.output
    assert not stage.calls("srun")


def test_a_setup_line_that_fails_ends_the_job_before_an_attempt(stage: Stage) -> None:
    assert stage.perform(stage.write(launch={"setup": ["true", "no_such_module load cuda"]})) == 1
    assert "launch.setup: status 127 from: no_such_module load cuda" in stage.output
    assert not stage.calls("python")


def test_setup_lines_may_set_what_they_like(stage: Stage) -> None:
    setup = ["set -euo pipefail", "export GREETING='it works'"]
    stage.does(**{"training.sh": "exit 1", "end.sh": "echo requeue"})
    assert stage.perform(stage.write(launch={"setup": setup})) == 0, stage.output
    assert stage.environment_of_ranks()["GREETING"] == "it works"
    assert stage.requeues() == ["77"]


@pytest.mark.parametrize("arguments", [[], ["a", "b"], ["/nowhere"]])
def test_a_wrong_call_says_what_is_wrong(stage: Stage, arguments: list[str]) -> None:
    import subprocess

    done = subprocess.run(
        ["bash", str(stage.write()), *arguments],
        env={"PATH": str(stage.bin)},
        capture_output=True,
        text=True,
        timeout=20,
    )
    assert done.returncode == 1
    assert "run directory" in done.stderr
