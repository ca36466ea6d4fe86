"""State of custom loops, and copies of it with which a restore is checked once after the second step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.optim import Optimizer

from cluster_ddp.train.own.passed_in import put_rates, rates
from cluster_ddp.train.own.twins import twins
from cluster_ddp.train.ranks.distributed import World
from cluster_ddp.train.state.stateful import Stateful
from cluster_ddp.train.state.training import State

_RATES = "learning rates of the optimizer"


class FreshState:
    """Makes a second, fresh state of a script, into which a save is restored to check that the state comes back.

    A script has no function that creates its model again, so model and optimizer are copied on construction, before
    anything is restored, to the CPU of rank 0. That copy is used once; later calls copy them as they are then.

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
        self._state.put_first_settings(optimizer)  # OneCycleLR, for one, has changed the momenta by now
        also = self._make_also(optimizer)
        self._state.put_back_first(also)
        return State(model, optimizer, also=also)


class AlreadyChecked:
    """Stand-in for objects whose ``load_state_dict`` was already checked when they were passed in."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._state: dict[str, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        return self._state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._state = state


class StateWithRates:
    """A script's own state together with the learning rates, which a script may change in any way."""

    def __init__(self, optimizer: Optimizer, also: Stateful | None) -> None:
        self._optimizer, self._also = optimizer, also

    def state_dict(self) -> dict[str, Any]:
        return {**({} if self._also is None else self._also.state_dict()), _RATES: rates(self._optimizer)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        put_rates(self._optimizer, state.pop(_RATES, []))
        if self._also is not None and state:
            self._also.load_state_dict(state)
