"""Models whose state is of some awkward kind: exact, or refused."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from zoo_models import CLASSES, FEATURES, mlp


class WithState(nn.Module):
    """An mlp whose scores depend on state of some awkward kind."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layers, self.kind = mlp(), kind
        if kind == "None buffer filled later":
            self.register_buffer("mean", None)
        elif kind == "stride-0 buffer":
            self.register_buffer("mean", torch.ones(1).expand(FEATURES))
        elif kind == "buffer that is not persistent":
            self.register_buffer("mean", torch.zeros(FEATURES), persistent=False)
        elif kind == "buffer that grows":
            self.register_buffer("mean", torch.zeros(0, FEATURES))
        elif kind == "state_dict of copies":
            self.register_buffer("mean", torch.zeros(FEATURES))
            self._register_state_dict_hook(_copies)
        elif kind == "extra state that is no tensor":
            self.calls = 0
        elif kind == "complex128 buffer":
            self.register_buffer("mean", torch.zeros(FEATURES, dtype=torch.complex128))
        elif kind == "buffer replaced":
            self.register_buffer("mean", torch.zeros(FEATURES))
        elif kind == "lambda in state_dict":
            self._register_state_dict_hook(_with_lambda)

    def get_extra_state(self) -> Any:
        return {"calls": self.calls}

    def set_extra_state(self, state: Any) -> None:
        self.calls = state["calls"]

    def forward(self, inputs: Tensor) -> Tensor:
        if not self.training:
            return self.layers(inputs)
        with torch.no_grad():
            inputs = inputs + self._state(inputs.detach().mean(0))
        return self.layers(inputs)

    def _state(self, mean: Tensor) -> Tensor:
        if self.kind == "None buffer filled later":
            self.mean = mean if self.mean is None else self.mean.lerp(mean, 0.1)
        elif self.kind == "stride-0 buffer":
            self.mean = (self.mean[:1] * 1.1).expand(FEATURES)
        elif self.kind == "buffer that grows":
            self.mean = torch.cat([self.mean, mean[None]])
            return self.mean.mean(0)
        elif self.kind == "buffer replaced":
            self.mean = self.mean * 0.9 + mean
        elif self.kind == "extra state that is no tensor":
            self.calls += 1
            return mean * self.calls
        elif self.kind == "lambda in state_dict":
            return mean
        else:
            self.mean.mul_(0.9).add_(mean)  # in place
        return self.mean.real.float()


class Draws(nn.Module):
    """Has a dropout with a generator of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.generator = mlp(), torch.Generator()

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            kept = torch.bernoulli(torch.full(inputs.shape, 0.7), generator=self.generator)
            inputs = inputs * kept.to(inputs.device)
        return self.layers(inputs)


class Slots:
    __slots__ = ("count", "generator")

    def __init__(self) -> None:
        self.count, self.generator = 0, torch.Generator()


class DrawsSomehow(nn.Module):
    """Draws from generators in a partial, in what a function has closed over, and in an object with slots."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator()
        self.layers, self.slots = mlp(), Slots()
        self.first = partial(torch.randn, FEATURES, generator=torch.Generator())
        self.second = lambda: torch.randn(FEATURES, generator=generator)

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            noise = self.first() + self.second() + torch.randn(FEATURES, generator=self.slots.generator)
            inputs = inputs + noise.to(inputs.device)
        return self.layers(inputs)


class Clamps(nn.Module):
    """Gives its first weight other data in each forward pass, as a clamp of weights does."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = mlp()

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            self.layers[0].weight.data = self.layers[0].weight.data.clamp(-0.1, 0.1)
        return self.layers(inputs)


class Turns(nn.Module):
    """Replaces buffers, and the data of a weight, by what lies in memory column by column, as eigenvectors do."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = mlp()
        for name, is_saved in (("covariance", True), ("saved", True), ("omitted", False)):
            self.register_buffer(name, torch.eye(FEATURES), persistent=is_saved)

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            weight = self.layers[0].weight
            with torch.no_grad():
                self.covariance.lerp_(inputs.T @ inputs, 0.1)
                self.saved = torch.linalg.eigh(self.covariance)[1]
                self.omitted = self.saved - self.saved.mean()
                weight.data = weight.data.T.contiguous().T
        return self.layers(inputs @ self.saved @ self.omitted / self.omitted.std())


