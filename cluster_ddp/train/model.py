"""Prepares the task's model for training: device, SyncBatchNorm, activation checkpointing, compile, DDP.

DDP's gradient buckets are settled before the first step, so that a resumed run sums in the same order as an
uninterrupted one.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Mapping
from typing import Any, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from cluster_ddp.job import TrainSpec
from cluster_ddp.train.errors import TaskError, TrainError
from cluster_ddp.train.objects.comm_hooks import states_of_hooks, watch_comm_hooks
from cluster_ddp.train.objects.surroundings import variables_around
from cluster_ddp.train.randomness import parts_of
from cluster_ddp.train.ranks.distributed import World, all_gather, all_gather_object
from cluster_ddp.train.recomputing import checkpoint_blocks
from cluster_ddp.train.refusals import (
    SHAPED_BY_A_BATCH,
    refuse_bypass,
    refuse_differences,
    refuse_dtypes,
    refuse_scripted,
    refuse_sparse,
    refuse_trained_in_8_bits,
)
from cluster_ddp.train.state.stateful import Stateful, are_alike, copied
from cluster_ddp.train.state.undoing import wholly_undone
from cluster_ddp.train.step import run_backward

_NOTHING = contextlib.nullcontext()
_HOOKS = {"fp16": default_hooks.fp16_compress_hook, "bf16": default_hooks.bf16_compress_hook}
_SETTLING_PASSES = 2  # after the first, DDP rebuilds its buckets; the second runs in the new layout
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
    wrapped = DistributedDataParallel(
        model,
        device_ids=[device.index] if device.type == "cuda" else None,
        find_unused_parameters=train.find_unused_parameters,
        static_graph=train.static_graph,
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


def settle_buckets(
    model: nn.Module, also: Stateful | None, loss: Callable[[], Tensor], warn: Callable[[str], None]
) -> None:
    """Run throw-away forward and backward passes, and undo their effects.

    DDP rebuilds its buckets after the first backward pass, in the order in which gradients arrived. With three or more
    ranks, the layout determines the order in which numbers are added, and so their last bits. A resumed process would
    use the first layout for one step more than the uninterrupted one did. So every attempt, including the first,
    settles the layout before it starts, using the same batch. That of other networks that the task has put into DDP is
    settled by `settle_layout`, because they may be trained only later.

    Parameters
    ----------
    model
        The wrapped model, in training mode.
    also
        Anything else with state that `loss` may change, such as the task; its state is restored.
    loss
        Computes the loss of the first micro-batch of the training, with all generators seeded.
    warn
        Called if DDP has been given a hook with a state.

    Raises
    ------
    TaskError
        Not all gradients were summed over the ranks, because `loss` did not compute them by calling `model`; or a
        buffer has changed its shape.
    """
    buffers = [(name, buffer, buffer.detach().clone()) for name, buffer in model.named_buffers()]
    state = copied(also.state_dict()) if also is not None else {}
    extra_states = [
        (module, copied({"": module.get_extra_state()}))
        for module in model.modules()
        if type(module).get_extra_state is not nn.Module.get_extra_state
    ]
    trained = [parameter.requires_grad for parameter in model.parameters()]
    # On the host, where there was memory for them when the model was built.
    weights = [(parameter, parameter.detach().to("cpu", copy=True)) for parameter in model.parameters()]
    for held in parts_of(also, *variables_around([also]).values()):
        settle_layout(held, dist.get_world_size())
    in_ddp = [model] if isinstance(model, DistributedDataParallel) else []
    comm_hooks = watch_comm_hooks(in_ddp, warn)
    has_hook = any(map(states_of_hooks, in_ddp))
    for _ in range(2):  # after the first pass, DDP rebuilds its buckets
        with wholly_undone(also, model):
            run_backward(refuse_bypass(model, loss))
        for parameter, value in weights:  # loss() may change them by itself, as with a momentum encoder
            if parameter.shape == value.shape:
                parameter.data.copy_(value)
        if not has_hook and any(map(states_of_hooks, in_ddp)):
            # DDP takes only one, and keeps it; what says in the task that it has been given has been undone.
            in_ddp[0].register_comm_hook = lambda *_, **__: None  # type: ignore[method-assign]
        next(comm_hooks, None)
        if _all_are_summed(model):
            summed = {
                name: weight.new_empty(0) if weight.grad is None else weight.grad
                for name, weight in model.named_parameters()
            }
            refuse_differences("the gradients of the first batch", summed)
        model.zero_grad(set_to_none=True)
    for parameter, is_trained in zip(model.parameters(), trained, strict=True):
        parameter.requires_grad_(is_trained)
    for name, buffer, before in buffers:
        if buffer.shape != before.shape:
            raise TaskError(
                f"the buffer {name.removeprefix('module.')} has the shape {list(before.shape)} before the first batch "
                f"and {list(buffer.shape)} after it, which a resume could not repeat. {SHAPED_BY_A_BATCH}"
            )
        buffer.data.copy_(before)
    for module, extra in extra_states:  # it may be that of a library's object, which has not been undone
        if not are_alike(extra, {"": module.get_extra_state()}):
            module.set_extra_state(extra[""])
    # A state that has not changed is not loaded: load_state_dict() may note that this is a resume.
    if also is not None and state and not all(all_gather_object(are_alike(state, also.state_dict()))):
        also.load_state_dict(state)


def settle_layout(model: object, world_size: int) -> None:
    """Settle DDP's buckets like `settle_buckets`, but without a loss, as for a custom loop.

    Zero gradients arrive in an order that every attempt repeats, the reverse of their registration. DDP with
    ``find_unused_parameters`` keeps its first layout, so there is nothing to settle.

    Parameters
    ----------
    model
        The wrapped model, before its first forward pass. Anything else is left alone.
    world_size
        Ranks in the group.

    Raises
    ------
    TrainError
        DDP was created with ``static_graph=True``, which takes its layout from the first real backward pass, and there
        are three or more ranks.
    """
    if not isinstance(model, DistributedDataParallel):
        return
    if model.static_graph:
        if world_size > 2:
            raise TrainError(
                "DistributedDataParallel(static_graph=True) on three ranks or more cannot be resumed exactly: it lays "
                "out its gradient buckets by the first backward pass of each attempt; omit static_graph"
            )
        return
    if model.find_unused_parameters:
        return
    weights = [weight for weight in model.module.parameters() if weight.is_floating_point() or weight.is_complex()]
    frozen = [] if any(weight.requires_grad for weight in weights) else weights  # only since it was put into DDP
    for weight in frozen:
        weight.requires_grad_(True)
    parameters = [weight for weight in weights if weight.requires_grad]
    sparse = {id(table.weight) for table in model.modules() if _has_sparse_gradient(table)}
    before = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    # What DistributedDataParallel.forward does around the module's forward; the reducer has no public API for it.
    reducer = model.reducer
    for _ in range(_SETTLING_PASSES):
        reducer.prepare_for_forward()
        reducer._rebuild_buckets()
        reducer.prepare_for_backward([])
        for parameter in reversed(parameters):
            run_backward(_nothing_of(parameter, is_sparse=id(parameter) in sparse))
        for parameter in parameters:
            parameter.grad = None
    for parameter, gradient in zip(parameters, before, strict=True):
        parameter.grad = gradient
    for weight in frozen:
        weight.requires_grad_(False)


def _has_sparse_gradient(module: nn.Module) -> TypeGuard[nn.Embedding | nn.EmbeddingBag]:
    return isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse


def _nothing_of(parameter: Tensor, *, is_sparse: bool) -> Tensor:
    """Zero as a function of the parameter, with the kind of gradient (sparse or dense) that DDP expects."""
    if is_sparse:
        row = torch.zeros(1, dtype=torch.int64, device=parameter.device)
        return F.embedding(row, parameter, sparse=True).sum() * 0
    return (parameter.reshape(-1)[:1] * 0).sum()


def _all_are_summed(model: nn.Module) -> bool:
    """Whether every gradient that DDP waits for has arrived, on all ranks; if not, DDP raises in the next pass."""
    if getattr(model, "find_unused_parameters", False) or getattr(model, "static_graph", False):
        return True
    unused = any(weight.requires_grad and weight.grad is None for weight in model.parameters())
    return not all_gather(torch.tensor(int(unused))).any()


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
