"""What a valid job file means."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from cluster_ddp import job as room
from cluster_ddp.job import JobFileError, dump_resolved, load_job, load_resolved, load_run_job, public
from cluster_ddp.network import resolve

WriteJob = Callable[..., Path]

EVERYTHING = """
name: digits
runs_dir: runs
task: cluster_ddp.tasks.digits:Digits
params: {width: 32, nested: {a: [1, 2.5, null, "x"]}, none: }
slurm: {partition: gpu, account: 0123, qos: high, nodes: 2, gpus_per_node: "a100:4", gpu_option: gres,
        cpus_per_task: 32, mem: 200G, time: "1-12:00:00", constraint: "a|b", exclude: "n[1-3]", nodelist: n4,
        reservation: r, extra: {exclusive: , mail-type: END, nice: 5, contiguous: true}}
launch: {procs_per_node: 4, setup: ["module load cuda", "it's"], python: python3.11, port: 20000, join_timeout: 10m,
         max_restarts: 2, hang_timeout: 5m,
         container: {image: "docker://a/b:c", runtime: pyxis, mounts: ["/data:/data:ro"]}}
network: {profile: ethernet, backend: nccl, ib_disable: false, socket_ifname: "^lo", timeout: 1h, debug: off,
          env: {NCCL_IB_TC: 0106, A: true, B: "", C: "a b\\nc"}}
requeue: {signal: sigusr2, warning: 5m, max_requeues: 0, max_without_progress: 1}
train: {epochs: 3, batch_size: 8, global_batch: 64, accumulation_steps: 1, lr: 1e-3, lr_scaling: sqrt, base_batch: 32,
        warmup_steps: 5, schedule: step, min_lr: 0, decay_every: 10, decay_factor: 0.5, weight_decay: 0,
        precision: fp16, scaler: {initial: 1024, growth_interval: 10, growth_factor: 3, backoff_factor: 0.1},
        tf32: true, clip_norm: 1, sync_batchnorm: true, ema_decay: 0.99, grad_checkpointing: false,
        find_unused_parameters: true, static_graph: true, bucket_mb: 1, gradient_as_bucket_view: false, comm_hook: bf16,
        compile: true, deterministic: true, seed: 7, workers: 2, drop_last: false,
        evaluate_every: 50 steps, max_bad_steps: 2, profile: {steps: 10-20}}
checkpoint: {every_steps: 5, every_minutes: 0.5, keep_last: 1, keep_every: 100,
             keep_best: {metric: val/loss, mode: min}, background: false, when_busy: skip, ranks_writing: one}
