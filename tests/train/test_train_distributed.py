"""Who a process is, the backend, what ranks exchange, and starting ranks from a script."""

from __future__ import annotations

import os
import platform
import socket
import subprocess
import sys
import time
import types
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from train_ranks import run_ranks, start_program

from cluster_ddp.errors import Cause
from cluster_ddp.job import JobSpec
from cluster_ddp.launch.ports import free_port
from cluster_ddp.run.runs import create_run
from cluster_ddp.train import (
    DistributedError,
    all_gather,
    all_gather_object,
    barrier,
    broadcast_object,
    choose_backend,
    cleanup_distributed,
    is_main_process,
    launch_distributed_training,
    reduce_tensor,
    setup_distributed,
)
from cluster_ddp.train.ranks import distributed
from cluster_ddp.train.ranks.distributed import find_world

PATIENCE = 180.0  # seconds for what takes a few, beside other tests


@pytest.mark.parametrize(
    ("system", "cuda", "backend"),
    [
        ("Linux", True, "nccl"),
        ("Linux", False, "gloo"),
        ("Darwin", True, "nccl"),
        ("Darwin", False, "gloo"),
        ("Windows", True, "gloo"),
        ("Windows", False, "gloo"),
    ],
)
def test_backends_by_platform(system: str, cuda: bool, backend: str) -> None:
    assert choose_backend(system, cuda) == backend


