from __future__ import annotations

import subprocess
import sys

import pytest

from cluster_ddp.job import JobSpec
from cluster_ddp.launch.torchrun.command import fill_in, option, torchrun_command, trains_a_task

TASK = JobSpec(name="a", task="cluster_ddp.tasks.digits:Digits", launch={"max_restarts": 2, "join_timeout": 90})
SCRIPT = JobSpec(name="a", script="/home/me/train.py", args=("--log-dir={log_dir}", "{is_host}", "--nnodes=9"))


def line(spec: JobSpec) -> list[str]:
    return torchrun_command(spec, run_directory="/runs/r", nodes=2, procs=4, rdzv_id="7.0", endpoint="n1:20007")


def test_the_line_holds_what_a_rendezvous_needs() -> None:
    command = line(TASK)
    assert command[0] == "torchrun"
    assert option(command, "--nnodes") == "2"
    assert option(command, "--nproc-per-node") == "4"
    assert option(command, "--rdzv-backend") == "c10d"
    assert option(command, "--rdzv-endpoint") == "n1:20007"
    assert option(command, "--rdzv-conf") == "is_host={is_host},join_timeout=90,last_call_timeout=30"
    assert option(command, "--max-restarts") == "2"
    assert command[-3:] == ["-m", "cluster_ddp.train", "/runs/r"]
    with pytest.raises(ValueError, match="--nothing"):
        option(command, "--nothing")


def test_only_options_that_torch_2_4_has_are_in_the_line() -> None:
    of_torch_2_4 = {
        "--nnodes", "--nproc-per-node", "--rdzv-id", "--rdzv-backend", "--rdzv-endpoint", "--rdzv-conf", "--local-addr",
        "--max-restarts", "--log-dir", "--redirects",
    }  # fmt: skip
    assert {word.partition("=")[0] for word in line(TASK) if word.startswith("--")} <= of_torch_2_4


def test_a_node_fills_in_its_own_values_and_leaves_the_script_alone() -> None:
    filled = fill_in(line(SCRIPT), is_host=True, local_addr="10.0.0.1", log_dir="/runs/r/x")
    assert filled[:3] == [sys.executable, "-m", "cluster_ddp.launch.torchrun"]
    assert "--rdzv-conf=is_host=1,join_timeout=600,last_call_timeout=30" in filled
    assert "--local-addr=10.0.0.1" in filled
    assert "--log-dir=/runs/r/x" in filled
    assert filled[-4:] == ["/home/me/train.py", "--log-dir={log_dir}", "{is_host}", "--nnodes=9"]
    other = fill_in(line(SCRIPT), is_host=False, local_addr="10.0.0.2", log_dir="/runs/r/y")
    assert "--rdzv-conf=is_host=0,join_timeout=600,last_call_timeout=30" in other
    assert option(line(SCRIPT), "--nnodes") == "2"


def test_tasks_and_scripts_are_told_apart() -> None:
    assert trains_a_task(line(TASK))
    assert not trains_a_task(line(SCRIPT))


def test_an_agent_loads_what_computes_with_tensors_without_data_only_where_it_is_used() -> None:
    program = """
import sys
from cluster_ddp.launch.torchrun.__main__ import defer_computing
defer_computing()
from torch.distributed import run
name = "torch._meta_registrations"
deferred = sys.modules[name]
assert not hasattr(deferred, "__file__") and "register_meta" not in vars(deferred)
from torch._meta_registrations import register_meta
assert register_meta is sys.modules[name].register_meta and sys.modules[name] is not deferred
"""
    subprocess.run([sys.executable, "-c", program], check=True)
