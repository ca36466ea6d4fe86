"""The objects a custom loop passes in by name, and their state in a checkpoint."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from cluster_ddp.checkpoint.plan import Tensors
from cluster_ddp.train.checks.differences import MODULE_BUFFERS
from cluster_ddp.train.data.fingerprint import drawn_to, fingerprint
from cluster_ddp.train.errors import TaskError, TrainError
from cluster_ddp.train.objects.comparing import equal_bits
from cluster_ddp.train.objects.packing import Packer, Unpacker
from cluster_ddp.train.optimizer import parameters_of
from cluster_ddp.train.own.program import reachable
from cluster_ddp.train.own.values import has_values, sampled, tensors_in
from cluster_ddp.train.own.wrappers import bare_of, ddp_of
from cluster_ddp.train.own.wrapping import refuse_sharded, refuse_unobservable, refuse_unwrapped
from cluster_ddp.train.randomness import OwnGenerators
from cluster_ddp.train.state.optimizer import OptimizerState

_DEPTH = 4  # how deep to search an optimizer for inner ones


class PassedIn:
    """Models, optimizers, schedulers and anything else with a state, combined into one state for a checkpoint.

    The module that an optimizer trains is saved as ``model.<name>``; if there are several, each under its own name.
    Everything else is saved by its ``state_dict()``.

    Parameters
    ----------
    things
        The objects, by the names under which they were passed in; None and empty lists are ignored.
    world_size
        Number of ranks; if there are several, modules that are trained have to be wrapped in DDP.

    Attributes
    ----------
    model
        What is trained, without its wrappers.
    optimizers
        All optimizers; the first is the one that `State` saves.
    more
        The states of the other optimizers, by name.
    stepping
        The optimizers, and those inside them, as in SAM and Lookahead.
    wrapped
        The modules wrapped in DDP.
    scalers
        The gradient scalers.

    Raises
    ------
    TrainError
        Something cannot be saved; the message names it.
    """

    def __init__(self, things: Mapping[str, Any], world_size: int) -> None:
        named = _with_scalers(_listed(things))
        self.wrapped = [ddp for thing in named.values() if (ddp := ddp_of(thing)) is not None]
        bare = {name: bare_of(thing) for name, thing in named.items()}
        refuse_sharded(bare)
        refuse_unobservable(bare)
        optimizers = {name: thing for name, thing in bare.items() if isinstance(thing, Optimizer)}
        if not optimizers:
            raise TrainError(_without_optimizer(bare))
        held = set(map(id, parameters_of(*optimizers.values())))
        trained = {
            name: thing
            for name, thing in bare.items()
            if isinstance(thing, nn.Module) and any(id(weight) in held for weight in thing.parameters())
        }
        self._refuse_foreign_parameters(optimizers, trained)
        if world_size > 1:
            refuse_unwrapped({name: ddp_of(named[name]) is not None for name in trained})
        self.model = next(iter(trained.values())) if len(trained) == 1 else nn.ModuleDict(trained)
        self.optimizers = list(optimizers.values())
        inside = reachable([("", optimizer) for optimizer in self.optimizers], _DEPTH)
        self.stepping = [part for _, part in inside if isinstance(part, Optimizer)]
        weights = {id(weight): name for name, weight in self.model.named_parameters()}
        others = list(optimizers.items())[1:]
        self.more = {name: OptimizerState(optimizer, weights) for name, optimizer in others}
        for name, optimizer in others:
            self.more[name].apart = self._inside(optimizer)
        self._rest: dict[str, Any] = {
            name: thing for name, thing in bare.items() if name not in trained and name not in optimizers
        }
        held_by = (getattr(thing, "scaler", thing) for thing in self._rest.values())  # Lightning's: in its plug-in
        self.scalers = [scaler for scaler in held_by if isinstance(scaler, torch.amp.GradScaler)]
        _refuse_forgotten_schedulers(optimizers, self._rest)
        for name, thing in self._rest.items():
            _see_that_it_can_be_kept(name, thing)

    def state_dict(self) -> dict[str, Any]:
        """The state of everything but the model and the first optimizer."""
        return {
            "rates": [rates(optimizer) for optimizer in self.optimizers],
            "more": {name: _collected(state) for name, state in self.more.items()},
            "rest": {name: _without_buffers(thing) for name, thing in self._rest.items()},
            MODULE_BUFFERS: {name: _buffers(thing) for name, thing in self._rest.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned.

        Raises
        ------
        TrainError
            Different objects were passed in when the checkpoint was saved.
        """
        was = {*state["more"], *state["rest"]}
        differing = sorted(was ^ {*self.more, *self._rest})
        if differing:
            raise TrainError(
                f"the checkpoint and this program do not pass in the same objects: {', '.join(differing)} "
                f"{'is' if len(differing) == 1 else 'are'} in only one of the two; pass in the same objects as "
                "before, or start a new run"
            )
        for name, thing in self._rest.items():
            thing.load_state_dict(state["rest"][name] | state[MODULE_BUFFERS][name])
        unpacker = Unpacker(next(self.model.parameters()).device)
        for name, kept in self.more.items():
            tensors, scalars = state["more"][name]
            kept.restore(tensors, scalars, unpacker)
        for optimizer, of_groups in zip(self.optimizers, state["rates"], strict=True):  # last: schedulers set them too
            put_rates(optimizer, of_groups)

    def tensors(self) -> Iterator[Tensor]:
        """All tensors that are saved."""
        yield from (*self.model.parameters(), *self.model.buffers())
        for thing in self._rest.values():
            if isinstance(thing, nn.Module):
                yield from (*thing.parameters(), *thing.buffers())
            else:
                yield from tensors_in(thing.state_dict())

    def states(self) -> Iterator[Tensor]:
        """The tensors in the ``state_dict()`` of what is neither trained nor an optimizer; they may be copies."""
        for thing in self._rest.values():
            yield from tensors_in(thing.state_dict())

    def generators(self) -> Iterator[Any]:
        """The generators whose state is in the ``state_dict()`` of the object that holds them."""
        for thing in self._rest.values():
            saved = {fingerprint(part) for part in _with_parts(thing.state_dict())}
            yield from (generator for generator in OwnGenerators(thing) if drawn_to(generator) in saved)

    @property
    def apart(self) -> frozenset[str]:
        """The names of the first optimizer's attributes that are optimizers passed in themselves."""
        return self._inside(self.optimizers[0])

    def _inside(self, optimizer: Optimizer) -> frozenset[str]:
        return frozenset(
            name for name, value in vars(optimizer).items() if any(value is other for other in self.optimizers)
        )

    @property
    def others(self) -> dict[str, Any]:
        """What is saved besides the trained modules and the optimizers, by name."""
        return self._rest

    @property
    def modules(self) -> Iterator[tuple[str, nn.Module]]:
        """All modules, without their wrappers, by name."""
        yield "model", self.model
        yield from ((name, thing) for name, thing in self._rest.items() if isinstance(thing, nn.Module))

    def as_now(self) -> Callable[[], None]:
        """Take a snapshot; returns a function that restores weights, optimizers, and the state of other objects.

        It also restores which weights are trained, and which have a gradient.
        The weights are copied to host memory until then. The optimizers' state is not copied: it is restored if it was
        discarded, and a change made in place is refused.
        """
        of_groups = [
            [copy.deepcopy(_settings_of(group)) for group in optimizer.param_groups] for optimizer in self.optimizers
        ]
        put_back_states = [_state_as_now(optimizer) for optimizer in self.optimizers]
        others = [thing for thing in self._rest.values() if not isinstance(thing, nn.Module)]
        states = [copy.deepcopy(thing.state_dict()) for thing in others]
        weights = [weight for _, module in self.modules for weight in (*module.parameters(), *module.buffers())]
        values = [weight.detach().to("cpu", copy=True) for weight in weights]
        parameters = [weight for weight in weights if isinstance(weight, nn.Parameter)]
        are_trained = [weight.requires_grad for weight in parameters]
        gradients = [weight.grad for weight in parameters]  # of zeros; DDP may have to find these very tensors

        def put_back() -> None:
            for weight, value in zip(weights, values, strict=True):
                if not equal_bits(value, weight):
                    weight.data.copy_(value)
            for weight, is_trained in zip(parameters, are_trained, strict=True):
                weight.requires_grad_(is_trained)
            for weight, gradient in zip(parameters, gradients, strict=True):
                if gradient is not None and weight.grad is None and weight.requires_grad:
                    weight.grad = gradient.zero_()
            for thing, state in zip(others, states, strict=True):
                thing.load_state_dict(state)
            for put_back_state in put_back_states:
                put_back_state()
            for optimizer, settings in zip(self.optimizers, of_groups, strict=True):  # last: schedulers set rates too
                for group, was in zip(optimizer.param_groups, settings, strict=False):  # new groups are refused
                    _put_settings(group, was)

        return put_back

    @staticmethod
    def _refuse_foreign_parameters(optimizers: Mapping[str, Optimizer], trained: Mapping[str, nn.Module]) -> None:
        known = {id(weight) for module in trained.values() for weight in module.parameters()}
        for name, optimizer in optimizers.items():
            if any(id(weight) not in known for weight in parameters_of(optimizer)):
                raise TrainError(
                    f"{name} trains parameters that belong to none of the modules passed in: pass in the module that "
                    "holds them (model=model; a second one under its own name, head=head), not its class or its "
                    "state_dict(), or, for bare parameters such as an image, a torch.nn.ParameterList "
                    "(image=ParameterList([image]))"
                )


