"""The table of the zoo: what is exact, and what is refused with which words. docs/exactness.md is made of it."""

from __future__ import annotations

from random import Random
from typing import Any

from zoo_awkward import AWKWARD
from zoo_data import DATA
from zoo_models import MODELS
from zoo_optimizers import NOT_REMEMBERED, OPTIMIZERS
from zoo_training import LOSSES, Case

# Those whose state is of the parameter's dtype, whatever that is.
_IN_BF16 = (
    "the default", "SGD", "SGD momentum", "SGD momentum dampening", "SGD momentum foreach", "SGD momentum maximize",
    "SGD nesterov", "SGD fused", "Adam", "Adam foreach", "Adam fused", "Adam amsgrad", "Adam amsgrad fused",
    "Adam maximize", "Adam in two groups", "AdamW", "AdamW foreach", "AdamW fused", "Adadelta", "Adafactor", "Adamax",
    "Muon", "RAdam", "RAdam foreach", "RMSprop", "RMSprop centered momentum", "Rprop", "numbers instead of tensors",
    "ASGD", "NAdam", "NAdam foreach, decoupled", "state: fp32 master",
)  # fmt: skip
_ONLY_SPARSE = ("SparseAdam",)
_REFUSED_OPTIMIZERS = (
    "a group added later", "a parameter moved to another group", "a parameter taken out of its group",
    "no learning rate", "an optimizer in itself", "a dict in itself", "state of what it does not hold",
    "a number that its step() has closed over", *NOT_REMEMBERED,
)  # fmt: skip
_COMPLEX = ("SGD", "SGD momentum", "Adam", "AdamW", "RMSprop", "Adamax")

OF_OPTIMIZERS = [
    Case(optimizer=optimizer, model=model)
    for optimizer in OPTIMIZERS
    if optimizer not in _REFUSED_OPTIMIZERS
    for model in ("mlp", "norms", "bf16 parameters", "sparse embeddings")
    if (model == "sparse embeddings") == (optimizer in _ONLY_SPARSE)
    if model != "bf16 parameters" or optimizer in _IN_BF16
]

# Of parameters for which they keep nothing, more than are looked at one by one.
OF_OPTIMIZERS += [Case(f"state: {kept}", "300 parameters") for kept in ("global state", "tensor in the group")]

OF_MODELS = [
    Case(optimizer=optimizer, model=model)
    for model in [*MODELS, *AWKWARD]
    if model != "10,000 parameters"
    for optimizer in (
        ("SGD",) if model in ("sparse embeddings", "fp16 parameters") else ("AdamW",) if model == "complex parameters"
        else ("the default", "SGD momentum")
    )
]  # fmt: skip

OF_DATA = [Case(data=data, train={"workers": workers}) for data in DATA for workers in (0, 2)]

OF_STEPS = [
    Case(model="norms", loss=loss, train={"precision": precision, **settings})
    for loss in LOSSES
    for precision in ("fp32", "bf16", "fp16")
    for settings in ({}, {"accumulation_steps": 2, "clip_norm": 0.5})
] + [
    Case(model="norms", train=settings)
    for settings in (
        {"drop_last": False},
        {"grad_checkpointing": True},
        {"ema_decay": None},
        {"warmup_steps": 6, "schedule": "linear"},
        {"schedule": "step", "decay_every": 2},
        {"schedule": "constant"},
        {"precision": "fp16", "scaler": {"growth_interval": 2}},
        {"precision": "fp16", "scaler": {"initial": 2.0**40}},
    )
]

