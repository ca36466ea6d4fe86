"""run.steps, and DDP's bucket layout, which is settled without a loss."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from own_loops import begin_attempt, digest, failure, interrupt, model_of, new_run, states, told
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from train_ranks import run_ranks

from cluster_ddp.run.events import read_events
from cluster_ddp.train import join_run
from cluster_ddp.train.errors import TaskError
from cluster_ddp.train.model import settle_layout

STEPS = 8


def drawing(place: Path, attempt: int, at: int | None = None, how: str = "stop") -> dict[str, Any]:
    """A loop that draws its batches itself, with two models and two optimizers."""
    begin_attempt(place, attempt)
    done: dict[str, Any] = {"drawn": [], "after": 0, "status": None}
    try:
        with join_run() as run:
            torch.manual_seed(1 + run.world.rank)
            models: list[nn.Module] = [nn.Linear(4, 4), nn.Linear(4, 1)]
            if run.world.world_size > 1:
                models = [DistributedDataParallel(model) for model in models]
            maker, judge = models
            first = torch.optim.Adam(maker.parameters(), lr=0.01)
            second = torch.optim.AdamW(judge.parameters(), lr=0.02)
            for step in run.steps(STEPS, maker=maker, judge=judge, first=first, second=second):
                noise = torch.randn(3, 4) + random.random() + float(np.random.rand())
                for optimizer, sign in ((second, 1.0), (first, -1.0)):
                    optimizer.zero_grad()
                    loss = sign * judge(maker(noise)).square().mean()
                    loss.backward()
                    optimizer.step()
                run.log(step + 1, {"train/loss": loss.item()})
                done["drawn"].append((step, noise.sum().item()))
                if step == at:
                    interrupt(how)
            done["after"] += 1
        done["digest"] = digest(*models)
    except SystemExit as end:
        done["status"] = end.code
    return done


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_loop_that_draws_its_batches_goes_on_exactly(ranks: int, tmp_path: Path) -> None:
    calm = run_ranks(drawing, ranks, new_run(tmp_path / "calm").path, 0)
    run = new_run(tmp_path / "broken")
    first = run_ranks(drawing, ranks, run.path, 0, 4, "crash")
    second = run_ranks(drawing, ranks, run.path, 1, 5, "stop")
    third = run_ranks(drawing, ranks, run.path, 2)
    for parts in zip(first, second, third, calm, strict=True):
        *attempts, whole = parts
        assert dict(row for part in attempts for row in part["drawn"]) == dict(whole["drawn"])
        assert (attempts[-1]["digest"], attempts[-1]["after"]) == (whole["digest"], whole["after"])
        assert [part["after"] for part in attempts] == [0, 0, 1]
    assert len({tuple(dict(part["drawn"]).values()) for part in calm}) == ranks
    assert [event["event"] for event in read_events(run)][-1] == "completed"


def trained(settle: bool, resumed_after: int | None, **ddp: Any) -> bytes:
    """The weights after some steps, with a new process's DDP in the middle or without."""
    torch.manual_seed(0)
    layers = [nn.Linear(40, 40) for _ in range(6)]
    model = nn.Sequential(*layers)
    rank = torch.distributed.get_rank()

    def wrapped() -> DistributedDataParallel:
        made = DistributedDataParallel(model, bucket_cap_mb=0.02, **ddp)
        if settle:
            settle_layout(made, 3)
        return made

    used = wrapped()
    for step in range(6):
        if step == resumed_after:
            used = wrapped()
        inputs = torch.randn(5, 40, generator=torch.Generator().manual_seed(step * 10 + rank))
        for weight in model.parameters():
            weight.grad = None
        used(inputs).square().mean().backward()
        with torch.no_grad():
            for weight in model.parameters():
                weight -= 0.1 * weight.grad
    return b"".join(weight.detach().numpy().tobytes() for weight in model.parameters())


def compare(**ddp: Any) -> tuple[bool, bool]:
    """Whether a resume ends with the same bits: with the layout settled, and without."""
    return tuple(trained(settle, None, **ddp) == trained(settle, 2, **ddp) for settle in (True, False))  # type: ignore[return-value]