def _local_class(function: Callable[[Tensor], Tensor]) -> nn.Module:
    class Applies(nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            return function(weight)

    return Applies()


class Counts(nn.Module):
    """Counts its forward passes, and its scores depend on the count; `kind` says where that is."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layers, self.kind, count = mlp(), kind, [0]
        self.slots, self.long, self.array, self.set = Slots(), [0.0] * 200, bytearray(1), {-1}
        self.numbers = dict.fromkeys(range(200), 0.0)

        def times_count(*given: Any) -> Any:
            count[0] += 1
            return given[-1] * count[0]

        if kind == "cycle":
            self.cycle = itertools.cycle((1.0, 2.0, 3.0))
        elif kind == "closure":
            self.closure = times_count
        elif kind == "parametrizations.weight.0.forward":
            parametrize.register_parametrization(self.layers[0], "weight", _local_class(times_count))
        elif kind == "_forward_hooks":
            self.layers.register_forward_hook(times_count)
        elif kind == "its hooks":
            self.layers[0].weight.register_hook(times_count)

    def forward(self, inputs: Tensor) -> Tensor:
        scores: Tensor = self.layers(inputs)
        return scores * self._factor(scores) if self.training else scores

    def _factor(self, scores: Tensor) -> Any:
        if self.kind == "slots":
            self.slots.count += 1
            return self.slots.count
        if self.kind == "long":
            self.long[150] += 1
            return self.long[150]
        if self.kind == "numbers":
            self.numbers[150] += 1
            return self.numbers[150]
        if self.kind == "array":
            self.array[0] += 1
            return self.array[0]
        if self.kind == "set":
            self.set.add(len(self.set))
            return len(self.set)
        if self.kind == "cycle":
            return next(self.cycle)
        if self.kind == "closure":
            return self.closure(1)
        if self.kind == "generator" and not hasattr(self, "generator"):
            self.generator = torch.Generator()
        return torch.rand((), generator=self.generator) if self.kind == "generator" else 1


COUNTED = (
    "slots", "long", "numbers", "array", "set", "cycle", "closure", "generator", "_forward_hooks", "its hooks",
    "parametrizations.weight.0.forward",
)  # fmt: skip


class Changes(nn.Module):
    """Freezes its BatchNorm, or replaces its head, in one forward pass; the count is a buffer."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.norm, self.layers, self.head = nn.BatchNorm1d(FEATURES), mlp(), nn.Linear(CLASSES, CLASSES)
        self.register_buffer("passes", torch.zeros((), dtype=torch.int64))
        self.kind = kind

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            self.passes += 1
            if self.passes == 2 and self.kind == "BatchNorm frozen in training":
                self.norm.eval()
            elif self.passes == 2:
                self.head = nn.Linear(CLASSES, CLASSES).to(inputs.device)
        return self.head(self.layers(self.norm(inputs)))


class InFewBits(nn.Module):
    """Has a parameter or a buffer in few bits, which its scores depend on."""

    def __init__(self, dtype: torch.dtype, *, trained: bool | None = None) -> None:
        super().__init__()
        self.layers, bits = mlp(), torch.full((FEATURES,), 0x38, dtype=torch.uint8).view(dtype)
        if trained is None:
            self.register_buffer("factor", bits)
        else:
            self.factor = nn.Parameter(bits, requires_grad=trained)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.layers(inputs * self.factor.float())


class OnGraph(nn.Module):
    """Mixes the features by a sparse matrix, as graph networks do."""

    def __init__(self, *, persistent: bool) -> None:
        super().__init__()
        self.layers = mlp()
        self.register_buffer("graph", torch.eye(FEATURES).roll(1, 0).to_sparse(), persistent=persistent)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.layers(torch.sparse.mm(self.graph, inputs.T).T)


def _float4() -> torch.dtype:
    if not hasattr(torch, "float4_e2m1fn_x2"):
        pytest.skip("this torch has no such numbers")
    return torch.float4_e2m1fn_x2


def _quantization_aware(config: str, *, batch: bool = False) -> nn.Module:
    """With observers, some of which take their shape from the first batch: `batch` says whether model() runs one."""
    from torch.ao import quantization

    model = nn.Sequential(quantization.QuantStub(), *mlp(), quantization.DeQuantStub())
    model.qconfig = quantization.get_default_qat_qconfig(config)
    prepared: nn.Module = quantization.prepare_qat(model.train())
    if batch:
        prepared(torch.randn(8, FEATURES))
    return prepared


WithoutExtra = type("WithoutExtra", (WithState,), {})
for _name in ("get_extra_state", "set_extra_state"):
    setattr(WithoutExtra, _name, getattr(nn.Module, _name))


def _copies(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> dict[str, Any]:
    return type(state)({name: value.detach().clone() for name, value in state.items()})


def _with_lambda(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    state[f"{prefix}function"] = lambda: 0


def _pruned() -> nn.Module:
    from torch.nn.utils import prune

    model = mlp()
    prune.random_unstructured(model[0], "weight", 0.5)
    return model


def _old_weight_norm() -> nn.Module:
    return nn.Sequential(torch.nn.utils.weight_norm(nn.Linear(FEATURES, 16)), nn.Linear(16, CLASSES))


def _with_lock() -> nn.Module:
    model = mlp()
    model.lock = threading.Lock()
    return model


class Lazy(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.LazyLinear(16), nn.ReLU(), nn.LazyLinear(CLASSES))


# By name; those of the first table are exact.
AWKWARD: dict[str, Callable[[], nn.Module]] = {
    **{kind: partial(WithoutExtra, kind) for kind in ("buffer that is not persistent", "buffer replaced")},
    "extra state that is no tensor": partial(WithState, "extra state that is no tensor"),
    "a generator of its own": Draws,
    "generators in functions and slots": DrawsSomehow,
    "parameter.data replaced": Clamps,
    "other strides in training": Turns,
    "float8 parameter, frozen": partial(InFewBits, torch.float8_e4m3fn, trained=False),
    "sparse buffer, not persistent": partial(OnGraph, persistent=False),
    "quantization-aware, per tensor": partial(_quantization_aware, "qnnpack"),
    "quantization-aware, per channel, after a batch in model()": partial(_quantization_aware, "fbgemm", batch=True),
    "BatchNorm frozen in training": partial(Changes, "BatchNorm frozen in training"),
}
REFUSED_MODELS: dict[str, Callable[[], nn.Module]] = {
    **{f"counts in {kind}": partial(Counts, kind) for kind in COUNTED},
    **{
        kind: partial(WithoutExtra, kind)
        for kind in (
            "None buffer filled later", "stride-0 buffer", "buffer that grows", "state_dict of copies",
            "complex128 buffer", "lambda in state_dict",
        )
    },
    "sparse buffer": partial(OnGraph, persistent=True),
    "float4 buffer": lambda: InFewBits(_float4()),
    "float8 parameter, trained": partial(InFewBits, torch.float8_e4m3fn, trained=True),
    "quantization-aware, per channel": partial(_quantization_aware, "fbgemm"),
    "pruned": _pruned,
    "old weight norm": _old_weight_norm,
    "lock": _with_lock,
    "lazy": Lazy,
    "parameter replaced": partial(Changes, "parameter replaced"),
}  # fmt: skip
