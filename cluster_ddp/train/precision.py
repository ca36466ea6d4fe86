"""The number formats used in training: autocast, the gradient scaler, TF32."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass

import torch

from cluster_ddp.job import TrainSpec
from cluster_ddp.train.errors import TrainError

_NOTHING = nullcontext()
_FOR_GOOD = ExitStack()  # what is entered by it is never left
_DTYPES = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Precision:
    """The number format of forward passes."""

    name: str  # fp32, bf16 or fp16
    device: str
    dtype: torch.dtype | None  # the autocast dtype; None: no autocast

    def autocast(self) -> AbstractContextManager[None]:
        """The context for a forward pass and its loss."""
        if self.dtype is None:
            return _NOTHING
        return torch.autocast(self.device, self.dtype)


def choose_precision(train: TrainSpec, device: torch.device) -> Precision:
    """Resolve ``train.precision``: auto is bf16 on GPUs that compute in it, fp16 on older ones, fp32 on the CPU.

    Raises
    ------
    TrainError
        The device cannot compute in the format that was asked for.
    """
    name = _fitting(device) if train.precision == "auto" else train.precision
    if name == "bf16" and device.type == "cuda" and not torch.cuda.is_bf16_supported():
        raise TrainError(
            f"train.precision: bf16: {torch.cuda.get_device_name(device)} cannot compute in it; set fp16 or auto"
        )
    return Precision(name, device.type, _DTYPES[name])


def _fitting(device: torch.device) -> str:
    if device.type != "cuda":
        return "fp32"
    return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp16"


def make_scaler(train: TrainSpec, precision: Precision) -> torch.amp.GradScaler | None:
    """The gradient scaler of fp16 with the job file's settings; None for the other formats, which need none."""
    if precision.dtype is not torch.float16:
        return None
    return torch.amp.GradScaler(
        precision.device,
        init_scale=train.scaler.initial,
        growth_factor=train.scaler.growth_factor,
        backoff_factor=train.scaler.backoff_factor,
        growth_interval=train.scaler.growth_interval,
    )


def set_backends(train: TrainSpec, device: torch.device) -> None:
    """Apply TF32 and determinism to torch as a whole."""
    torch.backends.cuda.matmul.allow_tf32 = train.tf32
    torch.backends.cudnn.allow_tf32 = train.tf32
    if train.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without it cuBLAS refuses
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False
        run_scripts_as_they_are()
    elif device.type == "cpu":
        keep_order_of_sums()


def keep_order_of_sums() -> None:
    """Make results on the CPU the same each time, which the gradient of ``weight[indices]`` is not with threads.

    What torch cannot compute that way is computed nonetheless, with a warning of torch.
    """
    if not torch.are_deterministic_algorithms_enabled():
        torch.set_deterministic_debug_mode("warn")  # the same without importing torch's compiler, which takes a second
        # Filling it with NaN costs time, and would stop programs that never use it; only lstsq's "gelsy" reads it.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    run_scripts_as_they_are()


def run_scripts_as_they_are() -> None:
    """Have functions of `torch.jit.script` give the same gradients in each call.

    Torch rewrites them after the first ones, which changes the last bits: the first step after a resume would differ.
    """
    _FOR_GOOD.enter_context(torch.jit.optimized_execution(False))  # type: ignore[attr-defined]