def left_in_evaluation_mode(place: Path, attempt: int, at: int | None = None) -> dict[str, Any]:
    """A loop that forgets model.train() after an evaluation."""
    begin_attempt(place, attempt)
    done: dict[str, Any] = {"status": None}
    try:
        with join_run() as run:
            torch.manual_seed(1)
            model = model_of()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for step in run.steps(STEPS, model=model, optimizer=optimizer):
                optimizer.zero_grad()
                model(torch.randn(4, 6)).square().mean().backward()
                optimizer.step()
                if step == 2:
                    model.eval()
                if step == at:
                    interrupt("crash")
        done["digest"] = digest(model)
    except SystemExit as end:
        done["status"] = end.code
    return done


def test_a_loop_that_stays_in_evaluation_mode_is_told(tmp_path: Path) -> None:
    calm, run = new_run(tmp_path / "calm"), new_run(tmp_path / "broken")
    (whole,) = run_ranks(left_in_evaluation_mode, 1, calm.path, 0)
    (warning,) = told(calm)
    assert "Sequential is in evaluation mode at an update" in warning
    (crashed,) = run_ranks(left_in_evaluation_mode, 1, run.path, 0, 6)
    (resumed,) = run_ranks(left_in_evaluation_mode, 1, run.path, 1)
    assert crashed["status"] == 1 and resumed["digest"] == whole["digest"]


def showing_an_earlier_loss(place: Path, attempt: int, at: int | None = None) -> Any:
    """Prints in each step what only every fourth one sets."""
    begin_attempt(place, attempt)
    try:
        with join_run() as run:
            model = model_of()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for step in run.steps(STEPS, model=model, optimizer=optimizer):
                optimizer.zero_grad()
                loss = model(torch.randn(4, 6)).square().mean()
                loss.backward()
                optimizer.step()
                if step % 4 == 0:
                    shown = loss.item()
                print(shown)
                if step == at:
                    interrupt("stop")
    except SystemExit as end:
        return end.code
    return None


def test_a_variable_that_a_resume_finds_unset_is_told(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    run_ranks(showing_an_earlier_loss, 1, run.path, 0, 5)
    assert run_ranks(showing_an_earlier_loss, 1, run.path, 1) == [1]
    assert "'shown'" in told(run)[-1] and "set it before the loop as well" in told(run)[-1]


def reading_the_step_early(place: Path) -> None:
    begin_attempt(place, 0)
    with join_run() as run:
        model = model_of()
        first = run.step
        for _ in run.steps(2 - first, model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1)):
            assert run.step >= first


