"""Checks that refuse what would fail later, or silently train something other than what was meant.

Most of them run before or in the first step. For optimizers see `unsuited_optimizers`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any, NoReturn

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torch.utils.hooks import RemovableHandle

from cluster_ddp.checkpoint.plan import Tensors
from cluster_ddp.checkpoint.replicas import tensor_digests
from cluster_ddp.job import BatchPlan, TrainSpec
from cluster_ddp.train.data.order import SampleStream, rank_micro_batches
from cluster_ddp.train.errors import DataError, TaskError
from cluster_ddp.train.ranks.distributed import all_gather, all_gather_object
from cluster_ddp.words import listed

MODULE_BUFFERS = "buffers of modules"  # key for buffers that may differ between ranks, such as BatchNorm's statistics
_MAX_TEXT = 60  # characters of a value in a message
# Dtypes that torch can neither copy nor compute with, or that a checkpoint cannot contain.
_UNSTORED = {
    dtype
    for name, dtype in vars(torch).items()
    if isinstance(dtype, torch.dtype) and re.fullmatch(r"float4\w*|u?int[1-7]|bits\w+|qu?int\w+|complex32", name)
}
_OTHER_OPTIMIZERS = "task.more"  # prefix for a custom loop's further optimizers
_HANDED_OVER = "task.rest."  # prefix for what a custom loop passes in by name
_FROM_RANK_0 = ("task.", "extra.")  # tensors saved from rank 0 only, which no forward pass broadcasts


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


def refuse_loader(data: object, method: str) -> None:
    """Raise a `DataError` if a task method returned a DataLoader instead of a data set."""
    if isinstance(data, DataLoader):
        raise DataError(
            f"{method} returned a DataLoader; return its data set: the trainer makes the batches itself, "
            "from train.batch_size, train.workers and collate() of the task. A data set can make the choices of a "
            "sampler, such as by weights, in __getitem__"
        )


class SingleSamples:
    """Refuses, in the first forward pass, a BatchNorm that would get a single value per channel at the end of an epoch.

    With ``train.drop_last: false``, a rank may be left with one sample of the last batch, for which BatchNorm raises.
    The first pass shows whether it gets more than one value per sample, as with images.

    Parameters
    ----------
    order
        The global batches; None if they are not known in advance.
    """

    def __init__(self, model: nn.Module, order: SampleStream | None, plan: BatchPlan) -> None:
        self._handles: list[RemovableHandle] = []
        if order is None or order.drop_last:
            return
        last = order.steps_per_epoch - 1
        if order.size(last) == order.global_batch or _fewest_samples(order, plan, last) > 1:
            return
        self._order, self._plan = order, plan
        self._left = order.size(last)
        self._samples = _fewest_samples(order, plan, step=0)
        self._handles = [
            module.register_forward_pre_hook(self._judge)
            for module in model.modules()
            if isinstance(module, nn.modules.batchnorm._BatchNorm)
        ]

    def begin(self, step: int) -> None:
        """Call when the first step is known: a run may resume just before the last batch of an epoch."""
        if self._handles:
            self._samples = _fewest_samples(self._order, self._plan, step)

    def end(self) -> None:
        """Call after the first step."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _judge(self, module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        if module.training and inputs[0].numel() <= self._samples * inputs[0].shape[1]:
            raise TaskError(
                f"train.drop_last: false leaves {self._left} sample{'s' * (self._left > 1)} for the last batch of an "
                "epoch, so a rank gets only one of them, but BatchNorm needs two: set train.drop_last: true, or "
                "another train.global_batch"
            )


def _fewest_samples(order: SampleStream, plan: BatchPlan, step: int) -> int:
    """Samples in the smallest forward pass of a step, over all ranks."""
    of_ranks = (rank_micro_batches(order, plan, rank, step, step + 1) for rank in range(plan.world_size))
    return min(len(micro.indices) for rank in of_ranks for micro in rank)


