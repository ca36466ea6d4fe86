"""What the model or an optimizer holds together with the task, or under a name that torch uses elsewhere."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.optim import optimizer as torch_optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook
from zoo_models import device
from zoo_training import MADE, Case, ZooTask, judge

from cluster_ddp.train import Task
from cluster_ddp.train.state.modes import Modes
from cluster_ddp.train.state.training import State


class Bank(ZooTask):
    """Its model reads a tensor of the task, in the place of which loading puts another one."""

    def __init__(self, case: Case, crash: int | None = None) -> None:
        super().__init__(case, crash)
        self.bank = torch.ones(4, device=device())

    def model(self) -> nn.Module:
        model: Any = super().model()
        model.bank = self.bank
        return model

    def loss(self, model: nn.Module, batch: Any) -> Any:
        loss: Tensor = super().loss(model, batch) * getattr(model, "module", model).bank.mean()
        self.bank.lerp_(loss.detach(), 0.5)
        return loss

    def state_dict(self) -> dict[str, Any]:
        return {"bank": self.bank}

    def load_state_dict(self, state: Any) -> None:
        self.bank = state["bank"]


class BankCopiedInto(Bank):
    """Loads it into the tensor that the model holds."""

    def load_state_dict(self, state: Any) -> None:
        self.bank.copy_(state["bank"])


@pytest.mark.parametrize(("kind", "is_told"), [(Bank, True), (BankCopiedInto, False)])
def test_what_loading_replaces_while_the_model_holds_it_is_told(
    kind: type[Bank], is_told: bool, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert judge(Case(), tmp_path, kind).exact != is_told
    assert ("task.bank, " in capfd.readouterr().err) == is_told


class Counted(nn.Linear):
    """Counts its forward passes in a slot."""

    __slots__ = ("passes",)

    def forward(self, inputs: Tensor) -> Tensor:
        self.passes = getattr(self, "passes", 0) + 1
        return super().forward(inputs) * self.passes


class CountsInSlot(ZooTask):
    """Has such a layer."""

    def model(self) -> nn.Module:
        model: Any = super().model()
        model[0] = Counted(model[0].in_features, model[0].out_features)
        return model


def test_a_slot_of_a_layer_is_looked_at(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert not judge(Case(), tmp_path, CountsInSlot).exact
    assert "training changes model.0.passes" in capfd.readouterr().err


class LooksAhead(SGD):
    """Counts its steps by a name that torch's schedulers use for theirs, and halves every fourth update."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, lr=lr)
        self._step_count = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self._step_count += 1
        for parameter in self.param_groups[0]["params"]:
            parameter.grad *= 0.5 if self._step_count % 4 == 0 else 1.0
        super().step()


