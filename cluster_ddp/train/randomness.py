"""Makes random numbers a function of where training is, not of how it got there.

Every generator is seeded from (seed, step, rank, micro-batch) before a forward pass, and from (seed, epoch, sample
index) before a sample is fetched. So no generator's state has to be saved, and a resume replays nothing.
"""

from __future__ import annotations

import collections
import contextlib
import enum
import functools
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from cluster_ddp.train.objects.inner_parts import PLAIN, can_be_seen, elements, inner_parts, length

GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, np.random.BitGenerator, random.Random)
_WORD = (1 << 64) - 1
_HALF_WORD = (1 << 32) - 1
_POSITIVE_INT = (1 << 31) - 1
_WATCHED = 748_920_187  # the seed of a generator that is watched; an unusual one
_DEPTH, _WIDTH = 10, 100  # how deep objects are searched for generators, and the longest lists that are searched
_NOT_SEARCHED = (Tensor, np.ndarray, type, ModuleType, *GENERATORS)


class Use(enum.IntEnum):
    """What random numbers are used for; prevents equal numbers in different roles from giving equal seeds."""

    BUILD = 1
    ORDER = 2
    STEP = 3
    SAMPLE = 4
    EVALUATION = 5
    EPOCH = 6
    TRAIN_DATA = 7
    EVAL_DATA = 8
    OPTIMIZER = 9


def mix(word: int) -> int:
    """Scramble 64 bits so that neighbouring words become unrelated (SplitMix64, Steele et al. 2014)."""
    word = (word + 0x9E3779B97F4A7C15) & _WORD
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & _WORD
    return word ^ (word >> 31)


def derive(*words: int) -> int:
    """Hash integers to a 64-bit seed; their order matters."""
    seed = 0
    for word in words:
        seed = mix(seed ^ mix(word & _WORD))
    return seed


def seed_everything(seed: int) -> None:
    """Seed torch on all devices, Python's random and NumPy. Slow where there is a GPU (100 us or more); for setup."""
    if torch.get_device_module() is torch.cpu and not torch.backends.mps.is_available():  # torch 2.4 names no Mac's GPU
        torch.default_generator.manual_seed(seed)  # the same, without a stack trace for each device that torch knows
    else:
        torch.manual_seed(seed)
    _seed_libraries(seed)


@contextlib.contextmanager
def keep_generators() -> Iterator[None]:
    """Restore torch's generators (CPU and this rank's GPU), Python's random and NumPy afterwards."""
    python, numpy_ = random.getstate(), np.random.get_state()
    gpus = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
    try:
        with torch.random.fork_rng(gpus):  # by default it forks all GPUs of the node, with a warning
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy_)


def as_now(generator: Any) -> Callable[[], Any]:
    """A function that brings this generator back to the state that it is in now."""
    if isinstance(generator, (np.random.Generator, np.random.BitGenerator)):
        bits: Any = getattr(generator, "bit_generator", generator)
        return functools.partial(setattr, bits, "state", bits.state)
    if isinstance(generator, random.Random):
        return functools.partial(generator.setstate, generator.getstate())
    return functools.partial(generator.set_state, generator.get_state())


def seed_host(seed: int) -> None:
    """Seed torch's CPU generator, Python's random and NumPy: about 7 us, and twice that between the steps of a loop."""
    # torch.manual_seed takes 97 us if CUDA is not initialised; the generator itself takes 1.2 us.
    _seed_torch(seed)
    _seed_libraries(seed)


class HostGenerator(NamedTuple):
    """A generator that `seed_host` seeds; `restore` brings it back to the state that `state` returns."""

    seed: Callable[[int], object]
    draw: Callable[[], float]
    state: Callable[[], Any]
    restore: Callable[[Any], object]


_TORCH = torch.default_generator
_PYTHON: Any = getattr(random.random, "__self__", None)
_NUMPY: Any = getattr(np.random.random_sample, "__self__", None)
# What random.seed, np.random.seed and the like call for an integer, bound once. In a loop whose data has filled the
# caches, the way there takes as long as seeding.
_seed_torch = _TORCH.manual_seed
_restart_python = super(random.Random, _PYTHON).seed
_restart_numpy = _NUMPY.seed
_DRAWN = torch.empty((), dtype=torch.float64, device="cpu")  # making a new one takes longer than drawing

