"""Whatever a task holds: what steps change there is told, and generators there are seeded, or told."""

from __future__ import annotations

import collections
import decimal
import enum
import io
import itertools
import multiprocessing
import random
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Normal
from torch.nn import functional as F
from torch.nn.utils import prune
from torch.optim import Adam
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR
from torch.utils.data import Dataset, IterableDataset, WeightedRandomSampler, random_split
from zoo_models import FEATURES
from zoo_training import Case, ZooTask, judge

from cluster_ddp.train.state.training import State


class Phase(enum.Enum):
    FIRST = 1
    LATER = 2


class Rows(list[float]):
    """Some rows of a frame."""

    def to_numpy(self) -> Any:
        return np.array(self)


class Frame:
    """As a data frame of pandas or polars, whose columns are no attributes."""

    rows = Rows([0.0] * 10_000)

    def __len__(self) -> int:
        return len(Frame.rows)

    def __getitem__(self, chosen: slice) -> Rows:
        return Rows(Frame.rows[chosen])

    def to_numpy(self) -> Any:
        raise AssertionError("all of its rows")


class Index(decimal.Context):
    """Holds what it has outside Python, as an index of faiss does, and shows a number of it."""


class Tree(ElementTree.Element):
    """Shows only how many leaves it has."""


class Derived(Tensor):
    """A tensor of another name, as those of images and masks."""


class Counted:
    """Can be in a set, as the objects of most classes."""

    count = 0


class Replay(Dataset[Any]):
    """What an earlier step has seen, to be drawn again: no batch is made from it."""

    def __init__(self) -> None:
        self.items, self.priorities, self.sums = collections.deque[int](), dict[int, float](), Counted()


class Stream(IterableDataset[Any]):
    """The same as a stream."""

    def __init__(self) -> None:
        self.items = [0]

    def __iter__(self) -> Iterator[int]:
        return iter(self.items)


