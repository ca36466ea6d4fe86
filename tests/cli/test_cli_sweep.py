"""``cluster-ddp sweep``, with Slurm's commands as stand-ins."""

from __future__ import annotations

import json
import shlex
import subprocess
from pathlib import Path

import pytest
from cli_stage import Call, Slurm, the_sweep
from sweep_stage import GRID, arrays, end, start

from cluster_ddp.job import load_resolved
from cluster_ddp.run.directory import RunDirectory
from cluster_ddp.run.events import COMPLETED, FAILED
from cluster_ddp.run.record import read_record
from cluster_ddp.run.status.report import describe
from cluster_ddp.run.sweep import claimed, read_sweep, update_sweep
from cluster_ddp.slurm.commands import submit_script
from cluster_ddp.submit.element import main as element_program


@pytest.fixture
def slurm(slurm: Slurm) -> Slurm:
    slurm.program("scontrol", 'echo "MaxArraySize            = ${MAX_ARRAY_SIZE:-1001}"')
    return slurm


def test_one_call_of_sbatch_and_no_run_before_an_element_starts(here: Path, slurm: Slurm, call: Call) -> None:
    said = call("sweep", "--no-check", "job.yaml", *GRID, "--at-once", "2", "--json")
    assert said.status == 0, said.err
    sweep = the_sweep(here)
    answer = json.loads(said.out)
    assert answer == {"run_id": sweep.id, "directory": str(sweep.path), "slurm_job_id": "101", "state": "PENDING"}
    assert slurm.submissions() == [
        [
            "--parsable", "--array=0-3%2", f"--output={sweep.path}/slurm-%A.out", f"--comment=cluster_ddp {sweep.id}",
            str(sweep.script), str(sweep.path), "0",
        ]
    ]  # fmt: skip
    made = ["job.sbatch", "job.yaml", "start-failed.sh", "sweep.json"]
    assert sorted(path.name for path in sweep.path.iterdir()) == made
    assert "4 of 4 elements submitted, Slurm job 101" in said.err


