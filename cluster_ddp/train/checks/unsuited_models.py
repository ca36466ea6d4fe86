"""Models that cannot be trained, saved or restored as they are, refused before the first step."""

from __future__ import annotations

import re

import torch
from torch import Tensor, nn

from cluster_ddp.checkpoint.plan import Tensors
from cluster_ddp.train.errors import TaskError

# Dtypes that torch can neither copy nor compute with, or that a checkpoint cannot contain.
_UNSTORED = {
    dtype
    for name, dtype in vars(torch).items()
    if isinstance(dtype, torch.dtype) and re.fullmatch(r"float4\w*|u?int[1-7]|bits\w+|qu?int\w+|complex32", name)
}


def refuse_scripted(model: nn.Module) -> None:
    """Raise a `TaskError` for scripted and traced modules, whose attributes nobody can see."""
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise TaskError(
                f"'{name}' of model() is a scripted module, whose attributes a checkpoint cannot contain: use the "
                "module that it was made from, and train.compile: true to make it fast"
            )


def refuse_dtypes(model: nn.Module) -> None:
    """Raise a `TaskError` for parameters and buffers of a dtype that no checkpoint can contain."""
    for kind, named in (("parameter", model.named_parameters()), ("buffer", model.named_buffers())):
        for name, tensor in named:
            if tensor.dtype in _UNSTORED:
                raise TaskError(
                    f"the {kind} {name} has dtype {tensor.dtype}, which a checkpoint cannot contain: keep it in "
                    "another dtype, or keep its bits in torch.uint8 and view() them in that dtype where they are used"
                )


def refuse_sparse(model: nn.Module) -> None:
    """Raise a `TaskError` for sparse tensors in the model's state; one outside of it, such as a graph, may stay."""
    for name, tensor in model.state_dict(keep_vars=True).items():
        if isinstance(tensor, Tensor) and tensor.layout is not torch.strided:
            raise TaskError(
                f"the buffer {name} is sparse, which a checkpoint cannot contain: register it with persistent=False if "
                "model() always creates it with the same values; otherwise register its indices and values instead"
            )


def refuse_trained_in_8_bits(model: nn.Module) -> None:
    """Raise a `TaskError` for 8-bit parameters that require gradients, which torch cannot compute with."""
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter.element_size() == 1:
            raise TaskError(
                f"the parameter {name} has dtype {parameter.dtype} and requires_grad, and torch cannot compute with "
                "such gradients: keep it in torch.bfloat16, or give it requires_grad=False"
            )


def refuse_expanded(named: Tensors) -> None:
    """Raise a `TaskError` if elements of a tensor of the model share their memory."""
    for name, strides in zip(named, (named.looks() or {}).get("stride", ()), strict=False):
        if 0 in strides and _is_expanded(named[name]):
            raise TaskError(
                f"the model's '{name.removeprefix('model.')}' is expanded: its elements share their memory and "
                "cannot be put back one by one; register it with .expand(...).contiguous()"
            )


def _is_expanded(tensor: Tensor) -> bool:
    return any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))
