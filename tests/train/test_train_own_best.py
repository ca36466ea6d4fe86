"""The best so far, a patience, or a rate that a loop keeps itself is told, unless the checkpoint has it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from counted_epochs import Kept, Trainer, batches

from cluster_ddp.train.own import kept
from cluster_ddp.train.own.watch.counts import watch_counts
from cluster_ddp.train.own.watch.reported import Reported
from cluster_ddp.train.own.watch.saved import Saved


def keeps_the_best_at_the_top(once: Any) -> None:
    global best
    if not once:
        best = torch.load("checkpoint.pt")["best"]
    for _ in range(2):
        for accuracy in once():
            is_best = accuracy > best
            best = max(best, accuracy)
            print(is_best)


best = 0.0


def keeps_the_best_in_a_dict(once: Any, kept: Any = None) -> None:
    best = {"accuracy": 0.0, "epoch": 0} if kept is None else kept
    for epoch in range(2):
        accuracy = sum(once())
        if accuracy > best["accuracy"]:
            best["accuracy"], best["epoch"] = accuracy, epoch


def restores_the_best_weights(once: Any) -> None:
    model, kept = torch.nn.Linear(1, 1), Kept(accuracy=0.0)
    best = kept.best = copy.deepcopy(model.state_dict())
    for epoch in range(2):
        state = model.state_dict()
        accuracy = sum(once())
        if accuracy > kept.accuracy:
            kept.accuracy, best = accuracy, copy.deepcopy(model.state_dict())
            kept.best = copy.deepcopy(model.state_dict())
            print(epoch, state)
    model.load_state_dict(best)
    model.load_state_dict(kept.best)


def keeps_snapshots(once: Any) -> None:
    model, snapshots, models, states, history = torch.nn.Linear(1, 1), list[Any](), {}, kept.Kept(all=[]), list[Any]()
    for epoch in range(2):
        accuracy = {"accuracy": sum(once())}
        snapshots.append(copy.deepcopy(model.state_dict()))
        states.all.append(copy.deepcopy(model.state_dict()))
        models[epoch] = copy.deepcopy(model)
        history.append(copy.deepcopy(accuracy))
    for snapshot in (*snapshots, *states.all):
        model.load_state_dict(snapshot)
    print(models, history)


def halves_the_rate(once: Any, lr: float = 1.0) -> None:
    group = {"lr": lr}
    for _ in range(2):
        print(sum(once()))
        lr *= 0.5
        group["lr"] = lr


def forces_less(once: Any, ratio: float = 1.0) -> None:
    for _ in range(2):
        for size in once():
            size = size * ratio
            print(size)
        ratio *= 0.5


def halves_what_the_optimizer_has(once: Any) -> None:
    param_groups = [{"lr": 1.0}]
    lr = param_groups[0]["lr"]
    for _ in range(2):
        print(sum(once()))
        lr *= 0.5
        param_groups[0]["lr"] = lr


@pytest.mark.parametrize(
    ("loop", "names", "remedy"),
    [
        (forces_less, "ratio", "run.keep(ratio=...)"),
        (halves_the_rate, "lr", "run.keep(lr=...)"),
        (
            lambda once: Trainer().stops_early(once),
            "patience, self.best, total",
            "run.keep(best=..., patience=..., total=...)",
        ),
        (keeps_the_best_at_the_top, "best", "run.keep(best=...)"),
        (keeps_the_best_in_a_dict, "best['accuracy']", "run.keep(best=...)"),
        (restores_the_best_weights, "best", "run.keep(best=...)"),
        (keeps_snapshots, "models, snapshots", "run.keep(models=..., snapshots=...)"),
    ],
)
def test_a_best_and_a_patience_by_which_epochs_go_are_told(loop: Any, names: str, remedy: str) -> None:
    messages: list[str] = []
    loop(batches(messages))
    assert messages[0].startswith(f"the loop depends on {names}, which no checkpoint contains")
    assert remedy in messages[0]


def test_a_rate_that_comes_from_the_optimizer_is_not_told() -> None:
    messages: list[str] = []
    halves_what_the_optimizer_has(batches(messages))
    assert messages == []


def test_a_dict_that_the_loop_keeps_is_not_told() -> None:
    best, messages, values = {"accuracy": 0.0, "epoch": 0}, list[str](), kept.KeptValues()
    values.add({"best": best})
    saved = Saved(kept=values)
    keeps_the_best_in_a_dict(
        lambda: (list(watch_counts(saved, Reported(messages.append))) and 1 for _ in range(3)), best
    )
    assert messages == []


def test_a_count_in_what_is_handed_over_is_that_one_s_own() -> None:
    state, messages = Trainer(), list[str]()
    Trainer(state).of_what_is_handed_over(batches(messages, state))
    assert messages == []
    Trainer(state).of_what_is_handed_over(batches(messages))
    assert "counts its batches in self.state.iter_num" in messages[0]


class EarlyStopping:
    """As programs have it."""

    def __init__(self) -> None:
        self.counter, self.trace_func = 0, print


class KeptEarlyStopping(EarlyStopping):
    def state_dict(self) -> dict[str, Any]:
        return {"counter": self.counter}


@pytest.mark.parametrize("kind", [EarlyStopping, KeptEarlyStopping])
def test_an_object_for_early_stopping_that_nothing_keeps_is_told(kind: type[EarlyStopping]) -> None:
    messages: list[str] = []
    holder = Trainer(kind())
    for _ in batches(messages)():
        assert holder.state.counter == 0
    assert [message.split(", so no ")[0] for message in messages] == (
        ["state is an EarlyStopping without state_dict()"] if kind is EarlyStopping else []
    )
