"""Optimizers that a task cannot have, in a custom loop."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import torch
from own_loops import LOADERS, begin_attempt, digest, distributed, failure, interrupt, model_of, new_run, states, told
from torch import Tensor, nn
from torch.distributed import all_reduce
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import prune
from train_ranks import run_ranks

from cluster_ddp.run.events import read_events
from cluster_ddp.train import join_run


def by_closure(place: Path, attempt: int, at: tuple[int, int] | None) -> str | None:
    """Trains by LBFGS, which looks at the loss of all ranks; stopped in batch `at`."""
    begin_attempt(place, attempt)
    with contextlib.suppress(SystemExit), join_run() as run:
        torch.manual_seed(5)
        model = DistributedDataParallel(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)))
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.05, max_iter=3, history_size=4)
        loader = run.resumable(distributed(4)(), model=model, optimizer=optimizer, epochs=3)
        for epoch in loader.epochs():
            for number, (inputs, labels) in loader.enumerate():

                def closure(inputs: Tensor = inputs, labels: Tensor = labels) -> Tensor:
                    optimizer.zero_grad()
                    loss = F.cross_entropy(model(inputs), labels)
                    loss.backward()
                    of_all = loss.detach()
                    all_reduce(of_all)
                    return of_all

                optimizer.step(closure)
                if at == (epoch, number):
                    interrupt("stop")
        return digest(model)
    return None


def attempts(calm: Path, broken: Path) -> list[str | None]:
    return [by_closure(calm, 0, None), by_closure(broken, 0, (1, 2)), by_closure(broken, 1, None)]


def test_lbfgs_whose_closure_gives_the_loss_of_all_ranks_is_exact(tmp_path: Path) -> None:
    for whole, stopped, resumed in run_ranks(attempts, 2, new_run(tmp_path / "w").path, new_run(tmp_path / "b").path):
        assert whole is not None
        assert (stopped, resumed) == (None, whole)


class Around(torch.optim.SGD):
    """Steps by another optimizer, as SAM and Lookahead do."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, lr=lr)
        self.inner = torch.optim.SGD(self.param_groups, lr=lr)

    def step(self, closure: Any = None) -> Any:
        return self.inner.step(closure)


def with_others(place: Path, is_new: bool) -> int | str | None:
    """Trains by an optimizer that is made in each epoch, or by one inside that which is kept, and then fine-tunes."""
    begin_attempt(place, 0)
    try:
        with join_run() as run:
            model = model_of()
            kept: Any = Around(model.parameters(), lr=0.1)
            loader = run.resumable(LOADERS["tensors"](), model=model, optimizer=kept, epochs=2)
            for _ in loader.epochs():
                optimizer = torch.optim.SGD(model.parameters(), lr=0.1) if is_new else kept
                for inputs, labels in loader:
                    optimizer.zero_grad()
                    F.cross_entropy(model(inputs), labels).backward()
                    optimizer.step()
            torch.optim.SGD(model.parameters(), lr=1e-3).step()
        torch.optim.SGD(model.parameters(), lr=1e-3).step()
    except SystemExit as end:
        return end.code
    return None


def test_an_optimizer_that_is_not_handed_over_is_refused_at_its_second_batch(tmp_path: Path) -> None:
    fresh, inside = new_run(tmp_path / "fresh"), new_run(tmp_path / "inside")
    assert run_ranks(with_others, 1, fresh.path, is_new=True) == [1]
    assert "an optimizer (SGD) that was not passed in has trained weights that were" in failure(fresh)
    assert run_ranks(with_others, 1, inside.path, is_new=False) == [None]
    assert states(inside) == ["started", "completed"]


class Sharp(torch.optim.SGD):
    """SAM: its two steps are no `step`, and that of the optimizer inside it is. Climbs less each time."""

    def __init__(self, parameters: Any, cache: Any = ([None], 0.5)) -> None:
        super().__init__(parameters, lr=0.1)
        self.defaults["cache"] = cache  # as a default of torch's, the very object that __init__ has
        self.inner = torch.optim.SGD(self.param_groups, lr=0.1, momentum=0.9)
        self.climbed = 0

    @torch.no_grad()
    def climb(self) -> None:
        self.climbed += 1
        for weight in self.param_groups[0]["params"]:
            self.state[weight]["climbed"] = 0.05 / self.climbed * weight.grad
            weight += self.state[weight]["climbed"]
        self.zero_grad()

    @torch.no_grad()
    def descend(self) -> None:
        for weight in self.param_groups[0]["params"]:
            weight -= self.state[weight]["climbed"]
        self.inner.step()
        self.zero_grad()


