"""What differs between the ranks and must not, found by comparing digests."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from typing import Any, NoReturn

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor

from cluster_ddp.checkpoint.replicas import tensor_digests
from cluster_ddp.train.errors import TaskError
from cluster_ddp.train.ranks.distributed import all_gather, all_gather_object
from cluster_ddp.words import listed

MODULE_BUFFERS = "buffers of modules"  # key for buffers that may differ between ranks, such as BatchNorm's statistics
_MAX_TEXT = 60  # characters of a value in a message
_OTHER_OPTIMIZERS = "task.more"  # prefix for a custom loop's further optimizers
_HANDED_OVER = "task.rest."  # prefix for what a custom loop passes in by name
_FROM_RANK_0 = ("task.", "extra.")  # tensors saved from rank 0 only, which no forward pass broadcasts


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
            "    each rank would train its own model. Compute everything that needs gradients by model(...), the model "
            "that is in DistributedDataParallel (in a task: the one that loss() is given), not by a part or a method "
            "of it. Any code besides the optimizer that changes weights must do the same on every rank: draw new "
            "values from a torch.Generator with the same seed on all, or send them from rank 0 (dist.broadcast). "
            "Embedding(max_norm=...) rescales only the rows in a rank's own batch: leave max_norm out, and limit the "
            "norm of the rows that forward() has looked up"
        )


def _refuse_divided(what: str, different: list[str]) -> NoReturn:
    raise TaskError(
        f"{what} differ between the ranks: {listed(different)}\n"
        "    the optimizer's state is not the same on every rank, as if it were divided among them, but a checkpoint "
        "holds it only once: use an optimizer that keeps all of its state on every rank, as those of torch.optim do"
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