# Each with a part of the message; all are refused before the third step is done.
REFUSED = [
    (Case("a group added later"), "give it all parameters when it is created"),
    (Case("a parameter moved to another group"), "holds different parameters, or in a different order"),
    (Case("a parameter taken out of its group"), "holds different parameters, or in a different order"),
    (Case("no learning rate"), "give it lr, and turn off its own schedule"),
    (Case("SGD momentum fused", "bf16 parameters"), "use fused=False"),
    (Case("SGD momentum", "sparse embeddings"), "use SparseAdam"),
    (Case("a tensor that comes later"), "optimizer.before: a tensor now, None after a resume"),
    (Case("a number by the id of a parameter"), "optimizer.updates."),
    (Case("a number that its step() has closed over"), "steps.0: 2 now, 0 after a resume"),
    (Case("a very long list in itself"), "optimizer.numbers, the rest:"),
    (Case("an iterator in itself"), "optimizer.iterator: 98 now, 100 after a resume"),
    (Case("an optimizer in itself"), "optimizer.inner.state.0.weight.momentum_buffer: is not restored"),
    (Case("a dict in itself"), "optimizer.momentum.0.weight: is not restored"),
    (Case("state of what it does not hold"), "optimizer.state.0.weight.momentum: is not restored"),
    (Case(model="parameter replaced"), "is not the same parameter as when training began"),
    (Case(model="None buffer filled later"), "model.mean"),
    (Case(model="stride-0 buffer"), "register it with .expand(...).contiguous()"),
    (Case(model="buffer that grows"), "model.mean [2, 32], now [0, 32]"),
    (Case(model="state_dict of copies"), "state_dict() of a module must return the tensors themselves"),
    (Case(model="complex128 buffer"), "which safetensors cannot hold"),
    (Case(model="float4 buffer"), "keep its bits in torch.uint8 and view() them"),
    (Case(model="sparse buffer"), "register it with persistent=False"),
    (Case(model="float8 parameter, trained"), "torch cannot compute with such gradients"),
    (Case(model="quantization-aware, per channel"), "has its final shape if model() runs a batch"),
    (Case(model="lambda in state_dict"), "the model's state 'function' is of type function"),
    (Case(model="pruned"), "call prune.remove"),
    (Case(model="old weight norm"), "use torch.nn.utils.parametrizations"),
    (Case(model="lock"), "Keep whatever it cannot copy out of the model"),
    (Case(model="lazy"), "run a batch through the model in model()"),
]

OF_RANKS = [
    Case(model="norms"),
    Case(model="norms", data="iterable with skip()", train={"accumulation_steps": 2}),
    Case(model="conv", train={"sync_batchnorm": True}),
    Case(model="attention", loss="(sum, weight)", train={"bucket_mb": 0.002}),
    Case(model="attention", train={"comm_hook": "fp16", "clip_norm": 0.5}),
    Case(model="teacher asked first"),
    Case(model="buffer replaced"),
    Case(model="two towers", train={"find_unused_parameters": True}),
    Case(optimizer="SGD momentum", model="freezes", train={"find_unused_parameters": True}),
    Case(model="tied embeddings", train={"static_graph": True}),
    Case(optimizer="SGD", model="sparse embeddings"),
    Case(model="bf16 parameters", train={"precision": "bf16"}),
    Case(model="frozen backbone", data="__getitems__", train={"drop_last": False}),
    Case(model="one element of another stride"),
    Case(model="300 parameters", train={"gradient_as_bucket_view": False, "bucket_mb": 0.002}),
]


# Keys of `train`, each with what a composed case may set it to.
_SETTINGS: dict[str, tuple[Any, ...]] = {
    "accumulation_steps": (2, 4),
    "clip_norm": (0.5,),
    "drop_last": (False,),
    "ema_decay": (None,),
    "grad_checkpointing": (True,),
    "precision": ("bf16", "fp16"),
    "schedule": ("constant", "linear", "step"),
    "seed": (1, 2**31, 2**60 - 1),
    "warmup_steps": (1, 4, 7),
    "workers": (1, 2),
}


def compose(random: Random) -> Case:
    """A case at random, of those that torch can train."""
    while True:
        case = Case(
            random.choice(list(OPTIMIZERS)),
            random.choice([model for model in MODELS if model != "10,000 parameters"]),
            random.choice(list(DATA)),
            random.choice(list(LOSSES)),
            {key: random.choice(values) for key, values in _SETTINGS.items() if random.random() < 0.35},
        )
        if fits(case):
            return case


def fits(case: Case) -> bool:
    """Whether a case is one that torch itself can train."""
    train: dict[str, Any] = dict(case.train)
    if case.optimizer in _REFUSED_OPTIMIZERS:
        return False
    sparse = case.model == "sparse embeddings"
    if sparse != (case.optimizer in _ONLY_SPARSE) and not (sparse and case.optimizer == "SGD"):
        return False
    if sparse and (train.get("clip_norm") or train.get("precision") == "fp16"):
        return False
    if case.model == "complex parameters" and case.optimizer not in _COMPLEX:
        return False
    if case.model in ("bf16 parameters", "partly bf16") and case.optimizer not in _IN_BF16:
        return False
    if case.model == "fp16 parameters" and (case.optimizer != "SGD" or train.get("precision") == "fp16"):
        return False
    if case.model == "recurrent" and train.get("precision") == "fp16":  # no LSTM in fp16 on the CPU
        return False
    if case.model == "complex parameters" and train.get("precision") == "fp16":  # no scaled complex gradients
        return False
    if case.model == "tied embeddings" and case.optimizer == "SGD of all but one parameter":  # it has only one
        return False
    if case.model == "odd parameters" and case.optimizer.startswith("Adafactor"):  # divides by the number of elements
        return False
    return not train.get("grad_checkpointing") or case.model in ("mlp", "norms", "matrices", "conv")
