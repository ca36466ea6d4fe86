"""``cluster-ddp submit``: what is checked, what is made, what is sent, what is said."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest
from cli_stage import Call, Slurm

from cluster_ddp.job import load_job, load_resolved
from cluster_ddp.run.attempt import begin_attempt
from cluster_ddp.run.directory import RunDirectory
from cluster_ddp.run.events import EventWriter, read_events
from cluster_ddp.run.record import read_record
from cluster_ddp.run.via import QUEUED
from cluster_ddp.slurm.commands import call_once
from cluster_ddp.submit.ways import submission


def only_run(here: Path) -> RunDirectory:
    (path,) = (here / "runs").iterdir()
    return RunDirectory(path)


def test_a_dry_run_prints_the_script_alone_and_writes_nothing(call: Call, here: Path, no_slurm: None) -> None:
    before = sorted(here.rglob("*"))
    said = call("submit", "job.yaml", "--dry-run")
    assert said.status == 0
    assert said.out.startswith("#!/bin/bash\n")
    assert said.out.endswith('-m cluster_ddp.train "$run"\n')
    assert "2 x 1 = 2" in said.err
    assert "NCCL_DEBUG=WARN" in said.err
    assert sorted(here.rglob("*")) == before


SCALED = ["--set", "train.lr=0.003", "--set", "train.lr_scaling=linear", "--set", "train.base_batch=32"]


def test_a_dry_run_says_ranks_batch_and_peak_rate(call: Call, here: Path, no_slurm: None) -> None:
    setup = "2 ranks, global batch 64 (2 ranks x 32 samples), peak lr 0.006"
    assert f"  training:       {setup}\n" in call("submit", "job.yaml", "--dry-run", *SCALED).err
    assert f"# {setup}\n" in call("local", "job.yaml", "--dry-run", "--nodes=2", "--procs=1", *SCALED).err


def test_status_shows_how_a_run_trains(call: Call, here: Path, slurm: Slurm) -> None:
    call("submit", "job.yaml")
    run = only_run(here)
    begin_attempt(run, slurm_job_id="101", host="n1", pid=0, nodes=2, procs=1)
    setup = "2 ranks, global batch 64 (2 ranks x 32 samples), peak lr 0.006"
    EventWriter(run, "rank-0").write("started", attempt=0, step=0, world_size=2, training=setup)
    assert f"\n  training         {setup}\n" in call("status", run.id).out


def test_what_is_sent_is_what_the_dry_run_shows(call: Call, here: Path, slurm: Slurm) -> None:
    shown = call("submit", "job.yaml", "--dry-run").out
    assert call("submit", "job.yaml").status == 0
    run = only_run(here)
    assert run.script.read_text() == shown
    assert stat.S_IMODE(run.script.stat().st_mode) == 0o700
    assert load_resolved(run.job_file) == load_job("job.yaml").spec


def test_a_submission_is_recorded(call: Call, here: Path, slurm: Slurm) -> None:
    said = call("submit", "job.yaml", "--json")
    assert said.status == 0, said.err
    run = only_run(here)
    assert json.loads(said.out) == {
        "run_id": run.id,
        "directory": str(run.path),
        "slurm_job_id": "101",
        "state": "PENDING",
    }
    assert said.out.count("\n") == 1
    assert slurm.submissions() == [
        [
            "--parsable",
            f"--output={run.path}/slurm-%j.out",
            f"--comment=cluster_ddp {run.id}",
            str(run.script),
            str(run.path),
        ]
    ]
    assert read_record(run).slurm_job_ids == ("101",)
    (event,) = read_events(run)
    assert (event["event"], event["via"], event["slurm_job_id"]) == ("submitted", "sbatch", "101")


def test_without_json_standard_output_stays_empty(call: Call, here: Path, slurm: Slurm) -> None:
    said = call("submit", "job.yaml")
    assert said.out == ""
    assert "cluster-ddp status small-" in said.err


def test_a_percent_sign_in_the_path_is_no_pattern(call: Call, here: Path, slurm: Slurm) -> None:
    assert call("submit", "job.yaml", "--set", "runs_dir=100%j").status == 0
    assert f"--output={here}/100%%j/small-" in slurm.submissions()[0][1]


def test_a_comment_of_the_users_own_follows_ours(call: Call, here: Path, slurm: Slurm) -> None:
    assert call("submit", "job.yaml", "--set", "slurm.extra.comment=mine").status == 0
    assert f"--comment=cluster_ddp {only_run(here).id} mine" in slurm.submissions()[0]


def test_settings_are_laid_over_the_job(call: Call, here: Path, slurm: Slurm) -> None:
    assert call("submit", "job.yaml", "--set", "slurm.nodes=3", "--set", "train.lr=0.5").status == 0
    spec = load_resolved(only_run(here).job_file)
    assert (spec.slurm.nodes, spec.train.lr) == (3, 0.5)


def test_when_sbatch_refuses_nothing_is_left(call: Call, here: Path, slurm: Slurm) -> None:
    slurm.program("sbatch", "echo 'sbatch: error: invalid partition specified: x' >&2; exit 1")
    said = call("submit", "job.yaml")
    assert said.status == 3
    assert "invalid partition specified: x" in said.err
    assert "Traceback" not in said.err
    assert list((here / "runs").iterdir()) == []


UNHEARD = "echo 'sbatch: error: Batch job submission failed: Socket timed out on send/recv operation' >&2; exit 1"


@pytest.mark.parametrize(
    "answer",
    [
        "exit 0", "echo 'Welcome to the cluster'", "exec sleep 30", UNHEARD, "echo 7; echo 'no log book' >&2; exit 1",
        "kill -KILL $$",
    ],
)  # fmt: skip
def test_when_the_job_may_be_queued_its_run_directory_stays(
    call: Call, here: Path, slurm: Slurm, monkeypatch: pytest.MonkeyPatch, answer: str
) -> None:
    monkeypatch.setitem(call_once.__kwdefaults__, "seconds", 1.0)
    slurm.program("sbatch", answer)
    said = call("submit", "job.yaml")
    assert said.status == 3
    assert "squeue --me" in said.err and str(only_run(here).path) in said.err
    assert read_record(only_run(here)).submitting is not None  # squeue is asked for the job by its comment


def test_a_long_refusal_is_shortened(call: Call, here: Path, slurm: Slurm) -> None:
    slurm.program("sbatch", "printf 'noise %.0s' {1..50000} >&2; echo 'sbatch: error: the reason' >&2; exit 1")
    said = call("submit", "job.yaml")
    assert said.status == 3 and "the reason" in said.err and len(said.err) < 6000


def test_without_slurm_the_status_is_3_and_nothing_is_made(call: Call, here: Path, no_slurm: None) -> None:
    said = call("submit", "job.yaml", "--json")
    assert said.status == 3
    assert "sbatch is not on PATH" in said.err
    assert said.out == ""
    assert not (here / "runs").exists()


def test_a_wrong_job_file_is_found_before_anything_is_made(call: Call, here: Path, slurm: Slurm) -> None:
    (here / "job.yaml").write_text("task: cluster_ddp.tasks.digits:Digits\nslurm: {tiem: 1}\n")
    said = call("submit", "job.yaml")
    assert said.status == 2
    assert "job.yaml:2" in said.err and "time" in said.err
    assert not (here / "runs").exists()
    assert slurm.submissions() == []


def test_a_file_where_the_runs_should_be(call: Call, here: Path, slurm: Slurm) -> None:
    (here / "runs").write_text("")
    said = call("submit", "job.yaml")
    assert said.status == 2
    assert "CLUSTER_DDP_RUNS" in said.err
    assert slurm.submissions() == []


def test_a_missing_task_is_found_unless_told_otherwise(call: Call, here: Path, slurm: Slurm) -> None:
    assert call("submit", "job.yaml", "--set", "task=no_such.module:Task").status == 2
    assert slurm.submissions() == []
    assert call("submit", "job.yaml", "--set", "task=no_such.module:Task", "--no-check").status == 0


def test_a_broken_setup_line_is_found_before_the_queue(call: Call, here: Path, slurm: Slurm) -> None:
    said = call("submit", "job.yaml", "--set", 'launch.setup=["echo \'unclosed"]')
    assert said.status == 2
    assert "launch.setup" in said.err
    assert not (here / "runs").exists()


def test_each_job_of_a_chain_waits_for_all_before_it(call: Call, here: Path, slurm: Slurm) -> None:
    """If it waited for the one before alone, and somebody cancelled that one, it would start for nothing."""
    said = call("submit", "job.yaml", "--chain", "3", "--json")
    assert json.loads(said.out)["slurm_job_id"] == "101"
    first, second, third = slurm.submissions()
    assert not [word for word in first if word.startswith("--dependency")]
    assert "--dependency=afterany:101" in second
    assert "--dependency=afterany:101:102" in third
    assert {words[-1] for words in (first, second, third)} == {str(only_run(here).path)}
    assert read_record(only_run(here)).slurm_job_ids == ("101", "102", "103")


def test_a_chain_that_is_refused_in_the_middle_is_taken_back(call: Call, here: Path, slurm: Slurm) -> None:
    slurm.program(
        "sbatch",
        '[[ -e $here/one ]] && { echo "sbatch: error: QOSMaxSubmitJobPerUserLimit" >&2; exit 1; }\n'
        'touch "$here/one"; echo 7',
    )
    said = call("submit", "job.yaml", "--chain", "2")
    assert said.status == 3
    assert (slurm.folder / "cancelled").read_text() == "7\n"
    assert list((here / "runs").iterdir()) == []


def test_a_chain_that_cannot_be_taken_back_keeps_its_run(call: Call, here: Path, slurm: Slurm) -> None:
    away = "echo 'slurm_load_jobs error: Unable to contact slurm controller (connect failure)' >&2; exit 1"
    slurm.program("sbatch", f'[[ -e $here/one ]] && {{ {away}; }}\ntouch "$here/one"; echo 7')
    slurm.program("scancel", away)
    said = call("submit", "job.yaml", "--chain", "2")
    assert said.status == 3 and "first jobs (7) could not be taken back out of the queue" in said.err
    assert read_record(only_run(here)).slurm_job_ids == ("7",)


def test_after_waits_for_another_run(call: Call, here: Path, slurm: Slurm) -> None:
    first = json.loads(call("submit", "job.yaml", "--json").out)["run_id"]
    assert call("submit", "job.yaml", "--after", first).status == 0
    assert "--dependency=afterany:101" in slurm.submissions()[1]


def test_after_a_run_that_does_not_exist(call: Call, here: Path, slurm: Slurm) -> None:
    assert call("submit", "job.yaml", "--after", "nothing").status == 2
    assert slurm.submissions() == []


def test_inside_a_job_the_parents_variables_stay_behind(
    call: Call, here: Path, slurm: Slurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"SLURM_JOB_ID": "5", "SLURM_NNODES": "9", "SLURM_CONF": "/etc/x", "WANDB_API_KEY": "k"}.items():
        monkeypatch.setenv(name, value)
    assert call("submit", "job.yaml").status == 0
    pairs = (slurm.folder / "environment").read_bytes().decode().split("\0")
    names = {pair.split("=", 1)[0] for pair in pairs}
    assert "SLURM_CONF" in names and "WANDB_API_KEY" in names
    assert not {"SLURM_JOB_ID", "SLURM_NNODES"} & names


@pytest.mark.parametrize("via", QUEUED)
def test_each_way_to_submit_has_a_submission(call: Call, here: Path, via: str) -> None:
    assert submission(load_job("job.yaml").spec, via).via == via
    assert call("submit", "job.yaml", "--via", f"no-{via}").status == 2


@pytest.mark.parametrize("options", [("--chain", "2"), ("--after", "small")])
def test_what_submitit_cannot_do(call: Call, here: Path, slurm: Slurm, options: tuple[str, ...]) -> None:
    call("submit", "job.yaml")
    said = call("submit", "job.yaml", "--via", "submitit", *options)
    assert said.status == 2
    assert "--via sbatch" in said.err


def test_remarks_about_the_network_are_passed_on(call: Call, here: Path) -> None:
    said = call("submit", "job.yaml", "--dry-run", "--set", "network.env.NCCL_TIMEOUT=1800")
    assert "became the process-group timeout" in " ".join(said.err.split())
    assert "collectives time out after 1800 s" in said.err
    assert "NCCL_TIMEOUT=" not in said.out


def test_a_dry_run_says_where_each_value_was_written(call: Call, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (here / "site.yaml").write_text("slurm: {partition: gpu}\n")
    monkeypatch.setenv("CLUSTER_DDP_CONFIG", "site.yaml")
    said = call("submit", "job.yaml", "--set", "train.lr=0.5", "--dry-run")
    assert "slurm.partition: gpu   site.yaml:1" in said.err
    assert "slurm.nodes: 2   job.yaml:3" in said.err
    assert "train.lr: 0.5   --set train.lr=..." in said.err
