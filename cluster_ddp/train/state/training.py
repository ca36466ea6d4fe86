"""The state of a training run as named tensors and numbers: what a checkpoint contains."""

from __future__ import annotations

import contextlib
import copy
import functools
import json
from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from cluster_ddp.checkpoint.plan import Tensors, describe
from cluster_ddp.train.data.made_from import Source, code_of_steps
from cluster_ddp.train.objects.attributes import Attributes
from cluster_ddp.train.objects.held import (
    enclosing_methods,
    hooks_of_all,
    hooks_of_tensor,
    of_module,
    of_tensor,
)
from cluster_ddp.train.objects.inner_parts import inner_parts
from cluster_ddp.train.objects.packing import Packer, Unpacker
from cluster_ddp.train.objects.places import names_in
from cluster_ddp.train.objects.surroundings import settings_of_torch, variables_around
from cluster_ddp.train.randomness import OwnGenerators
from cluster_ddp.train.ranks.communicating import Communicating
from cluster_ddp.train.state.coming_back import of_task
from cluster_ddp.train.state.counts import Counts
from cluster_ddp.train.state.hidden_buffers import HiddenBuffers
from cluster_ddp.train.state.model import ModelState
from cluster_ddp.train.state.modes import Modes
from cluster_ddp.train.state.optimizer import OptimizerState
from cluster_ddp.train.state.stateful import Averages, Stateful, copied, load_into, refuse_not_put_back
from cluster_ddp.train.state.undoing import undone
from cluster_ddp.train.state.watching import Watch
from cluster_ddp.train.task import Task, expect_type

Collected = tuple[Tensors, dict[str, Any]]

_BUFFER = "buffer."  # prefix for buffers that state_dict() omits
EXTRA = "extra."  # prefix for tensors in what modules return from get_extra_state()


