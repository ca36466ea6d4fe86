"""The state of a loop that says itself where a step begins and ends: one model, one optimizer, and what else it has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.optim import Optimizer

from cluster_ddp.train.distributed import World
from cluster_ddp.train.own.handed import put_rates, rates
from cluster_ddp.train.own.twins import twins
from cluster_ddp.train.state.training import State, Stateful

_RATES = "learning rates of the optimizer"


class Once:
    """Makes the state of a script once more, to see that it comes back: nothing in a script makes its model again.

    It is a copy of model and optimizer as they are now, before anything is restored, on the CPU and on rank 0, which is
    used once and let go of; later ones are copies of what they are then.

    Raises
    ------
    TaskError
        They cannot be copied.
    """

    def __init__(
        self,
        state: State,
        model: nn.Module,
        optimizer: Optimizer,
        make_also: Callable[[Optimizer], Stateful],
        world: World,
    ) -> None:
        self._state, self._model, self._optimizer, self._make_also = state, model, optimizer, make_also
        self._copies = twins(model, optimizer) if world.is_main else None

    def __call__(self) -> State:
        model, optimizer = self._copies or twins(self._model, self._optimizer)
        self._copies = None
        self._state.put_first_settings(optimizer)  # which a scheduler may have changed by now, as OneCycleLR momenta
        also = self._make_also(optimizer)
        self._state.put_back_first(also)
        return State(model, optimizer, also=also)


class Echo:
    """Stands for what takes its state back, as has been seen when it was passed in."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._state: dict[str, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        return self._state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._state = state


class Own:
    """A script's own state, with the learning rates, which a script may change in whatever way."""

    def __init__(self, optimizer: Optimizer, also: Stateful | None) -> None:
        self._optimizer, self._also = optimizer, also

    def state_dict(self) -> dict[str, Any]:
        return {**({} if self._also is None else self._also.state_dict()), _RATES: rates(self._optimizer)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        put_rates(self._optimizer, state.pop(_RATES, []))
        if self._also is not None and state:
            self._also.load_state_dict(state)
