"""What a real Slurm says before a job waits in its queue."""

from __future__ import annotations

import json
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from slurm_cluster import CHECKOUT, SlurmCluster

pytestmark = pytest.mark.timeout(300)


@pytest.mark.parametrize(
    ("via", "setting", "status", "said"),
    [
        ("sbatch", "slurm.cpus_per_task=32", 2, "32 is more than any node of partition debug has: 8"),
        ("sbatch", "slurm.gpus_per_node=5", 2, "5 is more than any node of partition debug has: 4"),
        ("sbatch", "slurm.nodes=4", 2, "4 is more than partition debug has"),
        ("sbatch", "slurm.partition=debugg", 2, "Did you mean debug?"),
        ("sbatch", "slurm.constraint=nosuch", 3, "What to do: slurm.constraint: sinfo -o '%P %f'"),
        ("submitit", "slurm.constraint=nosuch", 3, "What to do: slurm.constraint: sinfo -o '%P %f'"),
    ],
)
def test_a_job_that_could_never_start_is_refused(
    cluster: SlurmCluster, tmp_path: Path, via: str, setting: str, status: int, said: str
) -> None:
    job = str(CHECKOUT / "job_templates" / "cpu.yaml")
    asked = ("submit", job, f"--via={via}", "--set", setting, "--set", f"runs_dir={tmp_path / 'runs'}")
    done = cluster.cli(*asked, check=False, timeout=250)
    assert (done.returncode, said in done.stderr) == (status, True), done.stderr
    assert not (tmp_path / "runs").exists()


def test_commands_given_at_once_or_from_a_folder_that_is_gone(cluster: SlurmCluster, tmp_path: Path) -> None:
    job = str(CHECKOUT / "job_templates" / "cpu.yaml")
    settings = ("--set", "slurm.extra.hold=true", "--set", f"runs_dir={tmp_path / 'runs'}")
    submit = ("submit", job, "--json", "--no-check", *settings)
    with ThreadPoolExecutor(4) as pool:
        submitted = list(pool.map(lambda _: cluster.cli(*submit, timeout=200), range(2)))
        answers = [json.loads(done.stdout.splitlines()[-1]) for done in submitted]
        assert len({answer["directory"] for answer in answers}) == len({a["slurm_job_id"] for a in answers}) == 2
        run = answers[0]["directory"]
        cluster.cli("cancel", run, timeout=200)
        cluster.wait_for_state(int(answers[0]["slurm_job_id"]), "CANCELLED")
        resumed = list(pool.map(lambda _: cluster.cli("resume", run, check=False, timeout=200), range(4)))
    assert sorted(done.returncode for done in resumed) == [0, 2, 2, 2], resumed
    why = ("resume", "continues by itself", "is HELD")  # the last two if the job is in the queue by then
    refusals = [done.stderr for done in resumed if done.returncode]
    assert all(any(words in said for words in why) for said in refusals), refusals
    assert len(cluster.queue()) == 2

    gone = f'mkdir {tmp_path}/gone && cd {tmp_path}/gone && rmdir ../gone && exec "$@"'
    done = cluster.call("bash", "-c", gone, "-", sys.executable, "-m", "cluster_ddp", *submit, timeout=200)
    assert done.returncode == 2 and "folder" in done.stderr and "Traceback" not in done.stderr, done.stderr
    assert len(cluster.queue()) == 2


@pytest.mark.parametrize("words", [("submit",), ("sweep", "--grid", "train.lr=1e-2,1e-3")])
def test_jobs_of_a_submission_that_was_killed_are_seen_and_cancelled(
    cluster: SlurmCluster, tmp_path: Path, words: tuple[str, ...]
) -> None:
    """Whoever submits is killed when Slurm has the job, and before he hears of it."""
    job, runs = str(CHECKOUT / "job_templates" / "cpu.yaml"), tmp_path / "runs"
    sbatch = tmp_path / "bin" / "sbatch"
    sbatch.parent.mkdir()
    path = cluster.env["PATH"]
    sbatch.write_text(f'#!/bin/bash\nPATH={path} sbatch "$@" >/dev/null\nkill -KILL $PPID\n')
    sbatch.chmod(0o755)
    settings = ("--set", "slurm.extra.hold=true", "--set", f"runs_dir={runs}")
    killed = {**cluster.env, "PATH": f"{sbatch.parent}:{path}"}
    done = cluster.cli(words[0], job, "--no-check", *words[1:], *settings, check=False, timeout=200, env=killed)
    assert done.returncode == -signal.SIGKILL, done.stderr
    jobs = set(cluster.run("squeue", "--noheader", "--me", "--array", "--format=%i").split())
    (folder,) = runs.iterdir()
    found = json.loads(cluster.cli("status", str(folder), "--json", timeout=200).stdout)
    rows = found if isinstance(found, list) else [found]
    assert {row["slurm_job_id"] for row in rows} == jobs and {row["state"] for row in rows} == {"HELD"}, rows
    cluster.cli("cancel", str(folder), timeout=200)
    assert cluster.queue() == []


def test_the_first_files_run_as_they_are(cluster: SlurmCluster, tmp_path: Path) -> None:
    env = {**cluster.env, "CLUSTER_DDP_CONFIG": str(tmp_path / "config/site.yaml"), "SCRATCH": str(tmp_path)}
    cluster.cli("init", cwd=tmp_path, env=env)
    done = cluster.cli("submit", "job.yaml", "--json", cwd=tmp_path, env=env, timeout=250)
    answer = json.loads(done.stdout.splitlines()[-1])
    assert answer["state"] == "PENDING"
    assert Path(answer["directory"]).parent == tmp_path / "cluster_ddp_runs"
    cluster.wait_for_state(int(answer["slurm_job_id"]), "RUNNING")
    cluster.cli("cancel", answer["directory"], cwd=tmp_path, env=env, check=False)
