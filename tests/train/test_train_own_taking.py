"""How a custom loop takes its batches, and what it does around them: put back at a resume, or told."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from own_loops import LOADERS, Images, begin_attempt, digest, failure, interrupt, model_of, new_run, states, told
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader
from train_ranks import run_ranks

from cluster_ddp.train import join_run
from cluster_ddp.train.errors import TrainError
from cluster_ddp.train.own.passed_in import PassedIn
from cluster_ddp.train.own.watch.taking import Taking


def passed_on(batches: Iterator[Any]) -> Iterator[Any]:
    """As tqdm and functions that move batches to a device do."""
    yield from batches


def told_of(wrap: Callable[[Iterator[Any]], Iterator[Any]]) -> list[str]:
    """What is told at the first updates of a loop that takes its batches through this."""
    messages: list[str] = []
    batches = (number for number in range(5))
    taking = Taking([], [], lambda: 0, messages.append)
    for _ in itertools.takewhile(lambda _: True, wrap(batches)):
        taking.update(batches)
    return messages


@pytest.mark.parametrize(
    ("wrap", "words"),
    [
        (enumerate, "enumerate() over the resumable loader starts at 0 again"),
        (lambda batches: enumerate(passed_on(batches), 1), "loader.enumerate()"),
        (
            lambda batches: itertools.islice(batches, 3),
            "islice() over the resumable loader counts from where the run was resumed",
        ),
        (lambda batches: itertools.islice(itertools.cycle(batches), 9), "repeats batches"),
        (
            lambda batches: zip(range(3), batches, strict=False),
            "zip() over the resumable loader combines it with",
        ),
    ],
)
def test_what_counts_or_repeats_batches_is_told_once(wrap: Callable[..., Any], words: str) -> None:
    assert words in "".join(told_of(wrap))
    assert told_of(passed_on) == []
    assert told_of(lambda batches: zip(batches, passed_on(batches), strict=False)) == []


def endless(batches: Iterator[Any]) -> Iterator[Any]:
    while True:
        yield from batches


def endless_and_moving(batches: Iterator[Any]) -> Iterator[Any]:
    while True:
        for batch in batches:  # noqa: UP028
            yield batch


def by_epochs(batches: Iterator[Any]) -> Iterator[Any]:
    def epochs() -> Iterator[int]:
        yield from range(2)

    for _ in epochs():
        yield from batches


def in_halves(batches: Iterator[Any]) -> Iterator[Any]:
    for batch in batches:
        yield from (batch, batch)


def test_a_generator_that_goes_over_the_batches_again_and_again_is_refused_at_the_first_update() -> None:
    for wrap in (endless, endless_and_moving, lambda batches: passed_on(endless(batches))):
        with pytest.raises(TrainError, match=r"the generator endless\w*\(\) goes over the resumable loader again"):
            told_of(wrap)
    assert told_of(by_epochs) == [] == told_of(in_halves)


def test_a_thread_that_takes_the_batches_ahead_of_the_loop_is_refused_at_the_first_update() -> None:
    messages: list[str] = []

    def in_a_thread(call: Callable[[], None]) -> None:
        thread = threading.Thread(target=call)
        thread.start()
        thread.join()

    taking = Taking([], [], lambda: 0, messages.append)
    in_a_thread(taking.begin)
    with pytest.raises(TrainError, match="a thread of the program's own takes the batches"):
        taking.update(iter(()))
    taking.begin()
    in_a_thread(lambda: taking.update(iter(())))  # as autograd does on a GPU, where a hook of a gradient updates
    whole = Taking([], [], lambda: 0, messages.append)
    in_a_thread(lambda: (whole.begin(), whole.update(iter(()))))  # type: ignore[func-returns-value]
    assert messages == []


def asked_before(what: str) -> list[str]:
    """What is told of a loop that asks for its second batch when it has done this with the first."""
    messages: list[str] = []
    model, scaler = nn.Linear(2, 1), torch.amp.GradScaler("cpu", enabled=what != "no scale")
    taking = Taking([torch.optim.SGD(model.parameters())], [scaler], lambda: 0, messages.append)
    if what in ("gradients", "no scale"):
        model(torch.ones(2)).sum().backward()
    elif what == "overflow":  # the update is left out, and the gradients are gone
        scaler.scale(torch.ones(()))
    taking.ask()
    taking.ask()
    return messages


def test_a_loop_that_reads_ahead_of_its_training_is_told() -> None:
    assert [asked_before(what) for what in ("gradients", "no scale", "overflow")] == [[], [], []]
    (message,) = asked_before("nothing")
    assert "asks for its second batch before it has computed gradients of the first" in message


def train(model: nn.Module, optimizer: torch.optim.Optimizer, step: list[Any]) -> None:
    optimizer.zero_grad()
    for inputs, labels in step:
        F.cross_entropy(model(inputs), labels).backward()
    optimizer.step()


def by_number(place: Path, takes: str) -> None:
    """Two epochs: by a for loop, which may end at the last step, by next() so many times, or two batches at once."""
    begin_attempt(place, 0)
    with join_run() as run:
        model = model_of()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        accumulate = 2 if takes == "pairs" else 1
        loader = run.resumable(LOADERS["tensors"](), model=model, optimizer=optimizer, epochs=2, accumulate=accumulate)
        for _ in loader.epochs():
            batches = iter(loader)
            steps: Any = ([batch] for batch in batches)
            if takes == "numbers":
                steps = ([next(batches)] for _ in range(len(loader)))
            elif takes == "numbers from the place":
                for _ in range(run.step % len(loader), len(loader)):
                    train(model, optimizer, [next(batches)])
                steps = []
            elif takes == "pairs":
                steps = zip(batches, batches, strict=False)
            for step in steps:
                train(model, optimizer, step)
                if takes == "to the last" and run.step + 1 == 2 * len(loader):
                    break


WAYS: list[tuple[str, list[str]]] = [
    ("for", []),
    ("to the last", []),
    ("numbers", ["a fixed number of batches"]),
    ("numbers from the place", []),
    ("pairs", []),
]


@pytest.mark.parametrize(("takes", "words"), WAYS)
def test_batches_that_are_taken_by_number_are_told_and_those_of_one_step_at_once_are_not(
    takes: str, words: list[str], tmp_path: Path
) -> None:
    run = new_run(tmp_path)
    run_ranks(by_number, 1, run.path, takes)
    messages = told(run)
    assert len(messages) == len(words)
    assert all(word in message for word, message in zip(words, messages, strict=True))


def around(place: Path, attempt: int, at: tuple[int, int] | None, how: str) -> str | None:
    """A loop that draws, counts, resets before the batches of an epoch, and after the last; its weights."""
    begin_attempt(place, attempt)
    model = model_of()
    is_through = False
    with contextlib.suppress(SystemExit), join_run() as run:
        torch.manual_seed(5)
        for layer in model.modules():
            if hasattr(layer, "reset_parameters"):
                layer.reset_parameters()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)
        kept = run.keep(scale=1.0)
        things = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
        loader = run.resumable(DataLoader(Images(), 6, shuffle=True), **things, epochs=3)
        for epoch in loader.epochs():
            if epoch:
                scheduler.step()
                optimizer.param_groups[0]["weight_decay"] *= 1.5
                optimizer.state.clear()
            kept.scale *= 1.5
            drawn = torch.rand(())
            for number, (inputs, labels) in loader.enumerate():
                optimizer.zero_grad()
                F.cross_entropy(model(inputs * kept.scale + drawn), labels).backward()
                optimizer.step()
                if at == (epoch, number):
                    interrupt(how)
        with torch.no_grad():
            model.get_parameter("0.weight").add_(torch.rand(()))
        is_through = True
    return digest(model) if is_through else None


def attempts(calm: Path, broken: Path) -> list[str | None]:
    """A run that is left alone, and one that fails in the middle of an epoch and is stopped in two more."""
    places = [((1, 4), "crash"), ((1, 6), "stop"), ((2, 6), "stop"), (None, "")]
    return [around(calm, 0, None, ""), *(around(broken, number, *place) for number, place in enumerate(places))]


def test_what_is_done_before_the_batches_of_an_epoch_and_after_the_loop_is_exact(tmp_path: Path) -> None:
    ((calm, *broken),) = run_ranks(attempts, 1, new_run(tmp_path / "calm").path, new_run(tmp_path / "broken").path)
    assert calm is not None
    assert broken == [None, None, None, calm]


def test_an_optimizer_s_state_that_is_overwritten_before_the_batches_of_an_epoch_is_refused() -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    put_back = PassedIn({"model": model, "optimizer": optimizer}, 1).as_now()
    optimizer.load_state_dict(torch.optim.Adam(model.parameters()).state_dict())
    put_back()
    assert optimizer.state[model.bias]["step"] == 1
    optimizer.state[model.bias]["exp_avg"].zero_()
    with pytest.raises(TrainError, match="changes the state of Adam in place"):
        put_back()


def by_hand(place: Path) -> None:
    """Takes as many batches as an epoch has, and is stopped in the second."""
    for attempt in (0, 1):
        begin_attempt(place, attempt)
        with contextlib.suppress(SystemExit), join_run() as run:
            model = model_of()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            loader = run.resumable(DataLoader(Images(), 6), model=model, optimizer=optimizer, epochs=3)
            for epoch in loader.epochs():
                batches = iter(loader)
                for number in range(len(loader)):
                    inputs, labels = next(batches)
                    F.cross_entropy(model(inputs), labels).backward()
                    optimizer.step()
                    if (attempt, epoch, number) == (0, 1, 4):
                        interrupt("stop")


def test_next_beyond_the_batches_that_are_left_says_so_and_gradients_that_add_up_are_told(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    run_ranks(by_hand, 1, run.path)
    assert "the batches of epoch 1 are used up: this resume had only 3 of 8 left" in failure(run)
    assert "has gradients in it from before the last update" in "".join(told(run))


def by_engine(calm: Path, broken: Path) -> list[str | None]:
    """Takes as many batches as an epoch has by a pass that is begun once more at its end, as Ignite's engines do."""
    ends: list[str | None] = []
    for place, attempt, stops in ((calm, 0, False), (broken, 0, True), (broken, 1, False)):
        begin_attempt(place, attempt)
        ends.append(None)
        with contextlib.suppress(SystemExit), join_run() as run:
            torch.manual_seed(5)
            model = model_of()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            loader = run.resumable(DataLoader(Images(), 6), model=model, optimizer=optimizer, epochs=3)
            for epoch in loader.epochs():
                batches, ended, number = iter(loader), 0, 0
                while number < len(loader) and ended < 2:
                    try:
                        inputs, labels = next(batches)
                    except StopIteration:
                        batches, ended = iter(loader), ended + 1
                        continue
                    number, ended = number + 1, 0
                    optimizer.zero_grad()
                    F.cross_entropy(model(inputs), labels).backward()
                    optimizer.step()
                    if stops and (epoch, number) == (1, 4):
                        interrupt("stop")
            ends[-1] = digest(model)
    return ends