def test_rank_0_says_that_it_waits_for_ranks_that_do_not_come(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(distributed, "LATE_SECONDS", 0.1)
    alone = {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
    for name, value in alone.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(DistributedError, match="rank 0 of 2 cannot meet the others"):
        setup_distributed("gloo", timeout=1.0)
    assert "rank 0 has waited 0.1 s for all 2 ranks to join: each has to call join_run()" in capfd.readouterr().err


def test_who_this_process_is() -> None:
    torchrun = {"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8"}
    srun = {"SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURM_NTASKS": "4", "SLURM_STEP_NUM_TASKS": "4"}
    assert find_world(torchrun) == (5, 1, 8)
    assert find_world(srun) == (3, 1, 4)
    assert find_world({**srun, **torchrun}) == (5, 1, 8)
    # A batch script, or a shell in an allocation, has these without being a task of a step.
    assert find_world({"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_LOCALID": "0"}) == (0, 0, 1)
    assert find_world({}) == (0, 0, 1)


def test_which_gpu_is_a_ranks_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchrun shows all to all; with --gpus-per-task each task of a step finds its own as number 0."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    second = find_world({"SLURM_PROCID": "5", "SLURM_LOCALID": "1", "SLURM_STEP_NUM_TASKS": "8"})
    for per_task, gpus, own in [("", 1, 1), ("", 4, 1), ("1", 1, 0), ("2", 2, 1)]:  # ("", 1, 1): one for two, an error
        monkeypatch.setattr(torch.cuda, "device_count", lambda gpus=gpus: gpus)
        monkeypatch.setenv("SLURM_GPUS_PER_TASK", per_task)
        if not per_task:
            monkeypatch.delenv("SLURM_GPUS_PER_TASK")
        assert second.device == torch.device("cuda", own)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setenv("LOCAL_RANK", "1")
    for name, value in {"RANK": "1", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(DistributedError, match="local rank 1 has no GPU: this node shows 1"):
        setup_distributed()


def test_alone_everything_is_itself() -> None:
    rank, local_rank, world_size = setup_distributed()
    assert (rank, local_rank, world_size) == (0, 0, 1) and is_main_process() and not dist.is_initialized()
    barrier()
    tensor = torch.arange(3.0)
    assert torch.equal(reduce_tensor(tensor), tensor) and reduce_tensor(tensor) is not tensor
    assert torch.equal(all_gather(tensor), tensor[None])
    assert all_gather_object({"a": 1}) == [{"a": 1}] and broadcast_object("x") == "x"


def exchange() -> dict[str, Any]:
    rank = dist.get_rank()
    own = torch.tensor([float(rank), 10.0 - rank])
    barrier()
    found = {op: reduce_tensor(own, op).tolist() for op in ("mean", "sum", "max", "min")}  # type: ignore[arg-type]
    found["own"] = own.tolist()
    found["gathered"] = all_gather(torch.full((2, 2), rank)).tolist()
    found["objects"] = all_gather_object({"rank": rank})
    found["broadcast"] = broadcast_object(f"from {rank}")
    found["main"] = is_main_process()
    return found


def test_what_ranks_exchange() -> None:
    for rank, found in enumerate(run_ranks(exchange, 3)):
        assert found["mean"] == [1.0, 9.0] and found["sum"] == [3.0, 27.0]
        assert found["max"] == [2.0, 10.0] and found["min"] == [0.0, 8.0]
        assert found["own"] == [rank, 10.0 - rank]
        assert found["gathered"] == [[[number] * 2] * 2 for number in range(3)]
        assert found["objects"] == [{"rank": number} for number in range(3)]
        assert found["broadcast"] == "from 0" and found["main"] == (rank == 0)


def meet_elsewhere() -> tuple[int, int] | None:
    """Ranks 1 and 2 of three make a group of their own when rank 0, which has kept the store, is gone."""
    world = find_world()
    keeper, port = broadcast_object((os.getpid(), free_port()))
    cleanup_distributed()
    if world.is_main:
        return None
    while Path(f"/proc/{keeper}").exists():
        time.sleep(0.01)
    os.environ.update(RANK=str(world.rank - 1), WORLD_SIZE="2", MASTER_PORT=str(port))
    rank, _, size = setup_distributed(timeout=30)
    barrier()
    return rank, size


@pytest.mark.skipif(not Path("/proc").exists(), reason="by /proc it is seen that a process has ended")
def test_a_group_at_another_address_does_not_meet_by_the_first_one_s_store() -> None:
    assert run_ranks(meet_elsewhere, 3) == [None, (0, 2), (1, 2)]


def test_the_timeout_is_applied(tmp_path: Path) -> None:
    """A collective that the other rank never joins fails after the process group's timeout, not after 30 minutes."""
    (tmp_path / "program.py").write_text(
        "import os, time, torch, torch.distributed as dist\n"
        "from pathlib import Path\n"
        "from cluster_ddp.train import setup_distributed\n"
        "place = Path(__file__).parent\n"
        "(place / os.environ['RANK']).touch()\n"  # the timeout is that of the meeting, too
        "while not ((place / '0').exists() and (place / '1').exists()): time.sleep(0.01)\n"
        "world = setup_distributed(timeout=2)\n"
        "begun = time.monotonic()\n"
        "if world.rank == 0:\n"
        "    try: dist.all_reduce(torch.ones(1))\n"
        "    except RuntimeError as error: print('failed after', time.monotonic() - begun)\n"
        "else: time.sleep(8)\n"
    )
    first, second = (
        start_program(environment, tmp_path / "log", tmp_path / "program.py") for environment in _environments(2)
    )
    first.join(PATIENCE)
    for rank in (first, second):
        rank.kill()
        rank.join()
    output = (tmp_path / "log").read_text()
    assert "failed after" in output and 1.5 < float(output.split()[2]) < 7


@pytest.mark.skipif(sys.platform != "linux", reason="names threads as Linux shows them")
@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="the Gloo of older torch gives its threads no names")
def test_no_thread_of_the_group_is_left_when_the_interpreter_ends() -> None:
    """One that wants Python's lock then would abort the process; here a model of the script's own lives to the end."""
    program = (
        "import atexit, torch\n"
        "from pathlib import Path\n"
        "from torch.nn.parallel import DistributedDataParallel\n"
        "from cluster_ddp.train import cleanup_distributed, setup_distributed\n"
        "from cluster_ddp.train.ranks.deferred_dynamo import defer_dynamo\n"
        "defer_dynamo()\n"  # to import it takes as long as all else
        "def threads(): return [path.read_text().strip() for path in Path('/proc/self/task').glob('*/comm')]\n"
        "atexit.register(lambda: print('after', *threads()))\n"  # the first to be registered comes last
        "setup_distributed(timeout=120)\n"
        "model = DistributedDataParallel(torch.nn.Linear(2, 2))\n"
        "model(torch.ones(1, 2)).sum().backward()\n"
        "print('before', *threads())\n"
        "cleanup_distributed()\n"
    )
    for rank in _start(program, 2):
        before, after = rank.communicate(timeout=PATIENCE)[0].splitlines()
        assert rank.returncode == 0
        assert "gloo" in before
        assert "gloo" not in after, "the model keeps its group alive by more than distributed._HOLD_THE_GROUP"


def test_srun_without_torchrun(tmp_path: Path) -> None:
    """Two tasks of a step on one node find each other by Slurm's variables alone."""
    (tmp_path / "program.py").write_text(
        "import torch\n"
        "from cluster_ddp.train import setup_distributed, reduce_tensor, cleanup_distributed\n"
        "world = setup_distributed(timeout=120)\n"
        "print(f'{world.rank} {reduce_tensor(torch.ones(1), \"sum\").item()}\\n', end='')\n"
        "cleanup_distributed()\n"
    )
    common = {**os.environ, "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NUM_NODES": "1"}
    common["SLURM_JOB_ID"] = str(4_000_000 + os.getpid())
    tasks = [
        start_program(
            {**common, "SLURM_PROCID": str(task), "SLURM_LOCALID": str(task)},
            tmp_path / "log",
            tmp_path / "program.py",
        )
        for task in range(2)
    ]
    for started in tasks:
        started.join(PATIENCE)
        started.kill()
        started.join()
    assert sorted((tmp_path / "log").read_text().splitlines()) == ["0 2.0", "1 2.0"]


def test_several_nodes_without_an_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_PROCID", "1")
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "2")
    monkeypatch.setenv("SLURM_STEP_NUM_NODES", "2")
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with pytest.raises(DistributedError, match=r"export MASTER_ADDR=\$\(scontrol show hostnames"):
        setup_distributed()


def test_more_ranks_than_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("LOCAL_RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "3")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(DistributedError, match=r"local rank 2 has no GPU: this node shows 2.*launch\.procs_per_node"):
        setup_distributed()


@pytest.mark.parametrize(("usable", "visible", "is_broken"), [
    (0, "0,1", True), (1, "0,1", True), (2, "0,1", False), (0, "", False), (0, "NoDevFiles", False), (0, "-1", False),
])  # fmt: skip
def test_a_node_whose_gpus_are_broken_is_at_fault(
    monkeypatch: pytest.MonkeyPatch, usable: int, visible: str, is_broken: bool
) -> None:
    """Else it would train on the CPU without a word, or the job be told that it has too many ranks."""
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: usable > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: usable)
    monkeypatch.setattr(torch.cuda, "set_device", lambda gpu: None)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)  # it need not meet others
    for name, value in {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    setup_distributed() if usable != 1 else None  # outside of a job nothing is known
    monkeypatch.setenv("SLURM_STEP_GPUS", "0,1")
    if not is_broken:
        setup_distributed()
        return
    with pytest.raises(DistributedError, match=rf"2 GPUs, of which torch can use {usable}") as raised:
        setup_distributed()
    assert raised.value.cause is Cause.HOST  # so it is tried again, and elsewhere


def write_rank(rank: int, world_size: int, *, folder: Path) -> None:
    total = reduce_tensor(torch.tensor([float(rank)]), "sum").item()
    (folder / f"{rank}-{world_size}").write_text(str(total))


def test_launching_ranks_from_a_script(tmp_path: Path) -> None:
    launch_distributed_training(write_rank, world_size=2, backend="gloo", folder=tmp_path)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"0-2": "1.0", "1-2": "1.0"}