log: {every_steps: 1, sample_ids: true, tensorboard: true, wandb: {project: p, mode: offline, init_timeout: 60}}
"""


def test_three_lines_are_a_job(job: WriteJob) -> None:
    spec = load_job(str(job("task: cluster_ddp.tasks.digits:Digits\ntrain:\n  epochs: 2\n", "my job.yaml"))).spec
    assert (spec.name, spec.train.epochs, spec.train.batch_size, spec.world_size) == ("my-job", 2, 32, 1)
    assert load_job(str(job(""))).spec.train.epochs == 1
    assert (spec.requeue.warning, resolve(spec.network).timeout, spec.launch.join_timeout) == (120, 1800, 600)
    assert (spec.checkpoint.every_minutes, spec.checkpoint.keep_last, spec.log.wandb) == (10.0, 3, None)


def test_every_key_of_the_design(job: WriteJob, tmp_path: Path) -> None:
    spec = load_job(str(job(EVERYTHING))).spec
    assert spec.runs_dir == str(tmp_path / "runs")
    assert spec.params == {"width": 32, "nested": {"a": [1, 2.5, None, "x"]}, "none": None}
    assert (spec.slurm.account, spec.slurm.time) == ("0123", 36 * 3600)
    assert (spec.slurm.gpu_count, spec.slurm.gpu_type) == (4, "a100")
    assert spec.slurm.extra == {"exclusive": None, "mail-type": "END", "nice": 5, "contiguous": True}
    assert spec.launch.setup == ("module load cuda", "it's")
    assert (spec.launch.hang_timeout, spec.launch.python) == (300, "python3.11")
    assert spec.network.env == {"NCCL_IB_TC": "0106", "A": "true", "B": "", "C": "a b\nc"}
    assert spec.network.debug == "off"
    assert spec.requeue.signal == "USR2"
    assert (spec.train.lr, spec.train.evaluate_every) == (0.001, 50)
    assert spec.train.profile is not None
    assert spec.train.profile.steps == (10, 20)
    assert spec.log.wandb is not None
    assert spec.log.wandb.init_timeout == 60
    assert spec.world_size == 8


def test_the_resolved_job_reads_back_as_itself(job: WriteJob, tmp_path: Path) -> None:
    for text in (EVERYTHING, "", "script: job.yaml\nargs: [--lr, 1e-3, 0123, 'a b', '', \"a\\nb\"]\n"):
        spec = load_job(str(job(text))).spec
        resolved = tmp_path / "resolved.yaml"
        resolved.write_text(dump_resolved(spec))
        assert load_resolved(resolved) == spec
        assert dump_resolved(load_resolved(resolved)) == dump_resolved(spec)


@pytest.mark.filterwarnings("error")
def test_a_job_with_every_setting_is_dumped_without_a_warning(job: WriteJob) -> None:
    """A tuple among its settings once made pydantic warn on every rank, where the digest of the job is taken."""
    spec = load_job(str(job(EVERYTHING))).spec
    assert '"steps":[10,20]' in spec.model_dump_json()
    assert spec.model_dump()["train"]["profile"] == {"steps": (10, 20)}


def test_a_resolved_job_is_not_merged_with_anything(job: WriteJob) -> None:
    with pytest.raises(JobFileError, match="extends: is not a job file key"):
        load_resolved(job("extends: multi-node\nname: x\ntask: a:B\n"))


def test_where_a_text_is_expected_a_number_is_taken_as_written(job: WriteJob) -> None:
    spec = load_job(str(job("script: job.yaml\nargs: [1e-3, 007, 0x10, 1.50, -1]\nslurm: {mem: 4000}\n"))).spec
    assert spec.args == ("1e-3", "007", "0x10", "1.50", "-1")
    assert spec.slurm.mem == "4000"


@pytest.mark.parametrize(
    "text",
    [
        "runs_dir: 3",
        "script: 3",
        "launch: {python: 3.11}",
        "launch: {container: {image: 3}}",
        "checkpoint: {keep_best: {metric: 1}}",
        "notify: {command: 7}",
        "network: {socket_ifname: 0}",
    ],
)
def test_a_number_is_no_path_and_no_command(job: WriteJob, text: str) -> None:
    program = "" if text.startswith("script") else "task: cluster_ddp.tasks.digits:Digits\n"
    with pytest.raises(JobFileError, match=r"job.yaml:\d: [a-z_.]+: [0-9.]+ is a number\n    allowed: .* in quotes"):
        load_job(str(job(f"{program}{text}\n")))


def test_a_number_in_quotes_is_a_path(job: WriteJob) -> None:
    file = job('task: cluster_ddp.tasks.digits:Digits\nruns_dir: "3"\nlaunch: {python: "3.11"}\n')
    spec = load_job(str(file)).spec
    assert (spec.runs_dir, spec.launch.python) == (str(file.parent / "3"), "3.11")
    file.write_text(dump_resolved(spec))
    assert load_resolved(file) == spec


def test_memory_that_sbatch_does_not_take_is_refused_but_not_in_a_run_that_there_is(job: WriteJob) -> None:
    file = job("task: cluster_ddp.tasks.digits:Digits\nslurm: {mem: 1.5G}\n")
    with pytest.raises(JobFileError, match=r'job.yaml:2: slurm.mem: a fraction, .*\n    allowed: .* "1536M"'):
        load_job(str(file))
    file.write_text(f"name: x\n{file.read_text()}")
    assert load_run_job(file, ["train.workers=1"]).spec.slurm.mem == "1.5G"


@pytest.mark.parametrize(("memory", "warned"), [("64", True), ("0", False), ("4000", False), ("64G", False)])
def test_so_few_megabytes_are_told(job: WriteJob, memory: str, warned: bool) -> None:
    text = f"task: cluster_ddp.tasks.digits:Digits\nslurm: {{mem: {memory}}}\n"
    warnings = load_job(str(job(text)), check_target=False).warnings
    assert [" is 64 MB on each node, as for sbatch; for gigabytes: 64G" in text for text in warnings] == [True] * warned


def test_nothing_means_the_default(job: WriteJob) -> None:
    spec = load_job(str(job("slurm: {partition: , nodes: , time: ~}\ntrain:\nnetwork: {env: {A: }}\n"))).spec
    assert (spec.slurm.partition, spec.slurm.nodes, spec.slurm.time, spec.network.env) == (None, 1, None, {})


def test_paths_are_relative_to_the_file_that_names_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "my_task.py").write_text("class Mine: ...\n")
    (tmp_path / "base" / "base.yaml").write_text("task: my_task.py:Mine\nlaunch: {python: venv/bin/python}\n")
    (tmp_path / "job.yaml").write_text(
        "extends: base/base.yaml\nruns_dir: ../runs\nlaunch: {container: {image: a.sif, mounts: [data]}}\n"
    )
    monkeypatch.chdir("/")
    spec = load_job(str(tmp_path / "job.yaml"), ["launch.container.image=b.sif"]).spec
    assert spec.task == f"{tmp_path}/base/my_task.py:Mine"
    assert spec.launch.python == f"{tmp_path}/base/venv/bin/python"
    assert spec.runs_dir == str(tmp_path.parent / "runs")
    assert spec.launch.container is not None
    assert spec.launch.container.image == "/b.sif"
    assert spec.launch.container.mounts == ("data",)


def test_home_and_variables_in_paths(
    job: WriteJob, monkeypatch: pytest.MonkeyPatch, errors_of: Callable[..., str]
) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setenv("SCRATCH", "/scratch/me")
    assert load_job(str(job("runs_dir: ~/runs"))).spec.runs_dir == "/home/me/runs"
    assert load_job(str(job("runs_dir: ${SCRATCH}/runs"))).spec.runs_dir == "/scratch/me/runs"
    assert load_job(str(job('runs_dir: "/a b/$(touch pwned);x"'))).spec.runs_dir == "/a b/$(touch pwned);x"
    assert "job.yaml:1: $NOWHERE/runs: the variable $NOWHERE is not set" in errors_of("runs_dir: $NOWHERE/runs")


def by_another_version(job: WriteJob, **keys: str) -> Path:
    """A run's job as a version with other keys writes it."""
    resolved = dump_resolved(load_job(str(job("train: {lr: 0.5}"))).spec)
    for section, line in keys.items():
        resolved = resolved.replace(f"\n{section}:\n", f"\n{section}:\n  {line}\n") if section != "top" else resolved
    return job(resolved + keys.get("top", ""), "resolved.yaml")


