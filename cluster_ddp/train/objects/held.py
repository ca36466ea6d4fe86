"""Finds what was added to modules, tensors and classes, such as attributes and hooks, in which steps may keep state."""

from __future__ import annotations

import collections
import dis
import functools
from types import FunctionType, MethodType
from typing import Any

from torch import Tensor, nn
from torch.distributions import Distribution
from torch.distributions.utils import lazy_property
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from cluster_ddp.train.objects.comm_hooks import states_of_hooks
from cluster_ddp.train.objects.inner_parts import inner_parts
from cluster_ddp.train.objects.kinds import is_of_library
from cluster_ddp.train.objects.only_written import codes_of
from cluster_ddp.train.objects.whose_code import is_library

# Also the marks of torch.compile and Lightning, what transformers' Trainer sets during training, and whether one of its
# models has hooks to record its hidden states.
_OF_MODULES = frozenset(vars(nn.Module())) | {
    "_is_torch_compile", "_compile_kwargs", "_trainer", "_current_fx_name", "_output_capturing_hooks_installed",
}  # fmt: skip
_MARKS_OF_DYNAMO = ("_dynamo", "_torchdynamo")
_MARKS_OF_TENSORS = ("_is_buffer", "_is_param")  # by nn.Buffer, and for parameters of other classes
# By package: attributes that objects recompute whenever they need them, such as kornia's last random draw, its results
# and the type of its input, the decay of diffusers' averages, what a metric of torchmetrics has computed since it was
# updated, which metrics of a collection share their states, what pytorch-metric-learning counts in each batch, or the
# kind of loss that a model of transformers finds from its first labels. And what is for readers of a saved model only:
# sentence-transformers' model card, and what save_pretrained() of transformers notes in the model's settings.
_RECOMPUTED = {
    "kornia": {
        "_params", "_transform_matrix", "_transform_matrices", "_transform_matrix_params", "_lazy_matrix_args",
        "_transform_matrix_params_snapshot", "_output_image", "transform_op", "input_dtype",
    },
    "diffusers": {"cur_decay_value"},
    "torchmetrics": {"_computed", "_forward_cache", "_groups", "_groups_checked", "_state_is_copy"},
    "pytorch_metric_learning": {"divisor", "num_pairs", "num_pos_pairs", "num_neg_pairs", "num_triplets"},
    "gpytorch": {"_memoize_cache"},
    "linear_operator": {"_memoize_cache"},
    "omegaconf": {"_flags_cache"},
    "transformers": {"problem_type", "architectures", "dtype"},
    "sentence_transformers": {"model_card_data"},
    "queue": {"unfinished_tasks"},  # read by join() only
}  # fmt: skip
# Not state: flags for torch's warnings and checks, what a step is told about its own gradients, and the number of
# elements of LBFGS's parameters.
NOT_STATE_OF_OPTIMIZERS = frozenset(
    {
        "_opt_called", "_warned_capturable_if_run_uncaptured", "_need_device_dtype_check_for_fused", "found_inf",
        "grad_scale", "_numel_cache",
    }
)  # fmt: skip


def of_module(module: nn.Module) -> dict[str, Any]:
    """A module's own attributes, without those that every module has, but with hooks and `enclosing_methods`."""
    but = recomputed(module)
    more: dict[str, Any] = {}
    if isinstance(module, DistributedDataParallel):
        but |= _set_by_ddp()
        more = {"communication hooks": states_of_hooks(module)}
    hooks = {key: held for key, value in vars(module).items() if are_hooks(value) and (held := _hooks_of_user(value))}
    own = {key: value for key, value in inner_parts(module) if key not in _OF_MODULES and key not in but}
    own = {key: value for key, value in own.items() if not _is_own_method(module, key, value)}
    return {**enclosing_methods(module), **own, **more, **hooks}