def _without_optimizer(bare: Mapping[str, Any]) -> str:
    name, given = next(((name, thing) for name, thing in bare.items() if "optim" in name), ("", None))
    kind = f"{type(given).__module__}.{type(given).__name__}"
    if inner := [where for where, part in reachable([(name, given)], 2) if isinstance(part, Optimizer)]:
        return (
            f"{name} is of type {kind}, which is not a torch.optim.Optimizer but contains one: pass that one in, "
            f"{name}={inner[0]}, and, if the outer one has state of its own, that as well, under another name "
            f"(outer={name})"
        )
    return (
        f"no torch.optim.Optimizer is passed in{'' if given is None else f' ({name} is of type {kind})'}: give "
        "optimizer=. For updates by hand, such as weight -= rate * weight.grad, use torch.optim.SGD; a program that "
        "trains without torch.optim runs as it is, without the added lines, and saves by itself"
    )


def _buffers(thing: Any) -> dict[str, Any]:
    """The buffers in the state of a module; empty for anything else."""
    if not isinstance(thing, nn.Module):
        return {}
    names = dict(thing.named_buffers())
    return {name: value for name, value in thing.state_dict().items() if name in names}


def _without_buffers(thing: Any) -> dict[str, Any]:
    buffers = _buffers(thing)
    return {name: value for name, value in thing.state_dict().items() if name not in buffers}


