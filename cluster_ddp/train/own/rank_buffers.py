"""The buffers of which each rank has its own, such as BatchNorm's statistics."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from cluster_ddp.checkpoint.replicas import tensor_digests
from cluster_ddp.train.own.values import has_values
from cluster_ddp.train.ranks.distributed import World, all_gather_object
from cluster_ddp.words import listed

MAX_BYTES = 256 * 2**20  # bytes of all ranks together, which each of them holds in memory once it has saved them


class RankBuffers:
    """The buffers of the passed-in modules that differ between the ranks; a resume gives each rank its own again.

    A forward pass of DDP replaces them by those of rank 0, but until then, a program that evaluates ``model.module`` or
    updates an average reads each rank's own. Nothing replaces those of a mean teacher.

    Parameters
    ----------
    modules
        The modules, without DDP, by the names under which they were passed in.
    wrapped
        The DDP around some of them. Whether it replaces buffers in its next forward pass depends on the previous one:
        it does not after one under ``no_sync()``, as in Lightning's manual optimization.
    warn
        Called with a message if the buffers are too large to be saved for each rank.
    """

    def __init__(
        self,
        modules: Iterable[tuple[str, nn.Module]],
        wrapped: Sequence[DistributedDataParallel],
        world: World,
        warn: Callable[[str], None],
    ) -> None:
        self._modules, self._wrapped, self._world, self._warn = list(modules), wrapped, world, warn
        # Once a buffer has differed it is saved from then on: a checkpoint with other tensors is checked once more.
        self._sizes: dict[str, int] = {}  # in bytes, by name
        self._values: list[Tensor] = []
        self._is_told = False

    def state_dict(self) -> dict[str, Any]:
        """What was last gathered: the names and sizes, and the bytes of each rank."""
        are_next = [model.require_forward_param_sync for model in self._wrapped]
        return {"sizes": self._sizes, "bytes": self._values, "next pass replaces": are_next}

    def gather(self) -> None:
        """Collect the buffers that differ; all ranks call it before a save."""
        if self._world.world_size == 1:
            return
        found = self._find()
        marks = tensor_digests(list(found.values())).tolist()
        looks = {name: (buffer.shape, buffer.dtype) for name, buffer in found.items()}
        ranks = all_gather_object((looks, dict(zip(found, marks, strict=True))))
        alike = [name for name, look in ranks[0][0].items() if all(of.get(name) == look for of, _ in ranks)]
        own = {name for name in alike if any(of[name] != ranks[0][1][name] for _, of in ranks)}
        names = self._small_enough({name: found[name] for name in alike if name in own.union(self._sizes)})
        self._sizes = {name: found[name].nbytes for name in names}
        self._values = []
        if names:
            mine = torch.cat([_bytes_of(found[name]) for name in names])
            self._values = all_gather_object(mine)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore this rank's own; on a different number of ranks all keep those of rank 0, which are there already."""
        for model, is_next in zip(self._wrapped, state["next pass replaces"], strict=False):  # none on a single rank
            model.require_forward_param_sync = is_next
        if len(state["bytes"]) != self._world.world_size:
            return
        self._sizes, self._values = state["sizes"], state["bytes"]
        found, parts = self._find(), torch.split(self._values[self._world.rank], list(self._sizes.values()))
        for name, part in zip(self._sizes, parts, strict=True):
            buffer = found.get(name)
            if buffer is None or buffer.nbytes != part.nbytes:
                continue  # not in the model's state_dict(): the first forward pass makes it
            with torch.no_grad():
                buffer.copy_(part.clone().view(buffer.dtype).view(buffer.shape))  # cloned: to be aligned

    def _find(self) -> dict[str, Tensor]:
        buffers = (
            (f"{name}.{path}", buffer) for name, module in self._modules for path, buffer in module.named_buffers()
        )
        found = {name: buffer for name, buffer in buffers if has_values(buffer)}
        first = {id(buffer): name for name, buffer in reversed(found.items())}
        return {name: buffer for name, buffer in found.items() if first[id(buffer)] == name}

    def _small_enough(self, buffers: dict[str, Tensor]) -> list[str]:
        """The names of the smallest ones that together are no larger than what is saved."""
        taken, left = set[str](), MAX_BYTES // self._world.world_size
        for name in sorted(buffers, key=lambda name: buffers[name].nbytes):
            if buffers[name].nbytes > left:
                break
            left -= buffers[name].nbytes
            taken.add(name)
        if (large := [name for name in buffers if name not in taken]) and not self._is_told:
            self._is_told = True
            self._warn(
                f"the ranks hold different buffers, too large to be saved for each of them: {listed(large)}. "
                "A checkpoint contains those of rank 0, and a resume gives them to all ranks: it is exact "
                "only if nothing, such as an evaluation on all ranks, reads them before DDP has sent those of rank 0 "
                "again. Otherwise send them yourself after each update (dist.broadcast(buffer, 0))"
            )
        return [name for name in buffers if name in taken]


def _bytes_of(buffer: Tensor) -> Tensor:
    return buffer.detach().cpu().contiguous().view(-1).view(torch.uint8)
