"""Random numbers as a function of where training is, not of how it got there.

Every generator is seeded anew from (seed, step, rank, micro-batch) before a forward pass and from (seed, epoch, sample
index) before a sample is fetched. So no generator's state has to be saved, and a resume costs no replay.
"""

from __future__ import annotations

import enum
import random
from typing import Any

import numpy as np
import torch

_WORD = (1 << 64) - 1
_HALF_WORD = (1 << 32) - 1


class Use(enum.IntEnum):
    """What random numbers are for; keeps equal numbers in different roles from giving equal seeds."""

    BUILD = 1
    ORDER = 2
    STEP = 3
    SAMPLE = 4
    EVALUATION = 5


def mix(word: int) -> int:
    """Scramble 64 bits so that neighbouring words have nothing in common (SplitMix64, Steele et al. 2014)."""
    word = (word + 0x9E3779B97F4A7C15) & _WORD
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & _WORD
    return word ^ (word >> 31)


def derive(*words: int) -> int:
    """Hash integers to a seed of 64 bits; the order of the words matters."""
    seed = 0
    for word in words:
        seed = mix(seed ^ mix(word & _WORD))
    return seed


def seed_everything(seed: int) -> None:
    """Seed torch on all devices, Python's random and NumPy. Slow (about 100 us); for set-up."""
    torch.manual_seed(seed)
    _seed_libraries(seed)


def seed_host(seed: int) -> None:
    """Seed torch's CPU generator, Python's random and NumPy: about 7 us."""
    # torch.manual_seed costs 97 us where CUDA is not initialised; the generator itself 1.2 us.
    torch.default_generator.manual_seed(seed)
    _seed_libraries(seed)


# The generators behind the functions of the modules; going past those halves the time.
_seed_python: Any = random.Random.__base__.seed  # type: ignore[union-attr]
_python_generator: random.Random = random.seed.__self__  # type: ignore[attr-defined]
_numpy_generator: np.random.RandomState = getattr(np.random.get_state, "__self__")  # noqa: B009 (untyped)


def _seed_libraries(seed: int) -> None:
    _seed_python(_python_generator, seed & _HALF_WORD)
    _python_generator.gauss_next = None  # type: ignore[attr-defined]
    _numpy_generator.seed(seed & _HALF_WORD)


class StepSeeds:
    """Seeds the generators before each forward pass.

    Parameters
    ----------
    seed
        The run's seed.
    rank
        Ranks draw different numbers, for dropout among others.
    device
        Where the model is; its own generator is seeded too.
    """

    def __init__(self, seed: int, rank: int, device: torch.device) -> None:
        self._base = derive(Use.STEP, seed, rank)
        self._generator = _device_generator(device)

    def apply(self, step: int, micro_batch: int) -> None:
        """Put all generators where the forward pass of this micro-batch of this step begins."""
        seed = mix(self._base ^ mix((step << 20) + micro_batch))
        seed_host(seed)
        if self._generator is not None:
            self._generator.manual_seed(seed)


def _device_generator(device: torch.device) -> torch.Generator | None:
    if device.type == "cuda":
        torch.cuda.init()  # type: ignore[no-untyped-call]
        return torch.cuda.default_generators[device.index or 0]
    if device.type == "mps":
        return torch.mps._get_default_mps_generator()
    return None
