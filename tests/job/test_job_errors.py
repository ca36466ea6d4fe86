"""Each error gets one clear message: file, line, key, value, what is allowed, what was meant."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

Errors = Callable[..., str]


@pytest.mark.parametrize(
    ("text", "line", "says"),
    [
        ("slurm:\n  time: banana\n", 2, ["slurm.time", '"banana"', "04:00:00", "90m"]),
        ("slurm:\n  tmie: 3\n", 2, ["slurm.tmie", "did you mean: time", "allowed in slurm: partition,"]),
        ("train:\n  learning_rate: 0.1\n", 2, ["train.learning_rate", "did you mean: lr\n"]),
        ("slumr: {nodes: 2}\n", 1, ["slumr", "did you mean: slurm", "extends"]),
        ("partition: gpu\n", 1, ["did you mean: slurm.partition"]),
        ("slurm:\n\n  nodes: two\n", 3, ["slurm.nodes", '"two"', "a whole number"]),
        ("slurm: {nodes: 0}\n", 1, ["slurm.nodes", "0 is too small", "at least 1"]),
        ("slurm: {nodes: 2.0}\n", 1, ["slurm.nodes", "a whole number"]),
        ("slurm: {nodes: 1e30}\n", 1, ["slurm.nodes", "1e+30 is too large", "a whole number"]),
        ("slurm: {time: 99999999999999h}\n", 1, ["slurm.time", "is not between one second and ten years"]),
        ("slurm: {time: 9999999999}\n", 1, ["slurm.time", "is not between one second and ten years"]),
        ("requeue: {warning: 99999999999999h}\n", 1, ["requeue.warning", "is not between one second and ten years"]),
        ("slurm: {nodes: true}\n", 1, ["slurm.nodes", "true", "a whole number"]),
        ("slurm: [1]\n", 1, ["slurm", "a list is not a mapping", "allowed in slurm: partition"]),
        ("slurm: 3\n", 1, ["slurm", "3 is not a mapping"]),
        ("slurm: {partition: [a]}\n", 1, ["slurm.partition", "a list is not a string"]),
        ("slurm: {partition: ''}\n", 1, ["slurm.partition", "is empty"]),
        ('slurm: {partition: "a\\nb"}\n', 1, ["slurm.partition", "line break"]),
        ("slurm: {mem: lots}\n", 1, ["slurm.mem", '"200G"']),
        ("slurm: {gpus_per_node: four}\n", 1, ["slurm.gpus_per_node", '"four"', "a100:4"]),
        ("slurm: {gpus_per_node: -1}\n", 1, ["slurm.gpus_per_node", "-1"]),
        ("slurm: {gpu_option: gpu-per-node}\n", 1, ["did you mean: gpus-per-node"]),
        ("name: a b\n", 1, ["name", '"a b"', 'such as "a-b"']),
        ("name: $(touch pwned)\n", 1, ["name", "cannot name a job"]),
        ("name: -x\n", 1, ["name", "cannot name a job"]),
        (f"name: {'x' * 65}\n", 1, ["name", "at most 64"]),
        ("task: Digits\n", 1, ["task", "package.module:Class"]),
        ("train:\n  lr: yes\n", 2, ["train.lr", '"yes"', "a number"]),
        ("train: {lr: 0}\n", 1, ["train.lr", "more than 0"]),
        ("train: {tf32: yes}\n", 1, ["train.tf32", "true or false"]),
        ("train: {precision: float16}\n", 1, ["train.precision", "fp32, fp16, bf16 or auto"]),
        ("train: {evaluate_every: never}\n", 1, ["train.evaluate_every", '"500 steps"']),
        ("train: {profile: {steps: 20-10}}\n", 1, ["train.profile.steps", '"10-20"']),
        ("train: {seed: 99999999999999999999999}\n", 1, ["train.seed", "is too large"]),
        ("train: {ema_decay: 1.5}\n", 1, ["train.ema_decay", "less than 1"]),
        ("requeue: {signal: KILL}\n", 1, ["requeue.signal", '"KILL"', "USR1"]),
        ("requeue: {warning: 0}\n", 1, ["requeue.warning", "ten years"]),
        ("launch: {port: 80}\n", 1, ["launch.port", "from 1024 to 65535"]),
        ("launch: {procs_per_node: 0}\n", 1, ["launch.procs_per_node", "auto, or a whole number at least 1"]),
        ("launch:\n  setup:\n    - ok\n    - [x]\n", 4, ["launch.setup.1", "a list is not a string"]),
        ("launch: {setup: module load cuda}\n", 1, ["launch.setup", "is not a list"]),
        ("launch: {container: {runtime: enroot}}\n", 1, ["launch.container.image", "is missing"]),
        ("network: {env: {A-B: 1}}\n", 1, ["network.env.A-B", "name of a variable"]),
        ("network: {env: [A]}\n", 1, ["network.env", "is not a mapping"]),
        ("checkpoint: {keep_best: {mode: max}}\n", 1, ["checkpoint.keep_best.metric", "is missing"]),
        ("train: {lr: 1" + "0" * 500 + "}\n", 1, ["train.lr"]),
        ("log: {every_steps: 1" + "0" * 500 + "}\n", 1, ["log.every_steps", "501 characters"]),
    ],
)
def test_one_error(errors_of: Errors, tmp_path: Path, text: str, line: int, says: list[str]) -> None:
    message = errors_of(text)
    assert message.startswith(f"{tmp_path / 'job.yaml'}:{line}: "), message
    for part in says:
        assert part in message, message


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("train: {epochs: 3, steps: 10}\n", ["train.steps", "10 contradicts train.epochs: 3"]),
        ("train: {batch_size: 7, global_batch: 32}\n", ["train.global_batch", "not divisible by train.batch_size: 7"]),
        ("train: {accumulation_steps: 3, global_batch: 32}\n", ["train.global_batch", "train.accumulation_steps: 3"]),
        ("slurm: {nodes: 3}\ntrain: {global_batch: 32}\n", ["train.global_batch", "among 3 ranks", "2, 4, 8"]),
        ("task: a:B\nscript: train.py\n", ["script", "contradicts task"]),
        ("script: train.py\nparams: {a: 1}\n", ["params", "go to a task"]),
        ("task: a:B\nargs: [x]\n", ["args", "go to a script"]),
        ("script:\n", ["neither task nor script"]),
        ("train: {lr_scaling: linear}\n", ["train.lr_scaling", "train.base_batch"]),
        ("train: {lr: 0.1, min_lr: 0.2}\n", ["train.min_lr", "more than train.lr"]),
        ("train: {steps: 10, warmup_steps: 20}\n", ["train.warmup_steps", "more than train.steps: 10"]),
        ("slurm: {time: 1}\nrequeue: {warning: 2m}\n", ["requeue.warning", "before the job starts"]),
        ('slurm: {time: 4h, extra: {time-min: "00:01:30"}}\n', ["requeue.warning", "less than slurm.extra.time-min"]),
        ("slurm: {gpus_per_node: 2}\nlaunch: {procs_per_node: 4}\n", ["launch.procs_per_node", "4 is more than the 2"]),
        ("network: {profile: infiniband, ib_disable: true}\n", ["network.ib_disable", "contradicts"]),
        ("slurm: {mem: 10G, extra: {mem-per-cpu: 2G}}\n", ["slurm.extra.mem-per-cpu", "together with slurm.mem"]),
    ],
)
def test_settings_that_exclude_each_other(errors_of: Errors, text: str, says: list[str]) -> None:
    message = errors_of(text)
    for part in says:
        assert part in message, message


def test_all_errors_are_reported_at_once_in_the_order_of_the_file(errors_of: Errors) -> None:
    message = errors_of("train: {lr: x}\nslurm:\n  nodes: 0\n  tiem: 1\nlog: 3\n", "train.seed=-1")
    lines = [line for line in message.splitlines() if not line.startswith("    ")]
    assert lines[0] == "5 errors:"
    assert [line.split(": ")[1] for line in lines[1:]] == ["train.lr", "slurm.nodes", "slurm.tiem", "log", "train.seed"]
    assert lines[-1].startswith("--set train.seed=-1: ")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{signal: USR1}", "use requeue.signal and requeue.warning"),
        ("{output: x}", "the output goes to the run directory"),
        ("{no-kill: true}", "a job that loses a node has to end"),
        ("{job-name: x}", "use name"),
        ("{clusters: big}", "query the cluster of this login node"),
        ("{gpus: 3}", "use slurm.gpus_per_node"),
        ("{gres: 'gpu:4'}", "use slurm.gpus_per_node with gpu_option: gres"),
        ("{gres: 'lustre:1,gpu:4'}", "use slurm.gpus_per_node with gpu_option: gres"),
        ("{ntasks-per-node: 4}", "use launch.procs_per_node"),
        ("{requeue: true}", "use requeue.max_requeues"),
        ("{export: ALL}", "use network.env"),
        ("{array: 0-3}", "one run is one job; to vary settings use cluster-ddp sweep"),
        ("{--mail-user: x}", "write mail-user"),
        ("{mail_user: x}", "write mail-user"),
        ("{'a b': x}", "an option as sbatch(1) names it"),
        ("{arra: 0-3}", "is short for array to sbatch"),
        ("{outpu: x}", "is short for output"),
        ("{wra: x}", "is short for wrap"),
        ("{expor: s3cr3t}", "is short for export"),
        ("{gre: 'gpu:4'}", "is short for gres"),
        ("{comm: x}", "is short for comment"),
        ("{comment: [x]}", "a string, a number, true, false or nothing"),
        ('{comment: "a\\nb"}', "a string of one line"),
        ("[exclusive]", "is not a mapping"),
    ],
)
def test_sbatch_options_with_a_place_of_their_own(errors_of: Errors, text: str, says: str) -> None:
    message = errors_of(f"slurm:\n  extra: {text}\n")
    assert "job.yaml:2: slurm.extra" in message
    assert says in message


@pytest.mark.parametrize(
    "line",
    [
        "#SBATCH --nodes=64",
        "  #SBATCH --partition=big",
        "#PBS -l nodes=64",
        "#SLURM -N 9",
        "#BSUB -n 9",
        "true\\n#SBATCH -N 9",
    ],
)
def test_a_line_of_setup_is_no_order_to_sbatch(errors_of: Errors, line: str) -> None:
    """submitit writes these lines directly behind its own directives, where sbatch obeys them."""
    message = errors_of(f'launch:\n  setup:\n    - "true"\n    - "{line}"\n')
    assert "job.yaml:4: launch.setup.1: " in message and "is a directive that sbatch may obey" in message
