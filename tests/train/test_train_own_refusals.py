"""run.resumable and join_run: what cannot be exact is refused by name, and what ends a block oddly is told."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from own_loops import (
    SAMPLES,
    Crash,
    Images,
    InAThread,
    Rows,
    begin_attempt,
    digest,
    distributed,
    failure,
    model_of,
    new_run,
    states,
)
from torch import nn
from torch.utils.data import DataLoader, Sampler
from train_ranks import run_ranks

from cluster_ddp.train import ScriptRun, join_run


class Restless(Sampler[int]):
    """Its order depends on how often it was asked."""

    asked = 0

    def __len__(self) -> int:
        return SAMPLES

    def __iter__(self) -> Iterator[int]:
        self.asked += 1
        return iter([(index + self.asked) % SAMPLES for index in range(SAMPLES)])


class RestlessLater(Restless):
    """The same, from the second epoch on."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return super().__iter__() if self.epoch else iter(range(SAMPLES))


class Clocked(Images):
    """Draws from what nothing seeds."""

    def __getitem__(self, index: int) -> Any:
        return torch.frombuffer(bytearray(os.urandom(24)), dtype=torch.int32).float(), 0


def plain(data: Any = None, **more: Any) -> DataLoader[Any]:
    return DataLoader(data or Images(), batch_size=6, **more)


class Step(NamedTuple):
    """What a replay buffer holds."""

    state: int
    action: int


class PastItsSampler(DataLoader[Any]):
    """Makes its batches itself."""

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        yield from ([torch.zeros(6, 6), torch.zeros(6)] for _ in range(len(self)))


class Wrapper:
    """Goes over a loader, as those do that move batches to the GPU."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        self.loader = loader

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        yield from self.loader


class CopiesItself(nn.Linear):
    """As the models of Keras do."""

    def __deepcopy__(self, memo: Any) -> CopiesItself:
        return CopiesItself(self.in_features, self.out_features)


def fill(run: ScriptRun, kept: Any, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Steps that put something into what is kept."""
    for step in run.steps(2, model=model, optimizer=optimizer):
        kept.memory.append(Step(step, 1))


