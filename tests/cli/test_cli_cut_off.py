"""Submissions that were killed around the call of sbatch: what the other commands see of them, and do with them."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from cli_stage import Call, Slurm

from cluster_ddp.run.attempt import begin_attempt
from cluster_ddp.run.attempt_record import end_attempt
from cluster_ddp.run.directory import RunDirectory
from cluster_ddp.run.events import FAILED, EventWriter
from cluster_ddp.run.record import add_slurm_job, read_record
from cluster_ddp.run.sweep import SweepDirectory, read_sweep
from cluster_ddp.submit.element import run_of_element

SUBMIT = ("submit", "--no-check", "job.yaml")
SWEEP = ("sweep", "--no-check", "job.yaml", "--grid", "train.lr=1e-2,1e-3,1e-4")
BEHIND = 'n=$(($(cat "$here/count" 2>/dev/null || echo 100) + 1)); echo $n >"$here/count"; echo >"$here/sbatch.$n"'


@pytest.fixture
def slurm(slurm: Slurm) -> Slurm:
    """Slurm's commands, each of which notes its calls; squeue knows the jobs that it is asked about."""
    slurm.program("scontrol", "echo 'MaxArraySize = 1001'")
    slurm.program("sacct", 'echo >>"$here/asked.sacct"')
    slurm.program(
        "squeue",
        'echo >>"$here/asked"; for word; do [[ $word == --jobs=* ]] && ids=,${word#--jobs=},; done\n'
        'while IFS="|" read -r id rest; do\n'
        '  [[ -z $ids || $ids == *,$id,* || $ids == *,${id%_*},* ]] && echo "$id|$rest"\n'
        'done <"$here/queue"; exit 0',
    )
    return slurm


def asked(slurm: Slurm) -> tuple[int, int]:
    """How often squeue and sacct were called, since the last look."""
    files = [slurm.folder / "asked", slurm.folder / "asked.sacct"]
    counts = [len(file.read_text().splitlines()) if file.exists() else 0 for file in files]
    for file in files:
        file.unlink(missing_ok=True)
    return counts[0], counts[1]


