"""What is checked in the first two steps of an attempt on several ranks, before their gradients are used."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from cluster_ddp.train.checks.differences import refuse_differences
from cluster_ddp.train.checks.remedies import CALL_IT, FIND_UNUSED
from cluster_ddp.train.errors import TaskError
from cluster_ddp.train.model import is_settled
from cluster_ddp.train.objects.comm_hooks import watch_comm_hooks
from cluster_ddp.train.ranks.distributed import all_gather_object
from cluster_ddp.words import listed

Versions = dict[str, tuple[Tensor, int]]  # gradients by name, with a number that grows where something is added

_NOTHING = contextlib.nullcontext()


class FirstSteps:
    """Checks that the gradients of the first steps are summed over the ranks.

    Parameters
    ----------
    wrapped
        The model that loss() is given.
    warn
        Prints a warning on rank 0.
    accumulates
        Whether a step has several micro-batches.
    """

    def __init__(self, wrapped: nn.Module, warn: Callable[[str], None], *, accumulates: bool) -> None:
        self._accumulates = accumulates
        self._ddp = wrapped if isinstance(wrapped, DistributedDataParallel) else None  # None as well once they are over
        self._calls = 0
        self._has_ended_one = False
        self._before: Versions = {}  # the gradients before the last micro-batch so far
        self._comm_hooks = watch_comm_hooks([self._ddp] if self._ddp is not None else [], warn)

    def computing(self) -> contextlib.AbstractContextManager[None]:
        """Surround a call of loss(); raises a `TaskError` if that takes the model for the bare one."""
        return _NOTHING if self._ddp is None else self._counting(self._ddp)

    @contextlib.contextmanager
    def _counting(self, ddp: DistributedDataParallel) -> Iterator[None]:
        handle = ddp.register_forward_pre_hook(self._count)
        self._before = _versions_of_gradients(ddp.module)
        try:
            yield
        except AttributeError as error:
            if "'DistributedDataParallel' object has no attribute" in str(error):
                raise TaskError(f"{error}: {CALL_IT}") from error
            raise
        finally:
            handle.remove()

    def _count(self, *_: object) -> None:
        self._calls += 1

    def end(self) -> None:
        """Call in each step when its gradients are complete; all ranks call it together.

        Raises
        ------
        TaskError
            loss() did not call the model that it was given, so nothing has summed the gradients; they differ between
            the ranks; or parameters have none of the last micro-batch, for which DDP would wait.
        """
        next(self._comm_hooks, None)  # in the second step, it compares
        if self._ddp is None:
            return
        if not self._calls:
            raise TaskError(f"loss() did not call the model that it was given: {CALL_IT}")
        if is_settled(self._ddp, dist.get_world_size(), accumulates=self._accumulates):
            _refuse_unused(self._ddp.module, self._before)
        if self._has_ended_one:  # what differs after the second step is found by the comparison of the weights
            self._ddp, self._before = None, {}
            return
        self._has_ended_one = True
        gradients = {
            name: weight.new_empty(0) if weight.grad is None else weight.grad
            for name, weight in self._ddp.named_parameters()
        }
        refuse_differences("the gradients of the first batch", gradients)


def _versions_of_gradients(model: nn.Module) -> Versions:
    gradients = {name: weight.grad for name, weight in model.named_parameters()}
    return {name: (gradient, gradient._version) for name, gradient in gradients.items() if gradient is not None}


def _is_same(version: tuple[Tensor, int] | None, other: tuple[Tensor, int] | None) -> bool:
    if version is None or other is None:
        return version is other
    return version[0] is other[0] and version[1] == other[1]


def _refuse_unused(model: nn.Module, before: Versions) -> None:
    now = _versions_of_gradients(model)
    trained = [name for name, weight in model.named_parameters() if weight.requires_grad]
    unused = [name for name in trained if _is_same(now.get(name), before.get(name))]
    by_rank = [(rank, names) for rank, names in enumerate(all_gather_object(unused)) if names]
    if by_rank:
        rank, names = by_rank[0]
        raise TaskError(
            f"parameters that take no part in the loss{' of the last micro-batch' * bool(before)}, on rank {rank}: "
            f"{listed(names)}\n    DDP would wait for their gradients: {FIND_UNUSED}"
        )