HOST_GENERATORS = (
    HostGenerator(
        _seed_torch,
        lambda: _DRAWN.uniform_(generator=_TORCH).item(),
        _TORCH.get_state,
        _TORCH.set_state,
    ),
    HostGenerator(lambda seed: _seed_python(seed), random.random, random.getstate, random.setstate),
    # These are seeded faster than restored.
    HostGenerator(
        lambda seed: _seed_numpy(seed), np.random.random_sample, lambda: _WATCHED, lambda seed: _seed_numpy(seed)
    ),
    HostGenerator(
        lambda seed: _seed_opencv(seed), lambda: _drawn_from_opencv(), lambda: _WATCHED, lambda seed: _seed_opencv(seed)
    ),
)
"""Torch's on the CPU, Python's random, NumPy and OpenCV: to seed one takes 1 to 20 us, to draw from it 0.1 to 3 us."""


def watch(number: int) -> Callable[[], bool]:
    """Watch the generator of this number in `HOST_GENERATORS`: 1 to 4 us.

    Returns
    -------
    A function to call once, which says whether nothing has drawn from it, or seeded it, since.
    """
    generator = HOST_GENERATORS[number]
    state, following = _watched(number)
    generator.restore(state)
    return lambda: generator.draw() == following


@functools.cache
def _watched(number: int) -> tuple[Any, float]:
    """A state of this generator, and what it draws next.

    The state follows a draw: for the first one after being seeded, a generator makes hundreds of numbers.
    """
    generator = HOST_GENERATORS[number]
    generator.seed(_WATCHED)
    generator.draw()
    state = generator.state()
    generator.restore(state)
    return state, generator.draw()


def drawn() -> tuple[float, ...]:
    """Draw from each of the `HOST_GENERATORS`."""
    return tuple(generator.draw() for generator in HOST_GENERATORS)


def _seed_libraries(seed: int) -> None:
    _seed_python(seed)
    _seed_numpy(seed)
    _seed_opencv(seed)


def _seed_python(seed: int) -> None:
    _restart_python(seed & _HALF_WORD)
    _PYTHON.gauss_next = None


def _seed_numpy(seed: int) -> None:
    try:
        _restart_numpy(seed & _HALF_WORD)
    except TypeError:  # np.random.set_bit_generator has put another kind there
        np.random.seed(seed & _HALF_WORD)


# OpenCV has its own generator, for cv2.randn and the like. A module named cv2 may be something else, half imported, or
# not imported yet.


def _seed_opencv(seed: int) -> None:
    if (seed_it := getattr(sys.modules.get("cv2"), "setRNGSeed", None)) is not None:
        seed_it(seed & _POSITIVE_INT)


def _drawn_from_opencv() -> float:
    draw = getattr(sys.modules.get("cv2"), "randu", None)
    return 0.0 if draw is None else float(draw(np.zeros((1, 1)), 0.0, 1.0)[0, 0])


def parts_of(*holders: Any, depth: int = _DEPTH) -> Iterator[Any]:
    """Yield objects and their parts, each once, except parts that are numbers or strings.

    The parts of models are all their modules, but not their tensors.
    """
    seen: set[int] = set()
    level: list[Any] = list(holders)
    unless_it_fails = contextlib.suppress(Exception)
    for _ in range(depth):
        inner: list[Any] = []
        for value in level:
            if id(value) not in seen and can_be_seen(value):
                seen.add(id(value))
                with unless_it_fails:  # it may have no attributes, although it has a class
                    inner += (part for part in _parts(value) if type(part) not in PLAIN)  # most are, and have no parts
                yield value
        level = inner


