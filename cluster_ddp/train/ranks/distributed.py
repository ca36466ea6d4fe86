"""Joins the other ranks, and exchanges small amounts of data with them. Every function also works in a single process.

It can be used alone, in your own script:

    rank, local_rank, world_size = setup_distributed()
    ...
    cleanup_distributed()
"""

from __future__ import annotations

import atexit
import contextlib
import datetime
import gc
import os
import platform
import sys
import threading
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import NoneType
from typing import Any, Literal, NamedTuple, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.nn  # before a group exists: defaults of its functions would hold the group until exit
from torch import Tensor
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]
from torch.nn.parallel import DistributedDataParallel

from cluster_ddp.errors import Cause
from cluster_ddp.job import load_resolved
from cluster_ddp.launch.address import LOOPBACK
from cluster_ddp.launch.ports import job_port
from cluster_ddp.launch.variables import RUN_VARIABLE
from cluster_ddp.network import DEFAULT_TIMEOUT, resolve
from cluster_ddp.printing import say
from cluster_ddp.process import host_name
from cluster_ddp.run.causes import cause_of_message
from cluster_ddp.run.directory import RunDirectory
from cluster_ddp.train.errors import DistributedError

T = TypeVar("T")

LATE_SECONDS = 60.0  # seconds after which rank 0 says that it is waiting for the others
_HOLD_THE_GROUP = ("logger", "reducer", "process_group")  # attributes of a DistributedDataParallel that hold the group
_held_groups: list[dist.ProcessGroup | None] = []
_used_stores: dict[tuple[str, str, int], list[Store]] = {}  # stores of the groups that were destroyed, by meeting point
_cpu_groups: dict[dist.ProcessGroup, dist.ProcessGroup] = {}  # for each group for GPUs only, the group of its CPUs


# Set by srun for the tasks of a step among which it divides the GPUs.
_GPUS_GIVEN = ("SLURM_STEP_GPUS", "SLURM_JOB_GPUS", "SLURM_GPUS_ON_NODE")
_GPU_PER_TASK = ("SLURM_GPUS_PER_TASK", "SLURM_NTASKS_PER_GPU", "SLURM_GPU_BIND")


class World(NamedTuple):
    """The place of this process among the ranks."""

    rank: int
    local_rank: int
    world_size: int

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, the only one that writes and prints."""
        return self.rank == 0

    @property
    def gpu(self) -> int:
        """The index of its GPU: the local rank, or 0 if ``srun --gpus-per-task`` shows each rank only its own."""
        divided = "LOCAL_RANK" not in os.environ and any(name in os.environ for name in _GPU_PER_TASK)
        return 0 if divided and torch.cuda.device_count() == 1 else self.local_rank

    @property
    def device(self) -> torch.device:
        """The device of this rank: its GPU, or a Mac's GPU in a single process, or the CPU."""
        if torch.cuda.is_available():
            return torch.device("cuda", self.gpu)
        if torch.backends.mps.is_available() and self.world_size == 1:
            return torch.device("mps")
        return torch.device("cpu")


def choose_backend(system: str | None = None, cuda: bool | None = None) -> Literal["nccl", "gloo"]:
    """The backend for a platform: NCCL with CUDA, except on Windows; otherwise Gloo.

    Parameters
    ----------
    system
        As named by ``platform.system()``: Linux, Darwin or Windows; None: this one.
    cuda
        Whether CUDA is available; None: look.
    """
    system = platform.system() if system is None else system
    cuda = torch.cuda.is_available() if cuda is None else cuda
    return "nccl" if cuda and system != "Windows" else "gloo"


def find_world(environment: Mapping[str, str] = os.environ) -> World:
    """Read rank, local rank and world size from torchrun's variables, or srun's, or assume a single process."""
    if "RANK" in environment and "WORLD_SIZE" in environment:
        rank = int(environment["RANK"])
        return World(rank, int(environment.get("LOCAL_RANK", rank)), int(environment["WORLD_SIZE"]))
    # A batch script also has SLURM_PROCID and SLURM_NTASKS, but is not a task of a step: only srun sets this variable.
    if "SLURM_STEP_NUM_TASKS" in environment and "SLURM_PROCID" in environment:
        local_rank = int(environment.get("SLURM_LOCALID", 0))
        return World(int(environment["SLURM_PROCID"]), local_rank, int(environment["SLURM_STEP_NUM_TASKS"]))
    return World(0, 0, 1)


