"""What has to be alike on all ranks, compared while training goes on."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from cluster_ddp.checkpoint.replicas import tensor_digests
from cluster_ddp.train.distributed import all_gather
from cluster_ddp.train.errors import TaskError

_SHOWN = 5


def refuse_differences(what: str, tensors: Mapping[str, Tensor]) -> None:
    """Compare tensors over the ranks, bit by bit; all ranks call it.

    Parameters
    ----------
    what
        What they are and when, for the message: "after step 2 the weights".
    tensors
        By name, the same names on all ranks.

    Raises
    ------
    TaskError
        They are not alike, on all ranks.
    """
    if not dist.is_initialized() or not tensors:
        return
    digests = all_gather(tensor_digests(list(tensors.values())).cpu())
    alike = torch.all(digests == digests[0], dim=0).tolist()
    different = [name for name, same in zip(tensors, alike, strict=True) if not same]
    if different:
        more = f" and {len(different) - _SHOWN} more" if len(different) > _SHOWN else ""
        raise TaskError(
            f"{what} differ between the ranks: {', '.join(different[:_SHOWN])}{more}\n"
            "    each rank would train a model of its own: let loss() compute everything that has a gradient by "
            "model(...), the model that it is given, and let nothing that changes weights depend on the rank"
        )