def _parts(value: Any) -> Iterator[Any]:
    if isinstance(value, nn.Module):
        yield from (vars(module) for module in value.modules())
    elif isinstance(value, (dict, list, tuple, collections.deque)):
        if length(value) <= _WIDTH:
            yield from elements(value)
        own = getattr(value, "__dict__", {})  # of a derived class; it may be the dict itself
        yield from own.values() if len(own) <= _WIDTH else ()
    elif not isinstance(value, _NOT_SEARCHED) and not _is_of_training(value):
        yield from (part for _, part in inner_parts(value))


def _is_of_training(value: Any) -> bool:
    """Whether it belongs to this package, such as a trainer that a task holds, which refers to all generators."""
    return type(value).__module__.startswith("cluster_ddp.train.")


def seed_one(generator: Any, word: int) -> None:
    """Seed a generator of any of the kinds in `GENERATORS`."""
    if isinstance(generator, (np.random.Generator, np.random.BitGenerator)):
        bits: Any = getattr(generator, "bit_generator", generator)
        bits.state = type(bits)(word).state
    elif isinstance(generator, torch.Generator):
        generator.manual_seed(word)
    else:
        generator.seed(word & _HALF_WORD)


class OwnGenerators:
    """The random generators that objects hold in their attributes, or in those of their parts.

    They are seeded together with the global ones, and so are as exact. Variables of modules are not found.

    Parameters
    ----------
    holders
        The objects to search.
    around
        Further generators by name, which no object holds. They do not affect how the held ones are seeded.
    depth
        How deep to search.
    apart_from
        Generators to leave alone.
    """

    def __init__(
        self,
        *holders: Any,
        around: Mapping[str, Any] | None = None,
        depth: int = _DEPTH,
        apart_from: Iterable[Any] = (),
    ) -> None:
        self._holders, self._around, self._depth = holders, around or {}, depth
        self._apart_from = list(apart_from)
        self.find()

    def find(self) -> None:
        """Search again: a holder's `load_state_dict` may have created new ones."""
        known = {id(torch.default_generator), id(getattr(random.random, "__self__", None))}
        others = known.union(map(id, self._apart_from))
        parts = parts_of(*self._holders, depth=self._depth)
        held = [part for part in parts if isinstance(part, GENERATORS) and id(part) not in others]
        self._found = dict(enumerate(held))
        others.update(map(id, held))
        around = {name: generator for name, generator in self._around.items() if id(generator) not in others}
        self._found |= {derive(*name.encode()): generator for name, generator in around.items()}
        self._seeded = known.union(map(id, self._found.values()))

    def __contains__(self, generator: object) -> bool:
        """Whether a generator is one of these or a global one, all of which are seeded."""
        return id(generator) in self._seeded and not isinstance(generator, random.SystemRandom)

    def __bool__(self) -> bool:
        return bool(self._found)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._found.values())

    def seed(self, seed: int) -> None:
        """Seed each generator: 1 to 20 us."""
        for number, generator in self._found.items():
            seed_one(generator, mix(seed + number))


class StepSeeds:
    """Seeds the generators before each forward pass of a step or an evaluation.

    Parameters
    ----------
    seed
        The run's seed.
    rank
        Ranks draw different numbers, such as for dropout.
    device
        The model's device, whose generator is seeded too.
    own
        Other generators that the forward pass draws from.
    use
        What the forward passes are for.
    """

    def __init__(
        self,
        seed: int,
        rank: int,
        device: torch.device,
        own: OwnGenerators | None = None,
        use: Use = Use.STEP,
    ) -> None:
        self._base = derive(use, seed, rank)
        self._generator = _device_generator(device)
        self._own = OwnGenerators() if own is None else own

    def apply(self, step: int, micro_batch: int) -> None:
        """Seed all generators for the forward pass of this micro-batch of this step."""
        seed = mix(self._base ^ mix((step << 20) + micro_batch))
        seed_host(seed)
        self._own.seed(seed)
        if self._generator is not None:
            self._generator.manual_seed(seed)


def _device_generator(device: torch.device) -> torch.Generator | None:
    if device.type == "cuda":
        torch.cuda.init()  # type: ignore[no-untyped-call]
        return torch.cuda.default_generators[device.index or 0]
    if device.type == "mps":
        return torch.mps._get_default_mps_generator()
    return None
