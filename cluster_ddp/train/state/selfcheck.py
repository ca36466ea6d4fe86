"""Checks in the first steps that the state is restored from a checkpoint, bit by bit.

A complete checkpoint is made in memory and read back into a model and an optimizer built as in a resume. This costs
about as much as one save and building the model. Anything that differs is refused by name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor

from cluster_ddp.checkpoint.errors import CheckpointError, CheckpointMismatch
from cluster_ddp.checkpoint.memory import MemoryCheckpoint
from cluster_ddp.checkpoint.plan import SavePlan, find_aliases, find_overlaps
from cluster_ddp.errors import ClusterDDPError
from cluster_ddp.train.errors import TaskError
from cluster_ddp.train.objects.attributes import Attributes
from cluster_ddp.train.objects.comparing import equal_bits
from cluster_ddp.train.objects.kinds import kind_of
from cluster_ddp.train.objects.packing import comparable, without_words
from cluster_ddp.train.state.stored import check_scalars
from cluster_ddp.train.state.training import EXTRA, Collected, State
from cluster_ddp.words import listed

_SHOWN = 5  # maximum number of differences in the message
_MAX_TEXT = 120  # maximum length of each, in characters
_REMEDIES = {
    "model": "convert the model (.to(), .half()) before it is passed in; register buffers in __init__ with their "
    "final shape, and change them in place (copy_, add_); state_dict() of a module must return the tensors "
    "themselves. A buffer that takes its shape from the first batch, as the observers of quantization-aware training "
    "do, has its final shape if model() runs a batch through the model",
    "names": "all parameters must be in their places under their names before the optimizer is made: in your own loop "
    "also before run.resumable() or run.steps(). To prune in training, put masks there with prune.identity(layer, "
    "'weight'), and set them later by layer.weight_mask.copy_(mask)",
    "ema": "what is averaged must be in the model from the start",
    "optimizer": "keep it in state[parameter] or in the groups, or return and restore it in the optimizer's own "
    "state_dict() and load_state_dict(); in your own loop, also pass in an optimizer inside it, under "
    "its own name (base=optimizer.{inner})",
    "task": "load_state_dict() of the task has to restore everything that its state_dict() returns, and to copy into a "
    "tensor that is trained: with torch.no_grad(): self.scale.copy_(state['scale'])",
    "memory": "give each tensor its own memory: weight.copy_(other) instead of weight.data = other. Of a tensor and a "
    "view of it, return one in state_dict(), and make the other from it in load_state_dict(). In your own loop, "
    "keep copies: run.keep(weights=copy.deepcopy(model.state_dict()))",
    "counts": "report this as an error of cluster-ddp",
}


def check_comes_back(
    state: State, step: int, collected: Collected, plan: SavePlan, make_fresh: Callable[[], State]
) -> None:
    """Compare the state with the one that a resume after this step would have.

    Raises
    ------
    TaskError
        Something is not restored; the message names it.
    """
    with state.undoing():
        _check_comes_back(state, step, collected, plan, make_fresh)


def _check_comes_back(
    state: State, step: int, collected: Collected, plan: SavePlan, make_fresh: Callable[[], State]
) -> None:
    tensors, scalars = collected
    limits = state.limits()  # now, because the other task may hold the same objects, into which it loads
    try:
        stored = MemoryCheckpoint(tensors, scalars, plan)
        other = make_fresh()
        restored = stored.restore(other.live(), check_scalars)
        other.load(step, restored.scalars, restored.extra)
        again, scalars_again = other.collect()
    except CheckpointMismatch as error:
        raise _refusal(state, [str(error.differences).strip()], "model") from error
    except CheckpointError as error:
        raise _refusal(state, [str(error)], "model") from error
    except ClusterDDPError:
        raise
    except Exception as error:
        raise TaskError(
            "after two steps, a second model and optimizer were made and given the state of the first, as a resume "
            f"does, and that failed with {type(error).__name__}: {error}\n"
            "    model(), optimizer() and load_state_dict() have to work when they are called a second time"
        ) from error
    state.compare_values(other)
    differing = [
        *_tensors_that_differ(tensors, again),
        *_scalars_that_differ(
            {**scalars, "requires_grad": state.trained()}, {**scalars_again, "requires_grad": other.trained()}
        ),
        *(f"optimizer.{name}: {how}" for name, how in state.hidden_differences(other)),
        *_limits_that_differ(limits, other.limits()),
        *_gradients_that_would_be_lost(*state.around_loading(other)),
    ]
    if not differing and (shared := _memory_that_differs(plan.aliases, tensors, again)):
        raise _refusal(state, shared, "memory")
    if differing:
        kinds = {re.split("[._:]", name)[0] for name in differing}
        kinds |= {"names"} if state.trained().keys() != other.trained().keys() else set()
        order = ("names", "model", "optimizer", "task", *kinds)
        raise _refusal(state, differing, next(kind for kind in order if kind in kinds))


def check_taken_back(state: State, scalars: Mapping[str, Any], extra: Mapping[str, Tensor]) -> None:
    """Compare the task and the modules' extra state with the checkpoint that has just been loaded into them.

    The check in the first steps finds only what has changed until then. All ranks call it.

    Raises
    ------
    TaskError
        Something was not restored; the message names it.
    """
    if differing := _not_taken_back(state, scalars, extra):
        raise _refusal(state, differing, "task")


def no_longer_there(state: State, scalars: Mapping[str, Any]) -> str | None:
    """What to tell if the task has loaded a checkpoint and no longer has parts of its state.

    It may have been changed to do without them. All ranks call it.
    """
    _, now = state.collect()
    if not (lost := sorted(scalars.get("task", {}).keys() - now["task"].keys())):
        return None
    return (
        f"the checkpoint holds {listed(lost)} of the task, which state_dict() does not return after "
        "load_state_dict(): unless the task has been changed to do without, it is lost, and this resume is not exact"
    )


def lost_between_ranks(state: State, scalars: Mapping[str, Any], extra: Mapping[str, Tensor]) -> str | None:
    """What to tell where `check_taken_back` refuses, if another number of ranks has saved the state, such as by rank.

    All ranks call it.
    """
    if not (differing := _not_taken_back(state, scalars, extra)):
        return None
    return (
        "the checkpoint was saved on a different number of ranks, and its state of the task does not come back on this "
        f"one: {listed(differing, between='; ')}. What ranks have of their own is lost, or given to several: let "
        "load_state_dict() divide it among the present ranks, or return what is the same on all of them"
    )


def _not_taken_back(state: State, scalars: Mapping[str, Any], extra: Mapping[str, Tensor]) -> list[str]:
    """Keys that only one of the two has come from changes of the code, and are ignored."""
    tensors, now = state.collect()
    differing = [
        f"{name.removeprefix(EXTRA)}: different values come back"
        for name in sorted(extra.keys() & tensors.keys())
        if name.startswith(("task.", EXTRA)) and not equal_bits(extra[name], tensors[name])
    ]
    for kind in ("task", "extra_state"):
        both = sorted(scalars.get(kind, {}).keys() & now[kind].keys())
        was, is_now = ({f"{kind}.{key}": without_words(of[kind][key]) for key in both} for of in (scalars, now))
        differing += _scalars_that_differ(was, is_now)
    return differing


def _memory_that_differs(
    aliases: Mapping[str, str], live: Mapping[str, Tensor], again: Mapping[str, Tensor]
) -> list[str]:
    wholes = aliases.keys() ^ find_aliases(again).keys()
    now, then = find_overlaps(live), find_overlaps(again)
    return [
        *(f"{name}: shares memory with other tensors after a resume" for name in sorted(wholes)),
        *(f"{name}: is a part of {other}, and would not be after a resume" for other, name in sorted(now - then)),
        *(f"{name}: would be a part of {other} after a resume" for other, name in sorted(then - now)),
    ]


def _refusal(state: State, differing: list[str], kind: str) -> TaskError:
    more = f"\n  and {len(differing) - _SHOWN} more" if len(differing) > _SHOWN else ""
    listed = "\n  ".join(differing[:_SHOWN])
    remedy = _REMEDIES.get(kind, _REMEDIES["model"]).format(inner=state.inner_optimizer() or "base_optimizer")
    return TaskError(f"a resume would not continue from the same state:\n  {listed}{more}\n    {remedy}")


def _tensors_that_differ(live: Mapping[str, Tensor], again: Mapping[str, Tensor]) -> Iterator[str]:
    for name in sorted(live.keys() | again.keys()):
        if name not in again or name not in live:
            yield f"{name}: {'is not restored' if name in live else 'appears after a resume, but was not there'}"
            continue
        was, now = live[name].detach(), again[name].detach()
        if (was.dtype, was.shape) != (now.dtype, now.shape):
            yield f"{name}: {was.dtype} {list(was.shape)} comes back as {now.dtype} {list(now.shape)}"
        elif was.stride() != now.stride():
            yield f"{name}: strides {list(was.stride())} come back as {list(now.stride())}"
        elif not equal_bits(was, now):
            yield f"{name}: different values come back"


def _scalars_that_differ(live: Mapping[str, Any], again: Mapping[str, Any]) -> Iterator[str]:
    """Compare without devices: the restored state is on the CPU. The order of sets is reported elsewhere."""
    for name in live:
        # The strides have been compared with the tensors; a copy of the task may hold the very modules of the task.
        if name in ("optimizer_layouts", "modes_of_task"):
            continue
        # The state of the task has its dicts in the order in which a step may go through them.
        was, now = (json.dumps(comparable(of[name]), sort_keys=name != "task") for of in (live, again))
        if was != now:
            yield f"{name}: {_shortened(was)} comes back as {_shortened(now)}"


def _limits_that_differ(live: Mapping[str, Any], again: Mapping[str, Any]) -> Iterator[str]:
    """A window that keeps growing after a resume, or a dict with another default, holds the same at first."""
    for name, was in live.items():
        now = again.get(name, was)
        if isinstance(was, int) and now != was:
            yield f"{name}: a deque with maxlen={was} comes back as something else; load into one with that maxlen"
        if callable(was) and callable(now) and kind_of(was) != kind_of(now):
            made, made_again = Attributes({name: was()}), Attributes({name: now()})
            if made.changed(made_again) or any(_limits_that_differ(made.limits, made_again.limits)):
                yield f"{name}: a defaultdict comes back with a different default; load into one with the same"


def _gradients_that_would_be_lost(before: Attributes, after: Attributes) -> Iterator[str]:
    """Tensors of the task that its load_state_dict() has replaced by others, which nothing trains."""
    for name, held in sorted(before.in_optimizers() - after.in_optimizers()):
        yield f"{name}: is {held} now, and would be another tensor after a resume"
    for name, leaf in before.leaves.items():
        loaded = after.leaves.get(name)
        is_trained = isinstance(leaf, Tensor) and leaf.is_leaf and leaf.requires_grad
        if is_trained and isinstance(loaded, Tensor) and not loaded.requires_grad:
            yield f"{name}: requires a gradient now, and would not after a resume"


def _shortened(text: str) -> str:
    return text if len(text) <= _MAX_TEXT else f"{text[:_MAX_TEXT]}..."
