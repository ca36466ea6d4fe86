"""The zoo's data sets. An item is an input of shape (32,) and a label below 3."""

from __future__ import annotations

import queue
import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, Dataset, IterableDataset, Subset, TensorDataset
from zoo_models import CLASSES, FEATURES

SAMPLES = 44  # five batches of 8, and a half

Item = tuple[Tensor, Tensor]
MakeData = Callable[[], Dataset[Any]]


def samples(number: int = SAMPLES) -> tuple[Tensor, Tensor]:
    """Inputs of shape (number, 32) and labels of shape (number,)."""
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(number, FEATURES, generator=generator)
    return inputs, inputs[:, 0].gt(0).long() + inputs[:, 1].gt(0.5).long().clamp(max=CLASSES - 1)


def noise() -> Tensor:
    """Random augmentation that draws from all three generators."""
    return torch.randn(FEATURES) * 0.1 + random.random() * 0.1 + float(np.random.rand()) * 0.1


class Augmented(Dataset[Item]):
    """Map-style, with random augmentation."""

    def __init__(self) -> None:
        self.inputs, self.labels = samples()

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> Item:
        return self.inputs[index] + noise(), self.labels[index]


class Named(Augmented):
    """Its items are dicts."""

    def __getitem__(self, index: int) -> Any:
        inputs, label = super().__getitem__(index)
        return {"inputs": inputs, "labels": label}


class ByWeights(Augmented):
    """Draws which item it gives, as a WeightedRandomSampler does."""

    def __getitem__(self, index: int) -> Item:
        return super().__getitem__(int(torch.multinomial(1.0 + self.labels, 1)))


class ByBatch(Augmented):
    """Fetched by `__getitems__`, without augmentation."""

    def __getitems__(self, indices: list[int]) -> list[Item]:
        return [(self.inputs[index], self.labels[index]) for index in indices]


class WholeBatch(Augmented):
    """Its `__getitems__` gives a batch, no list of items."""

    def __getitems__(self, indices: list[int]) -> Any:
        return self.inputs[indices], self.labels[indices]


class Stream(IterableDataset[Item]):
    """Iterable, with random augmentation; every epoch begins elsewhere."""

    def __init__(self) -> None:
        self.inputs, self.labels = samples()
        self.epoch = self.first = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Item]:
        for position in range(self.first, SAMPLES):
            index = (position + 7 * self.epoch) % SAMPLES
            yield self.inputs[index] + noise(), self.labels[index]


class SkippingStream(Stream):
    """Skips by itself."""

    def skip(self, items: int) -> None:
        self.first = items


class LongStream(Stream):
    """Never ends."""

    def __iter__(self) -> Iterator[Item]:
        while True:
            yield from super().__iter__()


class RandomBatches(Augmented):
    """Random augmentation behind `__getitems__`."""

    def __getitems__(self, indices: list[int]) -> list[Item]:
        return [self[index] for index in indices]


class OwnSubset(Subset[Item]):
    """A subclass of Subset, with augmentation of its own."""

    def __getitem__(self, index: Any) -> Any:
        inputs, label = super().__getitem__(index)
        return inputs + noise(), label

    def __getitems__(self, indices: list[int]) -> list[Item]:
        return [self[index] for index in indices]


class Jitter:
    """A transform with a generator of its own."""

    def __init__(self, generator: Any) -> None:
        self.generator = generator

    def __call__(self, inputs: Tensor) -> Tensor:
        if isinstance(self.generator, list):
            return self.generator[0][0][0](inputs)
        if isinstance(self.generator, torch.Generator):
            return inputs + torch.randn(FEATURES, generator=self.generator)
        if isinstance(self.generator, random.Random):
            return inputs + self.generator.gauss(0, 1)
        return inputs + torch.from_numpy(self.generator.standard_normal(FEATURES)).float()


class OwnGenerators(Augmented):
    """Draws from generators that only its transforms know."""

    def __init__(self, *generators: Any) -> None:
        super().__init__()
        self.transforms = [Jitter(generator) for generator in generators]

    def __getitem__(self, index: int) -> Item:
        inputs = self.inputs[index]
        for transform in self.transforms:
            inputs = transform(inputs)
        return inputs, self.labels[index]


_AT_THE_TOP = np.random.default_rng(1)
_IN_A_DICT = {"transform": [Jitter(np.random.default_rng(1))]}


def _noises() -> Iterator[float]:
    generator = np.random.default_rng(1)
    while True:
        yield float(generator.standard_normal())


_HIDDEN = _noises()


class DrawsFromTheTop(Augmented):
    """Draws from a generator at the top of this module, for few samples."""

    def __getitem__(self, index: int) -> Item:
        noise = float(_AT_THE_TOP.standard_normal()) if index % 11 == 0 else 0.0
        return self.inputs[index] + noise, self.labels[index]


class BatchesFromTheTop(DrawsFromTheTop):
    """The same, by batch."""

    def __getitems__(self, indices: list[int]) -> list[Item]:
        return [self[index] for index in indices]


class DrawsFromADict(Augmented):
    """Draws from a generator that a transform in a dict at the top of this module holds."""

    __getitems__ = None  # as a set has it that is not to be fetched by batch

    def __getitem__(self, index: int) -> Item:
        return _IN_A_DICT["transform"][0](self.inputs[index]), self.labels[index]


class HiddenGenerator(Augmented):
    """Draws from a generator that is nobody's attribute."""

    def __getitem__(self, index: int) -> Item:
        return self.inputs[index] + next(_HIDDEN), self.labels[index]


class HiddenBatches(RandomBatches):
    """The same, by batch."""

    __getitem__ = HiddenGenerator.__getitem__