def test_an_element_makes_its_run_at_its_first_start_and_finds_it_again(
    here: Path, slurm: Slurm, call: Call, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    call("sweep", "--no-check", "job.yaml", *GRID)
    sweep = the_sweep(here)
    for name, value in {"JOB_ID": "101", "ARRAY_JOB_ID": "101", "ARRAY_TASK_ID": "3"}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    assert element_program([str(sweep.path), "3"]) == element_program([str(sweep.path), "3"]) == 0
    first, second = capfd.readouterr().out.split()
    run = RunDirectory(Path(first))
    assert first == second == f"{sweep.path}/0003-lr=1e-4-width=16"
    assert read_record(run).slurm_job_ids == ("101_3",)  # 101 is the array: it would stand for the siblings, too
    assert (run.script.read_text(), read_record(run).via) == (sweep.script.read_text(), "sbatch")
    job = run.job_file.read_text()
    assert "lr: 0.0001" in job and "width: 16" in job
    assert element_program([str(sweep.path), "4"]) == 2
    assert [path.name for path in sweep.path.glob(".begin*")] == []


def test_the_same_command_starts_only_what_is_missing_or_failed(here: Path, slurm: Slurm, call: Call) -> None:
    call("sweep", "--no-check", "job.yaml", *GRID)
    sweep = the_sweep(here)
    end(start(sweep, 0, "101_0"), "101_0", COMPLETED)
    end(failed := start(sweep, 1, "101_1"), "101_1", FAILED)
    assert describe(failed, {}).state.value == "FAILED"
    slurm.queue.write_text(f"101_3|101|FAILED||NonZeroExitCode|cluster_ddp {sweep.id}\n")
    (sweep.path / "slurm-101.out").write_text("job.sbatch: launch.setup: status 1 from: false\n")
    assert "(slurm-101.out of the sweep ends with: job.sbatch: launch.setup: status 1" in call("status", sweep.id).out
    slurm.queue.write_text(f"101_2|101|PENDING||Priority|cluster_ddp {sweep.id}\n")
    said = call("sweep", "--no-check", "job.yaml", *GRID)  # 3 has left the queue without having begun
    assert "2 of 4 elements submitted" in said.err
    assert "1 COMPLETED, 1 FAILED, 1 LOST, 1 PENDING" in said.err
    assert arrays(slurm) == ["0-3", "1,3"]
    assert read_record(failed).slurm_job_ids == ("101_1", "102_1")
    mine = f"cluster_ddp {sweep.id}"
    slurm.queue.write_text("".join(f"{job}|{job}|PENDING||Priority|{mine}\n" for job in ("101_2", "102_1", "102_3")))
    assert describe(failed, {}).state.value != "FAILED"
    assert "0 of 4 elements submitted" in call("sweep", "--no-check", "job.yaml", *reversed_grid()).err
    # What is asked of Slurm may change, and a wider grid adds to what there is.
    call("sweep", "--no-check", "job.yaml", "--set", "slurm.mem=8G", "--grid", "train.lr=1e-3,1e-4,1e-5", *GRID[2:])
    assert arrays(slurm) == ["0-3", "1,3", "4-5"]
    assert "--mem=8G" in sweep.script.read_text()
    # Another training is another sweep.
    call("sweep", "--no-check", "job.yaml", "--set", "train.steps=30", *GRID)
    assert arrays(slurm)[3:] == ["0-3"]
    assert len(list((here / "runs").iterdir())) == 2


def reversed_grid() -> tuple[str, ...]:
    return (*GRID[2:], *GRID[:2])


def test_an_array_has_no_task_beyond_the_limit_and_each_waits_for_the_one_before(
    here: Path, slurm: Slurm, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MAX_ARRAY_SIZE", "4")
    call("sweep", "--no-check", "job.yaml", "--grid", "train.seed=" + ",".join(map(str, range(10))), "--at-once", "3")
    sweep = the_sweep(here)
    assert arrays(slurm) == ["0-3%3", "0-3%3", "0-1%3"]
    assert [words[-1] for words in slurm.submissions()] == ["0", "4", "8"]
    assert ["--dependency=afterany:101" in words for words in slurm.submissions()] == [False, True, False]
    slurm.queue.write_text(f"103_1|103|RUNNING|n1|None|cluster_ddp {sweep.id}\n")
    rows = json.loads(call("status", sweep.id, "--json").out)
    assert [row["state"] for row in rows] == ["LOST"] * 9 + ["RUNNING"]


def test_two_calls_at_once_submit_once(here: Path, slurm: Slurm, call: Call) -> None:
    call("sweep", "--no-check", "job.yaml", *GRID)
    sweep = the_sweep(here)
    with subprocess.Popen(["sleep", "60"]) as other:
        start_time = Path(f"/proc/{other.pid}/stat").read_text().rpartition(")")[2].split()[19]
        update_sweep(sweep, claimed)
        text = sweep.record_file.read_text()
        mine = json.loads(text)["submitting"]
        sweep.record_file.write_text(
            text.replace(f'"pid": {mine["pid"]}', f'"pid": {other.pid}').replace(mine["started"], start_time)
        )
        said = call("sweep", "--no-check", "job.yaml", *GRID)
        assert said.status == 2
        assert f"is being submitted by process {other.pid}" in said.err
        other.kill()
    assert call("sweep", "--no-check", "job.yaml", *GRID).status == 0  # whoever had it is dead


def test_a_sweep_that_is_cancelled_while_it_is_submitted_leaves_no_array_in_the_queue(
    here: Path, slurm: Slurm, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cancelled_before(*arguments: str, **more: list[str]) -> str:
        assert call("cancel", the_sweep(here).id).status == 0
        return submit_script(*arguments, **more)  # type: ignore[arg-type]

    monkeypatch.setattr("cluster_ddp.submit.sweep.submit_script", cancelled_before)
    said = call("sweep", "--no-check", "job.yaml", *GRID)
    assert said.status == 2 and "its Slurm job 101 has been taken back out of the queue" in said.err
    assert (slurm.folder / "cancelled").read_text() == "101\n"
    assert read_sweep(the_sweep(here)).submitting is None


def test_what_a_call_that_was_killed_has_submitted_is_not_submitted_again(
    here: Path, slurm: Slurm, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MAX_ARRAY_SIZE", "3")
    call("sweep", "--no-check", "job.yaml", *GRID)
    sweep = the_sweep(here)
    assert arrays(slurm) == ["0-2", "0"]
    record = json.loads(sweep.record_file.read_text())
    with subprocess.Popen(["true"]) as dead:  # it died after its second sbatch, before it noted that array
        dead.wait()
    record["arrays"].pop()
    process = {"host": "", "pid": dead.pid, "boot_id": "another-boot", "namespace": "", "started": "1"}
    record |= {"submitting": {**process, "since": 1.0}, "announced": 3}
    sweep.record_file.write_text(json.dumps(record))
    mine = f"cluster_ddp {sweep.id}"
    waiting = [f"{job}|{job}|PENDING||Priority|{mine}" for job in ("101_0", "101_1", "101_2", "102_0")]
    slurm.queue.write_text("\n".join([*waiting, "9_1|9|PENDING||Priority|cluster_ddp other", ""]))
    said = call("sweep", "--no-check", "job.yaml", *GRID)
    assert "0 of 4 elements submitted" in said.err
    assert [array.job_id for array in read_sweep(sweep).arrays] == ["101", "102"]
    assert [array.offset for array in read_sweep(sweep).arrays] == [0, 3]


HOSTILE = [
    "$(touch stray)",
    "`touch stray`",
    "'; touch stray; '",
    '"; touch stray; "',
    "a\\nb",
    "%j %A",
    "\\\\",
    "ü\x7f",
]


def test_hostile_values_reach_the_element_and_nothing_else(here: Path, slurm: Slurm, call: Call) -> None:
    listed = here / "list.yaml"
    listed.write_text("".join(f"- {{params.text: {json.dumps(value)}}}\n" for value in HOSTILE))
    said = call("sweep", "--no-check", "job.yaml", "--list", "list.yaml")
    assert said.status == 0, said.err
    sweep = the_sweep(here)
    for number, value in enumerate(HOSTILE):
        run = start(sweep, number, f"101_{number}")
        assert load_resolved(run.job_file).params["text"] == value
        assert run.path.parent == sweep.path
    assert "stray" not in sweep.script.read_text()
    assert not list(here.rglob("stray"))
    assert subprocess.run(["bash", "-n", str(sweep.script)], check=False).returncode == 0


def test_the_arguments_of_a_script_may_differ(
    here: Path, slurm: Slurm, call: Call, capfd: pytest.CaptureFixture[str]
) -> None:
    (here / "train.py").write_text("")
    (here / "script.yaml").write_text("script: train.py\nargs: [--lr, 1]\n")
    said = call("sweep", "--no-check", "script.yaml", "--grid", "args=[--lr,0.1],[--lr,'0.2 $(x)']")
    assert said.status == 0, said.err
    sweep = the_sweep(here)
    assert 'train.py "${args[@]}"' in sweep.script.read_text()
    (line,) = [line for line in sweep.script.read_text().splitlines() if line.startswith("mapfile")]
    run = start(sweep, 1, "101_1")
    shown = (
        f"python=({shlex.quote(__import__('sys').executable)}); run={run.path}; {line}; printf '<%s>' \"${{args[@]}}\""
    )
    done = subprocess.run(["bash", "-c", shown], capture_output=True, text=True, check=True)
    assert done.stdout == "<--lr><0.2 $(x)>"


def test_a_sweep_of_this_machine_is_not_mixed_with_one_of_slurm(here: Path, slurm: Slurm, call: Call) -> None:
    call("sweep", "--no-check", "job.yaml", *GRID)
    said = call("sweep", "--no-check", "job.yaml", *GRID, "--local", "--gpus", "none")
    assert said.status == 2 and "was started via sbatch, and its runs can only continue that way" in said.err
    assert call("sweep", "--no-check", "job.yaml", *GRID, "--procs", "2").status == 2


def test_a_dry_run_writes_nothing_and_needs_no_slurm(here: Path, no_slurm: None, call: Call) -> None:
    said = call("sweep", "--no-check", "job.yaml", *GRID, "--dry-run")
    assert said.status == 0
    assert said.out.startswith("#!/bin/bash")
    assert "    0002-lr=1e-4-width=8   train.lr=1e-4 params.width=8\n" in said.err
    assert "    0003-lr=1e-4-width=16  train.lr=1e-4 params.width=16\n" in said.err
    assert not (here / "runs").exists()
    assert call("sweep", "--no-check", "job.yaml", *GRID).status == 3
    assert not (here / "runs").exists()


def test_wrong_values_are_refused_before_anything_is_made(here: Path, slurm: Slurm, call: Call) -> None:
    said = call("sweep", "--no-check", "job.yaml", "--grid", "train.lr=1e-3,-1")
    assert said.status == 2
    assert "element 1: --set train.lr=-1: train.lr: -1 is too small" in said.err
    assert not (here / "runs").exists()
    assert slurm.submissions() == []