def test_a_run_of_another_version_goes_on_without_the_keys_that_this_one_does_not_know(job: WriteJob) -> None:
    file = by_another_version(job, launch="rescue: {after: 3}", train="mixup: 0.0", top="alerts: [me]\n")
    assert load_resolved(file) == load_job(str(job("train: {lr: 0.5}"))).spec
    file = by_another_version(job, launch="rescue: {after: 3}", train="mixup: 0.0", top="alerts: [me]\n")
    assert load_run_job(file, ["train.lr=0.25"]).spec.train.lr == 0.25
    remarks = load_run_job(file, ()).remarks
    assert len(remarks) == 3
    for name in ("launch.rescue", "train.mixup", "alerts"):
        assert any(f"{name}: cluster_ddp" in remark and f"{file}:" in remark for remark in remarks)


def test_but_not_without_one_that_decides_what_is_trained(job: WriteJob) -> None:
    file = by_another_version(job, train="mixup: 0.2")
    for load in (load_resolved, load_run_job):
        with pytest.raises(JobFileError, match=r"resolved.yaml:\d+: train.mixup: .* does not know this setting"):
            load(file)


def test_a_key_that_is_unknown_is_an_error_everywhere_else(job: WriteJob) -> None:
    file = by_another_version(job)
    with pytest.raises(JobFileError, match="mixup"):
        load_run_job(file, ["train.mixup=0.0"])


def test_loading_reads_no_torch_and_leaves_the_environment_alone() -> None:
    code = (
        "import os, sys\nbefore = dict(os.environ)\n"
        "from cluster_ddp.job import load_job\nload_job('multi-node')\n"
        "assert dict(os.environ) == before\n"
        "heavy = {'torch', 'numpy', 'submitit', 'wandb', 'rich'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_loading_searches_the_installed_packages_for_no_plugins_of_pydantic() -> None:
    code = (
        "import importlib.metadata, pydantic\n"
        "searched = []\n"
        "importlib.metadata.entry_points = lambda **group: searched.append(group) or ()\n"
        "from cluster_ddp.job import load_job\nload_job('multi-node')\n"
        "assert not searched, f'pydantic {pydantic.VERSION} looks for its plugins elsewhere'\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_errors_and_templates_come_without_the_models() -> None:
    code = (
        "import sys\nfrom cluster_ddp.job import ClusterDDPError, template_names\n"
        "from cluster_ddp.job.errors import JobFileError\nassert template_names()\n"
        "heavy = {'pydantic', 'yaml'} & set(sys.modules)\nassert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_every_public_name_can_be_imported() -> None:
    names = [name for name in vars(public) if not name.startswith("_")]
    assert "JobSpec" in names and "load_job" in names
    for name in names:
        assert getattr(room, name).__module__.startswith("cluster_ddp.job.")
    with pytest.raises(AttributeError, match="nonsense"):
        room.nonsense  # noqa: B018