def sharp(calm: Path, broken: Path, manual: Path) -> list[str | None]:
    """Trains by SAM, left alone and stopped and resumed, and then without any optimizer."""
    ends: list[str | None] = []
    for place, attempt, at in ((calm, 0, None), (broken, 0, (1, 2)), (broken, 1, None)):
        begin_attempt(place, attempt)
        ends.append(None)
        with contextlib.suppress(SystemExit), join_run() as run:
            torch.manual_seed(5)
            model = model_of()
            optimizer = Sharp(model.parameters())
            loader = run.resumable(
                LOADERS["tensors"](), model=model, optimizer=optimizer, inner=optimizer.inner, epochs=3
            )
            for epoch in loader.epochs():
                for number, (inputs, labels) in loader.enumerate():
                    F.cross_entropy(model(inputs), labels).backward()
                    optimizer.climb()
                    F.cross_entropy(model(inputs), labels).backward()
                    optimizer.descend()
                    if at == (epoch, number):
                        interrupt("stop")
            ends[-1] = digest(model)
    begin_attempt(manual, 0)
    with join_run() as run:
        for _ in run.steps(504, model=(weight := nn.Linear(1, 1)), optimizer=torch.optim.SGD(weight.parameters())):
            weight.bias.data += 1
    return ends


def test_an_optimizer_inside_another_is_kept_and_its_steps_are_seen(tmp_path: Path) -> None:
    calm, broken, manual = new_run(tmp_path / "calm"), new_run(tmp_path / "broken"), new_run(tmp_path / "manual")
    ((whole, stopped, resumed),) = run_ranks(sharp, 1, calm.path, broken.path, manual.path)
    assert whole is not None
    assert (stopped, resumed) == (None, whole)
    assert [told(calm), told(broken)] == [[], []]
    assert told(manual) == [], "updates by hand count as well"


def looks_ahead(place: Path) -> None:
    """Trains by an optimizer whose momentum is in the one inside it, which is not passed in."""
    begin_attempt(place, 0)
    with contextlib.suppress(SystemExit), join_run() as run:
        model = model_of()
        optimizer = Around(model.parameters(), lr=0.1)
        optimizer.inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for _ in run.steps(3, model=model, optimizer=optimizer):
            optimizer.zero_grad()
            model(torch.randn(4, 6)).sum().backward()
            optimizer.step()


def test_the_refusal_of_state_inside_an_optimizer_says_how_to_pass_it_in(tmp_path: Path) -> None:
    run_ranks(looks_ahead, 1, (run := new_run(tmp_path)).path)
    assert "(base=optimizer.inner)" in failure(run)


def prunes(place: Path, *, with_masks: bool) -> None:
    """Prunes a layer in the third step."""
    begin_attempt(place, 0)
    with contextlib.suppress(SystemExit), join_run() as run:
        model = nn.Linear(6, 2)
        if with_masks:
            prune.identity(model, "weight")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for step in run.steps(4, model=model, optimizer=optimizer):
            if step == 2 and with_masks:
                model.weight_mask.copy_(torch.rand(2, 6) < 0.5)
            elif step == 2:
                prune.l1_unstructured(model, "weight", 0.5)
            optimizer.zero_grad()
            model(torch.randn(4, 6)).sum().backward()
            optimizer.step()


def test_the_refusal_of_pruning_in_training_says_what_to_do_instead(tmp_path: Path) -> None:
    late, early = (new_run(tmp_path / name) for name in ("late", "early"))
    run_ranks(prunes, 1, late.path, with_masks=False)
    assert "prune.identity(layer, 'weight')" in failure(late) and "base=" not in failure(late)
    run_ranks(prunes, 1, early.path, with_masks=True)
    assert [event["event"] for event in read_events(early)][-1] == "completed" and told(early) == []


def reptile(place: Path) -> int | str | None:
    """Makes an optimizer for the inner steps of each step, whose state nobody needs after it."""
    begin_attempt(place, 0)
    try:
        with join_run() as run:
            model = model_of()
            outer = torch.optim.SGD(model.parameters(), lr=0.1)
            loader = run.resumable(LOADERS["tensors"](), model=model, optimizer=outer, epochs=1)
            for _, (inputs, labels) in ((epoch, batch) for epoch in loader.epochs() for batch in loader):
                before = [weight.detach().clone() for weight in model.parameters()]
                inner = torch.optim.SGD(model.parameters(), lr=0.1)
                for _ in range(2):
                    inner.zero_grad()
                    F.cross_entropy(model(inputs), labels).backward()
                    inner.step()
                for weight, old in zip(model.parameters(), before, strict=True):
                    weight.grad = old - weight.detach()
                    weight.data.copy_(old)
                outer.step()
    except SystemExit as end:
        return end.code
    return None