def test_an_engine_that_counts_its_batches_goes_on_exactly(tmp_path: Path) -> None:
    ((calm, stopped, resumed),) = run_ranks(by_engine, 1, new_run(tmp_path / "calm").path, new_run(tmp_path / "b").path)
    assert calm is not None
    assert (stopped, resumed) == (None, calm)


def reset(place: Path, attempt: int, at: int | None) -> list[Any]:
    """A loop that begins its second epoch with another last layer, and with running statistics of its own.

    Before its epochs it sets a layer and counts, as one does that loads a snapshot of its own.
    """
    begin_attempt(place, attempt)
    try:
        with join_run() as run:
            torch.manual_seed(5)
            model = model_of()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            loader = run.resumable(LOADERS["tensors"](), model=model, optimizer=optimizer, epochs=2)
            kept = run.keep(epochs=[])
            torch.nn.init.ones_(model[0].weight.data)
            kept.epochs.append(-1)
            for epoch in loader.epochs():
                kept.epochs.append(epoch)
                if epoch == 1:
                    torch.nn.init.normal_(model[4].weight.data)
                    model(torch.rand(8, 6))
                for inputs, labels in loader:
                    optimizer.zero_grad()
                    F.cross_entropy(model(inputs), labels).backward()
                    optimizer.step()
                    if run.step == at:
                        interrupt("stop")
            return [*model.state_dict().values(), torch.tensor(kept.epochs)]
    except SystemExit:
        pass
    return []