def setup_distributed(backend: str | None = None, timeout: float | None = None) -> World:
    """Read this process's rank, select its device, and join the other ranks.

    Parameters
    ----------
    backend
        nccl or gloo; None: as set in the run's job file, otherwise by platform, see `choose_backend`. With NCCL, the
        group also has Gloo, for communication between CPUs.
    timeout
        Seconds that a collective may take before it fails; None: as set in the run's job file, otherwise
        `cluster_ddp.network.DEFAULT_TIMEOUT`.

    Returns
    -------
    A `World`, which unpacks to (rank, local_rank, world_size). A single process joins no group.

    Raises
    ------
    DistributedError
        The address of rank 0 is unknown, this node has fewer GPUs than ranks, the ranks did not meet, or a rank and a
        world size were passed in (they are read from the environment).
    """
    if not isinstance(backend, (str, NoneType)):
        raise DistributedError(
            f"setup_distributed({backend!r}, {timeout!r}): it takes no rank and no world size; it finds them by itself "
            "if torchrun, srun or launch_distributed_training() started the process. Call setup_distributed()"
        )
    if any(argument.startswith(("--local-rank", "--local_rank")) for argument in sys.argv[1:]):
        warnings.warn(
            "the script was started with --local-rank, by torch.distributed.launch without --use-env: start it with "
            "torchrun, which puts the local rank into the environment only",
            stacklevel=2,
        )
    world = find_world()
    _take_device(world)
    if world.world_size == 1 or dist.is_initialized():
        return world
    if platform.system() == "Darwin":
        warnings.warn(
            "several ranks on one Mac: its GPU cannot be shared by DDP, so they train on the CPU and gain nothing over "
            "a single process",
            stacklevel=2,
        )
    _set_meeting_point(world)
    asked_backend, asked_timeout = _asked_for()
    chosen = backend or asked_backend or choose_backend()
    limit = datetime.timedelta(seconds=timeout or asked_timeout)
    try:
        with _said_while_waiting(world):
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if chosen == "nccl" else chosen,
                rank=world.rank,
                world_size=world.world_size,
                timeout=limit,
                store=_store_again(world) or _store_of_step(world, limit),
            )
    except (RuntimeError, ValueError) as error:
        where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        raise DistributedError(
            f"rank {world.rank} of {world.world_size} cannot meet the others at {where}: {error}\n"
            "    see whether rank 0 has failed, and whether a firewall is in between",
            cause=cause_of_message(str(error)),
        ) from error
    return world


@contextlib.contextmanager
def _said_while_waiting(world: World) -> Iterator[None]:
    """Make rank 0 report a long wait, for ranks that are slow or will never come."""
    timer = threading.Timer(
        LATE_SECONDS,
        lambda: say(
            f"cluster-ddp: rank 0 has waited {LATE_SECONDS:g} s for all {world.world_size} ranks to join: each has to "
            "call join_run() or setup_distributed(), which must not be under `if rank == 0:`; one may also be slow to "
            "start"
        ),
    )
    timer.daemon = True
    if world.is_main:
        timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _asked_for() -> tuple[str | None, float]:
    """The backend and timeout of the run that this process belongs to, for scripts that only use this module."""
    place = os.environ.get(RUN_VARIABLE)
    if place is None:
        return None, DEFAULT_TIMEOUT
    network = load_resolved(RunDirectory(Path(place)).job_file).network
    return network.fixed_backend, resolve(network).timeout


def _take_device(world: World) -> None:
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    given = _gpus_from_slurm()
    if given > gpus and (gpus == 0 or world.gpu >= gpus):  # without a GPU it would train on the CPU
        raise DistributedError(
            f"Slurm has given this node {given} GPUs, of which torch can use {gpus}: its CUDA driver or a GPU may be "
            "broken (nvidia-smi shows whether it is), or a container may hide them",
            cause=Cause.HOST,
        )
    if gpus == 0:
        return
    if world.gpu >= gpus:
        raise DistributedError(
            f"local rank {world.local_rank} has no GPU: this node shows {gpus}. "
            "Lower launch.procs_per_node, or check CUDA_VISIBLE_DEVICES."
        )
    torch.cuda.set_device(world.gpu)


def _gpus_from_slurm() -> int:
    """The number of GPUs that Slurm has made visible here; 0 if it has not, or this torch can use none anywhere."""
    is_built = torch.backends.cuda.is_built()  # type: ignore[no-untyped-call]
    if not is_built or not any(os.environ.get(name) for name in _GPUS_GIVEN):
        return 0
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    return sum(name.isdecimal() or name.startswith(("GPU-", "MIG-")) for name in visible)


def _set_meeting_point(world: World) -> None:
    """Set what torchrun has not set: the address from the environment, the port from the Slurm job id."""
    if "MASTER_ADDR" not in os.environ:
        if os.environ.get("SLURM_STEP_NUM_NODES") != "1":
            raise DistributedError(
                f"rank {world.rank} of {world.world_size} does not know where rank 0 is. Start with torchrun, or set "
                'in the batch script: export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)'
            )
        os.environ["MASTER_ADDR"] = LOOPBACK
    os.environ.setdefault("MASTER_PORT", str(job_port(int(os.environ.get("SLURM_JOB_ID", 0)))))