REFUSED: dict[str, tuple[Any, str]] = {
    "sampler": (lambda run, model, opt: run.resumable(
        plain(sampler=Restless()), model=model, optimizer=opt, epochs=1), "Restless gives a different order each time"),
    "sampler of later epochs": (lambda run, model, opt: run.resumable(
        plain(sampler=RestlessLater()), model=model, optimizer=opt, epochs=2),
        "RestlessLater gives a different order each time"),
    "samples": (lambda run, model, opt: loop_over(
        run.resumable(plain(Clocked()), model=model, optimizer=opt, epochs=1)), "sample 0 of"),
    "no length": (lambda run, model, opt: run.resumable(
        plain(Rows()), model=model, optimizer=opt, epochs=1), "give resumable(..., batches=)"),
    "no loader": (lambda run, model, opt: run.resumable(
        [1, 2], model=model, optimizer=opt, epochs=1), "takes a torch.utils.data.DataLoader, not list"),
    "a wrapper": (lambda run, model, opt: run.resumable(
        Wrapper(plain()), model=model, optimizer=opt, epochs=1), "pass in its .loader, and wrap what is returned"),
    "no state": (lambda run, model, opt: run.resumable(
        plain(), model=model, optimizer=opt, best=0.5, epochs=1), "run.keep(best=...)"),
    "no optimizer": (lambda run, model, opt: run.resumable(plain(), model=model, epochs=1), "give optimizer="),
    "no module": (lambda run, model, opt: run.resumable(
        plain(), model=model.state_dict(), optimizer=opt, epochs=1),
        "optimizer trains parameters that belong to none of the modules passed in: pass in the module that holds them "
        "(model=model;"),
    "forgetful": (lambda run, model, opt: run.resumable(
        plain(), model=model, optimizer=opt, counter=Forgetful(), epochs=1),
        "load_state_dict() of counter does not restore"),
    "epochs left out": (lambda run, model, opt: list(run.resumable(
        plain(), model=model, optimizer=opt, epochs=1)), "outside of its epochs"),
    "iterated twice": (lambda run, model, opt: loop_over(
        run.resumable(plain(), model=model, optimizer=opt, epochs=1), times=2), "twice in an epoch"),
    "another loader": (lambda run, model, opt: updates(run.resumable(
        plain(), model=model, optimizer=opt, epochs=1), model, opt, taken=plain()),
        "an optimizer stepped before a batch was taken from what resumable() returned"),
    "result dropped": (lambda run, model, opt: [
        run.resumable(loader := plain(), model=model, optimizer=opt, epochs=1), train(loader, model, opt)],
        "an optimizer stepped before a batch was taken from what resumable() returned"),
    "steps dropped": (lambda run, model, opt: [
        run.steps(8, model=model, optimizer=opt), train(plain(), model, opt)], "train inside `for step in run.steps"),
    "loop behind the block": (lambda run, model, opt: run.resumable(plain(), model=model, optimizer=opt, epochs=1),
        "ended before its loop began"),
    "in a thread": (lambda run, model, opt: in_thread(lambda: updates(
        run.resumable(plain(), model=model, optimizer=opt, epochs=1), model, opt)), "runs in a different thread"),
    "loop in a thread": (lambda run, model, opt: [
        loader := run.resumable(plain(), model=model, optimizer=opt, epochs=1),
        in_thread(lambda: updates(loader, model, opt))], "runs in a different thread"),
    "steps in a thread": (lambda run, model, opt: in_thread(lambda: [
        train(plain(), model, opt) for _ in run.steps(2, model=model, optimizer=opt)]), "runs in a different thread"),
    "epochs as text": (lambda run, model, opt: run.resumable(plain(), model=model, optimizer=opt, epochs="3"),
        "epochs must be an integer, not '3' (of type str)\n    (test_train_own_refusals.py, line "),
    "accumulate": (lambda run, model, opt: run.resumable(
        plain(), model=model, optimizer=opt, epochs=1, accumulate=0), "accumulate must be at least 1, not 0"),
    "steps over a loader": (lambda run, model, opt: run.steps(plain(), model=model, optimizer=opt),
        "the number of steps must be an integer, not <torch.utils.data"),
    "scheduler": (lambda run, model, opt: [
        torch.optim.lr_scheduler.StepLR(opt, 1), run.resumable(plain(), model=model, optimizer=opt, epochs=1)],
        "give scheduler="),
    "kept elsewhere": (lambda run, model, opt: updates(run.resumable(
        plain(), model=model, optimizer=(hidden := Hidden(model.parameters(), lr=0.1)), epochs=1), model, hidden),
        "optimizer.before.0.weight: is not restored"),
    "named tuples kept later": (lambda run, model, opt: fill(run, run.keep(memory=[]), model, opt),
        "run.keep(memory=...): memory.0 is of type test_train_own_refusals.Step, which a checkpoint cannot contain: "
        "keep tensors, numbers, strings, or lists and dicts of these, and a plain tuple(...) instead of one with"),
    "past its sampler": (lambda run, model, opt: loop_over(
        run.resumable(PastItsSampler(Images(), 6), model=model, optimizer=opt, epochs=1)),
        "the PastItsSampler gives batches without asking its sampler"),
    "read in a thread": (lambda run, model, opt: loop_over(
        run.resumable(InAThread(Images(), 6), model=model, optimizer=opt, epochs=1)),
        "the DataLoader reads the data set in a thread of its own"),
    "another optimizer": (lambda run, model, opt: run.resumable(plain(), model=model, optimizer=Forgetful(), epochs=1),
        "no torch.optim.Optimizer is passed in (optimizer is of type test_train_own_refusals.Forgetful)"),
    "around an optimizer": (lambda run, model, opt: run.resumable(
        plain(), model=model, optimizer=Around(opt), epochs=1),
        "contains one: pass that one in, optimizer=optimizer.base"),
    "a copy of its own": (lambda run, model, opt: run.resumable(
        plain(), model=(own := CopiesItself(6, 3)), optimizer=torch.optim.SGD(own.parameters()), epochs=1),
        "the model (CopiesItself) copies itself with its own __deepcopy__(), as Keras models do"),
    "a metric of several numbers": (lambda run, model, opt: [
        run.log(step, {"val/acc": torch.ones(2)}) for step in run.steps(1, model=model, optimizer=opt)],
        "the value of val/acc is of type Tensor and shape (2,), not one number: log its mean, or"),
    "two loops": (lambda run, model, opt: [
        run.resumable(plain(), model=model, optimizer=opt, epochs=1) for _ in range(2)], "a run has one loop"),
}  # fmt: skip


