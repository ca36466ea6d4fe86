"""The environment of the agent and the ranks.

The job's explicit settings override what the user has exported, which overrides every default.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from cluster_ddp.launch.variables import (
    ADDRESS_VARIABLE,
    ATTEMPT_VARIABLE,
    HEARTBEAT_VARIABLE,
    NODE_VARIABLE,
    RUN_VARIABLE,
)
from cluster_ddp.network import Setting, resolve
from cluster_ddp.run.code import kept_search_path

if TYPE_CHECKING:
    from cluster_ddp.job import JobSpec
    from cluster_ddp.run.directory import AttemptDirectory

_OF_ANOTHER_TORCHRUN = re.compile(
    r"(LOCAL_|GROUP_|ROLE_|NODE_)?RANK|(LOCAL_|GROUP_|ROLE_)?WORLD_SIZE|ROLE_NAME|TORCHELASTIC_\w+|PET_\w+"
)
# The agent handles only SIGPROF, which hardly anybody sends: it must survive the others (see agent.py).
_AGENT_SIGNALS = "SIGPROF"
_INTERFACES = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")
_SHORTEST_SHUTDOWN_SECONDS = 30  # torchrun's own default


@dataclass(frozen=True)
class NodeEnvironment:
    """The environment of a node's agent and ranks, and how it came about."""

    variables: dict[str, str]  # the complete environment, as passed to the agent
    settings: tuple[Setting, ...]  # what the node program added, each with its reason
    kept: dict[str, str]  # by name: variables that it would have set but found set, with the value that they keep
    remarks: tuple[str, ...]  # for the user: how the network settings were interpreted


def node_environment(
    spec: JobSpec,
    attempt: AttemptDirectory,
    *,
    node_rank: int,
    procs: int,
    heartbeat: Path,
    base: Mapping[str, str],
    gloo_interface: str | None = None,
) -> NodeEnvironment:
    """Determine the environment of the agent and the ranks from the job and from what is set already (`base`).

    Variables that a different torchrun, or srun's own ranks, left in the submitting shell are dropped: with a RANK
    variable the agent would take itself for a rank, and PET_... variables are options of torchrun.

    Parameters
    ----------
    gloo_interface
        The interface to set for Gloo; None if Gloo finds it by itself.
    """
    base = {name: value for name, value in base.items() if not _OF_ANOTHER_TORCHRUN.fullmatch(name)}
    if spec.launch.snapshot and "PYTHONPATH" in base:
        base["PYTHONPATH"] = os.pathsep.join(kept_search_path(attempt.run, base["PYTHONPATH"].split(os.pathsep)))
    network = resolve(spec.network)
    decided = _INTERFACES if ADDRESS_VARIABLE in base else ()  # by whoever chose the meeting address
    grace = max(_SHORTEST_SHUTDOWN_SECONDS, spec.requeue.warning)
    recorder = str(attempt.path / "flight-recorder-rank")
    defaults = [
        Setting("TORCH_NCCL_ASYNC_ERROR_HANDLING", "3", "torchrun's 1 keeps the flight recorder from being written"),
        Setting("TORCH_FR_DUMP_TEMP_FILE", recorder, "the flight recorder belongs to the attempt"),
        Setting("TORCH_NCCL_DEBUG_INFO_TEMP_FILE", recorder, "the same, before torch 2.8"),
        Setting("TORCH_NCCL_DEBUG_INFO_PIPE_FILE", recorder_pipes(heartbeat), "asks a rank for its flight recorder"),
        Setting("PET_SIGNALS_TO_HANDLE", _AGENT_SIGNALS, "the agent has to survive the signals that ranks save on"),
        Setting("PET_SHUTDOWN_TIMEOUT", str(grace), "ranks that the agent ends have time to save"),
        Setting("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(grace), "the same, where torchrun has no such option"),
        Setting("PYTHONHASHSEED", "0", "a set of strings has one order, on all ranks and after a resume"),
        Setting("MKL_CBWR", "AUTO", "products do not depend on where in memory a tensor lies, as after a resume"),
        _threads(procs, beside=busy_beside(spec, on_gpus=spec.slurm.gpu_count > 0)),
    ]
    if gloo_interface is not None:
        why = "this host's own name leads to loopback, where no other node would reach Gloo"
        defaults.append(Setting("GLOO_SOCKET_IFNAME", gloo_interface, why))
    named = network.variables.keys()
    wanted = [*network.settings, *(setting for setting in defaults if setting.name not in named)]
    added = tuple(setting for setting in wanted if setting.beats(base) and setting.name not in decided)
    names = {setting.name for setting in wanted} - {setting.name for setting in added}
    kept = {name: base[name] for name in sorted(names) if name in base}
    own = {
        RUN_VARIABLE: str(attempt.run.path),
        ATTEMPT_VARIABLE: str(attempt.number),
        NODE_VARIABLE: str(node_rank),
        HEARTBEAT_VARIABLE: str(heartbeat),
    }
    variables = {**base, **{setting.name: setting.value for setting in added}, **own}
    return NodeEnvironment(variables, added, kept, resolve(spec.network, base).remarks)


def recorder_pipes(heartbeat: Path) -> str:
    """Return the prefix of the pipes that ask ranks for their flight recorder; ``<rank>.pipe`` follows.

    They are next to the heartbeat file, since named pipes do not work on all shared storage.
    """
    return f"{heartbeat}.recorder-"


def threads_each(processes: int, beside: int = 0) -> int:
    """Return how many threads each of several processes may use here, if each leaves CPUs to `beside` others."""
    return max(1, usable_cpus() // processes - beside)


def busy_beside(spec: JobSpec, *, on_gpus: bool) -> int:
    """Return how many CPUs of its share a rank's workers and the writing of its checkpoints keep busy.

    torch divides a loop on the CPU among its threads and waits for the last one. With one thread too many, that takes
    until the system schedules it: a step of 4 ms on a GPU then takes 19 while a checkpoint is written. Ranks that
    compute on CPUs lose less by this than by threads that are missing all the time.
    """
    return 1 + spec.train.workers if on_gpus else 0


def omp_threads(processes: int, beside: int = 0) -> str:
    """Return OMP_NUM_THREADS for each of several processes here: the user's own, or else as `threads_each`."""
    return os.environ.get("OMP_NUM_THREADS") or str(threads_each(processes, beside))


def _threads(ranks: int, *, beside: int) -> Setting:
    why = f"{usable_cpus()} CPUs for {ranks} ranks"
    if beside:
        why += f", and {beside} of each rank's share for its workers and for saving"
    return Setting("OMP_NUM_THREADS", str(threads_each(ranks, beside)), why)


def usable_cpus() -> int:
    """Count the CPUs that this node program, its agent and its ranks may use together."""
    try:
        usable = len(os.sched_getaffinity(0))
    except AttributeError:  # not on Linux
        usable = os.cpu_count() or 1
    for name in ("SLURM_CPUS_PER_TASK", "SLURM_CPUS_ON_NODE"):
        value = os.environ.get(name, "")
        if value.isdigit() and int(value):
            return min(usable, int(value))
    return usable