class FrozenLayers:
    """Refuses, on several ranks, layers frozen or unfrozen during training in a way that DDP does not support.

    DDP sums the gradients of the parameters that had ``requires_grad`` when it was created, and waits for all of them
    unless it looks for unused ones in each step. On a single rank, nothing is refused.
    """

    def __init__(self, model: nn.Module, train: TrainSpec, world_size: int) -> None:
        self._named = dict(model.named_parameters()) if world_size > 1 else {}
        self._parameters = list(self._named.values())
        self._first = [parameter.requires_grad for parameter in self._parameters]
        self._follows = train.find_unused_parameters and not train.static_graph

    def check(self) -> None:
        """Call before each update; raises a `TaskError` if a layer was frozen or unfrozen."""
        if not self._parameters:
            return
        now = [parameter.requires_grad for parameter in self._parameters]
        if now == self._first:
            return
        for name, was, is_trained in zip(self._named, self._first, now, strict=True):
            if is_trained and not was:
                raise TaskError(
                    f"{name} was frozen when training began and is trained now: on several ranks its gradients are not "
                    "summed; let model() return it with requires_grad=True, freeze it in the first call of loss() "
                    "before model(...), and set train.find_unused_parameters: true"
                )
            if was and not is_trained and not self._follows:
                raise TaskError(
                    f"{name} was trained when training began and is frozen now: on several ranks that needs "
                    "train.find_unused_parameters: true, without train.static_graph"
                )


def refuse_differences(what: str, tensors: Mapping[str, Tensor]) -> None:
    """Compare tensors between the ranks, bit by bit; all ranks must call it.

    Parameters
    ----------
    what
        What they are and when, for the message: "after step 2 the weights".
    tensors
        By name, with the same names on all ranks.

    Raises
    ------
    TaskError
        They differ; raised on all ranks.
    """
    if not dist.is_initialized():
        return
    different = _not_on_all(list(tensors))
    if not different and tensors:
        digests = all_gather(tensor_digests(list(tensors.values())).cpu())
        alike = torch.all(digests == digests[0], dim=0).tolist()
        different = [name for name, same in zip(tensors, alike, strict=True) if not same]
    if different and all(name.startswith("optimizer.") for name in different):
        _refuse_divided(what, different)
    if different:
        raise TaskError(
            f"{what} differ between the ranks: {listed(different)}\n"
            "    each rank would train its own model. Compute everything that has a gradient by model(...), the model "
            "that is in DistributedDataParallel (in a task: the one that loss() is given), not by a part or a method "
            "of it. What changes weights besides the optimizer must do the same on every rank: draw new values from "
            "a torch.Generator with the same seed on all, or send them from rank 0 (dist.broadcast). "
            "Embedding(max_norm=...) rescales only the rows in a rank's own batch: leave max_norm out, and limit the "
            "norm of the rows that forward() has looked up"
        )


def _refuse_divided(what: str, different: list[str]) -> NoReturn:
    raise TaskError(
        f"{what} differ between the ranks: {listed(different)}\n"
        "    the optimizer keeps different state on each rank, like those that divide the work among the ranks, but a "
        "checkpoint holds what is the same on all of them: use an optimizer that does the same on every rank, as those "
        "of torch do"
    )


def _not_on_all(names: list[str]) -> list[str]:
    """The names that not every rank has, or all if only their order differs; the same on all ranks."""
    text = "\n".join(names)
    if len(set(all_gather_object(xxhash.xxh3_64_hexdigest(text.encode())))) == 1:
        return []
    first, *others = map(set, all_gather_object(names))
    return sorted(first.union(*others) - first.intersection(*others)) or sorted(names)


