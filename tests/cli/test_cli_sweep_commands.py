"""What the other commands do with a sweep: status, list, resume, stop, cancel."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from cli_stage import Call, Slurm, the_sweep
from sweep_stage import GRID, arrays, end, start

from cluster_ddp.run.attempt import begin_attempt
from cluster_ddp.run.attempt_record import end_attempt
from cluster_ddp.run.errors import ElementWithdrawn, RunError
from cluster_ddp.run.events import COMPLETED, FAILED, EventWriter
from cluster_ddp.run.liveness import claim
from cluster_ddp.run.status.report import describe
from cluster_ddp.run.sweep import SweepRecord, claimed, read_sweep
from cluster_ddp.run.via import LOCAL


@pytest.fixture
def slurm(slurm: Slurm) -> Slurm:
    slurm.program("scontrol", 'echo "MaxArraySize            = ${MAX_ARRAY_SIZE:-1001}"')
    return slurm


def test_of_a_sweep_that_runs_on_a_machine_that_may_be_down_it_is_said_how_to_end_it() -> None:
    """It is not being submitted."""
    there = {**claim(), "host": "there", "boot_id": "another"}
    record = SweepRecord("s", 0.0, (), via=LOCAL, submitting=there)
    with pytest.raises(RunError, match=r"(?s)being run by process \d+ on there.* if there is down: .*stop s$"):
        claimed(record)


def test_status_is_a_table_with_the_best(here: Path, slurm: Slurm, call: Call) -> None:
    call("sweep", "--no-check", "job.yaml", *GRID, "--set", "checkpoint.keep_best={metric: val/accuracy}")
    sweep = the_sweep(here)
    slurm.queue.write_text(f"101_3|101|PENDING||JobArrayTaskLimit|cluster_ddp {sweep.id}\n")
    for number, accuracy in ((0, 0.5), (1, 0.75), (2, 0.25)):
        run = start(sweep, number, f"101_{number}")
        row = {"step": 20, "samples": 640, "epoch": 0, "attempt": 0, "time": 1.0, "val/accuracy": accuracy}
        run.metrics_file.write_text(json.dumps(row) + "\n")
        end(run, f"101_{number}", COMPLETED)
    table = call("status", sweep.id[:-2]).out  # a unique prefix
    assert [line.split()[:2] for line in table.splitlines()[1:5]] == [
        ["0000-lr=1e-3-width=8", "COMPLETED"],
        ["0001-lr=1e-3-width=16", "COMPLETED"],
        ["0002-lr=1e-4-width=8", "COMPLETED"],
        ["0003-lr=1e-4-width=16", "PENDING"],
    ]
    assert table.endswith("best by val/accuracy: 0001-lr=1e-3-width=16  0.75\n")
    rows = json.loads(call("status", str(sweep.path), "--json").out)
    assert [(row["run_id"][:4], row["state"], row["slurm_job_id"]) for row in rows[2:]] == [
        ("0002", "COMPLETED", "101_2"),
        ("0003", "PENDING", "101_3"),
    ]
    slurm.queue.write_text(f"101_3|101|PENDING||JobHeldAdmin|cluster_ddp {sweep.id}\n")
    *_, held = json.loads(call("status", str(sweep.path), "--json").out)
    assert held["state"] == "HELD" and "ask them for: scontrol release 101_3" in held["reason"]
    # Where a site replaces comments, the owner and the name show whose job it is.
    for comment, name, owner, state in (
        ("the site's", "small", os.getuid(), "PENDING"),
        ("the site's", "other", os.getuid(), "LOST"),
        ("the site's", "small", os.getuid() + 1, "LOST"),
        ("cluster_ddp other", "small", os.getuid(), "LOST"),
    ):
        slurm.queue.write_text(f"101_3|101|PENDING||Priority|{comment}|{name}|{owner}\n")
        *_, row = json.loads(call("status", str(sweep.path), "--json").out)
        assert row["state"] == state, (comment, name, owner, row)
    (here / "runs" / "small-20260101-000000-abcd").mkdir()
    (here / "runs" / "small-20260101-000000-abcd" / "run.json").write_text("{}")
    assert call("status", "small").out.startswith("small-20260101")  # as before there was a sweep


def test_all_runs_are_shown_with_how_many_elements_of_a_sweep_stand_where(here: Path, slurm: Slurm, call: Call) -> None:
    call("sweep", "--no-check", "job.yaml", *GRID)
    sweep = the_sweep(here)
    end(start(sweep, 0, "101_0"), "101_0", COMPLETED)
    end(start(sweep, 1, "101_1"), "101_1", FAILED)
    mine = f"cluster_ddp {sweep.id}"
    slurm.queue.write_text(f"101_2|101|RUNNING||None|{mine}\n101_3|101|PENDING||Priority|{mine}\n")
    slurm.program("squeue", 'echo >>"$here/asked"; cat "$here/queue"')
    broken = here / "runs" / "broken-sweep-0123abcd"
    broken.mkdir()
    (broken / "sweep.json").write_text("{}")
    (here / "runs" / "small-20260101-000000-abcd").mkdir()
    (here / "runs" / "small-20260101-000000-abcd" / "run.json").write_text("{}")
    for command in ("list", "status"):
        said = call(command)
        assert said.status == 0, said.err
        _, run, unreadable, counted = said.out.splitlines()
        assert run.startswith("small-20260101-000000-abcd")
        assert unreadable.startswith(f"sweep {broken.name}: {broken}/sweep.json cannot be read")
        assert counted == f"sweep {sweep.id}: 4 elements: 1 RUNNING, 1 PENDING, 1 FAILED, 1 COMPLETED"
        *_, row = json.loads(call(command, "--json").out)
        assert row["elements"] == {"RUNNING": 1, "PENDING": 1, "FAILED": 1, "COMPLETED": 1}
        assert (row["run_id"], row["state"], row["directory"]) == (sweep.id, "RUNNING", str(sweep.path))
    assert (slurm.folder / "asked").read_text() == 4 * "\n"  # once for all of them


def test_other_commands_know_a_sweep_and_its_elements(here: Path, slurm: Slurm, call: Call) -> None:
    call("sweep", "--no-check", "job.yaml", *GRID)
    sweep = the_sweep(here)
    for words in (("logs", sweep.id), ("checkpoints", str(sweep.path)), ("export", sweep.id[:-2], "-o", "weights")):
        said = call(*words)
        assert said.status == 2 and "is a sweep" in said.err and "none of them has started" in said.err
    run = start(sweep, 2, "101_2")
    assert f"such as {run.path}" in call("logs", sweep.id).err
    assert json.loads(call("status", f"{sweep.id}/{run.id}", "--json").out)["run_id"] == run.id
    assert call("status", f"../{here.name}/runs/{sweep.id}/no").status == 2
    waiting = read_sweep(sweep).elements[1].name
    for name in (f"{sweep.id}/{waiting}", str(sweep.path / waiting)):
        said = call("stop", name)
        assert said.status == 2 and f"{waiting} of sweep {sweep.id} has not started" in said.err


def test_resume_of_a_sweep_is_its_command_again(here: Path, slurm: Slurm, call: Call) -> None:
    call("sweep", "--no-check", "job.yaml", *GRID, "--at-once", "2")
    sweep = the_sweep(here)
    script, before = sweep.script.read_text(), read_sweep(sweep)
    for number, event in ((0, COMPLETED), (1, FAILED)):
        end(start(sweep, number, f"101_{number}"), f"101_{number}", event)
    (here / "job.yaml").unlink()
    said = call("resume", sweep.id, "--json")
    assert said.status == 0, said.err
    assert (json.loads(said.out)["slurm_job_id"], arrays(slurm)) == ("102", ["0-3%2", "1-3%2"])
    assert sweep.script.read_text() == script and read_sweep(sweep).elements == before.elements
    for options in (("--set", "train.lr=1"), ("--nodes", "4")):
        said = call("resume", sweep.id, *options)
        assert said.status == 2 and "sweep command again" in said.err
    assert len(arrays(slurm)) == 2


def test_cancel_and_stop_act_on_all_elements(here: Path, slurm: Slurm, call: Call) -> None:
    call("sweep", "--no-check", "job.yaml", *GRID)
    sweep = the_sweep(here)
    done, running = start(sweep, 0, "101_0"), start(sweep, 1, "101_1")
    end(done, "101_0", COMPLETED)
    attempt = begin_attempt(running, slurm_job_id="101_1", host="elsewhere", pid=1, nodes=1, procs=1)
    mine = f"cluster_ddp {sweep.id}"
    queue = f"101_1|103|RUNNING|n1|None|{mine}\n101_2|101|PENDING||Priority|{mine}\n101_3|101|PENDING||Priority|other\n"
    slurm.queue.write_text(queue)
    said = call("stop", sweep.id)
    assert "1 element asked to save and exit, 1 removed from the queue" in said.err
    assert json.loads(attempt.stop_file.read_text())["reason"] == "person"
    assert (slurm.folder / "cancelled").read_text() == "--state=PENDING 101_2\n"
    assert call("cancel", str(sweep.path)).status == 0
    # Not 101_3: that job is somebody else's by now.
    assert (slurm.folder / "cancelled").read_text().splitlines()[1] == "101_1 101_2"
    slurm.queue.write_text(queue.replace("RUNNING", "CANCELLED").replace("PENDING", "CANCELLED"))
    assert [describe(run, {}).state.value for run in (done, running)] == ["COMPLETED", "CANCELLED"]
    assert (
        f"job 101_2 was cancelled before it started; cluster-ddp resume {sweep.id} starts it"
        in call("status", sweep.id).out
    )
    # What was cancelled stays so; what never began is missing.
    call("sweep", "--no-check", "job.yaml", *GRID)
    assert arrays(slurm) == ["0-3", "2-3"]


def test_what_waits_to_start_again_when_its_sweep_is_stopped_goes_on_when_that_is_resumed(
    here: Path, slurm: Slurm, call: Call
) -> None:
    call("sweep", "--no-check", "job.yaml", *GRID)
    sweep = the_sweep(here)
    requeued, resumed = start(sweep, 0, "101_0"), start(sweep, 1, "101_1")
    attempt = begin_attempt(requeued, slurm_job_id="101_0", host="n1", pid=0, nodes=1, procs=1)
    writer = EventWriter(requeued, "batch")
    writer.write("stopped", attempt=0, step=5, reason="preemption")
    writer.write("requeued", attempt=0, reason="stopped: preemption")
    end_attempt(attempt)
    mine = f"cluster_ddp {sweep.id}"
    queue = "".join(f"101_{task}|{101 + task}|PENDING||Priority|{mine}\n" for task in range(4))
    slurm.queue.write_text(queue)
    assert "4 removed from the queue" in call("stop", sweep.id).err
    for element, job in ((0, "101_0"), (1, "101_1")):  # in case Slurm starts them all the same
        with pytest.raises(ElementWithdrawn):
            start(sweep, element, job)
    slurm.queue.write_text(queue.replace("PENDING", "CANCELLED"))
    rows = json.loads(call("status", sweep.id, "--json").out)
    assert [row["state"] for row in rows] == ["STOPPED", "LOST", "LOST", "LOST"]
    assert rows[0]["reason"].startswith("stopped by ")
    assert "Slurm job 101_1 is no longer in the queue here, and no attempt has started in it" in rows[1]["reason"]
    assert "STOPPED" in call("status", str(requeued.path)).out
    call("resume", sweep.id)
    assert arrays(slurm) == ["0-3", "0-3"]
    assert [start(sweep, number, f"102_{number}") for number in (0, 1)] == [requeued, resumed]


def test_a_damaged_record_is_told_and_harms_nothing_else(here: Path, slurm: Slurm, call: Call) -> None:
    call("sweep", "--no-check", "job.yaml", *GRID)
    sweep = the_sweep(here)
    end(start(sweep, 2, "101_2"), "101_2", COMPLETED)
    good = sweep.record_file.read_text()
    for bad in ("{", "[]", good.replace('"0001-', '"../0001-'), good.replace('"offset": 0', '"offset": -1'), "null"):
        sweep.record_file.write_text(bad)
        for command in ("status", "stop", "cancel"):
            said = call(command, sweep.id)
            assert said.status == 2 and "sweep.json cannot be read" in said.err, (command, bad, said)
    assert call("list").status == 0
    sweep.record_file.unlink()  # as the message says
    assert "3 of 4 elements submitted" in call("sweep", "--no-check", "job.yaml", *GRID).err
