"""What a batch or an epoch sets for later ones is told from the source, unless it is set again wherever it is used."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cluster_ddp.train.own import kept as own_kept
from cluster_ddp.train.own.watch.counts import watch_counts
from cluster_ddp.train.own.watch.in_loss import watch_loss
from cluster_ddp.train.own.watch.remembered import watch_remembered
from cluster_ddp.train.own.watch.saved import Saved

MODEL = nn.Linear(4, 4)


class Kept(own_kept.Kept):
    """What run.keep gives."""

    stage, step = "first", 0


def twice(messages: list[str]) -> Callable[[], Iterator[Tensor]]:
    """Epochs of two batches; the first looks at the loop around it after each."""
    kept = own_kept.KeptValues()
    kept.add({"mode": "first"})  # equal to a variable of one of the loops
    saved = Saved([MODEL], kept)
    watches = [
        watch_counts(Saved(), messages.append),
        watch_loss(saved, messages, messages.append),
        watch_remembered(saved, messages, messages.append),
    ]

    def once() -> Iterator[Tensor]:
        for _ in range(2):
            yield torch.rand(3, 4)
            for watch in watches:
                next(watch, None)

    return once


def changes_its_criterion(once: Any) -> None:
    criterion: nn.Module = nn.MSELoss()
    for epoch in range(3):
        if epoch == 1:
            criterion = nn.L1Loss()
        for batch in once():
            criterion(MODEL(batch), batch).backward()


def changes_what_its_criterion_holds(once: Any) -> None:
    criterion = nn.CrossEntropyLoss(weight=torch.ones(4))
    for _ in range(3):
        for batch in once():
            criterion(MODEL(batch), batch.softmax(1)).backward()
        criterion.weight = torch.rand(4)


def begins_another_stage(once: Any) -> None:
    stage = "first"
    for _ in range(3):
        for batch in once():
            loss = MODEL(batch).square().mean()
            if stage == "first":
                if loss.item() < 0.01:
                    stage = "second"
            else:
                loss = loss + MODEL(batch).abs().mean()
            loss.backward()


def raises_a_weight_once_it_is_good(once: Any) -> None:
    beta = 0.1
    for _ in range(3):
        train(once, beta)
        if MODEL.weight.mean() > 9:
            beta = 1.0


def train(once: Any, weight: float) -> None:
    for batch in once():
        (weight * MODEL(batch).square().mean()).backward()


def lowers_its_rate_by_a_sum(once: Any) -> None:
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(torch.optim.SGD(MODEL.parameters()))
    for _ in range(3):
        total = 0.0
        for batch in once():
            loss = MODEL(batch).mean()
            loss.backward()
            total += loss.item()
        mean = total / 2
        scheduler.step(mean)


def passes_it_to_a_step(once: Any) -> None:
    criterion: nn.Module = nn.MSELoss()
    for epoch in range(3):
        for batch in once():
            step(batch, epoch, criterion=criterion)
        if epoch == 1:
            criterion = nn.L1Loss()


def step(batch: Tensor, epoch: int, criterion: nn.Module) -> None:
    loss = criterion(MODEL(batch), batch)
    loss.backward()
    print(epoch)


class Trainer:
    """Keeps its weight itself."""

    weight = 1.0

    def train(self, once: Any) -> None:
        for batch in once():
            self.step(batch)

    def step(self, batch: Tensor) -> None:
        (self.weight * MODEL(batch).mean()).backward()


def sets_an_attribute_of_its_trainer(once: Any) -> None:
    trainer = Trainer()
    for epoch in range(3):
        trainer.train(once)
        if epoch == 1:
            trainer.weight = 0.5


def ends_by_its_losses(once: Any) -> None:
    losses: list[float] = []
    for _ in range(3):
        for batch in once():
            MODEL(batch).mean().backward()
        losses.append(MODEL.weight.mean().item())
        if len(losses) > 2 and losses[-1] > losses[-2]:
            break


def lowers_its_own_rate(once: Any) -> None:
    rate = 2.0
    for _ in range(3):
        for batch in once():
            MODEL(batch).mean().backward()
            for weight in MODEL.parameters():
                weight.data.add_(weight.grad, alpha=-rate)  # type: ignore[arg-type]
        if MODEL.weight.mean() > 9:
            rate /= 4


def lowers_the_rate_by_earlier_losses(once: Any) -> None:
    optimizer, losses = torch.optim.SGD(MODEL.parameters()), {"train": [1.0, 0.0]}
    for _ in range(3):
        for batch in once():
            loss = MODEL(batch).mean()
            loss.backward()
        losses["train"].append(loss.item())
        if losses["train"][-1] > losses["train"][-2]:
            for group in optimizer.param_groups:
                group["lr"] *= 0.5


def prunes_by_masks(once: Any) -> None:
    masks: dict[str, Tensor] = {}
    for epoch in range(3):
        for batch in once():
            MODEL(batch).mean().backward()
            with torch.no_grad():
                for name, weight in MODEL.named_parameters():
                    if name in masks:
                        weight.mul_(masks[name])
        if epoch == 1:
            masks = {name: weight.abs() > 0.1 for name, weight in MODEL.named_parameters()}


def clips_by_a_mean(once: Any) -> None:
    bound = 1.0
    for batch in once():
        MODEL(batch).mean().backward()
        norm = nn.utils.clip_grad_norm_(MODEL.parameters(), bound)
        bound = 0.9 * bound + 0.1 * norm.item()


def takes_tasks_in_turn(once: Any) -> None:
    tasks = itertools.cycle("aab")
    for batch in once():
        loss = MODEL(batch).mean()
        if next(tasks) == "b":
            loss = loss + MODEL(batch).abs().mean()
        loss.backward()


def uses_what_the_first_batch_sets(once: Any) -> None:
    for _ in range(3):
        for number, batch in enumerate(once()):
            if number == 0:
                anchor = batch
            (MODEL(batch) - MODEL(anchor)).square().mean().backward()


def begins_late_in_each_epoch(once: Any) -> None:
    weight = 0.0
    for _ in range(3):
        for number, batch in enumerate(once()):
            if number > 2:
                weight = 0.5
            (weight * MODEL(batch).mean()).backward()


TOLD: dict[Callable[[Any], None], str] = {
    begins_late_in_each_epoch: "weight",
    changes_its_criterion: "criterion",
    changes_what_its_criterion_holds: "criterion.weight",
    begins_another_stage: "stage",
    raises_a_weight_once_it_is_good: "beta",
    lowers_its_rate_by_a_sum: "total",
    passes_it_to_a_step: "criterion",
    sets_an_attribute_of_its_trainer: "trainer.weight",
    ends_by_its_losses: "losses",
    lowers_its_own_rate: "rate",
    lowers_the_rate_by_earlier_losses: "losses['train']",
    prunes_by_masks: "masks",
    clips_by_a_mean: "bound",
    takes_tasks_in_turn: "tasks",
    uses_what_the_first_batch_sets: "anchor",
}


def from_then_on(once: Any, warm: int = 1, kind: str = "abs") -> None:
    criterion: nn.Module = nn.MSELoss()
    weight = scale = 0.0
    for epoch in range(3):
        if epoch >= warm:
            criterion = nn.L1Loss()
        if kind == "abs":
            scale = 0.1
        for batch in once():
            if epoch + 1 > warm:
                weight = 0.5
            (criterion(MODEL(batch), batch) + weight * scale * MODEL(batch).mean()).backward()


def makes_a_mask_once(once: Any) -> None:
    mask: Tensor | None = None
    for batch in once():
        if mask is None:
            mask = torch.ones(4, 4).tril()
        (MODEL(batch) @ mask).mean().backward()


def sums_losses_between_updates(once: Any) -> None:
    loss, parts = torch.zeros(()), []
    for number, batch in enumerate(once()):
        loss = loss + MODEL(batch).mean()
        parts.append(MODEL(batch).square().mean())
        if number % 2:
            (loss + sum(parts)).backward()
            loss, parts = torch.zeros(()), []


def sets_it_on_all_ways(once: Any) -> None:
    scale = 1.0
    for batch in once():
        if batch.mean() > 0.9:
            scale = 0.5
        elif batch.mean() < 0:
            continue
        else:
            scale = 2.0
        for _ in range(2):
            noise = torch.rand(4)
        try:
            target = batch + noise
        except ValueError:
            target = batch
        batch = batch * scale
        parts = [part.mean() for part in MODEL(batch) - target]
        sum(parts).backward()


def lowers_its_rate_by_an_evaluation(once: Any) -> None:
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(torch.optim.SGD(MODEL.parameters()))
    for _ in range(3):
        for batch in once():
            MODEL(batch).mean().backward()
        total = 0.0
        for batch in torch.rand(2, 3, 4):
            total += MODEL(batch).mean().item()
        scheduler.step(total / 2)


def lowers_the_rate_in_an_epoch(once: Any) -> None:
    optimizer, rates, shown = torch.optim.SGD(MODEL.parameters()), list[float](), dict[str, float]()
    for epoch in range(3):
        for batch in once():
            MODEL(batch).mean().backward()
            rates.append(optimizer.param_groups[0]["lr"])
            if len(rates) > 1:
                shown["lr"] = max(rates)
        for group in optimizer.param_groups:
            rate = group["lr"]
            group["lr"] = rate * 0.9
            if epoch in (1, 2):
                group["lr"] *= 0.1
        print(shown)


def fills_rows_first(once: Any) -> None:
    rows = torch.zeros(2, 4)
    for batch in once():
        for number in range(2):
            rows[number] = batch[number]
        MODEL(rows).mean().backward()


def only_prints(once: Any) -> None:
    best, shown, total = 0.0, [], 0.0
    for epoch in range(3):
        for batch in once():
            loss = sum(part.mean() for part in MODEL(batch))
            loss.backward()
            total += loss.item()
            shown.append(total)
        if epoch == 1:
            best = max(shown)
        part = MODEL.weight.mean()
        print(best, total / len(shown), part)


def begins_at_the_place(once: Any) -> None:
    run = Kept()
    step = run.step
    levels = level_of(step)
    for batch in once():
        (levels * MODEL(batch).mean()).backward()
        step += 1
        levels = level_of(step)


def level_of(step: int) -> float:
    return 1.0 / (1 + step)


def moves_a_module(once: Any, kind: str = "abs") -> None:
    encoder = nn.Linear(4, 4)
    for batch in once():
        encoder = encoder.to("cpu")
        if kind == "abs":
            scale = 1.0
        elif kind == "square":
            scale = 2.0
        (scale * MODEL(encoder(batch)).mean()).backward()
        encoder = encoder.float()


def keeps_it(once: Any) -> None:
    kept = Kept()
    stage = kept.stage
    for batch in once():
        loss = MODEL(batch).square().mean()
        if stage == "second":
            loss = 2 * loss
        elif loss < 0.01:
            stage = kept.stage = "second"
        loss.backward()


def wraps_its_model(once: Any) -> None:
    model: nn.Module = MODEL
    for batch in once():
        model = nn.Sequential(model) if len(batch) == 9 else model.train()
        model(batch).mean().backward()


def loads_an_encoder_to_validate(once: Any, trains_it: bool = False) -> None:
    """As the scripts of diffusers that free their text encoders during training."""
    encoder: nn.Module = nn.Linear(4, 4)
    for _ in range(2):
        for batch in once():
            (MODEL(encoder(batch)) if trains_it else MODEL(batch)).square().mean().backward()
        if not trains_it:
            encoder = nn.Linear(4, 4)
            encoder(torch.rand(1, 4))
            del encoder


NOT_TOLD = [
    from_then_on,
    makes_a_mask_once,
    sums_losses_between_updates,
    sets_it_on_all_ways,
    lowers_its_rate_by_an_evaluation,
    lowers_the_rate_in_an_epoch,
    fills_rows_first,
    only_prints,
    begins_at_the_place,
    moves_a_module,
    keeps_it,
    wraps_its_model,
    loads_an_encoder_to_validate,
]


@pytest.mark.parametrize("loop", TOLD, ids=lambda loop: loop.__name__)
def test_what_later_batches_use_is_told(loop: Callable[[Any], None]) -> None:
    messages: list[str] = []
    loop(twice(messages))
    assert len(messages) == 1
    assert f" {TOLD[loop]}" in messages[0]
    assert "']=" not in messages[0]  # to be kept under a name


@pytest.mark.parametrize("loop", NOT_TOLD, ids=lambda loop: loop.__name__)
def test_what_is_set_again_is_not_told(loop: Callable[[Any], None]) -> None:
    messages: list[str] = []
    loop(twice(messages))
    assert messages == []