def rates(optimizer: Optimizer) -> list[float]:
    """The learning rate of each group."""
    return [float(group["lr"]) for group in optimizer.param_groups]


def put_rates(optimizer: Optimizer, of_groups: list[float]) -> None:
    """Set the learning rate of each group."""
    for group, rate in zip(optimizer.param_groups, of_groups, strict=False):
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


def _settings_of(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}


def _put_settings(group: dict[str, Any], was: dict[str, Any]) -> None:
    for key, value in was.items():
        if isinstance(value, Tensor) and isinstance(group[key], Tensor):
            group[key].copy_(value)
        else:
            group[key] = value


def _state_as_now(optimizer: Optimizer) -> Callable[[], None]:
    held = dict(optimizer.state)
    parts = {key: dict(state) for key, state in held.items() if type(state) is dict}
    before = sampled(_tensors_of(held))

    def put_back() -> None:
        for key, state in parts.items():
            held[key].clear()
            held[key].update(state)
        optimizer.state.clear()
        optimizer.state.update(held)
        if sampled(_tensors_of(held)) != before:
            raise TrainError(
                f"the code before the batches of an epoch changes the state of {type(optimizer).__name__} in place. It "
                "did so again at this resume, in the middle of the epoch, and what it overwrote cannot be restored: "
                "run it after the batches of the previous epoch, or create new tensors"
            )

    return put_back