def killed(slurm: Slurm, *words: str, behind: bool, at: int = 1) -> None:
    """Call ``cluster-ddp`` and kill it while it waits for the answer of its `at`th sbatch, which has or has not come.

    Parameters
    ----------
    behind
        Whether the job is in the queue by then.
    """
    calls = 'c=$(($(cat "$here/calls" 2>/dev/null || echo 0) + 1)); echo $c >"$here/calls"'
    kill = f"[[ $c == {at} ]] && {{ kill -KILL $PPID; exit; }}"
    slurm.program("sbatch", "\n".join([calls, *([BEHIND, kill] if behind else [kill, BEHIND]), "echo $n"]))
    done = subprocess.run([sys.executable, "-m", "cluster_ddp", *words], capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    (slurm.folder / "calls").unlink()
    slurm.program("sbatch", f"{BEHIND}\necho $n")


def queue(slurm: Slurm, name: str, *jobs: str, state: str = "PENDING") -> None:
    """Have squeue know these jobs of a run or a sweep, and a stranger's."""
    lines = [f"{job}|{job}|{state}||Priority|cluster_ddp {name}" for job in jobs]
    slurm.queue.write_text("\n".join([*lines, "9|9|PENDING||Priority|cluster_ddp other-20260101-000000-abcd", ""]))


def only(here: Path) -> Path:
    (folder,) = (here / "runs").iterdir()
    return folder


def state(call: Call, slurm: Slurm, *words: str) -> list[tuple[str, str | None]]:
    """State and job of what is named, which squeue was asked about once."""
    asked(slurm)
    said = call("status", *words, "--json")
    assert said.status == 0 and asked(slurm) <= (1, 1), said.err
    rows = json.loads(said.out)
    return [(row["state"], row["slurm_job_id"]) for row in (rows if isinstance(rows, list) else [rows])]


def test_a_job_that_nobody_noted_is_seen(here: Path, slurm: Slurm, call: Call) -> None:
    killed(slurm, *SUBMIT, behind=True)
    run = RunDirectory(only(here))
    assert read_record(run).slurm_job_ids == ()
    queue(slurm, run.id, "101")
    assert state(call, slurm, run.id) == state(call, slurm) == [("PENDING", "101")]
    (row,) = json.loads(call("list", "--json").out)
    assert (row["state"], row["slurm_job_id"]) == ("PENDING", "101")
    assert read_record(run).slurm_job_ids == ()  # who only looks changes nothing
    said = call("resume", run.id)
    assert said.status == 2 and "is PENDING (Slurm job 101) and continues by itself" in said.err
    assert len(slurm.submissions()) == 1
    said = call("stop", run.id)
    assert said.status == 2 and f"to remove it from the queue for good: cluster-ddp cancel {run.id}" in said.err
    assert read_record(run).slurm_job_ids == ("101",)
    assert read_record(run).submitting is None


def test_cancel_takes_the_job_that_nobody_noted_out_of_the_queue(here: Path, slurm: Slurm, call: Call) -> None:
    killed(slurm, *SUBMIT, behind=True)
    run = RunDirectory(only(here))
    queue(slurm, run.id, "101")
    said = call("cancel", run.id)
    assert f"cancelled {run.id} and its Slurm job 101" in said.err
    assert (slurm.folder / "cancelled").read_text() == "101\n"
    queue(slurm, run.id)
    assert state(call, slurm, run.id)[0][0] == "CANCELLED"


def test_cancel_says_so_where_slurm_does_not_answer(here: Path, slurm: Slurm, call: Call) -> None:
    killed(slurm, *SUBMIT, behind=True)
    run = RunDirectory(only(here))
    slurm.program("squeue", "echo 'Access denied' >&2; exit 1")
    said = call("cancel", run.id)
    assert (
        said.status == 3 and "is marked as cancelled" in said.err and "one of its Slurm jobs may still run" in said.err
    )
    assert call("stop", run.id).status == 2


def test_what_was_never_given_to_slurm_is_lost_and_resume_submits_it(here: Path, slurm: Slurm, call: Call) -> None:
    killed(slurm, *SUBMIT, behind=False)
    run = RunDirectory(only(here))
    assert state(call, slurm, run.id) == [("LOST", None)]
    assert f"is not in the queue; cluster-ddp resume {run.path} submits it" in call("status", run.id).out
    assert "To continue it: cluster-ddp resume" in call("stop", run.id).err
    said = call("resume", run.id, "--json")
    assert said.status == 0, said.err
    job = json.loads(said.out)["slurm_job_id"]
    assert read_record(run).slurm_job_ids == (job,) and len(slurm.submissions()) == 1


def test_a_resume_and_a_chain_that_were_killed(here: Path, slurm: Slurm, call: Call) -> None:
    killed(slurm, *SUBMIT, "--chain", "3", behind=True, at=2)
    run = RunDirectory(only(here))
    assert read_record(run).slurm_job_ids == ("101",)
    queue(slurm, run.id, "101", "102")
    assert state(call, slurm, run.id) == [("PENDING", "101")]
    attempt = begin_attempt(run, slurm_job_id="101", host="n1", pid=0, nodes=2, procs=1)
    queue(slurm, run.id, "102")
    call("cancel", run.id)
    assert (slurm.folder / "cancelled").read_text() == "102\n"
    end_attempt(attempt)
    queue(slurm, run.id)
    killed(slurm, "resume", run.id, behind=True)
    queue(slurm, run.id, "103")
    assert state(call, slurm, run.id) == [("PENDING", "103")]
    assert "(Slurm job 103) and continues by itself" in call("resume", run.id).err
    begin_attempt(run, slurm_job_id="103", host="n1", pid=0, nodes=2, procs=1)
    assert read_record(run).slurm_job_ids == ("101", "102", "103")


def test_what_is_being_submitted_is_not_submitted_twice(here: Path, slurm: Slurm, call: Call) -> None:
    slurm.program("sbatch", f'touch "$here/begun"; until [ -e "$here/go" ]; do sleep 0.05; done; {BEHIND}; echo $n')
    with subprocess.Popen([sys.executable, "-m", "cluster_ddp", *SUBMIT], stderr=subprocess.DEVNULL) as submitting:
        while not (slurm.folder / "begun").exists():
            time.sleep(0.05)
        run = RunDirectory(only(here))
        assert "PENDING (not submitted yet)" in call("status", run.id).out
        said = call("resume", run.id)
        assert said.status == 2 and f"is being submitted by process {submitting.pid} on" in said.err
        (slurm.folder / "go").touch()
        assert submitting.wait(60) == 0
    assert read_record(run).slurm_job_ids == ("101",)


def test_a_refused_resume_says_no_more_than_it_did(here: Path, slurm: Slurm, call: Call) -> None:
    assert call(*SUBMIT).status == 0
    run = RunDirectory(only(here))
    slurm.program("sbatch", "echo 'sbatch: error: no' >&2; exit 1")
    assert call("resume", run.id).status == 3
    assert read_record(run).submitting is None


def test_the_array_of_a_sweep_that_nobody_noted_is_seen(here: Path, slurm: Slurm, call: Call) -> None:
    killed(slurm, *SWEEP, behind=True)
    sweep = SweepDirectory(only(here))
    assert read_sweep(sweep).arrays == ()
    queue(slurm, sweep.id, "101_0", "101_1", "101_2")
    waiting = [("PENDING", f"101_{task}") for task in range(3)]
    assert state(call, slurm, sweep.id) == waiting
    asked(slurm)
    assert "3 elements: 3 PENDING" in call("status").out and asked(slurm) == (1, 0)
    assert "3 elements: 3 PENDING" in call("list").out and asked(slurm) == (1, 0)
    assert "3 removed from the queue" in call("stop", sweep.id).err
    assert (slurm.folder / "cancelled").read_text() == "--state=PENDING 101_0 101_1 101_2\n"
    assert [(array.job_id, array.offset) for array in read_sweep(sweep).arrays] == [("101", 0)]
    assert state(call, slurm, sweep.id) == waiting
    assert "0 of 3 elements submitted" in call(*SWEEP).err


def test_cancel_of_a_sweep_that_was_killed(here: Path, slurm: Slurm, call: Call) -> None:
    killed(slurm, *SWEEP, behind=True)
    sweep = SweepDirectory(only(here))
    queue(slurm, sweep.id, "101_0", "101_1", "101_2")
    assert "including 3 of its Slurm jobs" in call("cancel", sweep.id).err
    assert (slurm.folder / "cancelled").read_text() == "101_0 101_1 101_2\n"


def test_failed_elements_that_were_submitted_again(here: Path, slurm: Slurm, call: Call) -> None:
    assert call(*SWEEP).status == 0
    sweep = SweepDirectory(only(here))
    run = run_of_element(sweep, read_sweep(sweep).elements[1], via="sbatch", job="101_1")
    attempt = begin_attempt(run, slurm_job_id="101_1", host="n1", pid=1, nodes=1, procs=1)
    EventWriter(run, "rank-0").write(FAILED, attempt=0, step=2, error="ValueError: no")
    end_attempt(attempt)
    queue(slurm, sweep.id, "101_0", "101_2")
    assert state(call, slurm, sweep.id)[1] == ("FAILED", "101_1")
    killed(slurm, *SWEEP, behind=True)
    queue(slurm, sweep.id, "101_0", "101_2", "102_1")
    assert state(call, slurm, sweep.id) == [("PENDING", "101_0"), ("PENDING", "102_1"), ("PENDING", "101_2")]
    assert "0 of 3 elements submitted" in call("resume", sweep.id).err
    assert read_record(run).slurm_job_ids == ("101_1", "102_1")


def test_the_second_array_of_a_sweep_that_nobody_noted(here: Path, slurm: Slurm, call: Call) -> None:
    slurm.program("scontrol", "echo 'MaxArraySize = 2'")
    killed(slurm, *SWEEP, behind=True, at=2)
    sweep = SweepDirectory(only(here))
    queue(slurm, sweep.id, "101_0", "101_1", "102_0")
    assert state(call, slurm, sweep.id) == [("PENDING", job) for job in ("101_0", "101_1", "102_0")]
    queue(slurm, sweep.id, "101_0", "101_1")
    assert state(call, slurm, sweep.id) == [("PENDING", "101_0"), ("PENDING", "101_1"), ("LOST", None)]
    assert "1 of 3 elements submitted" in call("resume", sweep.id).err


def test_a_sweep_of_which_sbatch_said_nothing_clear(here: Path, slurm: Slurm, call: Call) -> None:
    slurm.program("sbatch", f"{BEHIND}; echo 'Welcome to the cluster'")
    assert call(*SWEEP).status == 3
    sweep = SweepDirectory(only(here))
    queue(slurm, sweep.id, "101_0", "101_1", "101_2")
    assert [row[0] for row in state(call, slurm, sweep.id)] == ["PENDING"] * 3
    assert "0 of 3 elements submitted" in call(*SWEEP).err


def test_jobs_of_others_are_asked_about_as_well(here: Path, slurm: Slurm, call: Call) -> None:
    """Where a group shares a runs folder, the jobs of this user are not all."""
    killed(slurm, *SUBMIT, behind=True)
    run = RunDirectory(only(here))
    assert call(*SUBMIT, "--set", "name=shared", "--set", "storage.mode=group").status == 0
    (shared,) = (RunDirectory(folder) for folder in (here / "runs").iterdir() if folder.name.startswith("shared"))
    add_slurm_job(shared, "77")
    queue(slurm, run.id, "101")
    (slurm.folder / "others").write_text(f"77|77|RUNNING|n1|None|cluster_ddp {shared.id}\n")
    slurm.program(
        "squeue", '[[ "$*" == *--me* ]] && cat "$here/queue"; [[ "$*" == *--jobs=*77* ]] && cat "$here/others"; exit 0'
    )
    rows = {row["run_id"]: (row["state"], row["slurm_job_id"]) for row in json.loads(call("status", "--json").out)}
    assert rows == {run.id: ("PENDING", "101"), shared.id: ("RUNNING", "77")}