class Compiles(SGD):
    """Holds a function that is marked as torch.compile() marks those that it returns."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, lr=lr)

        def halved(value: float) -> float:
            return value / 2

        halved._torchdynamo_wrapper_id = id(halved)  # type: ignore[attr-defined]
        self.halved = halved


class WithAnother(ZooTask):
    """Trains with one of these."""

    def __init__(self, kind: type[Optimizer], *given: Any) -> None:
        super().__init__(*given)
        self.kind = kind

    def optimizer(self, model: nn.Module, lr: float) -> Optimizer:
        MADE[self] = self.kind(model.parameters(), lr=lr)  # type: ignore[call-arg]
        return MADE[self]


@pytest.mark.parametrize("kind", [LooksAhead, Compiles])
def test_a_count_of_steps_in_an_optimizer_and_a_compiled_function_are_exact(
    kind: type[Optimizer], tmp_path: Path
) -> None:
    assert str(judge(Case(), tmp_path, partial(WithAnother, kind))) == "exact"


class Weighs(SGD):
    """Multiplies its gradients by what is in its group, or by a number in a slot."""

    __slots__ = ("updates",)

    def __init__(self, parameters: Any, lr: float, weight: Any = None) -> None:
        super().__init__([{"params": list(parameters), "weight": weight}], lr=lr)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        weight = self.param_groups[0]["weight"]
        if weight is None:
            self.updates = getattr(self, "updates", 0) + 1
        factor = self.updates if weight is None else weight() if callable(weight) else weight[0]
        for parameter in self.param_groups[0]["params"]:
            parameter.grad *= factor
        super().step()


class InSlot(ZooTask):
    """Its optimizer keeps a number in a slot."""

    def weight(self) -> Any:
        return None

    def optimizer(self, model: nn.Module, lr: float) -> Optimizer:
        MADE[self] = Weighs(model.parameters(), lr, self.weight())
        return MADE[self]


class ByFunction(InSlot):
    """A function in the group counts its calls."""

    def weight(self) -> Any:
        calls = 0

        def count() -> int:
            nonlocal calls
            calls += 1
            return calls

        return count


class SharedList(InSlot):
    """Changes a list that the group holds, too."""

    weights: list[float]

    def weight(self) -> Any:
        self.weights = [1.0]
        return self.weights

    def loss(self, model: nn.Module, batch: Any) -> Any:
        loss: Tensor = super().loss(model, batch)
        self.weights[0] += float(loss.detach())
        return loss


@pytest.mark.parametrize(
    ("kind", "said"),
    [(InSlot, "optimizer.updates: "), (ByFunction, "optimizer.groups.0.weight.calls: 2 now, 0"), (SharedList, "exact")],
)
def test_what_an_optimizer_keeps_in_slots_and_in_its_groups(kind: type[InSlot], said: str, tmp_path: Path) -> None:
    assert said in str(judge(Case(), tmp_path, kind))


class HooksAll(ZooTask):
    """Changes weights by a hook of all optimizers, which keeps a number."""

    def optimizer(self, model: nn.Module, lr: float) -> Optimizer:
        made, factor = super().optimizer(model, lr), 1.0

        def shrink(optimizer: Optimizer, *_: Any) -> None:
            nonlocal factor
            if optimizer is self.made:
                factor *= 0.99
                torch._foreach_mul_([weight.detach() for weight in model.parameters()], factor)

        register_optimizer_step_post_hook(shrink)
        return made


def test_hooks_of_all_optimizers_are_looked_at(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    hooks = torch_optimizer._global_optimizer_post_hooks
    before = dict(hooks)
    try:
        assert not judge(Case(), tmp_path, HooksAll).exact
    finally:
        hooks.clear()
        hooks.update(before)
    assert "the hooks of all optimizers" in capfd.readouterr().err


def test_what_is_kept_in_the_wrapper_of_a_model_is_looked_at() -> None:
    wrapped: Any = nn.Sequential(model := nn.Linear(2, 2))
    state = State(model, SGD(model.parameters(), lr=0.1), also=Task(), wrapped=wrapped)
    wrapped.hers, calls = 0, []
    wrapped.register_forward_hook(lambda *_: calls.append(1))
    state.watch()
    wrapped.hers = 1
    wrapped(torch.ones(2))
    state.watch_again(is_compared=True)
    state.note()
    names = [name for name in state.unsaved() if "loss()" in name]
    assert names == [f"the model given to loss().{name}" for name in ("_forward_hooks", "hers")]


class Holder:
    """A task, as far as its networks are concerned."""

    def __init__(self) -> None:
        self.teacher = nn.Linear(2, 2)


def test_modes_that_a_step_before_the_restore_has_changed_are_put_back() -> None:
    task = Holder()
    modes = Modes(task, ())
    task.teacher.eval().requires_grad_(False)
    modes.restore({"task.teacher, bias": False})
    assert task.teacher.training and task.teacher.weight.requires_grad and not task.teacher.bias.requires_grad


def test_the_modes_of_a_network_deep_in_a_task_are_saved() -> None:
    task: Any = Holder()
    held: Any = nn.Linear(2, 2).eval()
    for name in ("actor", "policy", "agent", "agents", "system"):
        held = SimpleNamespace(**{name: held})
    task.farther, task.held = SimpleNamespace(held=SimpleNamespace(held=held)), held
    modes = Modes(task, ())
    held.system.agents.agent.policy.actor.train()
    assert modes.changed() == {"task.held.system.agents.agent.policy.actor": True}


def test_the_modes_of_a_network_that_a_task_has_only_later_come_back() -> None:
    task = Holder()
    modes = Modes(task, ())
    task.teacher = nn.Linear(2, 2).eval()
    task.teacher.weight.requires_grad_(False)
    changed = modes.changed()
    other = Holder()
    again = Modes(other, ())
    again.restore(changed)
    other.teacher = nn.Linear(2, 2)  # as load_state_dict() makes it
    again.restore_late(changed)
    assert not other.teacher.training and not other.teacher.weight.requires_grad and other.teacher.bias.requires_grad
