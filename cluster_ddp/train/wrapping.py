"""From the task's model to the one that is trained: device, SyncBatchNorm, activation checkpointing, compile, DDP."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from cluster_ddp.spec import TrainSpec
from cluster_ddp.train.distributed import World
from cluster_ddp.train.errors import TaskError, TrainError

_NOTHING = contextlib.nullcontext()
_HOOKS = {"fp16": default_hooks.fp16_compress_hook, "bf16": default_hooks.bf16_compress_hook}


def prepare_model(model: nn.Module, train: TrainSpec, device: torch.device) -> nn.Module:
    """Do what comes before DDP: SyncBatchNorm, activation checkpointing, the move to the device, compile.

    Names of parameters and buffers stay as the task's model has them.

    Raises
    ------
    TaskError
        The model has nothing to train, or no blocks to checkpoint.
    """
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise TaskError("model() has no trainable parameter: at least one needs requires_grad")
    if train.sync_batchnorm:
        model = _synchronised(model, device)
    if train.grad_checkpointing:
        checkpoint_blocks(model)
    model = model.to(device)
    if train.compile:
        model.compile()
    return model


def wrap(model: nn.Module, train: TrainSpec, world: World, device: torch.device) -> nn.Module:
    """Wrap the model in DDP as the job file says; a single process needs no wrapper.

    Raises
    ------
    TrainError
        The gradients cannot be compressed in this way on this device.
    """
    if world.world_size == 1:
        return model
    wrapped = DistributedDataParallel(
        model,
        device_ids=[device.index] if device.type == "cuda" else None,
        find_unused_parameters=train.find_unused_parameters,
        static_graph=train.static_graph,
        gradient_as_bucket_view=train.gradient_as_bucket_view,
        bucket_cap_mb=train.bucket_mb,
    )
    if train.comm_hook == "bf16" and device.type != "cuda":
        raise TrainError("train.comm_hook: bf16 needs CUDA with NCCL; fp16 works with Gloo too")
    if train.comm_hook != "none":
        wrapped.register_comm_hook(None, _HOOKS[train.comm_hook])
    return wrapped


def without_sync(model: nn.Module, last: bool) -> contextlib.AbstractContextManager[Any]:
    """Context of a micro-batch: only the last one of a step sums the gradients over the ranks."""
    if last or not isinstance(model, DistributedDataParallel):
        return _NOTHING
    return model.no_sync()


def _synchronised(model: nn.Module, device: torch.device) -> nn.Module:
    has_batchnorm = any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules())
    if not has_batchnorm:
        return model
    if device.type != "cuda":
        warnings.warn(
            f"train.sync_batchnorm: torch has no SyncBatchNorm on {device.type}; BatchNorm stays, and each rank "
            "normalises by its own micro-batch",
            stacklevel=2,
        )
        return model
    converted: nn.Module = nn.SyncBatchNorm.convert_sync_batchnorm(model)  # type: ignore[no-untyped-call]
    return converted


def checkpoint_blocks(model: nn.Module) -> int:
    """Let the blocks of a model forget their activations and compute them again in the backward pass.

    The blocks are the members of the outermost ModuleLists and Sequentials. Dropout draws the same numbers again, and
    BatchNorm's statistics take each batch in once.

    Returns
    -------
    The number of blocks.

    Raises
    ------
    TaskError
        The model has none.
    """
    blocks = list(_blocks(model))
    if not blocks:
        raise TaskError(
            "train.grad_checkpointing: the model has no nn.ModuleList or nn.Sequential whose members could be "
            "checkpointed; put its blocks into one, or turn it off"
        )
    for block in blocks:
        block.forward = functools.partial(_recomputed, block, block.forward)
    return len(blocks)


def _blocks(module: nn.Module) -> Iterator[nn.Module]:
    if isinstance(module, (nn.ModuleList, nn.Sequential)):
        yield from (child for child in module if any(True for _ in child.parameters()))
        return
    for child in module.children():
        yield from _blocks(child)


def _recomputed(block: nn.Module, forward: Any, *args: Any, **kwargs: Any) -> Any:
    if not (block.training and torch.is_grad_enabled()):
        return forward(*args, **kwargs)
    contexts = functools.partial(_contexts, block)
    return checkpoint(forward, *args, use_reentrant=False, context_fn=contexts, **kwargs)


def _contexts(block: nn.Module) -> tuple[Any, Any]:
    """Those of the first computation and of the second."""
    return contextlib.nullcontext(), _frozen_statistics(block)


@contextlib.contextmanager
def _frozen_statistics(block: nn.Module) -> Iterator[None]:
    norms = [module for module in block.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
    before = [(norm.momentum, norm.num_batches_tracked) for norm in norms]
    for norm, (_, batches) in zip(norms, before, strict=True):
        # Not None, which SyncBatchNorm does not take.
        norm.momentum, norm.num_batches_tracked = 0.0, None if batches is None else batches.clone()
    try:
        yield
    finally:
        for norm, (momentum, batches) in zip(norms, before, strict=True):
            norm.momentum, norm.num_batches_tracked = momentum, batches