def test_launching_falls_back_to_one_process(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    launch_distributed_training(write_rank, world_size=2, backend="nccl", folder=tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["0-1"]
    assert "training in one process: NCCL needs CUDA" in capsys.readouterr().err


@pytest.mark.parametrize(("backend", "reason"), [("mpi", "without MPI"), ("gloo", "no free port")])
def test_launching_where_ranks_cannot_meet(
    backend: str, reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = socket.create_server(("127.0.0.1", 0))
    with taken:
        monkeypatch.setattr("cluster_ddp.launch.ports.FIRST_PORT", taken.getsockname()[1])
        monkeypatch.setattr("cluster_ddp.launch.ports.PORTS", 1)
        monkeypatch.setattr("cluster_ddp.launch.ports.TRIES", 1)
        launch_distributed_training(write_rank, world_size=2, backend=backend, folder=tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["0-1"]
    assert reason in capsys.readouterr().err


def test_a_lambda_cannot_be_launched() -> None:
    with pytest.raises(DistributedError, match="top level of a module"):
        launch_distributed_training(lambda rank, world_size: None, 2, backend="gloo")


def test_a_rank_and_a_world_size_are_refused() -> None:
    with pytest.raises(DistributedError, match=r"setup_distributed\(0, 2\).*Call setup_distributed\(\)"):
        setup_distributed(0, 2)  # type: ignore[arg-type]


def test_the_local_rank_as_an_argument_is_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["train.py", "--local-rank=0"])
    with pytest.warns(UserWarning, match=r"without --use-env.*torchrun"):
        setup_distributed()


def test_the_network_of_the_job_file_serves_a_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = JobSpec.model_validate({"name": "own", "script": "own.py", "network": {"backend": "gloo", "timeout": 77}})
    run = create_run(job, runs_dir=tmp_path, via="local", script=None)
    seen: dict[str, Any] = {}
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **given: seen.update(given, backend=backend))
    values = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for name, value in {**values, "CLUSTER_DDP_RUN": str(run.path)}.items():
        monkeypatch.setenv(name, value)
    setup_distributed()
    assert seen["backend"] == "gloo" and seen["timeout"].total_seconds() == 77
    setup_distributed("gloo", timeout=5)
    assert seen["timeout"].total_seconds() == 5


def test_launching_from_a_notebook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shell = types.SimpleNamespace(config={"IPKernelApp": {}})
    monkeypatch.setitem(sys.modules, "IPython", types.SimpleNamespace(get_ipython=lambda: shell))  # type: ignore[arg-type]
    with pytest.raises(DistributedError, match=r"notebook.*torchrun"):
        launch_distributed_training(write_rank, world_size=2, folder=tmp_path)
    launch_distributed_training(write_rank, world_size=1, folder=tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["0-1"]


def test_several_ranks_on_a_mac_are_warned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "system", lambda: "Darwin")
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(dist, "init_process_group", lambda *args, **kwargs: None)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "1")
    with pytest.warns(UserWarning, match="one Mac.*gain nothing"):
        setup_distributed()


def _environments(world_size: int) -> list[dict[str, str]]:
    port = str(free_port())
    return [
        {
            **os.environ,
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(world_size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
            "CUDA_VISIBLE_DEVICES": "",
        }
        for rank in range(world_size)
    ]


def _start(program: str, world_size: int) -> list[subprocess.Popen[str]]:
    return [
        subprocess.Popen([sys.executable, "-c", program], env=environment, stdout=subprocess.PIPE, text=True)
        for environment in _environments(world_size)
    ]
