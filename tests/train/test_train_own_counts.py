"""A count of the loop's own by which it goes is told; one that is only printed is not."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch

from cluster_ddp.train.own import kept
from cluster_ddp.train.own.watch.counts import Counts


class Kept(kept.Kept):
    """What run.keep gives."""

    step = 0


def rate_of(step: int) -> float:
    return 1 / (step + 1)


def adjust_learning_rate(_: Any, step: int) -> None:
    """As the ImageNet example has it."""


def batches(messages: list[str], *handed: Any) -> Any:
    """Two epochs of three batches, which look at the loop after the second step of each."""
    counts = Counts(messages.append, handed)

    def once() -> Any:
        for number in range(3):
            yield number
            if number == 1:
                counts.second()

    return once


def ends_by_a_limit(once: Any) -> None:
    completed = 0
    for _ in range(2):
        for _ in once():
            completed += 1
            if completed >= 5:
                break


def leaves_each_epoch_early(once: Any) -> None:
    for _ in range(2):
        taken = 0
        for _ in once():
            taken += 1  # noqa: SIM113 - as people write it
            if taken == 3:
                break


def sets_the_rate(once: Any) -> None:
    step, rate = 0, 0.0
    for _ in range(2):
        for _ in once():
            rate = rate_of(step)
            step += 1
    assert rate


def sets_the_rate_by_a_call(once: Any) -> None:
    step = 0
    for _ in range(2):
        for _ in once():
            adjust_learning_rate(None, step)
            step += 1


def starts_each_epoch_at_its_number(once: Any) -> None:
    for epoch in range(2):
        updates = epoch * 3
        for _ in once():
            updates += 1
            adjust_learning_rate(None, step=updates)


def sets_the_rate_by_the_place_in_the_epoch(once: Any) -> None:
    for epoch in range(2):
        number = 0
        for _ in once():
            adjust_learning_rate(None, epoch + number // 3)
            number += 1  # noqa: SIM113


def counts_in_a_dict(once: Any) -> None:
    state = {"step": 0, "seen": 0}
    for _ in range(2):
        of_epoch = {"number": 0, "total": 0}
        for size in once():
            state["step"] += 1
            state["seen"] += size
            of_epoch["number"] += 1
            of_epoch["total"] += size
            if state["step"] > 5:
                break
        mean = of_epoch["total"] / of_epoch["number"]
        assert mean < state["seen"]


def only_prints(once: Any) -> None:
    step = shown = seen = 0
    for _ in range(2):
        total = number = 0
        for size in once():
            step += 1
            shown += 1
            seen += size
            number += 1
            total += size
            print(step, f"{shown / 2}")
            if step % 2 == 0:
                print("every second")
        mean = total / number
        assert mean


def shows_what_it_makes(once: Any) -> None:
    """As PyTorch's tutorial on DCGAN does: what it calls counts the images in the statistics of its BatchNorm."""
    made, net = [], torch.nn.BatchNorm1d(1)
    losses, iters = [], 0
    for epoch in range(2):
        for _ in once():
            if (iters % 500 == 0) or (epoch == 1):
                with torch.no_grad():
                    made.append(net(torch.zeros(2, 1)))
            losses.append(0.0)
            iters += 1


def show(net: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return net(torch.zeros(2, 1))


def look(net: torch.nn.Module) -> torch.Tensor:
    net.eval()
    made = show(net)
    net.train()
    return made


def shows_what_a_function_makes(once: Any) -> None:
    net, iters = torch.nn.BatchNorm1d(1), 0
    for _ in range(2):
        for _ in once():
            if iters % 500 == 0:
                show(net)
            iters += 1


def show_sometimes(step: int, net: torch.nn.Module) -> None:
    if step % 500 == 0:
        show(net)


def look_sometimes(net: torch.nn.Module, step: int) -> None:
    if step % 500 == 0:
        look(net)


def shows_what_a_function_makes_sometimes(once: Any) -> None:
    net, iters = torch.nn.BatchNorm1d(1), 0
    for _ in range(2):
        for _ in once():
            show_sometimes(net=net, step=iters)
            iters += 1


def looks_at_what_a_function_makes(once: Any) -> None:
    net, iters = torch.nn.BatchNorm1d(1), 0
    for _ in range(2):
        for _ in once():
            if iters % 500 == 0:
                look(net)
            if iters % 100 == 0:
                net.eval()
                show(net)
                net.train()
            look_sometimes(net, iters)
            iters += 1


def copies_its_weights(once: Any) -> None:
    """As DQN does."""
    net, target, steps = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1), 0
    for _ in range(2):
        for _ in once():
            steps += 1
            if steps % 3 == 0:
                target.load_state_dict(net.state_dict())


