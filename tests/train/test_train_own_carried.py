"""What a loop carries from step to step and nobody has passed in: hidden states, averages in dicts, schedulers."""

from __future__ import annotations

import copy
import math
import random
import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from own_loops import LOADERS, begin_attempt, model_of, new_run
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import ConstantLR, LinearLR, SequentialLR
from train_ranks import run_ranks

from cluster_ddp.run.events import read_events
from cluster_ddp.train import join_run
from cluster_ddp.train.own.kept import KeptValues
from cluster_ddp.train.own.program import variables_of
from cluster_ddp.train.own.watch.carried import watch_carried
from cluster_ddp.train.own.watch.first_steps import FirstSteps
from cluster_ddp.train.own.watch.queues import watch_queues
from cluster_ddp.train.own.watch.reported import Reported


class Shadow:
    """An average of the weights as many programs write it."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.shadow = {name: weight.detach().clone() for name, weight in model.named_parameters()}

    def update(self) -> None:
        for name, weight in self.model.named_parameters():
            self.shadow[name] = 0.9 * self.shadow[name] + 0.1 * weight.detach()


class Kept(Shadow):
    """The same, which is kept."""

    def state_dict(self) -> dict[str, Tensor]:
        return self.shadow

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self.shadow = dict(state)


class Clones(Kept):
    """The same, whose state is a copy."""

    def state_dict(self) -> dict[str, Tensor]:
        return copy.deepcopy(self.shadow)


class Slow(torch.optim.SGD):
    """An optimizer that holds a list with a tensor for each weight in its state."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        super().step()
        weights = self.param_groups[0]["params"]
        slow = self.state[weights[0]].setdefault("slow", [weight.clone() for weight in weights])
        torch._foreach_lerp_(slow, weights, 0.5)


class Pool:
    """The images that a CycleGAN's judge has seen."""

    def __init__(self) -> None:
        self.count, self.images = 0, list[Tensor]()

    def add(self, image: Tensor) -> None:
        self.images.append(image)
        self.count += 1


class Rows:
    """A buffer of fixed size, as in DQN."""

    def __init__(self) -> None:
        self.place, self.actions, self.counts = 0, np.zeros(40), np.zeros(40)

    def add(self, action: Tensor) -> None:
        self.actions[self.place] = float(action)
        self.counts += 1.0
        self.place = (self.place + 1) % 40