def refuse_different_state(
    when: str, tensors: Mapping[str, Tensor], scalars: Mapping[str, Any], own: Collection[str]
) -> None:
    """Compare, between the ranks, the state that is saved from rank 0 only; all ranks must call it.

    Parameters
    ----------
    when
        For the message: "after step 2".
    tensors, scalars
        The whole state, as it is saved.
    own
        Names of the model's tensors that each rank may have changed for itself: see `State.from_rank_0`.

    Raises
    ------
    TaskError
        The state of some rank differs from rank 0's; raised on all ranks.
    """
    if not dist.is_initialized():
        return
    named = {
        name: tensor
        for name, tensor in tensors.items()
        if name in own or (name.startswith(_FROM_RANK_0) and not name.startswith(f"task.{MODULE_BUFFERS}."))
    }
    values = {f"{kind}.{name}": value for kind in ("task", "extra_state") for name, value in scalars[kind].items()}
    values |= {name: value for name, value in scalars.items() if name.startswith("optimizer_")}
    leaves = (leaf for name, value in values.items() for leaf in _leaves(name, value))
    # An optimizer that is given a set of parameters has its states in another order on each rank.
    texts = ((name, json.dumps(value, sort_keys=name.startswith("optimizer_"))) for name, value in leaves)
    found = {name.removeprefix(_HANDED_OVER): _short(text) for name, text in texts}
    if named:
        found.update(zip(named, tensor_digests(list(named.values())).tolist(), strict=True))
    first, *others = all_gather_object(found)
    differing: dict[str, str] = {}
    for rank, other in enumerate(others, start=1):
        for name in first.keys() | other.keys():
            if first.get(name) != other.get(name):
                differing.setdefault(name, f"{name}{_shown(first.get(name), other.get(name), rank)}")
    if differing and all(name.startswith(_OTHER_OPTIMIZERS) for name in differing):
        _refuse_divided(f"{when} optimizers", sorted(differing))
    if differing:
        raise TaskError(
            f"{when} the state differs between the ranks: {listed(sorted(differing.values()), between='; ')}\n"
            "    a checkpoint holds that of rank 0, and a resume would give it to all ranks: let state_dict() return "
            "what is the same on all of them, such as a sum over them (reduce_tensor), or a list by rank "
            "(all_gather_object); register a buffer in __init__ with its final shape, and change it in place (copy_, "
            "add_); make a parameter that is not trained a buffer, or change it in the same way on all ranks (by a "
            "second optimizer: with gradients that reduce_tensor has averaged)"
        )


def _leaves(name: str, value: Any, depth: int = 3) -> Iterator[tuple[str, Any]]:
    """Yield the parts of a state in nested dicts, under readable names."""
    if isinstance(value, dict) and value and depth and all(key.isidentifier() for key in value):
        for key, part in value.items():
            yield from _leaves(f"{name}.{key}", part, depth - 1)
    else:
        yield name, value


def _short(text: str) -> str | int:
    return text if len(text) <= _MAX_TEXT else int(xxhash.xxh3_64_intdigest(text.encode()))


def _shown(of_rank_0: str | int | None, other: str | int | None, rank: int) -> str:
    if isinstance(of_rank_0, str) and isinstance(other, str):
        return f" ({of_rank_0} on rank 0, {other} on rank {rank})"
    return f" (different on rank {rank} than on rank 0)"


SHAPED_BY_A_BATCH = (
    "A buffer that takes its shape from the first batch, as the observers of quantization-aware training do, has its "
    "final shape if model() runs a batch through the model"
)

FIND_UNUSED = (
    "let DDP look for them (a task: train.find_unused_parameters: true; a custom loop: DistributedDataParallel(..., "
    'find_unused_parameters=True); Lightning: strategy="ddp_find_unused_parameters_true"), or set requires_grad=False '
    "for them"
)
CALL_IT = (
    "on several ranks only model(...) sums the gradients, so loss() has to call it, not one of its methods, "
    "model.module or a model stored in self; move what a method such as encode() does into forward(), and select it by "
    'an argument: model(x, "encode")'
)
