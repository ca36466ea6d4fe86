"""A count of the loop's own by which it goes is told; one that is only printed is not."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from counted_epochs import Kept, Trainer, batches, rate_of, show


def adjust_learning_rate(_: Any, step: int) -> None:
    """As the ImageNet example has it."""


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
    speed = -1.0
    for _ in range(2):
        total = number = 0
        for size in once():
            step += 1
            shown += 1
            seen += size
            number += 1
            total += size
            speed = size if speed == -1.0 else 0.9 * speed + 0.1 * size
            largest = {"of batch": 0.0}
            if size > largest["of batch"]:
                largest["of batch"] = size
            print(step, f"{shown / 2}", speed)
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
        (lambda once: Trainer().begins_there_by_another_name(once), None),
    ],
)
def test_a_count_by_which_the_loop_goes_is_told(loop: Callable[[Any], None], name: str | None) -> None:
    messages: list[str] = []
    loop(batches(messages))
    if name is None:
        assert messages == []
        return
    assert all(message == following for message, following in pairwise(messages))
    assert messages[0].startswith(f"the loop counts its batches in {name}, and uses that count")
    assert f"kept = run.keep({name.removeprefix('self.')}=0)" in messages[0]