def looks_at_what_it_makes(once: Any) -> None:
    net, loss, steps = torch.nn.BatchNorm1d(1), torch.nn.L1Loss(), 0
    for _ in range(2):
        for _ in once():
            if steps % 2 == 0:
                net.eval()
                print(loss(net(torch.zeros(2, 1)), torch.zeros(2, 1)))
                net.train()
            if steps % 3 == 0:
                print(loss(torch.zeros(1), torch.zeros(1)))
            steps += 1


def begins_at_the_place(once: Any, run: Any = Kept) -> None:
    step, kept = run.step, Kept()
    for _ in range(2):
        for _ in once():
            step += 1
            kept.step += 1
            if step > 5 or kept.step > 5:
                break


def logged(batches: Any, every: int = 2) -> Any:
    """As in the reference scripts of torchvision: what it counts, it prints."""
    number, spent = 0, 1.0
    for batch in batches:
        yield batch
        if number % every == 0 or number == 2:
            left = spent * (3 - number)
            print(f"{left} s left")
        number += 1  # noqa: SIM113 - as people write it


def cut(batches: Any) -> Any:
    number = 0
    for batch in batches:
        if number >= 2:
            break
        yield batch
        number += 1  # noqa: SIM113


def goes_through_what_logs(once: Any) -> None:
    for _ in range(2):
        for _ in logged(once()):
            pass


def goes_through_what_cuts(once: Any) -> None:
    for _ in range(2):
        for _ in cut(once()):
            pass


class Trainer:
    """As minGPT has one, with a best loss and early stopping."""

    def __init__(self, state: Any = None) -> None:
        self.iter_num, self.best, self.state = 0, float("inf"), state

    def ends_by_a_limit(self, once: Any) -> None:
        self.iter_num = 0
        for _ in range(2):
            for _ in once():
                self.iter_num += 1
                if self.iter_num >= 5:
                    break

    def begins_at_the_place(self, once: Any, run: Any = Kept) -> None:
        self._run = run
        self.iter_num = self._run.step
        for _ in range(2):
            for _ in once():
                self.iter_num += 1
                if self.iter_num >= 5:
                    break

    def sets_the_rate(self, once: Any) -> None:
        rate = 0.0
        for _ in once():
            rate = rate_of(self.iter_num)
            self.iter_num += 1
        assert rate

    def shows_what_a_method_makes(self, once: Any) -> None:
        for _ in once():
            if self.iter_num % 500 == 0:
                self.show()
            self.iter_num += 1

    def show(self) -> None:
        show(self.state)
        self.state(torch.zeros(2, 1))

    def stops_early(self, once: Any) -> None:
        patience, seen, last = 0, 0.0, 0.0
        for epoch in range(2):
            total = 0.0
            for size in once():
                total += size
            seen += total
            if last == 0.0 or time.time() - last > 60:
                last = time.time()
            if total < self.best:
                self.best, patience = total, 0
            else:
                patience += 1
                if patience > 3:
                    break
            print(epoch, seen)

    def of_what_is_handed_over(self, once: Any) -> None:
        for _ in once():
            self.state.iter_num += 1
            if self.state.iter_num > 5:
                break


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


@pytest.mark.parametrize(
    ("loop", "name"),
    [
        (ends_by_a_limit, "completed"),
        (leaves_each_epoch_early, "taken"),
        (sets_the_rate, "step"),
        (sets_the_rate_by_a_call, "step"),
        (lambda once: Trainer().ends_by_a_limit(once), "self.iter_num"),
        (lambda once: Trainer().sets_the_rate(once), "self.iter_num"),
        (starts_each_epoch_at_its_number, "updates"),
        (sets_the_rate_by_the_place_in_the_epoch, "number"),
        (goes_through_what_cuts, "number"),
        (shows_what_it_makes, "iters"),
        (shows_what_a_function_makes, "iters"),
        (shows_what_a_function_makes_sometimes, "iters"),
        (lambda once: Trainer(torch.nn.BatchNorm1d(1)).shows_what_a_method_makes(once), "self.iter_num"),
        (copies_its_weights, "steps"),
        (looks_at_what_a_function_makes, None),
        (looks_at_what_it_makes, None),
        (goes_through_what_logs, None),
        (only_prints, None),
        (begins_at_the_place, None),
        (lambda once: Trainer().begins_at_the_place(once), None),
    ],
)
def test_a_count_by_which_the_loop_goes_is_told(loop: Callable[[Any], None], name: str | None) -> None:
    messages: list[str] = []
    loop(batches(messages))
    if name is None:
        assert messages == []
        return
    assert all(one == other for one, other in pairwise(messages))
    assert messages[0].startswith(f"the loop counts its batches in {name}, and uses that count")
    assert f"kept = run.keep({name.removeprefix('self.')}=0)" in messages[0]


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
    counts = Counts(messages.append, kept=values)
    keeps_the_best_in_a_dict(lambda: (counts.second() or 1 for _ in range(3)), best)
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