class Returning(Stream):
    """As those of Hugging Face: `skip()` leaves this set alone and returns another."""

    def skip(self, items: int) -> Returning:
        other = Returning()
        other.first = items
        return other


class SkipsByReading(Stream):
    """Its `skip()` reads, so that the first item after it would come with the random numbers of those before."""

    def skip(self, items: int) -> SkipsByReading:
        other = SkipsByReading()
        other.first = items
        return other

    def __iter__(self) -> Iterator[Item]:
        first, self.first = self.first, 0
        for position, item in enumerate(super().__iter__()):
            if position >= first:
                yield item


class Shuffling(Stream):
    """Shuffles with the global generators when its iteration begins."""

    def __iter__(self) -> Iterator[Item]:
        for index in np.random.permutation(SAMPLES).tolist():
            yield self.inputs[index] + noise(), self.labels[index]


class CountsPasses(Stream):
    """Its order is another in each pass, whatever the epoch."""

    passes = 0

    def __iter__(self) -> Iterator[Item]:
        self.passes += 1
        for index in np.random.RandomState(self.passes).permutation(SAMPLES).tolist():
            yield self.inputs[index], self.labels[index]


class Caches(Augmented):
    """Keeps the samples with the augmentation that they had when they were read first."""

    def __init__(self) -> None:
        super().__init__()
        self.read: dict[int, Item] = {}

    def __getitem__(self, index: int) -> Item:
        if index not in self.read:
            self.read[index] = super().__getitem__(index)
        return self.read[index]


class CachesDrawn(Augmented):
    """The same, with augmentation by a generator of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = np.random.default_rng(1)
        self.drawn: dict[int, float] = {}

    def __getitem__(self, index: int) -> Item:
        if index not in self.drawn:
            self.drawn[index] = float(self.generator.standard_normal())
        return self.inputs[index] + self.drawn[index], self.labels[index]


class OrdersLate(Augmented):
    """Draws an order of its own when it is first read."""

    order: list[int] | None = None

    def __getitem__(self, index: int) -> Item:
        if self.order is None:
            self.order = torch.randperm(SAMPLES).tolist()
        return self.inputs[self.order[index]], self.labels[self.order[index]]


class NumbersWords(Augmented):
    """Gives numbers to words in the order in which they are read."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers: dict[str, int] = {}

    def __getitem__(self, index: int) -> Item:
        return self.inputs[index] + self.numbers.setdefault(f"word {index}", len(self.numbers)), self.labels[index]


_OPEN: list[Tensor] = []


class OpensOnce(Augmented):
    """Opens its file when it is first read, which can be opened only once in a process, as that of LMDB."""

    is_open = False

    def __getitem__(self, index: int) -> Item:
        if not self.is_open:
            if any(labels is self.labels for labels in _OPEN):
                raise OSError("it is already open in this process")
            _OPEN.append(self.labels)
            self.is_open = True
        return super().__getitem__(index)


class MixesLast(Augmented):
    """Mixes each sample with the one that was read before."""

    last: Tensor | None = None

    def __getitem__(self, index: int) -> Item:
        inputs, before = self.inputs[index], self.last
        self.last = inputs
        return inputs if before is None else inputs + 0.1 * before, self.labels[index]


class InThreads(Stream):
    """Reads ahead in a thread, which also augments; as the streams of Hugging Face do where they shuffle."""

    def __iter__(self) -> Iterator[Item]:
        ahead: queue.Queue[Any] = queue.Queue(4)
        thread = threading.Thread(target=lambda: [ahead.put(item) for item in super(InThreads, self).__iter__()])
        thread.daemon = True
        thread.start()
        for _ in range(SAMPLES):
            yield ahead.get()


DATA: dict[str, MakeData] = {
    "tensors": lambda: TensorDataset(*samples()),
    "map": Augmented,
    "dicts": Named,
    "subset": lambda: Subset(Augmented(), list(range(40))[::-1]),
    "subset of a subset": lambda: Subset(Subset(Augmented(), list(range(40))), list(range(0, 40, 2)) * 2),
    "a generator at the top of a module": DrawsFromTheTop,
    "a generator at the top of a module, __getitems__": BatchesFromTheTop,
    "a generator in a dict at the top of a module": DrawsFromADict,
    "a generator deep in its transforms": lambda: OwnGenerators([[[Jitter(np.random.default_rng(1))]]]),
    "a file that can be opened only once": OpensOnce,
    "drawn by weights": ByWeights,
    "concatenated": lambda: ConcatDataset([Augmented(), Augmented()]),
    "__getitems__": ByBatch,
    "__getitems__ of a whole batch": WholeBatch,
    "iterable": Stream,
    "iterable with skip()": SkippingStream,
    "endless": LongStream,
    "__getitems__ with augmentation": RandomBatches,
    "subclass of Subset": lambda: OwnSubset(Augmented(), list(range(SAMPLES))),
    "generators of its own": lambda: OwnGenerators(
        np.random.default_rng(1), torch.Generator().manual_seed(1), random.Random(1), np.random.RandomState(1)
    ),
    "skip() that returns": Returning,
    "skip() that reads": SkipsByReading,
    "shuffles as it begins": Shuffling,
}

REFUSED_DATA: dict[str, MakeData] = {
    "a generator that is nobody's attribute": HiddenGenerator,
    "a generator that is nobody's attribute, __getitems__": HiddenBatches,
    "counts its passes": CountsPasses,
    "random numbers in a thread": InThreads,
    "caches augmented samples": Caches,
    "caches what its own generator has drawn": CachesDrawn,
    "draws its order when it is read": OrdersLate,
    "mixes a sample with the one before": MixesLast,
    "numbers words in the order in which it reads them": NumbersWords,
}