def test_an_optimizer_for_the_inner_steps_of_one_step_is_not_refused(tmp_path: Path) -> None:
    assert run_ranks(reptile, 1, new_run(tmp_path).path) == [None]


def cycled(place: Path) -> int | str | None:
    """A scheduler sets the momentum with the rate, and the optimizer's state comes after the second batch only."""
    begin_attempt(place, 0)
    try:
        with join_run() as run:
            model = model_of()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
            scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=4)
            loader = run.resumable(
                LOADERS["tensors"](), model=model, optimizer=optimizer, scheduler=scheduler, epochs=1
            )
            for _ in loader.epochs():
                for number, (inputs, labels) in loader.enumerate():
                    F.cross_entropy(model(inputs), labels).backward()
                    if number % 3 == 2:
                        optimizer.step()
                        optimizer.zero_grad()
                        scheduler.step()
    except SystemExit as end:
        return end.code
    return None


def test_settings_that_change_before_the_optimizer_has_a_state_come_back(tmp_path: Path) -> None:
    assert run_ranks(cycled, 1, new_run(tmp_path).path) == [None]


def with_amsgrad(place: Path, attempt: int) -> None:
    """Is stopped in its fourth step, and is given amsgrad after that."""
    begin_attempt(place, attempt)
    with contextlib.suppress(SystemExit), join_run() as run:
        model = model_of()
        optimizer = torch.optim.AdamW(model.parameters(), amsgrad=attempt > 0)
        for step in run.steps(6, model=model, optimizer=optimizer):
            model(torch.randn(4, 6)).square().mean().backward()
            optimizer.step()
            if attempt == 0 and step == 3:
                interrupt("stop")


def test_settings_by_which_an_optimizer_keeps_more_than_was_saved_are_explained(tmp_path: Path) -> None:
    run = new_run(tmp_path, every=2)
    for attempt in (0, 1):
        run_ranks(with_amsgrad, 1, run.path, attempt)
    assert "step() of AdamW needs max_exp_avg_sq of each parameter, which the checkpoint does not hold" in failure(run)


def closing_over(place: Path) -> None:
    """Fails in the closure that an optimizer calls, by a key that has nothing to do with the optimizer."""
    begin_attempt(place, 0)
    with contextlib.suppress(SystemExit), join_run() as run:
        model = model_of()
        optimizer = torch.optim.Adam(model.parameters())
        for step in run.steps(4, model=model, optimizer=optimizer):
            batch = {"image" if step < 2 else "picture": torch.randn(4, 6)}

            def closure(batch: dict[str, Tensor] = batch) -> Tensor:
                loss = model(batch["image"]).square().mean()
                loss.backward()
                return loss

            optimizer.step(closure)


def test_a_key_that_a_closure_misses_is_not_taken_for_one_of_the_optimizer(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    run_ranks(closing_over, 1, run.path)
    assert failure(run) == "KeyError: 'image'"


class Slow(torch.optim.Optimizer):
    """Keeps slow weights around an optimizer, as torch_optimizer's Lookahead does: without Optimizer.__init__()."""

    def __init__(self, inner: torch.optim.Optimizer, *, is_empty: bool) -> None:
        self.inner, self.param_groups, self.is_empty = inner, inner.param_groups, is_empty
        self.slow: dict[Tensor, dict[str, Tensor]] = {}

    def step(self, closure: Any = None) -> None:
        self.inner.step(closure)
        for weight in self.param_groups[0]["params"] if not self.is_empty else ():
            self.slow.setdefault(weight, {"slow": weight.detach().clone()})


def around_the_given(place: Path, *, is_empty: bool) -> None:
    begin_attempt(place, 0)
    with join_run() as run:
        model = model_of()
        inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        outer = Slow(inner, is_empty=is_empty)
        for _ in run.steps(3, model=model, optimizer=inner):
            inner.zero_grad()
            model(torch.randn(4, 6)).sum().backward()
            outer.step()


def test_state_of_an_optimizer_around_the_one_that_was_passed_in_is_told(tmp_path: Path) -> None:
    run, empty = new_run(tmp_path / "run"), new_run(tmp_path / "empty")
    run_ranks(around_the_given, 1, run.path, is_empty=False)
    run_ranks(around_the_given, 1, empty.path, is_empty=True)
    (message,) = told(run)
    assert message.startswith("an optimizer around one that was passed in (Slow) holds tensors of its own")
    assert told(empty) == []
