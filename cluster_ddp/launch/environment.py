"""What the agent and the ranks find in their environment, and the report of it that the attempt keeps.

A variable that is set already wins: the batch script, or the person at the keyboard, knew better.
"""

from __future__ import annotations

import contextlib
import os
import platform
import re
import socket
import subprocess
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cluster_ddp.launch.processes import BOARD_VARIABLE
from cluster_ddp.network import Setting, resolve
from cluster_ddp.spec.secrets import is_secret_name

if TYPE_CHECKING:
    from cluster_ddp.run.directory import AttemptDirectory
    from cluster_ddp.spec import JobSpec

RUN_VARIABLE = "CLUSTER_DDP_RUN"
ATTEMPT_VARIABLE = "CLUSTER_DDP_ATTEMPT"
NODE_VARIABLE = "CLUSTER_DDP_NODE"
TERMINAL_VARIABLE = "CLUSTER_DDP_TERMINAL"
ADDRESS_VARIABLE = "CLUSTER_DDP_LOCAL_ADDR"

# The agent handles SIGQUIT only, which nobody sends: the others it must survive (see agent.py).
_AGENT_SIGNALS = "SIGQUIT"
_SHORTEST_SHUTDOWN_SECONDS = 30  # torchrun's own default
_REPORTED = ("NCCL_", "GLOO_", "TORCH", "PET_", "MASTER_", "SLURM_", "CUDA_", "OMP_", "CLUSTER_DDP_")
_PACKAGES = ("cluster_ddp", "torch", "numpy", "safetensors", "xxhash", "submitit", "wandb")
_LOOKS_LIKE_A_KEY = re.compile(r"(?=[^/]*\d)(?=[^/]*[A-Za-z])[A-Za-z0-9+/_=.]{32,}")
_MASKED = "(masked)"
_GPU_QUERY = ["nvidia-smi", "--query-gpu=index,name,uuid,memory.total,driver_version", "--format=csv,noheader"]
_GPU_SECONDS = 20.0


@dataclass(frozen=True)
class NodeEnvironment:
    """The environment of a node's agent and ranks.

    Attributes
    ----------
    variables
        All of it, as handed to the agent.
    settings
        What the node program added, each with its reason.
    kept
        What it would have set but found set already: name to the value that stays.
    remarks
        What a person should know about how the network settings were read.
    """

    variables: dict[str, str]
    settings: tuple[Setting, ...]
    kept: dict[str, str]
    remarks: tuple[str, ...]


def node_environment(
    spec: JobSpec, attempt: AttemptDirectory, *, node_rank: int, procs: int, board: Path, base: Mapping[str, str]
) -> NodeEnvironment:
    """Work out the environment of the agent and the ranks from the job and what is set already (`base`)."""
    network = resolve(spec.network)
    grace = max(_SHORTEST_SHUTDOWN_SECONDS, spec.requeue.warning)
    recorder = str(attempt.path / "flight-recorder-rank")
    wanted = [
        *network.settings,
        Setting("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1", "restarted ranks must not meet the keys of the dead"),
        Setting("TORCH_NCCL_ASYNC_ERROR_HANDLING", "3", "torchrun's 1 keeps the flight recorder from being written"),
        Setting("TORCH_FR_DUMP_TEMP_FILE", recorder, "the flight recorder belongs to the attempt"),
        Setting("TORCH_NCCL_DEBUG_INFO_TEMP_FILE", recorder, "the same, before torch 2.8"),
        Setting("TORCH_NCCL_DEBUG_INFO_PIPE_FILE", recorder_pipes(board), "asks a rank for its flight recorder"),
        Setting("PET_SIGNALS_TO_HANDLE", _AGENT_SIGNALS, "the agent has to survive the signals that ranks save on"),
        Setting("PET_SHUTDOWN_TIMEOUT", str(grace), "ranks that the agent ends have time to save"),
        Setting("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(grace), "the same, where torchrun has no such option"),
        Setting("OMP_NUM_THREADS", str(max(1, usable_cpus() // procs)), f"{usable_cpus()} CPUs for {procs} ranks"),
    ]
    added = tuple(setting for setting in wanted if setting.name not in base)
    kept = {setting.name: base[setting.name] for setting in wanted if setting.name in base}
    own = {
        RUN_VARIABLE: str(attempt.run.path),
        ATTEMPT_VARIABLE: str(attempt.number),
        NODE_VARIABLE: str(node_rank),
        BOARD_VARIABLE: str(board),
    }
    variables = {**base, **{setting.name: setting.value for setting in added}, **own}
    return NodeEnvironment(variables, added, kept, network.remarks)


def recorder_pipes(board: Path) -> str:
    """How the names of the pipes begin by which ranks are asked for their flight recorder; ``<rank>.pipe`` follows.

    They lie beside the board, since a named pipe on shared storage does not work everywhere.
    """
    return f"{board}.recorder-"


def usable_cpus() -> int:
    """CPUs that this node program, its agent and its ranks may use together."""
    try:
        usable = len(os.sched_getaffinity(0))
    except AttributeError:  # not Linux
        usable = os.cpu_count() or 1
    for name in ("SLURM_CPUS_PER_TASK", "SLURM_CPUS_ON_NODE"):
        value = os.environ.get(name, "")
        if value.isdigit() and int(value):
            return min(usable, int(value))
    return usable


def report(
    environment: NodeEnvironment, *, node_rank: int, ranks: list[dict[str, Any]], command: list[str]
) -> dict[str, Any]:
    """What one node of an attempt looked like, without secrets."""
    shown = {name: value for name, value in sorted(environment.variables.items()) if name.startswith(_REPORTED)}
    return {
        "host": socket.gethostname(),
        "node_rank": node_rank,
        "system": platform.platform(),
        "cpus": usable_cpus(),
        "gpus": _gpus(environment.variables),
        "versions": _versions(),
        "torchrun": command,
        "ranks": ranks,
        "set_by_cluster_ddp": [asdict(setting) for setting in environment.settings],
        "set_before": {name: _masked(name, value) for name, value in environment.kept.items()},
        "remarks": list(environment.remarks),
        "variables": {name: _masked(name, value) for name, value in shown.items()},
    }


def _masked(name: str, value: str) -> str:
    looks_like_a_key = not value.startswith("/") and _LOOKS_LIKE_A_KEY.fullmatch(value)
    return _MASKED if looks_like_a_key or is_secret_name(name) or name == "SLURM_JWT" else value


def _versions() -> dict[str, str]:
    import importlib.metadata  # only now: a tenth of what the node program imports

    versions = {"python": platform.python_version()}
    for package in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    return versions


def _gpus(variables: Mapping[str, str]) -> list[str]:
    try:
        done = subprocess.run(
            _GPU_QUERY, capture_output=True, text=True, timeout=_GPU_SECONDS, check=True, env=dict(variables)
        )
    except (OSError, subprocess.SubprocessError):
        return []
    return done.stdout.splitlines()
