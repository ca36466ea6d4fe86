"""docs/from-your-guide.md tells the truth: its functions exist, its launch lines run, its variables do what it says."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest
from documented import PROJECT, Call, finish
from light_agent import LIGHT_AGENT

import cluster_ddp.train
from cluster_ddp.job import NetworkSpec
from cluster_ddp.launch.ports import free_port
from cluster_ddp.network import resolve
from cluster_ddp.train import Task

PAGE = (PROJECT / "docs" / "from-your-guide.md").read_text()
ROWS = [[cell.strip() for cell in line.strip("|").split("|")] for line in PAGE.splitlines() if line.startswith("| ")]
LAUNCH = PAGE.split("## Launch commands")[1]
TASK = """\
task: cluster_ddp.tasks.crowd_bt:CrowdBT
train: {epochs: 1, batch_size: 16}
"""
JOB = f"""\
name: job
{TASK}\
network: {{profile: ethernet, ib_disable: false}}
"""


def section(title: str) -> str:
    return PAGE.split(f"## {title}\n")[1].split("\n## ")[0]


@pytest.fixture
def job(tmp_path: Path) -> Path:
    (tmp_path / "job.yaml").write_text(JOB)
    return tmp_path


def test_functions_exist() -> None:
    named = re.findall(r"`(\w+)\((?:[\w, ]*)\)`", " ".join(row[1] for row in ROWS))
    methods = {"model", "train_data", "eval_data", "loss", "evaluate", "optimizer"}
    assert methods <= set(named) & set(vars(Task))
    functions = set(named) - methods
    assert len(functions) > 6
    assert [name for name in functions if not hasattr(cluster_ddp.train, name)] == []


def test_launch_lines_are_commands_that_run(
    job: Path, ask: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = re.findall(r"\| `cluster-ddp (.*?)` \|", LAUNCH)
    assert len(lines) > 8
    monkeypatch.setattr("cluster_ddp.submit.machine.all_devices", lambda: ["0", "1", "2", "3"])
    for line in set(lines):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3" if "--gpus" in line else "")
        assert "torchrun" in ask(*shlex.split(line), "--dry-run")


def test_the_old_launcher_and_nodes_by_hand_still_start_a_script(job: Path, call: Call) -> None:
    script = (
        "from cluster_ddp.train import cleanup_distributed, setup_distributed\n"
        "print(f'ranks {setup_distributed()[2]}')\n"  # at once: the ranks share the terminal
        "cleanup_distributed()\n"
    )
    (job / "train.py").write_text(script)
    assert "--local-rank" in LAUNCH
    (job / "old.py").write_text(f"import sys\n{script}print(sys.argv)\n")
    meet = "--nnodes=2", "--nproc_per_node=1", "--master_addr=127.0.0.1", f"--master_port={free_port()}"
    old = call("torch.distributed.launch", "--node_rank=0", *meet, "old.py")
    new = call("torch.distributed.run", "--node_rank=1", *meet, "train.py")
    for node, arguments in ((old, 1), (new, 0)):
        said = finish(node)
        assert (said.count("ranks 2"), said.count("--local-rank=0")) == (1, arguments), said


def test_variables_are_translated_as_the_page_says() -> None:
    env = {"NCCL_TIMEOUT": "1800", "NCCL_BLOCKING_WAIT": "1", "NCCL_ASYNC_ERROR_HANDLING": "3"}
    dead = re.findall(r"NCCL_\w+", next(row[0] for row in ROWS if row[1] == "omit them"))
    assert len(dead) == 3
    plan = resolve(NetworkSpec(socket_ifname="ib0", debug="detail", env=env | dict.fromkeys(dead, "1")))
    assert plan.timeout == 1800
    assert not {*dead, *env} & plan.variables.keys()
    assert all(any(name in remark for remark in plan.remarks) for name in (*dead, *env))
    expected = {"GLOO_SOCKET_IFNAME": "ib0", "TORCH_DISTRIBUTED_DEBUG": "DETAIL", "TORCH_NCCL_BLOCKING_WAIT": "1"}
    assert expected.items() <= plan.variables.items()
    assert resolve(NetworkSpec(ib_disable=True)).variables["NCCL_IB_DISABLE"] == "1"
    for level in ("warn", "info"):
        assert resolve(NetworkSpec(debug=level)).variables["NCCL_DEBUG"] == level.upper()


def test_an_explicit_key_beats_what_was_exported_which_beats_the_profile(
    job: Path, call: Call, ask: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (job / "job.yaml").write_text(JOB.replace(TASK, "script: train.py\n"))
    (job / "train.py").touch()
    keys = "--set=network.profile=ethernet", "--set=network.ib_disable=true"
    exported = {"NCCL_IB_DISABLE": "0", "NCCL_SOCKET_NTHREADS": "2", "NCCL_TIMEOUT": "900"}
    said = finish(call("cluster_ddp", "local", "job.yaml", *keys, PYTHONPATH=LIGHT_AGENT, **exported))
    (report,) = job.glob("runs/*/attempts/000/environment-0.json")
    variables = json.loads(report.read_text())["variables"]
    assert (variables["NCCL_IB_DISABLE"], variables["NCCL_SOCKET_NTHREADS"]) == ("1", "2")
    for name, value in exported.items():
        monkeypatch.setenv(name, value)
    script = ask("submit", "job.yaml", *keys, "--dry-run")
    assert "export NCCL_IB_DISABLE=1" in script
    assert 'export NCCL_SOCKET_NTHREADS="${NCCL_SOCKET_NTHREADS:-4}"' in script
    dry = ask("local", "job.yaml", *keys, "--dry-run")
    for answer in (said, script, dry):
        assert all(answer.count(f"{name}={value} is exported") == 1 for name, value in exported.items()), answer
    assert "NCCL_IB_DISABLE=1" in dry
    assert "NCCL_SOCKET_NTHREADS=4" not in dry


def test_every_variable_of_the_page_is_in_a_row_of_its_own() -> None:
    first = " ".join(line.split("|")[1] for line in section("Variables").splitlines() if line.startswith("| `"))
    for name in ("MASTER_ADDR", "WORLD_SIZE", "CUDA_VISIBLE_DEVICES", "NCCL_TIMEOUT", "NCCL_DEBUG", "NCCL_P2P_LEVEL"):
        assert name in first
