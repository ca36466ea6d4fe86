from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cluster_ddp.job import JobSpec
from cluster_ddp.launch import environment
from cluster_ddp.launch.logs import Tail
from cluster_ddp.launch.node import hang_dump, report
from cluster_ddp.launch.node.heartbeat import stacks_beside
from cluster_ddp.run.directory import RunDirectory
from cluster_ddp.submit.local import LocalStart

JOB = JobSpec(
    name="a",
    task="cluster_ddp.tasks.digits:Digits",
    network={"socket_ifname": "ib0", "env": {"NCCL_ALGO": "Ring"}},
    requeue={"warning": 90},
)


def made(tmp_path: Path, **base: str) -> environment.NodeEnvironment:
    attempt = RunDirectory(tmp_path).attempt(3)
    return environment.node_environment(JOB, attempt, node_rank=1, procs=2, heartbeat=Path("/dev/shm/b"), base=base)


def test_ranks_get_the_run_the_network_and_what_keeps_them_alive(tmp_path: Path) -> None:
    variables = made(tmp_path, HOME="/home/me").variables
    assert variables["HOME"] == "/home/me"
    assert variables["CLUSTER_DDP_RUN"] == str(tmp_path)
    assert variables["CLUSTER_DDP_ATTEMPT"] == "3"
    assert variables["CLUSTER_DDP_NODE"] == "1"
    assert variables["CLUSTER_DDP_HEARTBEAT"] == "/dev/shm/b"
    assert variables["NCCL_SOCKET_IFNAME"] == variables["GLOO_SOCKET_IFNAME"] == "ib0"
    assert variables["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "3"
    assert variables["PET_SIGNALS_TO_HANDLE"] == "SIGPROF"
    assert variables["PET_SHUTDOWN_TIMEOUT"] == "90"
    assert variables["TORCH_FR_DUMP_TEMP_FILE"].startswith(str(tmp_path / "attempts" / "003"))
    assert int(variables["OMP_NUM_THREADS"]) == max(1, environment.usable_cpus() // 2)


@pytest.mark.parametrize(("gpus", "workers", "threads"), [(0, 2, "8"), (2, 0, "7"), (2, 3, "4"), ("a100:2", 12, "1")])
def test_ranks_on_gpus_leave_cpus_for_their_workers_and_for_saving(
    gpus: int | str, workers: int, threads: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environment, "usable_cpus", lambda: 16)
    monkeypatch.delenv("OMP_NUM_THREADS")
    task = "cluster_ddp.tasks.digits:Digits"
    job = JobSpec.model_validate(
        {"name": "a", "task": task, "slurm": {"gpus_per_node": gpus}, "train": {"workers": workers}}
    )
    attempt = RunDirectory(tmp_path).attempt(0)
    found = environment.node_environment(job, attempt, node_rank=0, procs=2, heartbeat=Path("/dev/shm/b"), base={})
    assert found.variables["OMP_NUM_THREADS"] == threads
    (why,) = [setting.why for setting in found.settings if setting.name == "OMP_NUM_THREADS"]
    assert ("for saving" in why) == bool(gpus)
    devices = (("0", "1"),) if gpus else ((),)
    local = LocalStart(job, 1, 2, devices, hide_gpus=False, port=1, python="python")
    assert local.variables(0)["OMP_NUM_THREADS"] == threads


def test_a_set_of_strings_has_one_order_in_every_process(tmp_path: Path) -> None:
    """So that classes numbered by ``list(set(labels))`` are the same on all ranks, and after a resume."""
    base = {name: value for name, value in os.environ.items() if name != "PYTHONHASHSEED"}
    command = [sys.executable, "-c", "print(list(set('abcdefghij')))"]
    processes = [subprocess.run(command, env=made(tmp_path, **base).variables, stdout=subprocess.PIPE) for _ in "123"]
    assert len({process.stdout for process in processes}) == 1


def test_a_product_does_not_depend_on_where_its_factors_lie(tmp_path: Path) -> None:
    """What is a part of another tensor comes back from a checkpoint as a tensor of its own, which lies elsewhere."""
    program = """if True:
        import torch
        torch.manual_seed(0)
        aligned, others = torch.randn(3, 257), torch.randn(5, 257).T
        not_aligned = torch.empty(3 * 257 + 1)[1:].view(3, 257).copy_(aligned)
        assert torch.equal(aligned @ others, not_aligned @ others)
    """
    subprocess.run([sys.executable, "-c", program], env=made(tmp_path, **os.environ).variables, check=True)


def test_what_is_exported_beats_defaults_and_yields_to_the_job_and_both_are_reported(tmp_path: Path) -> None:
    found = made(tmp_path, OMP_NUM_THREADS="7", NCCL_DEBUG="INFO", NCCL_ALGO="Tree")
    assert [found.variables[name] for name in ("OMP_NUM_THREADS", "NCCL_DEBUG", "NCCL_ALGO")] == ["7", "INFO", "Ring"]
    content = report.report(found, node_rank=1, ranks=[], command=["torchrun"])
    assert content["set_before"] == {"OMP_NUM_THREADS": "7", "NCCL_DEBUG": "INFO"}
    reasons = {setting["name"]: setting["why"] for setting in content["set_by_cluster_ddp"]}
    assert reasons["NCCL_SOCKET_IFNAME"] == "network.socket_ifname"
    assert reasons["NCCL_ALGO"] == "network.env"
    assert any("NCCL_ALGO=Tree is exported, but" in remark for remark in content["remarks"])


def test_the_interface_for_gloo_yields_to_whoever_names_one(tmp_path: Path) -> None:
    attempt = RunDirectory(tmp_path).attempt(0)

    def for_gloo(network: dict[str, str], **base: str) -> str:
        job = JobSpec(name="a", task="cluster_ddp.tasks.digits:Digits", network=network)
        found = environment.node_environment(
            job, attempt, node_rank=0, procs=1, heartbeat=Path("/dev/shm/b"), base=base, gloo_interface="eth0"
        )
        return found.variables["GLOO_SOCKET_IFNAME"]

    assert for_gloo({}) == "eth0"
    assert for_gloo({"socket_ifname": "ib0"}) == "ib0"
    assert for_gloo({}, GLOO_SOCKET_IFNAME="ib1") == "ib1"


def test_on_this_machine_the_interface_is_loopback_whatever_the_job_names(tmp_path: Path) -> None:
    loopback = {"NCCL_SOCKET_IFNAME": "lo", "GLOO_SOCKET_IFNAME": "lo"}
    assert loopback.items() <= made(tmp_path, CLUSTER_DDP_LOCAL_ADDR="127.0.0.1", **loopback).variables.items()


def test_the_jobs_own_word_beats_the_node_programs_default(tmp_path: Path) -> None:
    job = JobSpec(name="a", task="cluster_ddp.tasks.digits:Digits", network={"env": {"OMP_NUM_THREADS": "3"}})
    attempt = RunDirectory(tmp_path).attempt(0)
    found = environment.node_environment(job, attempt, node_rank=0, procs=1, heartbeat=Path("/dev/shm/b"), base={})
    assert found.variables["OMP_NUM_THREADS"] == "3"


def test_the_report_holds_no_secret(tmp_path: Path) -> None:
    secrets = {
        "WANDB_API_KEY": "0123456789abcdef0123456789abcdef01234567",
        "SLURM_JWT": "eyJhbGci",
        "TORCH_HUB_TOKEN": "short",
        "NCCL_NET_PLUGIN_ARG": "0123456789abcdef0123456789abcdef01234567",
    }
    harmless = {"CUDA_VISIBLE_DEVICES": "GPU-5a3f9c1e-1b2c-4d5e-8f90-a1b2c3d4e5f6", "SLURM_JOB_ID": "77"}
    text = str(report.report(made(tmp_path, **secrets, **harmless), node_rank=0, ranks=[], command=[]))
    for value in secrets.values():
        assert value not in text
    for value in (*harmless.values(), str(tmp_path)):
        assert value in text


def test_slurm_says_how_many_cpus_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_CPUS_PER_TASK", "1")
    assert environment.usable_cpus() == 1


def test_a_rank_with_a_flight_recorder_is_asked_for_it(tmp_path: Path) -> None:
    """As ProcessGroupNCCL does it: a named pipe per rank, and whatever is written there means: dump."""
    from cluster_ddp.launch.node.ranks import Rank

    heartbeat = tmp_path / "heartbeat"
    pipe = Path(f"{environment.recorder_pipes(heartbeat)}5.pipe")
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    process = subprocess.Popen(["sleep", "60"])
    try:
        rank = Rank(process.pid, 5, 1, None, None, None)
        began = time.monotonic()
        request = hang_dump.request_dump([rank], heartbeat)
        told = hang_dump.collect(request, heartbeat, RunDirectory(tmp_path).attempt(0))
        assert told == ["flight recorder of rank 5"]
        assert time.monotonic() - began >= 4
        assert os.read(reader, 10)
        assert process.poll() is None  # it does not know the stacks' signal, and was not sent it
    finally:
        process.kill()
        process.wait()
        os.close(reader)
    hang_dump.remove_pipes(heartbeat)
    assert not pipe.exists()


def test_only_stacks_that_were_asked_for_stay(tmp_path: Path) -> None:
    attempt, heartbeat = RunDirectory(tmp_path / "run").attempt(0), tmp_path / "heartbeat"
    attempt.path.mkdir(parents=True)
    stacks_beside(heartbeat, 0).touch()
    stacks_beside(heartbeat, 1).write_text("Thread 0x1")
    hang_dump.keep_stacks(heartbeat, attempt)
    assert [file.name for file in attempt.path.iterdir()] == [attempt.stacks_file(1).name]
    assert attempt.stacks_file(1).read_text() == "Thread 0x1"
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_log_is_followed_by_whole_lines(tmp_path: Path) -> None:
    log = tmp_path / "log"
    tail = Tail(log)
    assert tail.lines() == []
    with log.open("w") as file:
        file.write("one\ntw")
        file.flush()
        assert tail.lines() == ["one"]
        file.write("o\nthree")
        file.flush()
        assert tail.lines() == ["two"]
    assert tail.lines() == []
    assert tail.lines(rest=True) == ["three"]
    assert tail.lines(rest=True) == []


def test_what_another_torchrun_left_in_the_shell_is_dropped(tmp_path: Path) -> None:
    """sbatch exports the shell it is called from; an agent with a RANK was taken for a rank, and killed as hung."""
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_NAME", "ROLE_RANK")
    names += ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "PET_NNODES", "PET_MAX_RESTARTS", "NODE_RANK")
    found = made(tmp_path, MY_RANK="1", **dict.fromkeys(names, "3"))
    assert not set(names) & found.variables.keys()
    assert found.variables["MY_RANK"] == "1"


def test_a_password_in_an_address_is_masked_in_the_report(tmp_path: Path) -> None:
    found = made(tmp_path, TORCH_PROXY="http://me:s3cr3t@proxy:80")
    content = report.report(found, node_rank=1, ranks=[], command=["torchrun", "--x=http://me:s3cr3t@proxy:80"])
    assert "s3cr3t" not in str(content)
    assert content["variables"]["TORCH_PROXY"] == "http://me:***@proxy:80"