def _store_of_step(world: World, timeout: datetime.timedelta) -> Store | None:
    """The store for ranks started by srun, hosted by the first task of the step's first node.

    MASTER_ADDR names that node, which need not have rank 0: since Slurm 26.05, tasks are numbered by topology. None for
    ranks of torchrun, for which PyTorch creates the store.
    """
    if "RANK" in os.environ or "SLURM_NODEID" not in os.environ:
        return None
    keeps = os.environ["SLURM_NODEID"] == "0" and world.local_rank == 0
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store: Store = TCPStore(address, port, world.world_size, is_master=keeps, timeout=timeout)
    return store


def _store_again(world: World) -> Store | None:
    """For a later group of the same ranks, a new prefix in the first group's store; None for the first group.

    Under the same prefix, Gloo would find the addresses of the previous group and wait there forever.
    """
    stores = _used_stores.get(_meeting_point(world.world_size), [])
    return PrefixStore(f"cluster_ddp/group-{len(stores)}", stores[0]) if stores else None


def _meeting_point(size: int) -> tuple[str, str, int]:
    return os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", ""), size


def host_group() -> dist.ProcessGroup | None:
    """The group for communication between CPUs: None, the default group, unless a library made that for GPUs only.

    The first call must be made by all ranks together.
    """
    group = dist.group.WORLD
    if group is None or torch.device("cpu") in group._device_types:
        return None
    if group not in _cpu_groups:
        _cpu_groups.clear()
        _cpu_groups[group] = dist.new_group(backend="gloo")
    return _cpu_groups[group]


def store_of_ranks() -> Store | None:
    """Return the store through which the ranks met; None for a single rank without a group."""
    return dist.distributed_c10d._get_default_store() if dist.is_initialized() else None


def cleanup_distributed() -> None:
    """Leave the group, on all ranks together; call it after every other use of the group."""
    if (store := store_of_ranks()) is not None:
        hold_group()
        _used_stores.setdefault(_meeting_point(dist.get_world_size()), []).append(store)
        dist.destroy_process_group()


def hold_group() -> None:
    """Keep the group's Python object alive until exit, whoever destroys the group.

    Otherwise a DDP model that outlives the group may hold the last reference. Destroying the group then joins Gloo's
    threads while holding the GIL, which one of them may need to free a tensor: the process would never end. The group's
    own Python object releases the GIL first, so it has to be the last reference.
    """
    if dist.is_initialized():
        _held_groups.append(dist.group.WORLD)
        atexit.register(_end_groups)


def _end_groups() -> None:
    """Stop Gloo's threads before the interpreter shuts down, even if a script's models live until then.

    A thread that wants the GIL after that aborts the process, although all its work is done.
    """
    gc.collect()
    for candidate in gc.get_objects():  # no public API lists the models; takes 0.2 s, once, at exit
        if issubclass(type(candidate), DistributedDataParallel):
            for name in _HOLD_THE_GROUP:
                candidate.__dict__.pop(name, None)
    _held_groups.clear()


def describe_ranks(world: World) -> list[str]:
    """One line per host with its ranks and their devices; all ranks call it."""
    device = world.device
    kind = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    hosts: dict[tuple[str, str], list[str]] = {}
    for rank, place in enumerate(all_gather_object((host_name(), kind))):
        hosts.setdefault(place, []).append(str(rank))
    return [
        f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(ranks)}: {kind} on {host}"
        for (host, kind), ranks in hosts.items()
    ]


def is_main_process() -> bool:
    """Whether this is rank 0 or a single process."""
    return not dist.is_initialized() or dist.get_rank() == 0


def barrier() -> None:
    """Wait until every rank has called it."""
    if dist.is_initialized():
        # On a CPU tensor: an NCCL barrier would use the GPU, and make the host wait for all work queued on it.
        dist.all_reduce(torch.zeros(1), group=host_group())


def reduce_tensor(tensor: Tensor, op: Literal["mean", "sum", "max", "min"] = "mean") -> Tensor:
    """Reduce a tensor over all ranks.

    Parameters
    ----------
    tensor
        The same shape and dtype on every rank; it is not modified.
    op
        The reduction; a mean needs a floating-point tensor.

    Returns
    -------
    A new tensor of that shape, the same on every rank.
    """
    result = tensor.detach().clone()
    if not dist.is_initialized():
        return result
    ops = {"mean": dist.ReduceOp.SUM, "sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}
    dist.all_reduce(result, ops[op])
    return result / dist.get_world_size() if op == "mean" else result


def all_gather(tensor: Tensor) -> Tensor:
    """Gather a tensor of the same shape s from every rank: shape (world_size, *s), ordered by rank."""
    if not dist.is_initialized():
        return tensor.detach().clone().unsqueeze(0)
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, tensor.detach().contiguous())
    return torch.stack(parts)


def all_gather_object(value: T) -> list[T]:
    """Gather a small picklable object from every rank, ordered by rank."""
    if not dist.is_initialized():
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value, group=host_group())
    return values


def broadcast_object(value: T) -> T:
    """Send the small picklable object of rank 0 to every rank."""
    if not dist.is_initialized():
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0, device=torch.device("cpu"), group=host_group())
    return box[0]