def loop_over(loader: Any, times: int = 1) -> None:
    for _ in loader.epochs():
        for _ in range(times):
            for _ in loader:
                pass


def updates(
    loader: Any, model: nn.Module, optimizer: torch.optim.Optimizer, batches: int | None = None, taken: Any = None
) -> None:
    """An ordinary loop; with `batches` it takes so many in each epoch, by an iterator that it keeps.

    With `taken` it takes those of that.
    """
    for _ in loader.epochs():
        kept = enumerate(taken) if taken else loader.enumerate()
        for number, batch in kept:
            train([batch], model, optimizer)
            if number + 1 == batches:
                break


def train(batches: Iterable[Any], model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for inputs, labels in batches:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(inputs), labels % 3).backward()
        optimizer.step()


def in_thread(work: Callable[[], Any]) -> None:
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


class Hidden(torch.optim.SGD):
    """Keeps what it needs next time in a dict of its own."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.before = {weight: weight.grad for weight in self.param_groups[0]["params"]}
        super().step()


class Noisy(nn.Sequential):
    """Draws from a generator of its own; `crash` is the call that fails."""

    calls, crash = 0, -1

    def __init__(self) -> None:
        super().__init__(model_of())
        self.generator = torch.Generator()

    def forward(self, inputs: Any) -> Any:
        self.calls += 1
        if self.calls == self.crash:
            raise Crash
        return super().forward(inputs + torch.randn(inputs.shape, generator=self.generator))


def with_iterators(places: list[tuple[Path, int, int]]) -> list[str]:
    """Loops that take five batches in each epoch, each (run, attempt, crash); the weights after each."""
    ends = []
    for place, attempt, crash in places:
        begin_attempt(place, attempt)
        with contextlib.suppress(SystemExit), join_run() as run:
            torch.manual_seed(5)
            model = Noisy()
            model.crash = crash
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
            updates(run.resumable(plain(), model=model, optimizer=optimizer, epochs=3), model, optimizer, 5)
        ends.append(digest(model))
    return ends


def test_iterators_that_are_kept_and_generators_of_the_model_are_exact(tmp_path: Path) -> None:
    calm, broken = new_run(tmp_path / "calm").path, new_run(tmp_path / "broken").path
    (ends,) = run_ranks(with_iterators, 1, [(calm, 0, -1), (broken, 0, 8), (broken, 1, 6), (broken, 2, -1)])
    assert ends[-1] == ends[0] != ends[1]


class Around:
    """Is no optimizer itself, as the ScheduleFreeWrapper of schedulefree."""

    def __init__(self, base: torch.optim.Optimizer) -> None:
        self.base = base


class Forgetful:
    """Takes nothing back."""

    calls = 0

    def state_dict(self) -> dict[str, Any]:
        self.calls += 1
        return {"calls": self.calls}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


def refused(folder: Path) -> dict[str, tuple[Any, str]]:
    """How each of `REFUSED` ends."""
    ends = {}
    for name, (use, _) in REFUSED.items():
        run = new_run(folder / name)
        begin_attempt(run.path, 0)
        status = None
        try:
            with join_run() as joined:
                model = model_of()
                use(joined, model, torch.optim.SGD(model.parameters(), lr=0.1))
        except SystemExit as end:
            status = end.code
        ends[name] = (status, failure(run) if status else "")
    return ends


def test_what_cannot_be_exact_is_refused_by_name(tmp_path: Path) -> None:
    (ends,) = run_ranks(refused, 1, tmp_path)
    for name, (_, message) in REFUSED.items():
        status, error = ends[name]
        assert status == 1, name
        assert message in error, name


def unsharded(place: Path, wrapped: bool) -> Any:
    begin_attempt(place, 0)
    try:
        with join_run() as run:
            model = model_of()
            loader = plain(shuffle=True) if wrapped else distributed(6)()
            if wrapped:
                model = nn.parallel.DistributedDataParallel(model)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            run.resumable(loader, model=model, optimizer=optimizer, epochs=1)
    except SystemExit as end:
        return end.code


@pytest.mark.parametrize(
    ("wrapped", "message"), [(True, "sampler=DistributedSampler(dataset)"), (False, "pass in the wrapped model")]
)
def test_ranks_that_would_not_train_one_model_are_refused(wrapped: bool, message: str, tmp_path: Path) -> None:
    run = new_run(tmp_path)
    assert run_ranks(unsharded, 2, run.path, wrapped) == [1, 1]
    assert message in failure(run)


def left_alone(place: Path) -> int:
    """A program that only evaluates."""
    begin_attempt(place, 0)
    with join_run() as run:
        model_of().eval()(torch.ones(1, 6))
    return run.step


def test_a_program_that_only_evaluates_is_no_failure(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    assert run_ranks(left_alone, 1, run.path) == [0]
    assert states(run) == []  # the launcher sees that the program has ended well


def without_a_scheduler(place: Path) -> int:
    """A program that computes its learning rate from one that it keeps where schedulers do."""
    begin_attempt(place, 0)
    with join_run() as run:
        model = model_of()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for group in optimizer.param_groups:
            group["initial_lr"] = group["lr"]
        updates(run.resumable(plain(), model=model, optimizer=optimizer, epochs=1), model, optimizer)
    return run.step


def test_an_initial_rate_without_a_scheduler_is_no_failure(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    assert run_ranks(without_a_scheduler, 1, run.path) == [8]


def destroying(place: Path) -> Any:
    begin_attempt(place, 0)
    try:
        with join_run():
            torch.distributed.destroy_process_group()
    except SystemExit as end:
        return end.code


def test_a_group_destroyed_inside_the_block_is_named(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    assert run_ranks(destroying, 2, run.path) == [1, 1]
    assert "the process group was destroyed inside the block of join_run()" in failure(run)


class Metered(torch.optim.lr_scheduler.StepLR):
    """Notes the loss of its rank, as the schedulers of timm do, whose state holds that."""

    metric = 0.0


def metered(place: Path) -> Any:
    begin_attempt(place, 0)
    try:
        with join_run() as run:
            model = nn.parallel.DistributedDataParallel(model_of())
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            scheduler = Metered(optimizer, 9)
            loader = run.resumable(distributed(6)(), model=model, optimizer=optimizer, scheduler=scheduler, epochs=1)
            scheduler.metric = float(run.world.rank)
            updates(loader, model, optimizer)
    except SystemExit as end:
        return end.code


def test_what_each_rank_has_of_its_own_is_named(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    assert run_ranks(metered, 2, run.path) == [1, 1]
    assert "the state differs between the ranks: scheduler.metric (0.0 on rank 0, 1.0 on rank 1)" in failure(run)