class KeptRows(Rows):
    def state_dict(self) -> dict[str, Any]:
        return {"place": self.place, "actions": self.actions.tolist(), "counts": self.counts.tolist()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.place, self.actions, self.counts = state["place"], np.array(state["actions"]), np.array(state["counts"])


class Brief(Pool):
    """Holds something after every other step only."""

    rows: Tensor | None = None

    def add(self, image: Tensor) -> None:
        super().add(image)
        self.rows = torch.zeros(9, 3)
        if self.count % 2 == 0:
            self.rows = None
            self.images.clear()


def told(place: Path) -> None:
    """A loop with one of each."""
    begin_attempt(place, 0)
    with join_run() as run:
        model = model_of()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        average, copies = Shadow(model), [weight.detach().clone() for weight in model.parameters()]
        loader = run.resumable(LOADERS["shuffled"](), model=model, optimizer=optimizer, epochs=1)
        warmup = LinearLR(optimizer, total_iters=4)
        hidden = torch.zeros(3)
        memory: deque[Tensor] = deque(maxlen=5)
        replay: list[tuple[Tensor, int]] = []
        pool, rows, counted = Pool(), Rows(), Pool()
        run.keep(counted=counted.images)
        for _ in loader.epochs():
            for inputs, labels in loader:
                outputs = model(inputs) + hidden
                hidden = outputs.detach().mean(0)
                optimizer.zero_grad()
                F.cross_entropy(outputs, labels).backward()
                optimizer.step()
                warmup.step()
                average.update()
                for copied, weight in zip(copies, model.parameters(), strict=True):
                    copied.lerp_(weight.detach(), 0.1)
                memory.append(hidden)
                replay.append((hidden, 1))
                random.sample(replay, 1)
                pool.images.append(hidden)
                counted.add(hidden)
                rows.add(outputs.sum())


def not_told(place: Path) -> None:
    """A loop that keeps what it carries, and one with numbers and lists for people."""
    begin_attempt(place, 0)
    with join_run() as run:
        model = model_of()
        optimizer = Slow(model.parameters(), lr=0.1)
        average, clones = Kept(model), Clones(model)
        ema = [weight.detach().clone() for weight in model.parameters()]
        memory: deque[Tensor] = deque(maxlen=5)
        pool, rows = Pool(), KeptRows()
        kept = run.keep(hidden=torch.zeros(3), ema=ema, memory=memory, images=pool.images)
        scheduler = SequentialLR(optimizer, [LinearLR(optimizer), ConstantLR(optimizer)], milestones=[4])
        loader = run.resumable(
            LOADERS["shuffled"](), model=model, optimizer=optimizer, scheduler=scheduler, average=average,
            clones=clones, rows=rows, epochs=1,
        )  # fmt: skip
        total, losses, recent, logged, brief = 0.0, [], deque([0.0], maxlen=3), Pool(), Brief()
        for _ in loader.epochs():
            for number, (inputs, labels) in loader.enumerate():
                outputs = model(inputs) + kept.hidden
                kept.hidden = outputs.detach().mean(0)
                optimizer.zero_grad()
                loss = F.cross_entropy(outputs, labels)
                loss.backward()
                gradients = [weight.grad for weight in model.parameters()]
                before = [weight.detach().clone() for weight in model.parameters()]
                optimizer.step()
                scheduler.step()
                average.update()
                clones.update()
                for copied, weight in zip(ema, model.parameters(), strict=True):
                    copied.lerp_(weight.detach(), 0.1)
                memory.append(kept.hidden)
                recent.append(loss.item())
                if number:
                    total += loss.item() + len(gradients) + len(before)
                pool.images.append(outputs.detach()[0])
                rows.add(outputs.sum())
                logged.images.append(loss.detach())
                brief.add(outputs.detach())
                losses.append(outputs.detach())


@pytest.mark.parametrize("loop", [told, not_told])
def test_what_steps_carry_and_no_checkpoint_holds_is_told(loop: Callable[[Path], None], tmp_path: Path) -> None:
    run = new_run(tmp_path)
    run_ranks(loop, 1, run.path)
    messages = [event["message"] for event in read_events(run) if event["event"] == "warning"]
    if loop is not_told:
        assert messages == []
        return
    copies, queues, beside, scheduler, carried = messages
    assert "in average.shadow, copies, which no checkpoint contains" in copies
    assert queues.startswith(
        "steps put tensors into memory, pool.images, replay, rows.actions, which no checkpoint contains"
    )
    assert beside.startswith("steps change counted.count, which no checkpoint contains, in an object of which")
    assert "(LinearLR)" in scheduler
    assert "in hidden, which no checkpoint contains" in carried


def test_looking_for_queues_leaves_modules_alone(recwarn: pytest.WarningsRecorder) -> None:
    """Programs hold torch.distributed as `dist`, which has a deprecated part that warns when it is looked at."""
    import torch.distributed as dist

    assert dist is not None
    next(watch_queues(SimpleNamespace(optimizers=[], others={}), KeptValues(), Reported(print)))  # type: ignore[arg-type]
    assert [warning for warning in recwarn if "reduce_op" in str(warning.message)] == []


def batches(end_step: Callable[[], None]) -> Iterator[Tensor]:
    for number in range(3):
        yield torch.full((2,), float(number))
        end_step()


def test_variables_that_a_batch_sets_before_it_reads_them_are_not_carried() -> None:
    messages: list[str] = []
    state, old, seen, pairs = np.zeros(4), torch.ones(2), 0, (torch.zeros(2), 1)
    shown = old
    mask: Tensor | None = None
    for batch in batches(FirstSteps([watch_carried(KeptValues(), Reported(messages.append))]).end_step):
        if mask is None:
            mask = torch.ones(2)  # once, in the first batch
        output = mask * batch * 2 if seen else batch * 3
        if seen == 1:
            old = output  # set on one way only, and not read in the loop
        try:
            state = state * 0.5 + float(output.sum())
        finally:
            seen += 1
        try:
            shown = output * seen
        except ValueError:
            raise ValueError(f"after {shown}") from None
        while len(pairs) > 2:
            break
        for part in range(2):
            micro = batch * part  # as in accumulation within a step
        match seen:
            case 1:
                kind = batch * 2
            case _:
                kind = batch * 3
                kind = kind + 1
        pairs = (pairs[0] + output + 0 * micro + 0 * kind, seen)
    (message,) = messages
    assert "in pairs, state, which" in message
    assert old.shape == (2,)


class Env:
    """Stands for gymnasium's."""


class CartPole(Env):
    pass


def test_an_environment_that_goes_on_is_named() -> None:
    messages: list[str] = []
    envs, next_obs = CartPole(), torch.zeros(2)
    for batch in batches(FirstSteps([watch_carried(KeptValues(), Reported(messages.append))]).end_step):
        next_obs = next_obs + batch + 1
    (message,) = messages
    assert "in next_obs, which" in message
    assert "The state of envs also starts over" in message
    del envs


def test_to_look_at_variables_does_not_keep_what_they_are() -> None:
    gone = []
    for value in batches(lambda: None):
        gone.append(weakref.ref(value))
        assert variables_of(sys._getframe())["value"] is value
        break
    value = None
    assert gone[0]() is None


class Counting:
    """An average whose decay depends on how often it was updated, as that of YOLOv5."""

    def __init__(self, model: nn.Module) -> None:
        self.ema, self.updates = copy.deepcopy(model), 0
        self.decay = lambda updates: 0.9 * (1 - math.exp(-updates / 5))

    def update(self, model: nn.Module) -> None:
        self.updates += 1
        for average, weight in zip(self.ema.parameters(), model.parameters(), strict=True):
            average.data.lerp_(weight.data, 1 - self.decay(self.updates))


def averages(place: Path, whole: bool) -> None:
    """Passes in the average without what counts, or a `whole` one, which does not count."""
    begin_attempt(place, 0)
    with join_run() as run:
        model = model_of()
        ema = Counting(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        trainer = SimpleNamespace(model=model, ema=ema.ema, optimizer=optimizer, step=0)
        for _ in run.steps(4, model=model, optimizer=optimizer, ema=ema.ema):
            optimizer.zero_grad()
            model(torch.randn(4, 6)).sum().backward()
            optimizer.step()
            trainer.step += 1
            if not whole:
                ema.update(model)


@pytest.mark.parametrize("whole", [False, True])
def test_the_count_of_an_average_that_was_passed_in_without_it_is_told(whole: bool, tmp_path: Path) -> None:
    run = new_run(tmp_path)
    run_ranks(averages, 1, run.path, whole)
    messages = [event["message"] for event in read_events(run) if event["event"] == "warning"]
    assert [message.partition(", which")[0] for message in messages] == ([] if whole else ["steps change ema.updates"])
