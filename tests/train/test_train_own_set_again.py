"""What a batch or an epoch sets for later ones is not told if it is set again wherever it is used."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from watched_loops import MODEL, Kept, twice


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


@pytest.mark.parametrize("loop", NOT_TOLD, ids=lambda loop: loop.__name__)
def test_what_is_set_again_is_not_told(loop: Callable[[Any], None]) -> None:
    messages: list[str] = []
    loop(twice(messages))
    assert messages == []
