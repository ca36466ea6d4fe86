"""The default optimizer, and workarounds for torch's own optimizers."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer

from cluster_ddp.train.errors import TaskError

_NORMS = (
    nn.modules.batchnorm._NormBase,
    nn.LayerNorm,
    nn.GroupNorm,
    nn.RMSNorm,
    nn.LocalResponseNorm,
)
# Devices for which torch has fused optimizers: one kernel for all parameters.
_FUSED = frozenset({"cpu", "cuda", "mps", "xpu"})


class HasGroups(Protocol):
    """An optimizer, as far as its groups go."""

    param_groups: list[dict[str, Any]]


def adamw(model: nn.Module, lr: float, weight_decay: float) -> AdamW:
    """AdamW (Loshchilov and Hutter 2019, arXiv:1711.05101), fused if possible, without decay on norms and biases."""
    return AdamW(parameter_groups(model, weight_decay), lr=lr, fused=can_fuse(model))


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Split the trainable parameters into those with and without weight decay.

    Parameters of normalisation layers, and all with fewer than two dimensions (biases, gains), do not decay. A
    parameter that is used in several places is counted once.
    """
    of_norms = {
        id(parameter)
        for module in model.modules()
        if isinstance(module, _NORMS)
        for parameter in module.parameters(recurse=False)
    }
    decaying: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for parameter in model.parameters():
        if parameter.requires_grad:
            (others if parameter.ndim < 2 or id(parameter) in of_norms else decaying).append(parameter)
    groups: list[dict[str, Any]] = [
        {"params": decaying, "weight_decay": weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def parameters_of(*optimizers: HasGroups) -> list[nn.Parameter]:
    """The parameters that optimizers hold, in the order of their groups."""
    return [weight for optimizer in optimizers for group in optimizer.param_groups for weight in group["params"]]


def can_fuse(model: nn.Module) -> bool:
    """Whether torch has a fused optimizer for all trainable parameters of this model."""
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return all(parameter.device.type in _FUSED and torch.is_floating_point(parameter) for parameter in trainable)


def refuse_divided(optimizer: Optimizer) -> None:
    """Raise a `TaskError` for an optimizer that splits its state among the ranks, such as ZeroRedundancyOptimizer."""
    if callable(getattr(optimizer, "consolidate_state_dict", None)):
        raise TaskError(
            f"the optimizer is of type {type(optimizer).__name__}, which divides its state among the ranks: a "
            "checkpoint holds the state that all ranks have; use the optimizer inside it on its own"
        )


def refuse_broken(optimizer: Optimizer) -> None:
    """Raise a `TaskError` for a torch bug: fused SGD with momentum on the CPU reads past 16-bit parameters."""
    for group in optimizer.param_groups if isinstance(optimizer, SGD) else ():
        if group["fused"] and group["momentum"] and any(map(_is_half_on_cpu, group["params"])):
            raise TaskError(
                "optimizer(): torch's SGD with fused=True and momentum gives different weights each time for bf16 and "
                "fp16 parameters on the CPU; use fused=False"
            )


def _is_half_on_cpu(weight: torch.Tensor) -> bool:
    return weight.device.type == "cpu" and weight.dtype in (torch.bfloat16, torch.float16)


def start_momentum(optimizer: Optimizer, *, spoilt: bool) -> None:
    """Initialise the momentum of a fused SGD to zero.

    For its first update, it uses uninitialised memory as the momentum, and it fails if some parameters get their first
    gradient later than others.

    Parameters
    ----------
    spoilt
        Whether the optimizer itself may skip its first update, which would then keep the uninitialised momentum.

    Raises
    ------
    TaskError
        With dampening, a zero momentum cannot reproduce the first update, which differs from the others.
    """
    if not isinstance(optimizer, SGD):
        return
    for group in optimizer.param_groups:
        if group["fused"] and group["momentum"]:
            if group["dampening"]:
                if not spoilt:
                    continue
                raise TaskError(
                    "optimizer(): SGD with fused=True, momentum and dampening would be spoilt when its first update is "
                    "skipped for gradients that are not finite; use fused=False"
                )
            for parameter in group["params"]:
                if optimizer.state[parameter].get("momentum_buffer") is None:
                    optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)


def takes_found_inf(optimizer: Optimizer) -> bool:
    """Whether the optimizer itself skips an update by its `found_inf`, without the host waiting for the device."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))