@functools.cache
def _set_by_ddp() -> frozenset[str]:
    """What DDP keeps for itself, such as whether it has rebuilt its buckets."""
    codes = [code for value in vars(DistributedDataParallel).values() for code in codes_of(value)]
    instructions = (instruction for code in codes for instruction in dis.get_instructions(code))
    return frozenset(str(each.argval) for each in instructions if each.opname == "STORE_ATTR")


def of_tensor(tensor: Tensor) -> dict[str, Any]:
    """The attributes that somebody gave a tensor or parameter, without torch's hooks and marks."""
    marks = {*_MARKS_OF_TENSORS, *(("persistent",) if getattr(tensor, "_is_buffer", False) else ())}
    own = {key: value for key, value in vars(tensor).items() if not (key in marks and type(value) is bool)}
    own = {key: value for key, value in own.items() if not are_hooks(value)}
    return {key: value for key, value in own.items() if not key.startswith(_MARKS_OF_DYNAMO)}


def hooks_of_tensor(tensor: Tensor) -> dict[str, Any]:
    """The hooks that somebody gave a tensor, which may keep something."""
    hooks = {"hooks": tensor._backward_hooks, "other hooks": tensor._post_accumulate_grad_hooks}
    return {name: held for name, held in hooks.items() if held} if tensor.is_leaf else {}


def hooks_of_all() -> dict[str, Any]:
    """The hooks that somebody gave to all modules, or to all optimizers."""
    return {
        "the hooks of all modules": [
            hooks for name, hooks in vars(nn.modules.module).items() if name.startswith("_global_")
        ],
        "the hooks of all optimizers": [
            _hooks_of_user(hooks) for hooks in (_global_optimizer_pre_hooks, _global_optimizer_post_hooks)
        ],
    }


def _hooks_of_user(hooks: dict[int, Any]) -> dict[int, Any]:
    """Those hooks that are not of a library, such as those by which transformers records hidden states."""
    return collections.OrderedDict((key, hook) for key, hook in hooks.items() if not is_of_library(hook))


def _is_own_method(module: nn.Module, key: str, value: object) -> bool:
    """Whether it is the class's method of this name: Lightning restores `forward` like this after each step."""
    return (
        isinstance(value, MethodType) and value.__self__ is module and value.__func__ is getattr(type(module), key, 0)
    )


def recomputed(value: object) -> set[str]:
    """The attributes that are set before they are read; those of a module by each forward pass."""
    names = set(NOT_STATE_OF_OPTIMIZERS) if isinstance(value, Optimizer) else set[str]()
    if isinstance(value, FunctionType):  # of one that torch.compile() returned: its id, what it compiles
        names.update(key for key in vars(value) if key.startswith(_MARKS_OF_DYNAMO))
    for kind in type(value).__mro__:
        names |= _RECOMPUTED.get(kind.__module__.partition(".")[0], set())
        if issubclass(kind, Distribution):
            names.update(key for key, part in vars(kind).items() if isinstance(part, lazy_property))
    for hook in value._forward_pre_hooks.values() if isinstance(value, nn.Module) else ():
        if isinstance(hook, (SpectralNorm, WeightNorm)):
            names.add(hook.name)
        elif isinstance(hook, BasePruningMethod):
            names.add(hook._tensor_name)
    return names


def enclosing_methods(value: object) -> dict[str, FunctionType]:
    """The methods with closures, such as those of a class that was defined inside a function."""
    return {
        name: method
        for kind in reversed(type(value).__mro__)
        if not is_library(kind.__module__)
        for name, method in vars(kind).items()
        if isinstance(method, FunctionType) and method.__closure__
    }


def global_hooks() -> list[Any]:
    """The dicts of the hooks of all modules and of all optimizers."""
    of_modules = [hooks for hooks in vars(nn.modules.module).values() if are_hooks(hooks)]
    return [*of_modules, _global_optimizer_pre_hooks, _global_optimizer_post_hooks]


def are_hooks(value: Any) -> bool:
    """Whether these are hooks of a module or an optimizer, whose keys differ in each process."""
    return type(value) is collections.OrderedDict and all(type(key) is int for key in value)