class State:
    """Collects the state for a save, and restores it."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        scaler: torch.amp.GradScaler | None = None,
        ema: Averages | None = None,
        also: Stateful | None = None,
        apart: frozenset[str] = frozenset(),  # see `OptimizerState`
        others: Mapping[str, OptimizerState] | None = None,  # other optimizers, saved by `also`
        besides: Mapping[str, nn.Module] | None = None,  # other modules, saved by `also`
        seeded: OwnGenerators | None = None,  # the random generators seeded for each step; None: all
        wrapped: nn.Module | None = None,  # the model as loss() is given it
        read: Container[int] | None = None,  # ids of the data sets from which batches are made; None: all
        communicating: Communicating | None = None,  # of a task: what its methods have done so far
    ) -> None:
        self.counts = Counts()  # saved with the rest; the code that counts updates them
        self._model = model
        self._scaler = scaler
        self._ema = ema
        self._also = also
        self._parameters = [(name, weight, weight.requires_grad) for name, weight in model.named_parameters()]
        self._optimizer = OptimizerState(optimizer, {id(weight): name for name, weight, _ in self._parameters})
        self._optimizer.apart = apart
        self._others = others or {}
        self._seeded, self._read = seeded, read
        self._wrapped = None if wrapped is model else wrapped
        self._communicating = communicating or Communicating()
        self._model_state = ModelState(model, optimizer)
        self._modules = list(model.named_modules())
        self._saved = {id(optimizer), *(id(module) for _, module in self._modules)}
        self._besides = {
            f"{name}.{path}".rstrip("."): part
            for name, module in (besides or {}).items()
            for path, part in module.named_modules()
            if id(part) not in self._saved
        }
        self.is_of_task = isinstance(also, Task)
        self._watch = Watch(also, model, self._attributes, self._other_states)
        self._device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
        self._hidden = HiddenBuffers(model)
        of_model = {id(module) for _, module in self._modules}
        besides = {f"model.{name}": of_module(module) for name, module in self._modules} | self._optimizer.hooks()
        self.modes = Modes(also, of_model, besides) if isinstance(also, Task) else None
        self.collect()  # raise any refusal before the first step
        self._first_of_task = copied(self._task_state())

    def collect(self) -> Collected:
        """Return all tensors by name, sharing memory with the live ones, and the rest as JSON; raises `TaskError`."""
        tensors, extra_state = self._model_and_average()
        strides = self._model_state.changed_strides(tensors)
        scalars = self._optimizer.collect(tensors)
        hidden = {_BUFFER + name: tensor for name, tensor in self._hidden.changed().items()}
        tensors |= hidden
        packer = Packer(tensors)
        scalars |= {
            "counts": asdict(self.counts),
            "strides": strides | {name: list(buffer.stride()) for name, buffer in hidden.items()},
            "scaler": None if self._scaler is None else self._scaler.state_dict(),
            "requires_grad": {  # of layers that were frozen or unfrozen in training
                name: parameter.requires_grad
                for name, parameter, first in self._parameters
                if parameter.requires_grad != first
            },
            "evaluating": [name for name, module in self._modules if not module.training],
            "modes_of_task": {} if self.modes is None else self.modes.changed(),
            "extra_state": {name: packer.pack(value, EXTRA + name) for name, value in extra_state.items()},
            "task": packer.pack(self._task_state(), "task"),
        }
        return tensors, scalars

    def load(self, step: int, scalars: Mapping[str, Any], extra: Mapping[str, Tensor]) -> None:
        """Restore what `Checkpointer.restore` has not filled in place; `extra` is contiguous and on the CPU."""
        self.counts = Counts(**scalars["counts"])
        unpacker, strides = Unpacker(self._device), scalars.get("strides", {})
        self._model_state.load_strides(strides, unpacker)
        self._optimizer.restore(_with_prefix("optimizer.", extra), scalars, unpacker)
        changed = scalars.get("requires_grad", {})
        for name, parameter, _ in self._parameters:
            if name in changed:
                parameter.requires_grad_(changed[name])
        if "evaluating" in scalars:  # modules not in training mode, such as a frozen BatchNorm
            evaluating = set(scalars["evaluating"])
            for name, module in self._modules:
                module.training = name not in evaluating
        if self.modes is not None:
            self.modes.restore(scalars.get("modes_of_task", {}))
        hidden = {
            name.removeprefix(_BUFFER): unpacker.laid_out(
                tensor, tuple(strides.get(name, tensor.stride())), tensor.device
            )
            for name, tensor in _with_prefix(_BUFFER, extra).items()
        }
        self._hidden.load(hidden, self._device)
        self._load_extra_state(scalars, extra, unpacker)
        if self._scaler is not None and scalars["scaler"]:
            # The current scale is state; how it changes is set by the job file.
            kept = {key: scalars["scaler"][key] for key in ("scale", "_growth_tracker")}
            self._scaler.load_state_dict({**self._scaler.state_dict(), **kept})
        if self._ema is not None:
            self._ema.restore(step - self.counts.skipped)
        self._load_task(scalars, _with_prefix("task.", extra), unpacker)
        if self.modes is not None:
            self.modes.restore_late(scalars.get("modes_of_task", {}))

    def _load_extra_state(self, scalars: Mapping[str, Any], extra: Mapping[str, Tensor], unpacker: Unpacker) -> None:
        of_modules = _with_prefix(EXTRA, extra)
        self._model_state.load_extra_state(scalars.get("extra_state", {}), unpacker, of_modules.pop)

    def _load_task(self, scalars: Mapping[str, Any], of_task: dict[str, Tensor], unpacker: Unpacker) -> None:
        task_state = unpacker.unpack(scalars["task"], of_task.pop)
        task_state |= {name.removeprefix("task."): tensor for name, tensor in of_task.items()}  # older format
        if self._also is not None and task_state:
            self._watch.coming_back.note_before_loading()
            load_into(self._also, task_state, unpacker)

    @property
    def communicates(self) -> bool:
        """Whether methods of the task communicate, so that no rank may call them alone; the same on all ranks."""
        return self.is_of_task and self._communicating.is_seen

    def note_communicating(self) -> None:
        """Note that they do, on all ranks."""
        self._communicating.is_seen = True

    def call_along(self, collected: Collected, make_fresh: Callable[[], State]) -> None:
        """Call those methods of the task and the modules that rank 0 calls to check that this state comes back."""
        tensors, scalars = collected
        extra = {name: value.cpu().clone() for name, value in tensors.items() if name.startswith(("task.", EXTRA))}
        packed = json.loads(json.dumps({key: scalars[key] for key in ("task", "extra_state")}))
        unpacker = Unpacker(self._device)
        with self.undoing(), contextlib.suppress(Exception):  # rank 0 reports it
            other = make_fresh()
            other.live()
            other._load_extra_state(packed, extra, unpacker)
            other._load_task(packed, _with_prefix("task.", extra), unpacker)
            other.collect()
        self._watch.coming_back.before_loading = None

    def check_groups(self) -> None:
        """Raise a `TaskError` if an optimizer's groups differ from what a resume would find; called in every step."""
        for optimizer in (self._optimizer, *self._others.values()):
            optimizer.groups.check()

    def alike(self) -> dict[str, Tensor]:
        """The tensors that must be bitwise the same on all ranks, by name."""
        tensors, _ = self.collect()
        _, _, replicated = describe(tensors)
        return {name: tensors[name] for name in sorted(replicated)}

    def trained(self) -> dict[str, bool]:
        """Which parameters are trained now; a checkpoint contains the changes since this object was created."""
        return {name: parameter.requires_grad for name, parameter, _ in self._parameters}

    def live(self) -> dict[str, Tensor]:
        """The tensors that a restore fills in place: those of the model and of the average."""
        return self._model_and_average()[0]

    def from_rank_0(self) -> list[str]:
        """Names of tensors of the model that each rank may have changed for itself, and that rank 0 saves."""
        return [prefix + name for name in self._model_state.from_rank_0() for prefix in ("model.", _BUFFER)]

    def inner_optimizer(self) -> str | None:
        """The attribute in which the optimizer holds another one, as Lookahead does."""
        held = vars(self._optimizer.optimizer).items()
        return next((name for name, value in held if isinstance(value, Optimizer)), None)

    def hidden_differences(self, other: State) -> Iterator[tuple[str, str]]:
        """Numbers that the optimizer keeps in attributes, outside its state, and that differ in the other's."""
        return self._optimizer.hidden_differences(other._optimizer)

    def limits(self) -> dict[str, Any]:
        """How many elements each deque in the task may hold, and what makes those that a defaultdict lacks, by name."""
        return of_task(self._also).limits if isinstance(self._also, Task) else {}

    def around_loading(self, other: State) -> tuple[Attributes, Attributes]:
        """What the task of another state, which has loaded this one, held before and holds since."""
        back = self._watch.coming_back
        before, back.before_loading = back.before_loading, None  # it keeps all that the other holds
        if before is None or not isinstance(other._also, Task):
            return Attributes({}), Attributes({})
        return before, other._attributes()

    def watch(self) -> None:
        """Record the attributes and generators of model and task before the first step of an attempt."""
        if self._seeded is not None:
            self._seeded.find()
        self._watch.look()
        for other in self._others.values():
            other.changed_later()

    def watch_again(self, *, is_compared: bool) -> None:
        """Call after the first step, too, on all ranks: what takes turns is after the second as before the first."""
        if is_compared:
            self._watch.look()
        else:
            self._other_states()  # state_dict() of the task may communicate

    def watch_gradients(self) -> None:
        """Call before the second step: a resume has no gradients of the first."""
        if self.is_of_task:
            self._watch.watch_gradients()

    def note(self) -> None:
        """Call before model() and other methods are called once more, which may count: `unsaved` ignores the rest."""
        self._watch.note()

    def compare_values(self, other: State) -> None:
        """Note for `unsaved` which numbers, tensors and strings, and names of the same, come back in another state."""
        if isinstance(other._also, Task):
            is_another = other._model is not self._model
            self._watch.compare(other._also, other._attributes(), is_another_model=is_another)

    def unsaved(self) -> list[str]:
        """Attributes that have changed since `watch` or the last call, and that no checkpoint contains.

        Covers the model, the task and other optimizers; of the main optimizer, only what changes after the first call,
        because everything up to then has been compared.
        """
        if self._watch.latest is None:
            return []
        found = self._watch.unsaved(may_load=not self.communicates)
        for name, optimizer in self._optimizers().items():
            found.update(f"{name}.{key}" for key in optimizer.changed_later())
        return sorted(found)

    def other_names(self, name: str) -> set[str]:
        """The names that `MadeFrom` may use for what `unsaved` returns: by its class, or without a module."""
        place, _, key = name.rpartition(".")
        if place == "task":
            return {f"{kind.__name__}.{key}" for kind in type(self._also).__mro__}
        return {name, key} if "." not in place else {name}

    def _other_states(self) -> dict[str, Any]:
        return {"task": self._task_state(), "model": self._model_and_average()[1]}

    def _optimizers(self) -> dict[str, OptimizerState]:
        return {"optimizer": self._optimizer, **self._others}

    def _attributes(self) -> Attributes:
        modules = {**{f"model.{name}".rstrip("."): module for name, module in self._modules}, **self._besides}
        holders = {
            f"{name}.{key}": value for name, module in modules.items() for key, value in of_module(module).items()
        }
        # A replaced module has a different id; self._modules keeps the originals alive.
        layers = self._model.named_modules()
        holders["the model's layers"] = {name: (id(module), type(module).__qualname__) for name, module in layers}
        for name, weight in self._model_state.parameters.items():
            if hooks := hooks_of_tensor(weight):
                holders[f"model.{name}, its hooks"] = hooks
        for name, optimizer in self._optimizers().items():
            holders |= {f"{name}.{key}": hooks for key, hooks in optimizer.hooks().items()}
        for name, tensor in (*self._model_state.parameters.items(), *self._model.named_buffers()):
            holders |= {f"model.{name}.{key}": value for key, value in of_tensor(tensor).items()}
        if isinstance(self._also, Task):
            own = dict(inner_parts(self._also))  # also in slots
            parts = {**enclosing_methods(self._also), **own}
            holders |= {f"task.{key}": value for key, value in parts.items()}
            holders["task.__class__"] = type(self._also)
            code = [self._also, self._optimizer.optimizer, *(module for _, module in self._modules), *own.values()]
            holders |= variables_around(code)
            holders |= hooks_of_all()
            given = {} if self._wrapped is None else of_module(self._wrapped)
            holders |= {f"the model given to loss().{key}": value for key, value in given.items()}
        holders["the settings of torch"] = settings_of_torch()
        # The attributes of the task are among the holders, and hooks often refer to it.
        known = {id(self._optimizer.optimizer): "optimizer", id(self._also): "task", **names_in(modules)}
        latest, in_steps = self._watch.latest, lambda name: self._code_of_steps.mentions(name)
        return Attributes(holders, known, seeded=self._seeded, earlier=latest, read=self._read, in_steps=in_steps)

    @functools.cached_property
    def _code_of_steps(self) -> Source:
        return code_of_steps(self._also, self._model)

    def put_first_settings(self, optimizer: Optimizer) -> None:
        """Give the groups of a copy of the optimizer the settings that this one's had before the first step."""
        self._optimizer.put_first_settings(optimizer)

    def undoing(self) -> contextlib.AbstractContextManager[None]:
        """Undo afterwards what the task's methods, called once more for a check, have changed in what it holds."""
        return undone(self._also) if isinstance(self._also, Task) else contextlib.nullcontext()

    @contextlib.contextmanager
    def at_first(self) -> Iterator[None]:
        """Give the task, within the block, the state that it had before the first step of the run.

        Not if its methods communicate, since not all ranks may call this.
        """
        if self._also is None or not self._first_of_task or self.communicates:
            yield
            return
        now = copied(self._task_state())
        with self.undoing():
            self._also.load_state_dict(copy.deepcopy(self._first_of_task))
            try:
                yield
            finally:
                self._also.load_state_dict(now)

    def put_back_first(self, also: Stateful, other: State | None = None) -> None:
        """Load into another task, of another state, the state that this one had before the first step.

        Raises
        ------
        TaskError
            It does not restore that state.
        """
        if isinstance(also, Task) and other is not None:
            if self._watch.latest is not None:
                self._watch.coming_back.put_back_values(also)
            self._watch.coming_back.before_loading = other._attributes()
        if not self._first_of_task:
            return
        also.load_state_dict(copy.deepcopy(self._first_of_task))
        if isinstance(also, Task):
            self._watch.coming_back.note_first(also)
        refuse_not_put_back(also, self._first_of_task)

    def _model_and_average(self) -> tuple[Tensors, dict[str, Any]]:
        """Return the tensors of the model and the average, and the modules' extra state."""
        with self._communicating.watched():  # get_extra_state() of a module may
            named, extra_state = self._model_state.collect()
            if self._ema is not None:
                named.update({f"ema.{name}": value for name, value in self._ema.tensors().items()})
        return named, extra_state

    def _task_state(self) -> dict[str, Any]:
        if self._also is None:
            return {}
        with self._communicating.watched():
            return dict(expect_type(self._also.state_dict(), dict, "state_dict() of the task"))


def _with_prefix(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in tensors.items() if name.startswith(prefix)}
