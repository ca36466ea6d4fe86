"""The environment report of one node of an attempt: its hardware, software and settings, without secrets."""

from __future__ import annotations

import contextlib
import platform
import re
import subprocess
import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from cluster_ddp.job.secrets import is_secret_name, without_password
from cluster_ddp.launch.environment import NodeEnvironment, usable_cpus
from cluster_ddp.launch.node.ranks import LocalRanks
from cluster_ddp.process import host_name
from cluster_ddp.run.record import package_versions
from cluster_ddp.run.storage import Storage, write_json

_REPORTED = ("NCCL_", "GLOO_", "TORCH", "PET_", "MASTER_", "SLURM_", "CUDA_", "OMP_", "CLUSTER_DDP_")
_LOOKS_LIKE_A_KEY = re.compile(r"(?=[^/]*\d)(?=[^/]*[A-Za-z])[A-Za-z0-9+/_=.]{32,}")
_MASKED = "(masked)"
_GPU_QUERY = ["nvidia-smi", "--query-gpu=index,name,uuid,memory.total,driver_version", "--format=csv,noheader"]
_GPU_SECONDS = 20.0


class EnvironmentReport:
    """Writes the report of this node once, in the background: querying the GPUs takes a while."""

    def __init__(
        self, file: Path, environment: NodeEnvironment, ranks: LocalRanks, *, node_rank: int, command: Sequence[str]
    ) -> None:
        self._file = file
        self._environment = environment
        self._ranks = ranks
        self._node_rank = node_rank
        self._command = list(command)
        self._thread: threading.Thread | None = None

    def begin(self) -> None:
        """Write it, with the ranks known by now; only the first call has an effect."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._write, name="environment-report", daemon=True)
            self._thread.start()

    def finish(self) -> None:
        """Wait until it is written."""
        self.begin()
        assert self._thread is not None
        self._thread.join()

    def _write(self) -> None:
        ranks = [
            {"rank": rank.rank, "local_rank": rank.local_rank, "pid": rank.pid}
            for rank in sorted(self._ranks.seen.values(), key=lambda rank: rank.local_rank)
        ]
        content = report(self._environment, node_rank=self._node_rank, ranks=ranks, command=self._command)
        with contextlib.suppress(OSError):  # a full disk must not end training
            write_json(Storage(), self._file, content)


def report(
    environment: NodeEnvironment, *, node_rank: int, ranks: list[dict[str, Any]], command: list[str]
) -> dict[str, Any]:
    shown = {name: value for name, value in sorted(environment.variables.items()) if name.startswith(_REPORTED)}
    return {
        "host": host_name(),
        "node_rank": node_rank,
        "system": platform.platform(),
        "cpus": usable_cpus(),
        "gpus": _gpus(environment.variables),
        "versions": package_versions(),
        "torchrun": [without_password(argument) for argument in command],
        "ranks": ranks,
        "set_by_cluster_ddp": [asdict(setting) for setting in environment.settings],
        "set_before": {name: _masked(name, value) for name, value in environment.kept.items()},
        "remarks": list(environment.remarks),
        "variables": {name: _masked(name, value) for name, value in shown.items()},
    }


def _masked(name: str, value: str) -> str:
    looks_like_a_key = not value.startswith("/") and _LOOKS_LIKE_A_KEY.fullmatch(value)
    return _MASKED if looks_like_a_key or is_secret_name(name) or name == "SLURM_JWT" else without_password(value)


def _gpus(variables: Mapping[str, str]) -> list[str]:
    try:
        done = subprocess.run(
            _GPU_QUERY, capture_output=True, text=True, timeout=_GPU_SECONDS, check=True, env=dict(variables)
        )
    except (OSError, subprocess.SubprocessError):
        return []
    return done.stdout.splitlines()