def test_a_step_that_is_read_before_it_is_known_is_told(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    run_ranks(reading_the_step_early, 1, run.path)
    assert any(message.startswith("the program read run.step before run.resumable()") for message in told(run))


def updating_by_hand(place: Path, attempt: int, at: int | None = None, how: str = "stop") -> dict[str, Any]:
    """A loop that updates the weights itself, and whose optimizer never steps, as PyTorch's word_language_model."""
    begin_attempt(place, attempt)
    done: dict[str, Any] = {"status": None}
    try:
        with join_run() as run:
            torch.manual_seed(1)
            model = model_of()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for step in run.steps(STEPS, model=model, optimizer=optimizer):
                model.zero_grad()
                model(torch.randn(4, 6)).square().mean().backward()
                for weight in model.parameters():
                    assert weight.grad is not None
                    weight.data.add_(weight.grad, alpha=-0.1)
                if step == at:
                    interrupt(how)
        done["digest"] = digest(model)
    except SystemExit as end:
        done["status"] = end.code
    return done


def test_a_loop_that_updates_by_hand_stops_and_goes_on_exactly(tmp_path: Path) -> None:
    run = new_run(tmp_path / "broken")
    (whole,) = run_ranks(updating_by_hand, 1, new_run(tmp_path / "calm").path, 0)
    run_ranks(updating_by_hand, 1, run.path, 0, 1)
    run_ranks(updating_by_hand, 1, run.path, 1, 6, "crash")
    (last,) = run_ranks(updating_by_hand, 1, run.path, 2)
    assert last == whole
    assert states(run) == ["started", "stopped", "resumed", "failed", "resumed", "completed"]


def unfreezing(
    place: Path, attempt: int, at: int | None = None, wrap_frozen: bool = False, again: bool = False
) -> dict[str, Any]:
    """A loop that trains its head first, then all, then without the head, as a fine-tuning does."""
    begin_attempt(place, attempt)
    done: dict[str, Any] = {"status": None}
    try:
        with join_run() as run:
            torch.manual_seed(1)
            model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
            body, _, head = model
            body.requires_grad_(not wrap_frozen)
            several = run.world.world_size > 1
            wrapped = DistributedDataParallel(model, find_unused_parameters=not wrap_frozen) if several else model
            body.requires_grad_(False)
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
            for step in run.steps(12, model=wrapped, optimizer=optimizer):
                optimizer.zero_grad()
                wrapped(torch.randn(4, 6)).square().mean().backward()
                optimizer.step()
                if step == 3:
                    body.requires_grad_(True)
                    wrapped = DistributedDataParallel(model) if again else wrapped
                if step == 8 and not again:
                    head.requires_grad_(False)
                if step == at:
                    interrupt("crash")
        done["digest"] = digest(model)
    except SystemExit as end:
        done["status"] = end.code
    return done


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_loop_that_freezes_and_unfreezes_layers_goes_on_exactly(ranks: int, tmp_path: Path) -> None:
    whole, *_ = run_ranks(unfreezing, ranks, new_run(tmp_path / "calm").path, 0)
    run = new_run(tmp_path / "broken").path
    statuses = [run_ranks(unfreezing, ranks, run, attempt, at)[0]["status"] for attempt, at in enumerate((7, 10))]
    lasts = run_ranks(unfreezing, ranks, run, 2)
    assert (whole["status"], statuses) == (None, [1, 1])
    assert [last["digest"] for last in lasts] == [whole["digest"]] * ranks


def test_layers_that_ddp_has_left_out_are_refused_when_they_are_unfrozen(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    ends = run_ranks(unfreezing, 2, run.path, 0, wrap_frozen=True)
    assert ends == [{"status": 1}] * 2
    assert "0.weight was frozen when it was put into DistributedDataParallel" in failure(run)


def test_layers_that_another_ddp_takes_in_once_they_are_unfrozen_are_trained(tmp_path: Path) -> None:
    ends = run_ranks(unfreezing, 2, new_run(tmp_path).path, 0, wrap_frozen=True, again=True)
    assert [end["status"] for end in ends] == [None, None] and ends[0]["digest"] == ends[1]["digest"]


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"gradient_as_bucket_view": True},
        {"static_graph": True},
    ],
    ids=["", "views", "static graph"],
)
def test_the_settled_layout_is_the_one_that_ddp_keeps(more: dict[str, Any]) -> None:
    """The layout matters with three ranks: where this fails, DDP's reducer has changed beneath `settle_layout`."""
    for settled, unsettled in run_ranks(compare, 3, **more):
        assert settled
        assert not unsettled


def test_ddp_that_looks_for_unused_parameters_has_one_layout() -> None:
    assert run_ranks(compare, 3, find_unused_parameters=True) == [(True, True)] * 3


def both() -> str:
    model = DistributedDataParallel(nn.Linear(2, 2), find_unused_parameters=True, static_graph=True)
    settle_layout(model, 2)
    try:
        settle_layout(model, 3)
    except TaskError as error:
        return str(error)
    return ""


def test_a_static_graph_with_unused_parameters_is_refused_where_its_layout_matters() -> None:
    assert "omit static_graph" in run_ranks(both, 2)[0]


def settle_all_kinds() -> None:
    settle_layout(DistributedDataParallel(nn.EmbeddingBag(3, 2, sparse=True)), 2)  # its gradient has to be sparse
    settle_layout(DistributedDataParallel(nn.Linear(2, 2, dtype=torch.complex64)), 2)


def test_the_layout_of_sparse_and_complex_gradients_is_settled() -> None:
    assert run_ranks(settle_all_kinds, 2) == [None, None]


def settle_hooked() -> tuple[int, int]:
    seen: list[Any] = []
    bare = nn.Linear(2, 2)
    bare.weight.register_hook(seen.append)
    bare.bias.register_post_accumulate_grad_hook(seen.append)
    model = DistributedDataParallel(bare)
    settle_layout(model, 2)
    before = len(seen)
    model(torch.ones(1, 2)).sum().backward()
    return before, len(seen)


def test_hooks_of_weights_do_not_see_the_zeros_that_settle_the_layout() -> None:
    """Such as a hook that limits gradients by the average of their norms."""
    assert run_ranks(settle_hooked, 2) == [(0, 2)] * 2
