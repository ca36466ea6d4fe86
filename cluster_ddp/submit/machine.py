"""What a job uses on this machine: its interpreter and its GPUs."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING

from cluster_ddp.submit.base import SubmitError

if TYPE_CHECKING:
    from cluster_ddp.job import JobSpec

_GPU_SECONDS = 20.0


def interpreter(spec: JobSpec) -> str:
    """Return the interpreter that ``launch.python`` names, or else this one."""
    if spec.launch.python is None:
        return sys.executable
    found = shutil.which(spec.launch.python)
    if found is None:
        raise SubmitError(
            f"launch.python: {spec.launch.python} is not on this machine.\nFor this Python: --set launch.python=null"
        )
    return found


def devices_here(gpus: str | None = None) -> list[str]:
    """Return the GPUs that ``--gpus`` names, none for ``none`` (CPUs); by default all that are visible."""
    if gpus is not None:
        return [] if gpus.strip().lower() in ("", "none") else _named_devices(gpus)
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return [device.strip() for device in visible.split(",") if device.strip() not in ("", "-1")]
    return all_devices()


def _named_devices(gpus: str) -> list[str]:
    devices = [device.strip() for device in gpus.split(",")]
    if not all(device.isdecimal() or device.startswith(("GPU-", "MIG-")) for device in devices):
        raise SubmitError(f"--gpus {gpus} is not a list of devices such as 0,1 (or none)")
    if len(set(devices)) != len(devices):
        raise SubmitError(f"--gpus {gpus}: give each device once, such as 0,1,3, or none")
    if not all_devices() and not _torch_has_gpu():
        raise SubmitError(
            f"--gpus {gpus}: there is no GPU on this machine; --procs P instead trains P ranks on the CPU"
        )
    return devices


def _torch_has_gpu() -> bool:
    """Whether torch finds a GPU; nvidia-smi does not list those of AMD, and some containers lack it."""
    import torch

    return torch.cuda.is_available()


def all_devices() -> list[str]:
    """Return the indices of this machine's NVIDIA GPUs, whichever are visible to torch; empty if there are none."""
    try:
        done = subprocess.run(
            ["nvidia-smi", "--query-gpu=index", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=_GPU_SECONDS,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return []
    return done.stdout.split()
