"""What a checkpoint contains of a model: the tensors of its state_dict(), and its modules' extra state."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from cluster_ddp.checkpoint.plan import Tensors
from cluster_ddp.train.checks.unsuited_models import refuse_expanded
from cluster_ddp.train.ema import EXTRA_STATE
from cluster_ddp.train.errors import TaskError
from cluster_ddp.train.objects.packing import Unpacker
from cluster_ddp.train.optimizer import parameters_of


class ModelState:
    """Collects them by the names of the model's state_dict().

    Parameters
    ----------
    groups
        The optimizer's; the task may change parameters that are in none of them at any time.

    Attributes
    ----------
    parameters
        The parameters by name, as they were when this was made.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        self.parameters = dict(model.named_parameters())
        self._model, self._optimizer = model, optimizer
        # Those that are broadcast from rank 0 before each step, also once the module has replaced them.
        self._first_buffers = {name for name, _ in model.named_buffers(remove_duplicate=False)}
        self._first_strides: dict[str, tuple[int, ...]] = {}

    def collect(self) -> tuple[Tensors, dict[str, Any]]:
        """Return the tensors, which share memory with the live ones, and the extra state of modules.

        Raises
        ------
        TaskError
            Something in it cannot be saved, or would not come back.
        """
        extra_state: dict[str, Any] = {}
        held, named = self._held(), Tensors()
        for name, value in self._model.state_dict(keep_vars=True).items():
            first = self.parameters.get(name, value)
            if first is not value and self._model.get_parameter(name) is not first:
                raise TaskError(
                    f"{name} of the model is not the same parameter as when training began, and a resume would use the "
                    "original one: change the values of the original in place (nn.init, parameter.data.copy_)"
                )
            if name.rpartition(".")[2] == EXTRA_STATE:
                extra_state[name] = value
                continue
            if not isinstance(value, Tensor):
                raise TaskError(
                    f"the model's state '{name}' is of type {type(value).__name__}: a checkpoint holds tensors; keep "
                    "it as a buffer, or in state_dict() of the task"
                )
            # The task may change other parameters at any time, such as a frozen teacher's in loss().
            named[f"model.{name}"] = value if id(value) in held else value.detach()
        refuse_expanded(named)
        return named, extra_state

    def changed_strides(self, named: Tensors) -> dict[str, list[int]]:
        """The strides of what lies in memory otherwise than when this was first called, such as in channels_last."""
        strides = dict(zip(named, (named.looks() or {}).get("stride", ()), strict=False))
        self._first_strides = self._first_strides or strides
        return {name: list(now) for name, now in strides.items() if now != self._first_strides.get(name, now)}

    def load_strides(self, strides: Mapping[str, list[int]], unpacker: Unpacker) -> None:
        """Put tensors into memory as `changed_strides` has found them; otherwise results may have other last bits."""
        for name, value in self._model.state_dict(keep_vars=True).items() if strides else ():
            if (wanted := strides.get(f"model.{name}")) is not None:
                value.data = unpacker.laid_out(value.detach(), tuple(wanted), value.device)

    def load_extra_state(self, packed: Mapping[str, Any], unpacker: Unpacker, take: Callable[[str], Tensor]) -> None:
        """Restore the extra state of modules; `take` returns a tensor in it by its name."""
        for name, value in packed.items():
            module = self._model.get_submodule(name.removesuffix(EXTRA_STATE).removesuffix("."))
            module.set_extra_state(unpacker.unpack(value, take))

    def from_rank_0(self) -> list[str]:
        """Names of what each rank may have changed for itself, and rank 0 saves.

        These are buffers that were created later, which are not broadcast from rank 0, and parameters that the
        optimizer does not hold, such as the codebook of a VQ-VAE: only the task changes them.
        """
        held = self._held()
        own = [name for name, _ in self._model.named_buffers() if name not in self._first_buffers]
        return own + [name for name, weight in self.parameters.items() if id(weight) not in held]

    def _held(self) -> set[int]:
        return set(map(id, parameters_of(self._optimizer)))
