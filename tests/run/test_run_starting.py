"""What `status` says of a job that has started but does not train yet."""

from __future__ import annotations

from collections.abc import Callable

from run_builders import begin, begin_dead, conclude, limited, slurm_job

from cluster_ddp.run.attempt import request_resume
from cluster_ddp.run.attempt_record import end_attempt
from cluster_ddp.run.condense import conclude as conclude_and_digest
from cluster_ddp.run.directory import RunDirectory
from cluster_ddp.run.record import add_slurm_job
from cluster_ddp.run.status.report import describe
from cluster_ddp.run.stopfile import request_stop
from cluster_ddp.slurm.states import SlurmJob

Say = Callable[..., None]


def told(run: RunDirectory, word: str) -> tuple[str, str | None]:
    found = describe(run, {"7": SlurmJob("7", word, "None", "", "(null)")})
    return found.state.value, found.reason


def test_setup_lines_that_do_not_end_are_told(run: RunDirectory) -> None:
    add_slurm_job(run, "7")
    where = "still in Slurm's prolog, in launch.setup, starting Python or waiting for storage"
    assert told(run, "RUNNING") == ("RUNNING", f"starting: no attempt yet, {where} (see slurm-7.out)")


def test_setup_lines_of_a_restart_are_told_and_not_what_ended_the_attempt_before(run: RunDirectory, say: Say) -> None:
    attempt = begin_dead(run, slurm_job_id="7")
    request_stop(attempt, reason="preemption", by="the keeper")
    say("stopped", 0, step=5, reason="preemption")
    end_attempt(attempt)
    say("requeued", 0, reason="stopped: preemption")
    state, reason = told(run, "RUNNING")
    assert state == "RUNNING" and reason is not None and reason.startswith("starting: no attempt yet")
    assert told(run, "COMPLETING") == ("RUNNING", "stopped: preemption; Slurm is still ending its job (COMPLETING)")
    request_stop(attempt, reason="person", by="me")  # while a prolog hangs, say
    assert str(told(run, "RUNNING")[1]).startswith("stopping: its job is starting again, and will end before it trains")
    request_resume(run, by="me")
    assert str(told(run, "RUNNING")[1]).startswith("starting: no attempt yet")


def test_a_resume_of_a_run_that_could_not_be_requeued_is_told_as_starting(run: RunDirectory, say: Say) -> None:
    attempt = begin_dead(run, slurm_job_id="6")
    request_stop(attempt, reason="time-limit", by="the keeper")
    say("requeue-failed", 0, reason="Requested operation is presently disabled")
    request_resume(run, by="me")
    add_slurm_job(run, "7")
    assert str(told(run, "RUNNING")[1]).startswith("starting: no attempt yet")


def test_the_next_job_of_a_chain_whose_node_has_failed_is_told_as_starting(run: RunDirectory, say: Say) -> None:
    begin_dead(run, slurm_job_id="6")
    say("started", 0, step=0, world_size=2)
    add_slurm_job(run, "7")
    assert str(told(run, "RUNNING")[1]).startswith("starting: no attempt yet")


def test_nodes_that_have_not_come_up_are_counted_until_all_train(run: RunDirectory, say: Say) -> None:
    attempt = begin(run, slurm_job_id="7", nodes=2)
    for node in range(2):
        attempt.alive_file(node).touch()
    busy = (
        "srun: Job 7 step creation still disabled, retrying (Requested nodes are busy)"  # with an srun of launch.setup
    )
    (run.path / "slurm-7.out").write_text(f"cluster-ddp: attempt 0\n{busy}\n")
    so_far = f"nodes have started so far (slurm-7.out ends with: {busy})"
    assert told(run, "RUNNING")[1] == f"starting: 0 of 2 {so_far}"
    say("node-started", 0, node=1, host="n1")
    assert told(run, "RUNNING")[1] == f"starting: 1 of 2 {so_far}"
    say("node-started", 0, node=0, host="n0")
    assert told(run, "RUNNING")[1] == "starting: all nodes have started, but their ranks do not train yet"
    say("started", 0, step=0, world_size=2)
    assert told(run, "RUNNING")[1] is None


def test_a_stopped_script_whose_job_is_still_ending_is_not_told_as_starting_again(run: RunDirectory, say: Say) -> None:
    attempt = begin(run, slurm_job_id="7", nodes=2)
    for node in range(2):
        say("node-started", 0, node=node, host=f"n{node}", script=True)
    request_stop(attempt, reason="person", by="me")
    assert told(run, "RUNNING") == ("RUNNING", "stopping: asked by me")
    for node in range(2):
        say("node-finished", 0, node=node, host=f"n{node}", outcome="stopped")
    conclude_and_digest(attempt)  # which keeps the start of one node
    assert told(run, "RUNNING") == ("RUNNING", "stopped by me; Slurm shows its job as RUNNING")


def test_nodes_that_slurm_has_to_start_first_are_told(run: RunDirectory) -> None:
    add_slurm_job(run, "7")
    state, reason = told(run, "CONFIGURING")
    assert state == "PENDING" and str(reason).startswith("Slurm is powering up or rebooting its nodes")


def test_a_start_that_failed_is_told_while_the_next_one_waits(run: RunDirectory, say: Say) -> None:
    add_slurm_job(run, "7")
    failed = {"slurm_job_id": "7", "restart_count": 0, "host": "n1", "reason": "no Python"}
    say("start-failed", None, **failed, queued=True)
    assert told(run, "PENDING") == ("PENDING", "start failed on n1: no Python (see slurm-7.out)")
    say("start-failed", None, **{**failed, "restart_count": 1}, queued=False)
    assert told(run, "FAILED") == ("FAILED", "restart failed on n1: no Python (see slurm-7.out)")


def test_the_next_job_of_a_chain_that_waits_because_a_start_failed_tells_why(run: RunDirectory, say: Say) -> None:
    add_slurm_job(run, "7")
    add_slurm_job(run, "8")
    say("start-failed", None, slurm_job_id="7", restart_count=0, host="n1", reason="no Python", queued=False)
    jobs = {"7": slurm_job("FAILED"), "8": slurm_job("PENDING", "BeginTime")}
    found = describe(run, jobs)
    assert found.state.value == "PENDING" and found.reason is not None
    assert found.reason.startswith("start failed on n1: no Python (see slurm-7.out) (Slurm: not before its begin time")
    request_resume(run, by="me")
    assert "no Python" not in str(describe(run, jobs).reason), "a person has seen it"


def test_a_job_that_was_cancelled_in_its_setup_lines_has_not_failed(run: RunDirectory, say: Say) -> None:
    add_slurm_job(run, "7")
    say("start-failed", None, slurm_job_id="7", restart_count=0, host="n1", reason="status 143", queued=False)
    assert told(run, "CANCELLED")[0] == "CANCELLED"


def test_a_job_of_the_chain_that_somebody_has_started_too_early_does_not_continue_it(
    run: RunDirectory, say: Say
) -> None:
    """It had ended, since an attempt was alive; at the time limit the run was left to it."""
    limited(run, max_requeues=0)
    for job_id in ("5", "6", "7"):
        add_slurm_job(run, job_id)
    first = begin_dead(run, slurm_job_id="5")
    say("start-refused", 0, at=1, slurm_job_id="6", message="Slurm job 6 was started while attempt 0 was alive")
    assert describe(run, None).warnings == ("Slurm job 6 was started while attempt 0 was alive",)
    request_stop(first, reason="time-limit", by="the keeper")
    say("checkpoint", 0, at=2, step=10)
    assert conclude(first).continued_by == "7"
