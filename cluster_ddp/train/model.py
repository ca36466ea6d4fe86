"""Prepares the task's model for training: device, SyncBatchNorm, activation checkpointing, compile, DDP.

DDP's gradient buckets are settled before the first step, so that a resumed run sums in the same order as an
uninterrupted one.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Mapping
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from cluster_ddp.job import TrainSpec
from cluster_ddp.train.checks.unsuited_models import (
    refuse_dtypes,
    refuse_scripted,
    refuse_sparse,
    refuse_trained_in_8_bits,
)
from cluster_ddp.train.errors import TaskError, TrainError
from cluster_ddp.train.objects.held import hooks_of_tensor
from cluster_ddp.train.objects.surroundings import variables_around
from cluster_ddp.train.randomness import parts_of
from cluster_ddp.train.ranks.distributed import World
from cluster_ddp.train.recomputing import checkpoint_blocks
from cluster_ddp.train.step import run_backward

_NOTHING = contextlib.nullcontext()
_HOOKS = {"fp16": default_hooks.fp16_compress_hook, "bf16": default_hooks.bf16_compress_hook}
# Dtypes that neither Gloo nor NCCL can send, those that only Gloo cannot send, and alternatives to them.
_UNSENT = dict.fromkeys((torch.int16, torch.uint16, torch.uint32, torch.uint64), "torch.int32 or torch.int64")
_UNSENT_ON_CPU = dict.fromkeys(
    (dtype for name, dtype in vars(torch).items() if name.startswith("float8_")), "torch.bfloat16 or torch.float32"
)


def prepare_model(model: nn.Module, train: TrainSpec, device: torch.device) -> nn.Module:
    """Prepare a model for DDP: SyncBatchNorm, activation checkpointing, the move to the device, compile.

    The names of parameters and buffers do not change.

    Raises
    ------
    TaskError
        The model has nothing to train, tensors that cannot be trained or saved, or no blocks to checkpoint.
    """
    lazy = [name for name, parameter in model.named_parameters() if is_lazy(parameter)]
    if lazy:
        raise TaskError(
            f"model() returned parameters without a shape, of lazy modules: {', '.join(lazy[:5])}; run a batch through "
            "the model in model(), or use modules that are not lazy"
        )
    refuse_scripted(model)
    refuse_dtypes(model)
    refuse_sparse(model)
    refuse_trained_in_8_bits(model)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise TaskError("model() has no trainable parameter: at least one needs requires_grad")
    if train.sync_batchnorm:
        model = synchronised_batchnorm(model, device)
    if train.grad_checkpointing:
        checkpoint_blocks(model)
    model = model.to(device)
    if train.compile:
        model.compile()
    return model


def wrap(model: nn.Module, train: TrainSpec, world: World, device: torch.device) -> nn.Module:
    """Wrap the model in DDP as configured in the job file; a single process needs no wrapper.

    Raises
    ------
    TrainError
        The gradients cannot be compressed in this way on this device.
    TaskError
        A parameter or buffer is sparse or has a dtype that cannot be sent.
    """
    if world.world_size == 1:
        return model
    _refuse_unsent(model, _UNSENT if device.type == "cuda" else _UNSENT | _UNSENT_ON_CPU)
    # Both find what is unused; a static graph does so in the first pass, whose layout is not that of the others.
    is_static = train.static_graph and not train.find_unused_parameters
    wrapped = DistributedDataParallel(
        model,
        device_ids=[device.index] if device.type == "cuda" else None,
        find_unused_parameters=train.find_unused_parameters,
        static_graph=is_static,
        gradient_as_bucket_view=train.gradient_as_bucket_view,
        bucket_cap_mb=train.bucket_mb,
    )
    wrapped.broadcast_buffers = False  # after the broadcast at construction: `Buffers` sends them before each step
    if train.comm_hook == "bf16" and device.type != "cuda":
        raise TrainError("train.comm_hook: bf16 needs CUDA with NCCL; fp16 works with Gloo too")
    if train.comm_hook != "none":
        wrapped.register_comm_hook(None, _HOOKS[train.comm_hook])
    return wrapped


def _refuse_unsent(model: nn.Module, unsent: Mapping[torch.dtype, str]) -> None:
    """Raise a `TaskError` for parameters and buffers that ranks cannot send to each other."""
    for kind, named in (("parameter", model.named_parameters()), ("buffer", model.named_buffers())):
        for name, tensor in named:
            if tensor.layout is not torch.strided:
                raise TaskError(
                    f"the {kind} {name} is sparse, which DDP cannot send to the other ranks: hold its indices and "
                    "values, and make it from them where it is used"
                )
            if tensor.dtype in unsent:
                raise TaskError(
                    f"the {kind} {name} has dtype {tensor.dtype}, which ranks cannot send to each other, as "
                    f"several ranks must with everything that the model registers: keep it as {unsent[tensor.dtype]}"
                )


def without_sync(model: nn.Module, last: bool) -> contextlib.AbstractContextManager[Any]:
    """The context of a micro-batch: only the last one of a step sums the gradients over the ranks."""
    if last or not isinstance(model, DistributedDataParallel):
        return _NOTHING
    return model.no_sync()


def settle_layouts(model: nn.Module, task: object, world_size: int, *, accumulates: bool) -> None:
    """Settle the layouts of the buckets of a model in DDP, and of other networks that the task has put into DDP."""
    settle_layout(model, world_size, accumulates=accumulates)
    for held in parts_of(task, *variables_around([task]).values()):
        settle_layout(held, world_size)


def settle_layout(model: object, world_size: int, *, accumulates: bool = False) -> None:
    """Have DDP lay out its buckets before the first step as it will in all later ones.

    DDP rebuilds its buckets after the first backward pass (with ``static_graph`` after the second), in the order in
    which gradients arrived. With three or more ranks, the layout determines the order in which numbers are added, and
    so their last bits: a resumed process would use the first layout for one step more than the uninterrupted one did.
    So zero gradients arrive here, in an order that every attempt repeats, the reverse of their registration.

    Parameters
    ----------
    model
        The wrapped model, before its first forward pass. Anything else is left alone.
    world_size
        Ranks in the group.
    accumulates
        Whether the first backward passes do not send their gradients.

    Raises
    ------
    TaskError
        The layout depends on which parameters the first real backward pass of an attempt uses.
    """
    if not isinstance(model, DistributedDataParallel):
        return
    if model.static_graph and model.find_unused_parameters and (world_size > 2 or accumulates):
        raise TaskError(
            "static_graph and find_unused_parameters, both for one model: on three ranks or more, or with several "
            "backward passes in a step, DDP has to know beforehand which parameters are used; omit static_graph"
        )
    if not is_settled(model, world_size, accumulates=accumulates):
        return
    weights = [weight for weight in model.module.parameters() if weight.is_floating_point() or weight.is_complex()]
    frozen = [] if any(weight.requires_grad for weight in weights) else weights  # only since it was put into DDP
    for weight in frozen:
        weight.requires_grad_(True)
    parameters = [weight for weight in weights if weight.requires_grad]
    before = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    with warnings.catch_warnings(), _without_hooks(parameters):
        warnings.simplefilter("ignore")  # these gradients may have other strides than real ones
        _send_zeros(model, parameters)
    for parameter, gradient in zip(parameters, before, strict=True):
        parameter.grad = gradient
    for weight in frozen:
        weight.requires_grad_(False)


@contextlib.contextmanager
def _without_hooks(parameters: list[Tensor]) -> Iterator[None]:
    """Take away the hooks that the program gave to parameters: they may count or average the gradients they see."""
    given = [hooks for parameter in parameters for hooks in hooks_of_tensor(parameter).values()]
    were = [dict(hooks) for hooks in given]
    for hooks in given:
        hooks.clear()
    try:
        yield
    finally:
        for hooks, held in zip(given, were, strict=True):
            hooks.update(held)


def put_gradients_in_buckets(model: DistributedDataParallel, world_size: int) -> None:
    """Make the gradients of zeros that weights have views of DDP's buckets, as its backward pass leaves them.

    With ``gradient_as_bucket_view``, DDP divides those by the number of ranks, and multiplies others by its inverse,
    which for three ranks, among others, gives different bits. All ranks call it, once the layout is settled.
    """
    weights = [weight for weight in model.module.parameters() if weight.requires_grad]
    without = [weight for weight in weights if weight.grad is None]
    is_power_of_two = world_size & (world_size - 1) == 0
    if is_power_of_two or not model.gradient_as_bucket_view or len(without) == len(weights):
        return
    sparse = {id(table.weight) for table in model.modules() if _has_sparse_gradient(table)}
    with _without_hooks(weights):
        nothing = torch.stack([_nothing_of(weight, is_sparse=id(weight) in sparse) for weight in weights]).sum()
        model.reducer.prepare_for_forward()
        model.reducer._rebuild_buckets()
        model.reducer.prepare_for_backward([nothing] if model.find_unused_parameters else [])
        run_backward(nothing)
    for weight in without:
        weight.grad = None


def is_settled(model: DistributedDataParallel, world_size: int, *, accumulates: bool) -> bool:
    """Whether `settle_layout` settles the layout of a model.

    With ``find_unused_parameters``, DDP keeps its first layout. With ``static_graph``, it notes in its first backward
    pass which parameters are used: that has to be the first real one, except where the layout matters, or where that
    pass does not send its gradients, in which DDP fails.
    """
    return not model.find_unused_parameters and (world_size > 2 or accumulates or not model.static_graph)


def _send_zeros(model: DistributedDataParallel, parameters: list[Tensor]) -> None:
    """Do what `DistributedDataParallel.forward` does around the module's forward; there is no public API for it."""
    sparse = {id(table.weight) for table in model.modules() if _has_sparse_gradient(table)}
    reducer = model.reducer
    for number in range(3 if model.static_graph else 2):
        reducer.prepare_for_forward()
        reducer._rebuild_buckets()
        reducer.prepare_for_backward([])
        for parameter in reversed(parameters):
            run_backward(_nothing_of(parameter, is_sparse=id(parameter) in sparse))
        if model.static_graph and number == 0:  # in the first pass, the gradients wait for its end
            reducer._delay_all_reduce()  # type: ignore[attr-defined]
            model._static_graph_delay_allreduce_enqueued = True
        for parameter in parameters:
            parameter.grad = None


def _has_sparse_gradient(module: nn.Module) -> TypeGuard[nn.Embedding | nn.EmbeddingBag]:
    return isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse


def _nothing_of(parameter: Tensor, *, is_sparse: bool) -> Tensor:
    """Zero as a function of the parameter, with the kind of gradient (sparse or dense) that DDP expects."""
    if is_sparse:
        row = torch.zeros(1, dtype=torch.int64, device=parameter.device)
        return F.embedding(row, parameter, sparse=True).sum() * 0
    nothing = (parameter.reshape(-1)[:1] * 0).sum()
    return nothing.real if nothing.is_complex() else nothing


def synchronised_batchnorm(model: nn.Module, device: torch.device) -> nn.Module:
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
