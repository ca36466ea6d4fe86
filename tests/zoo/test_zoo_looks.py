"""A look at what a task holds: it keeps nothing in memory, and ends."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.optimizer import _global_optimizer_pre_hooks

from cluster_ddp.train.objects.attributes import Attributes
from cluster_ddp.train.state.watching import Watch


def test_a_look_does_not_keep_gradients_in_memory() -> None:
    weight = nn.Parameter(torch.ones(3))
    weight.grad = torch.ones(3)
    gradient, seen = weakref.ref(weight.grad), Attributes({"task.weight": weight})
    assert [holder for _, holder in seen.gradients().values()] == ["task.weight"]
    weight.grad = None
    assert gradient() is None and seen.gradients() == {}


def test_a_sparse_gradient_is_looked_at() -> None:
    table = nn.Parameter(torch.ones(4, 2))
    F.embedding(torch.tensor([1]), table, sparse=True).sum().backward()
    seen = Attributes({"task.table": table})
    assert seen.changed(Attributes({"task.table": table})) == ["task.table, its gradient"]


def test_tuples_that_share_their_parts_are_looked_at_once() -> None:
    plain: Any = (1,)
    wide: Any = (torch.ones(1),)
    for _ in range(8):
        plain, wide = (plain, plain), (wide,) * 40
    seen = Attributes({"task.plain": plain, "task.wide": wide})
    assert len(seen.leaves) < 2000
    wide[0][0][0][0][0][0][0][0][0].add_(1)
    assert seen.changed(Attributes({"task.plain": plain, "task.wide": wide})) == ["task.wide" + ".0" * 9]


def test_a_look_at_gradients_ends_even_if_state_dict_fails() -> None:
    weight = torch.ones(1, requires_grad=True)
    weight.sum().backward()
    states: list[dict[str, Any]] = [{}, {}]
    watch = Watch(None, None, lambda: Attributes({"task.weight": weight}), states.pop)
    watch.look()
    watch.watch_gradients()
    hooks = len(_global_optimizer_pre_hooks)
    states.clear()
    with pytest.raises(IndexError):
        watch.unsaved()
    assert len(_global_optimizer_pre_hooks) == hooks - 1