@pytest.mark.parametrize("at", [6, 9], ids=["between epochs", "within an epoch"])
def test_weights_that_are_set_before_the_batches_of_an_epoch_are_as_they_were_saved(at: int, tmp_path: Path) -> None:
    whole, cut = new_run(tmp_path / "whole"), new_run(tmp_path / "cut")
    (expected,) = run_ranks(reset, 1, whole.path, 0, None)
    assert run_ranks(reset, 1, cut.path, 0, at) == [[]]
    (found,) = run_ranks(reset, 1, cut.path, 1, None)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def evaluates_on_it(place: Path, attempt: int, at: int | None) -> list[Any]:
    """A loop that goes over the given loader within an epoch as well, and swallows whatever ends its batches."""
    begin_attempt(place, attempt)
    seen: list[Any] = []
    with contextlib.suppress(SystemExit), join_run() as run:
        torch.manual_seed(5)
        model = model_of()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        given = DataLoader(Images(), 6, shuffle=True)
        loader = run.resumable(given, model=model, optimizer=optimizer, epochs=3)
        for epoch in loader.epochs():
            try:
                for number, (inputs, labels) in loader.enumerate(1):
                    optimizer.zero_grad()
                    F.cross_entropy(model(inputs), labels).backward()
                    optimizer.step()
                    if number in (3, 6):
                        seen.append((epoch, number, next(iter(given))[0].tolist()))
                    if run.step == at:
                        interrupt("stop")
            except:  # noqa: E722 - as people write it
                pass
        seen.append(digest(model))
    return seen


def test_passes_over_the_given_loader_are_exact_and_a_bare_except_keeps_no_stop_off(tmp_path: Path) -> None:
    whole, cut = new_run(tmp_path / "whole"), new_run(tmp_path / "cut")
    (expected,) = run_ranks(evaluates_on_it, 1, whole.path, 0, None)
    (first,) = run_ranks(evaluates_on_it, 1, cut.path, 0, 12)  # between the two passes of the second epoch
    (second,) = run_ranks(evaluates_on_it, 1, cut.path, 1, None)
    assert states(cut) == ["started", "stopped", "resumed", "completed"]
    assert len(first) == 3
    assert first + second == expected