class Changes(ZooTask):
    """Each step changes something of each kind."""

    def __init__(self, case: Case, crash: int | None = None) -> None:
        super().__init__(case, crash)
        self.replaced_criterion: nn.Module = nn.L1Loss()
        self.replaced_function: Any = F.l1_loss
        self.replaced_lambda: Any = lambda: 1
        self.replaced_class: type = nn.L1Loss
        self.replaced_prior = Normal(0.0, 1.0)
        self.phase = Phase.FIRST
        self.dtype, self.window, self.file, self.decimal = torch.float32, range(1), Path("a"), decimal.Decimal(1)
        self.quasirandom, self.seeds = torch.quasirandom.SobolEngine(1), np.random.SeedSequence(1)
        self.of_the_system = random.SystemRandom()
        self.many_generators = [random.Random(number) for number in range(200)]
        self.thread, self.event, self.shared_event = threading.local(), threading.Event(), multiprocessing.Event()
        self.deep: Any = {"count": 0}
        for _ in range(8):
            self.deep = {"inner": self.deep}
        self.objects = [SimpleNamespace(count=0) for _ in range(300)]
        self.bank = {number: torch.zeros(()) for number in range(300)}
        self.settings = SimpleNamespace(**{f"name{number}": number for number in range(200)})
        self.in_a_set, self.of_set = set[Any](), Counted()
        self.in_a_set.add(self.of_set)
        self.frame = Frame()
        self.thread.count = 0
        self.prior, self.line, self.trend = (
            Normal(torch.zeros(1), 1.0),
            np.poly1d([1.0, 0.0]),
            np.polynomial.Polynomial([1.0]),
        )
        self.masked, self.of_objects = np.ma.MaskedArray([1.0, 2.0], mask=[False, False]), np.array([Counted(), None])
        self.nested = torch.nested.nested_tensor([torch.zeros(2)])
        self.conjugate = torch.zeros(6, dtype=torch.cfloat).conj()
        self.quantized = torch.quantize_per_tensor(torch.zeros(6), 0.1, 0, torch.qint8)
        self.derived, self.tree = torch.zeros(2).as_subclass(Derived), Tree("root")
        self.text, self.bytes = io.StringIO(), io.BytesIO()
        self.sampler, self.index = WeightedRandomSampler([1.0] * 4, 2), Index(prec=5)
        self.replayed, self.prioritized, self.summed, self.streamed = Replay(), Replay(), Replay(), Stream()
        self.method, self.next_number = list[int]().append, itertools.count().__next__
        self.seen_as_memory = memoryview(bytearray(1))

    def loss(self, model: nn.Module, batch: Any) -> Any:
        self.replaced_criterion, self.replaced_function, self.replaced_class = nn.MSELoss(), F.mse_loss, nn.MSELoss
        self.replaced_lambda = lambda: 2
        self.a_function_more = torch.tanh  # a function that was not there before
        self.replaced_prior = Normal(0.0, 2.0)
        self.phase = Phase.LATER
        self.dtype, self.window, self.file, self.decimal = torch.bfloat16, range(2), Path("b"), self.decimal + 1
        self.quasirandom.draw()
        self.seeds.spawn(1)
        self.many_generators[150].random()
        self.event.set()
        self.shared_event.set()
        self.thread.count += 1
        inner = self.deep
        while "inner" in inner:
            inner = inner["inner"]
        inner["count"] += 1
        self.objects[298].count += 1
        self.bank[298] = self.bank[298] + 1
        self.settings.name150 += 1
        self.of_set.count += 1
        Frame.rows[:] = [row + 1 for row in Frame.rows]
        self.prior.loc += 1
        self.line.coeffs[0] += 1
        self.trend = self.trend + 1
        self.masked[1] = np.ma.masked
        self.of_objects[0].count += 1
        self.nested = torch.nested.nested_tensor([part + 1 for part in self.nested.unbind()])
        self.conjugate = (self.conjugate + 1).conj()
        self.quantized = torch.quantize_per_tensor(self.quantized.dequantize() + 1, 0.1, 0, torch.qint8)
        self.derived.data.add_(1)
        self.tree.append(ElementTree.Element("leaf"))
        self.text.write("a")
        self.bytes.write(b"a")
        self.sampler.weights[0] += 1
        self.index.prec += 1
        self.replayed.items.append(1)
        self.prioritized.priorities[0] = 1.0
        self.summed.sums.count += 1
        self.streamed.items.append(1)
        self.method(self.next_number())
        self.seen_as_memory[0] += 1
        return super().loss(model, batch)


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
def test_whatever_a_step_changes_is_told(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    unsaved, found = State.unsaved, list[list[str]]()

    def noted(state: State) -> list[str]:
        found.append(unsaved(state))
        return found[-1]

    monkeypatch.setattr(State, "unsaved", noted)  # a warning lists only some of them
    judge(Case(train={"steps": 3, "ema_decay": None}), tmp_path, Changes)
    names = next(filter(None, found))
    told = f"training changes {', '.join(names[:5])} and {len(names) - 5} more, which no checkpoint contains"
    assert told in capfd.readouterr().err
    task = Changes(Case())
    kinds = {"a_function_more", *vars(task)} - vars(ZooTask(Case())).keys() - {"of_set"}
    assert [name for name in sorted(kinds) if f"task.{name}" not in " ".join(names)] == []
    assert "Phase" not in " ".join(names)


class Noise(nn.Module):
    """A transform of batches with a generator of its own, as those of images are written."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator()

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs + torch.rand(inputs.shape, generator=self.generator).to(inputs.device)


class Sealed(tuple[int, ...]):
    """Has no length of its own, as a part of the irreps of e3nn."""

    def __len__(self) -> int:
        raise NotImplementedError


class OutOfContext:
    """As the proxies of web frameworks, and mocks: asked what it is, it raises, or says something else."""

    def __init__(self, said: type | None = None) -> None:
        self.said = said

    @property
    def __class__(self) -> type:  # type: ignore[override]
        if self.said is None:
            raise RuntimeError
        return self.said


out_of_context = OutOfContext()


class Draws(ZooTask):
    """Draws from generators in a module that is not the model's, in a deque, and of NumPy's raw bits."""

    def __init__(self, case: Case, crash: int | None = None) -> None:
        super().__init__(case, crash)
        self.transforms = nn.Sequential(nn.Sequential(Noise()), Noise())
        self.generators = collections.deque([random.Random(1)])
        self.bits = np.random.PCG64(1)
        self.strange = [Sealed((1, 2)), OutOfContext(), OutOfContext(dict), weakref.proxy(self), weakref.proxy(Noise())]

    def loss(self, model: nn.Module, batch: Any) -> Any:
        inputs, labels = batch
        loss = super().loss(model, (self.transforms(inputs), labels))
        return loss * self.generators[0].random() * (1 + self.bits.random_raw() % 7)


def test_generators_in_modules_and_deques_are_exact_and_not_told(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert str(judge(Case(), tmp_path, Draws)) == "exact"
    told = [line for line in capfd.readouterr().err.splitlines() if "which no checkpoint contains" in line]
    assert [line for line in told if "training changes task.losses, which" not in line] == []


class GivesBack(ZooTask):
    """Gives all that it changes to the checkpoint, and makes its generator again when it takes that back."""

    def __init__(self, case: Case, crash: int | None = None) -> None:
        super().__init__(case, crash)
        self.generator = np.random.default_rng(1)
        self.recent: list[Tensor] = []
        self.critic = nn.Linear(2, 1, bias=False)
        nn.init.ones_(self.critic.weight)
        self.of_critic = Adam(self.critic.parameters())
        schedules = [LinearLR(self.of_critic, 0.1, total_iters=4), CosineAnnealingLR(self.of_critic, 8)]
        self.schedule = SequentialLR(self.of_critic, schedules, [4])

    def collate(self, items: list[Any]) -> Any:
        inputs, labels = super().collate(items)
        return inputs * self.generator.random(), labels

    def loss(self, model: nn.Module, batch: Any) -> Any:
        loss = super().loss(model, batch) * self.generator.random()
        self.recent = [] if len(self.recent) == 2 else [*self.recent, loss.detach()]
        self.of_critic.zero_grad()
        self.critic(torch.ones(2)).sum().backward()
        self.of_critic.step()
        self.schedule.step()
        return loss * (1 + len(self.recent)) * self.critic.weight.detach().sum()

    def state_dict(self) -> dict[str, Any]:
        return {
            "generator": self.generator.bit_generator.state,
            "recent": self.recent,
            "critic": self.critic.state_dict(),
            "of_critic": self.of_critic.state_dict(),
            "schedule": self.schedule.state_dict(),
        }

    def load_state_dict(self, state: Any) -> None:
        self.generator = np.random.default_rng()
        self.generator.bit_generator.state = state["generator"]
        self.recent = state["recent"]
        self.critic.load_state_dict(state["critic"])
        self.of_critic.load_state_dict(state["of_critic"])
        self.schedule.load_state_dict(state["schedule"])


def test_what_a_task_gives_back_is_exact_and_not_told(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert str(judge(Case(), tmp_path, GivesBack)) == "exact"
    told = [line for line in capfd.readouterr().err.splitlines() if "which no checkpoint contains" in line]
    assert [line for line in told if "training changes task.losses, which" not in line] == []


class Settings:
    """As those of omegaconf, which keep what they found when they were read first."""

    def read(self) -> int:
        self._flags_cache = {"struct": True}
        return 1


class Pruned(ZooTask):
    """Its model multiplies a weight by a mask in each forward pass, and its loss depends on settings.

    As Lightning does, it puts the model's own forward() back after it has stood in for it.
    """

    def __init__(self, case: Case, crash: int | None = None) -> None:
        super().__init__(case, crash)
        self.settings = Settings()

    def loss(self, model: nn.Module, batch: Any) -> Any:
        bare = getattr(model, "module", model)
        bare.forward = bare.forward
        return super().loss(model, batch) * self.settings.read()

    def model(self) -> nn.Module:
        model = nn.Linear(FEATURES, 3)
        prune.l1_unstructured(model, "weight", 0.5)
        return model


def test_what_each_step_makes_anew_is_not_told(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Settings, "__module__", "omegaconf.dictconfig")
    assert str(judge(Case(train={"ema_decay": None}), tmp_path, Pruned)) == "exact"
    told = [line for line in capfd.readouterr().err.splitlines() if "which no checkpoint contains" in line]
    assert [line for line in told if "training changes task.losses, which" not in line] == []


class DrawsMoreAtFirst(ZooTask):
    """Its model draws other numbers in each attempt, as before its weights lie in a cache; then a set is divided."""

    def model(self) -> nn.Module:
        model = super().model()
        torch.rand(1 + (self.crash or 0))
        return model

    def train_data(self) -> Dataset[Any]:
        part, _ = random_split(super().train_data(), [30, 14])
        return part


def test_what_a_model_draws_does_not_change_how_a_set_is_divided(tmp_path: Path) -> None:
    assert str(judge(Case(), tmp_path, DrawsMoreAtFirst)) == "exact"
