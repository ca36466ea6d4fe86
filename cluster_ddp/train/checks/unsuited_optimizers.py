"""Checks that refuse optimizers which cannot be stepped or saved as the trainer does."""

from __future__ import annotations

import inspect
import traceback

from torch.optim import Optimizer

from cluster_ddp.train.errors import TaskError

_NO_GROUP = "process group has not been initialized"  # part of torch's message
_NO_FUNCTION = "'NoneType' object is not callable"  # Python's message
SECOND_DERIVATIVES = (
    "needs second derivatives, by loss.backward(create_graph=True): the trainer keeps no graph of the gradients; "
    "return an optimizer that needs only the gradients, or train in a loop of your own with join_run(), which may "
    "keep it"
)


def refuse_other_passes(optimizer: Optimizer) -> None:
    """Raise a `TaskError` for an optimizer that needs other passes than one forward and one backward per step."""
    kind = type(optimizer)
    # Of the class, because a scheduler replaces the method of the instance.
    _, *parameters = inspect.signature(kind.step).parameters.values()
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    needed = any(parameter.default is parameter.empty and parameter.kind not in variable for parameter in parameters)
    if needed or _takes_two_passes(optimizer) or callable(getattr(optimizer, "set_closure", None)):  # GSAM
        raise TaskError(_needs_closure(optimizer))
    of_second_order = getattr(optimizer, "is_second_order", False)  # as timm's AdaHessian says of itself
    if of_second_order or any(parameter.name == "hessian" for parameter in parameters):  # SophiaH, in some steps only
        raise TaskError(f"optimizer() returned {kind.__name__}, whose step() {SECOND_DERIVATIVES}")
    if any(group.get("differentiable") for group in optimizer.param_groups):
        raise TaskError(
            f"optimizer() returned {kind.__name__} with differentiable=True, whose step() is to be differentiated "
            "itself and cannot change parameters in place, as the trainer has it do: omit differentiable, or "
            "train in a loop of your own with join_run()"
        )
    if callable(getattr(optimizer, "fused_backward", None)):  # LOMO, AdaLOMO
        raise TaskError(
            f"optimizer() returned {kind.__name__}, which changes weights while its fused_backward() runs: the trainer "
            "runs the backward pass, and checks all gradients before it changes a weight; return an optimizer that "
            "needs only the gradients"
        )


def refuse_without_closure(optimizer: Optimizer, error: Exception) -> None:
    """Raise a `TaskError` if an error of ``step()`` was raised because it was given no closure."""
    line = str(traceback.extract_tb(error.__traceback__)[-1].line)
    if isinstance(error, AssertionError) or line.startswith("raise "):
        is_needed = "closure" in f"{line} {error}"
    else:
        is_needed = _NO_FUNCTION in str(error) and "closure(" in line
    if is_needed:
        raise TaskError(_needs_closure(optimizer)) from error


def _needs_closure(optimizer: Optimizer) -> str:
    return (
        f"optimizer() returned {type(optimizer).__name__}, whose step() needs a closure that computes the loss again: "
        "the trainer computes each loss once; return an optimizer that needs only the gradients"
    )


def refuse_unfinished(optimizer: Optimizer) -> None:
    """Raise a `TaskError` for an optimizer without the attributes of torch's, such as some that wrap another one."""
    try:
        _ = optimizer.param_groups, optimizer.state_dict()
    except AttributeError as error:
        raise TaskError(
            f"optimizer() returned {type(optimizer).__name__}, which this torch cannot save: {error}. It seems not to "
            "call Optimizer.__init__, as some wrappers do not; return the one inside it, or one made for this torch"
        ) from error


def refuse_without_group(error: Exception) -> None:
    """Raise a `TaskError` if an optimizer's error is caused by a single rank having no process group."""
    if _NO_GROUP in str(error):
        raise TaskError(
            "the optimizer communicates with those of other ranks through torch.distributed, but a single rank has no "
            "process group: use one that works alone, as those of torch do. One that divides its work or its state "
            "among the ranks is refused on several ranks, too"
        ) from error


def other_settings(optimizer: Optimizer, error: KeyError) -> str | None:
    """Explain an error of ``step()`` if, after a resume, its settings require state that the checkpoint lacks."""
    missing = error.args[0]
    *_, (raised_in, _) = traceback.walk_tb(error.__traceback__)
    if raised_in.f_locals.get("self", optimizer) is not optimizer:  # a hook of step() raised it
        return None
    if any(missing in held for held in (*optimizer.state.values(), *optimizer.param_groups)):
        return None
    kind = type(optimizer).__name__
    return (
        f"step() of {kind} needs {missing} of each parameter, which the checkpoint does not hold: {kind} was created "
        "with different settings then, such as without amsgrad. Create it as it was, or start a new run"
    )


def _takes_two_passes(optimizer: Optimizer) -> bool:
    """Whether it belongs to the SAM family, which computes the loss again after a first half-step."""
    return all(callable(getattr(optimizer, name, None)) for name in ("first_step", "second_step"))