def _tensors_of(states: Mapping[Any, Any]) -> Iterator[Tensor]:
    return (tensor for tensor in tensors_in(states) if has_values(tensor))


def _listed(things: Mapping[str, Any]) -> dict[str, Any]:
    named: dict[str, Any] = {}
    for name, thing in things.items():
        if isinstance(thing, (list, tuple)):
            named.update({f"{name}{number}": part for number, part in enumerate(thing)})
        elif thing is not None:
            named[name] = thing
    return named


def _with_scalers(named: dict[str, Any]) -> dict[str, Any]:
    """Add the gradient scaler inside an optimizer prepared by Accelerate to what was passed in."""
    found = dict(named)
    for name, thing in named.items():
        scaler = getattr(thing, "scaler", None) if isinstance(thing, Optimizer) else None
        if scaler is not None and not any(scaler is other for other in found.values()):
            found[f"{name} scaler"] = scaler
    return found


def _refuse_forgotten_schedulers(optimizers: Mapping[str, Optimizer], rest: Mapping[str, Any]) -> None:
    """Refuse a scheduler that was not passed in: it leaves ``initial_lr`` in the optimizer's groups.

    Programs that compute the rate themselves write that key too, so a scheduler has to exist. Any other object passed
    in might hold it, so with one of these nothing is refused.
    """
    if any(not isinstance(thing, (nn.Module, torch.amp.GradScaler)) for thing in rest.values()):
        return
    for name, optimizer in optimizers.items():
        if any("initial_lr" in group for group in optimizer.param_groups) and _has_scheduler(optimizer):
            raise TrainError(
                f"a learning rate scheduler was made for {name} and was not passed in: after a resume it would start "
                "over; give scheduler="
            )


def _has_scheduler(optimizer: Optimizer) -> bool:
    """Whether the program holds an object that steps, has a state to load, and refers to this optimizer."""
    objects = gc.get_objects()
    kinds = {kind for kind in set(map(type, objects)) if _may_schedule(kind)}  # of a million objects, a few thousand
    return any(
        type(held) in kinds and bare_of(getattr(held, "__dict__", {}).get("optimizer")) is optimizer for held in objects
    )


def _may_schedule(kind: type) -> bool:
    methods = (getattr(kind, name, None) for name in ("step", "load_state_dict"))
    return all(map(callable, methods)) and not issubclass(kind, Optimizer)


def _collected(state: OptimizerState) -> list[Any]:
    tensors = Tensors()
    scalars = state.collect(tensors)
    return [dict(tensors), scalars]


def _see_that_it_can_be_kept(name: str, thing: Any) -> None:
    if not all(callable(getattr(thing, method, None)) for method in ("state_dict", "load_state_dict")):
        raise TrainError(
            f"{name} is of type {type(thing).__name__}, which has no state_dict() and load_state_dict(), so it cannot "
            f"be saved: add both, or do not pass it in. For the loop's own numbers: run.keep({name}=...)"
        )
    try:
        first = Packer({}).pack(dict(thing.state_dict()), name)
        if isinstance(thing, nn.Module):
            return
        thing.load_state_dict(copy.deepcopy(thing.state_dict()))
        again = Packer({}).pack(dict(thing.state_dict()), name)
    except TaskError as error:
        raise TrainError(f"{name} cannot be kept: {error}") from error
    if first != again:
        raise TrainError(f"load_state_dict() of {name} does not restore what its state_dict() returns")


def _with_parts(value: Any) -> Iterator[Any]:
    yield value
    if isinstance(value, Mapping):
        for part in value.values():
            yield from _with_parts(part)
