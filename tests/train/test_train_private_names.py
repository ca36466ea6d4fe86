"""Names of torch and other libraries that are not public, and that the trainer asks for without failing if they go."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam


def weight() -> nn.Parameter:
    return nn.Parameter(torch.ones(2))


def after_scaling() -> torch.amp.GradScaler:
    scaler = torch.amp.GradScaler("cpu", enabled=True)
    scaler.scale(torch.ones(()))
    return scaler


def after_a_step(make: Callable[[], torch.optim.Optimizer]) -> torch.optim.Optimizer:
    optimizer = make()
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer)  # notes that the optimizer was called

    def loss() -> Tensor:
        optimizer.zero_grad()
        total: Tensor = sum(parameter.sum() for group in optimizer.param_groups for parameter in group["params"])
        total.backward()
        return total

    optimizer.step(loss)  # type: ignore[arg-type]
    schedule.step()
    return optimizer


def metric() -> Any:
    from torchmetrics.aggregation import MeanMetric

    found = MeanMetric()
    found.update(1.0)
    return found


def fabric() -> tuple[Any, Any]:
    from lightning.fabric import Fabric

    module = nn.Linear(2, 2)
    return Fabric(accelerator="cpu", devices=1).setup(module, SGD(module.parameters(), lr=0.1))  # type: ignore[return-value]


def compiler() -> Any:
    torch.compile(lambda x: x + 1, backend="eager")(torch.ones(1))
    return type("Counters", (), dict(torch._dynamo.utils.counters["frames"]))()


NAMES: dict[str, tuple[Callable[[], Any], str]] = {
    "GradScaler._scale": (after_scaling, "own/watch/taking: whether a loop has scaled a loss yet"),
    "OptimizedModule._orig_mod": (lambda: torch.compile(nn.Linear(2, 2)), "own/wrappers: the model in torch.compile"),
    "Adam._step_supports_amp_scaling": (lambda: Adam([weight()], fused=True), "optimizer: the skipping of updates"),
    "Adam._opt_called": (lambda: after_a_step(lambda: Adam([weight()])), "objects/held: what is no state"),
    "SGD._need_device_dtype_check_for_fused": (lambda: SGD([weight()], fused=True), "objects/held"),
    "Adam._warned_capturable_if_run_uncaptured": (lambda: after_a_step(lambda: Adam([weight()])), "objects/held"),
    "LBFGS._numel_cache": (lambda: after_a_step(lambda: torch.optim.LBFGS([weight()])), "objects/held"),
    "Metric._update_count": (metric, "state/unread: a count that only warnings depend on"),
    "Metric._reductions": (metric, "state/unread"),
    "Metric._computed": (metric, "objects/held: what is computed again"),
    "Metric._forward_cache": (metric, "objects/held"),
    "Counters.total": (compiler, "compiling: whether torch goes on compiling"),
    "_FabricModule._forward_module": (lambda: fabric()[0], "own/wrappers: the model in Fabric's"),
    "_FabricOptimizer._optimizer": (lambda: fabric()[1], "own/wrappers: the optimizer in Fabric's"),
}


@pytest.mark.parametrize("name", NAMES)
def test_a_name_that_is_not_public_is_still_there(name: str) -> None:
    make, use = NAMES[name]
    holder = make()
    kind, _, attribute = name.partition(".")
    assert kind in {found.__name__ for found in type(holder).__mro__}
    where = f"{kind} of this version has no {attribute}, which is used in train/{use}"
    assert hasattr(holder, attribute) or attribute in getattr(holder, "_modules", {}), where
