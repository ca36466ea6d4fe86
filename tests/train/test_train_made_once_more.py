"""The model and the optimizer that are made once more for a check leave no trace in the task that trains."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import OrderedDict
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from own_loops import begin_attempt, failure
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel
from train_ranks import run_ranks
from train_tasks import CLASSES, FEATURES, Plain, differences, final_state, job, new_run, train

from cluster_ddp.train import Trainer, broadcast_object, is_main_process, join_run
from cluster_ddp.train.data.order import SampleStream

NETS: dict[str, nn.Module] = {}
NET: nn.Module | None = None


class Keeping(Plain):
    """Keeps its model where a copy of the task would keep another, and trains what it finds there."""

    of_class: nn.Module | None = None

    def __init__(self, where: str) -> None:
        self.where = where
        self.nets: dict[str, nn.Module] = {}
        self.ordered: OrderedDict[int, nn.Module] = OrderedDict()
        self.listed: list[nn.Module] = []
        self.kept = SimpleNamespace(net=None)

    def eval_data(self) -> None:
        return None

    def model(self) -> nn.Module:
        global NET
        made = super().model()
        self.nets["net"] = NETS["net"] = NET = self.kept.net = Keeping.of_class = made
        self.listed.append(made)
        self.ordered[len(self.ordered)] = made
        return made

    def net(self) -> Any:
        return {
            "a dict": self.nets["net"],
            "a list": self.listed[-1],
            "an ordered dict": list(self.ordered.values())[-1],
            "an object": self.kept.net,
            "a variable": NET,
            "a dict in a variable": NETS["net"],
            "the class": self.of_class,
        }[self.where]

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        inputs, labels = batch
        return F.cross_entropy(self.net()(inputs), labels)


@pytest.mark.parametrize(
    "where",
    ["a dict", "a list", "an ordered dict", "an object", "a variable", "a dict in a variable", "the class"],
)
def test_a_task_goes_on_with_the_model_that_it_has_kept(where: str, tmp_path: Path) -> None:
    spec = job(train={"steps": 5})
    unchecked = Trainer(spec, Keeping(where))  # without checkpoints, nothing is made once more
    unchecked.run()
    run = new_run(tmp_path, train={"steps": 5})
    task = Keeping(where)
    checked = Trainer(spec, task, run)
    checked.run()
    assert task.net() is checked.model
    for name, weight in unchecked.model.state_dict().items():
        assert torch.equal(weight, checked.model.state_dict()[name]), name


class Counting(nn.Linear):
    """Scales by what each rank counts for itself; its extra state is that of all ranks."""

    seen = 0.0

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            self.seen += float(inputs.mean())
        return super().forward(inputs) * (1.0 + self.seen)

    def get_extra_state(self) -> dict[str, Any]:
        seen: list[float | None] = [0.0] * dist.get_world_size()
        dist.all_gather_object(seen, self.seen)
        return {"seen": seen}

    def set_extra_state(self, state: Any) -> None:
        self.seen = state["seen"][dist.get_rank()]


class Communicating(Plain):
    """Its methods wait for those of the other ranks: for a download, and for what each rank counts for itself."""

    def __init__(self, which: str) -> None:
        self.which, self.seen, self.calls, self.table = which, 0.0, 0, torch.zeros(3)
        self.group = dist.new_group() if which == "state_dict(), in a group" else None

    def eval_data(self) -> None:
        return None

    def prepare(self) -> None:
        if self.which == "prepare()":
            dist.barrier()

    def model(self) -> nn.Module:
        if self.which == "model()":
            dist.barrier()
        if self.which == "get_extra_state()":
            return nn.Sequential(Counting(FEATURES, 8), nn.ReLU(), nn.Linear(8, CLASSES))
        return super().model()

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        self.calls += 1
        self.table[self.calls % 3] += 1
        self.seen += float(batch[0].mean())
        return super().loss(model, batch) * (1.0 + self.seen if self.which.startswith("state_dict()") else 1.0)

    def state_dict(self) -> dict[str, Any]:
        if not self.which.startswith("state_dict()"):
            return {"calls": self.calls, "table": self.table}
        seen: list[float | None] = [0.0] * dist.get_world_size()
        if self.which != "state_dict(), later" or self.calls > 3:
            dist.all_gather_object(seen, self.seen, group=self.group)
        return {"seen": seen, "calls": self.calls, "table": self.table}

    def load_state_dict(self, state: Any) -> None:
        self.seen, self.calls = state["seen"][dist.get_rank()] if "seen" in state else 0.0, state["calls"]
        self.table.copy_(state["table"])
        if self.which == "load_state_dict()":
            dist.all_reduce(torch.zeros(1))
        if self.which == "load_state_dict(), in DDP":
            DistributedDataParallel(nn.Linear(1, 1))


def whole_and_resumed(folder: Path, which: str) -> list[str]:
    sections = {"train": {"steps": 6, "global_batch": 24}, "log": {"every_steps": 1}}

    def run_of(kind: str) -> Any:
        return broadcast_object(new_run(folder / kind, **sections) if is_main_process() else None)

    unchecked, _ = train(Communicating(which), job(**sections))
    whole, _ = train(Communicating(which), job(**sections), run_of("whole"))
    broken = run_of("broken")
    train(Communicating(which), job(**sections), broken, stop_at=4)
    resumed, _ = train(Communicating(which), job(**sections), broken, 1)
    state = final_state(unchecked)
    return [*differences(state, final_state(whole)), *differences(state, final_state(resumed))]


@pytest.mark.parametrize(
    "which",
    [
        "model()",
        "state_dict()",
        "state_dict(), later",
        "state_dict(), in a group",
        "load_state_dict()",
        "load_state_dict(), in DDP",
        "get_extra_state()",
    ],
)
def test_methods_of_a_task_may_communicate_between_the_ranks(which: str, tmp_path: Path) -> None:
    assert run_ranks(whole_and_resumed, 2, tmp_path, which) == [[], []]


class Failing(Communicating):
    """Communicates before and after what fails on rank 0 only."""

    def model(self) -> nn.Module:
        dist.barrier()
        return super().model()

    def optimizer(self, model: nn.Module, lr: float) -> torch.optim.Optimizer:
        if self.calls and is_main_process():
            raise ValueError("made once only")
        return super().optimizer(model, lr)


def failure_of(folder: Path, task: Any) -> str:
    sections = {"train": {"steps": 6, "global_batch": 24}}
    run = broadcast_object(new_run(folder, **sections) if is_main_process() else None)
    with pytest.raises(Exception) as caught:
        train(task(), job(**sections), run)
    return f"{type(caught.value).__name__}: {caught.value}"


def test_other_ranks_do_not_wait_for_one_that_fails(tmp_path: Path) -> None:
    begun = time.monotonic()
    first, _ = run_ranks(failure_of, 2, tmp_path, partial(Failing, "load_state_dict()"))
    assert first.startswith("TaskError: after two steps, a second model and optimizer were made")
    assert "ValueError: made once only" in first
    assert time.monotonic() - begun < 50  # the ranks would wait 60 seconds for each other


class MakesGroup(Communicating):
    """Makes a group of ranks in prepare()."""

    def prepare(self) -> None:
        dist.new_group()


class Wraps(Communicating):
    """Puts a network into DDP in prepare()."""

    def prepare(self) -> None:
        DistributedDataParallel(nn.Linear(2, 2))


@pytest.mark.parametrize("kind", [Communicating, MakesGroup, Wraps])
def test_a_barrier_in_prepare_is_refused(kind: type[Communicating], tmp_path: Path) -> None:
    first, _ = run_ranks(failure_of, 2, tmp_path, partial(kind, "prepare()"))
    assert first.startswith("TaskError: prepare() communicates between the ranks, but only one rank of each node")


class Also:
    """What a script passes in, which waits for the other ranks as it is loaded."""

    def state_dict(self) -> dict[str, Any]:
        return {"calls": 1}

    def load_state_dict(self, state: Any) -> None:
        dist.barrier()


def script(place: Path) -> None:
    begin_attempt(place, 0)
    with contextlib.suppress(SystemExit), join_run() as run:
        model = DistributedDataParallel(nn.Linear(3, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run.resume(model, optimizer, SampleStream(16, 4, 0), total_steps=3, also=Also())
        for _ in range(3):
            run.begin_step()
            model(torch.ones(2, 3)).sum().backward()
            optimizer.step()
            run.end_step()


def test_what_is_passed_in_and_waits_for_other_ranks_in_a_check_is_refused(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    run_ranks(script, 2, run.path)
    assert "load_state_dict() of what is passed in communicates between the ranks, but rank 0 calls" in failure(run)


class HooksWhatItHas(Plain):
    """Gives hooks to modules and weights that __init__ has made, and to all modules, each time model() is called."""

    def __init__(self) -> None:
        self.teacher = super().model().requires_grad_(False)

    def model(self) -> nn.Module:
        self.teacher.register_forward_hook(lambda *args: args[-1] * 0.5)
        self.teacher.get_parameter("0.weight").requires_grad_(True).register_hook(lambda gradient: gradient * 0.5)
        register_module_forward_pre_hook(lambda *_: None)
        return super().model()


@pytest.mark.parametrize("has_thread", [False, True])
def test_hooks_that_model_gives_to_what_the_task_has_are_not_doubled_by_the_checks(
    has_thread: bool, tmp_path: Path
) -> None:
    done = threading.Event()

    def read_ahead() -> None:
        done.wait(60)

    if has_thread:
        threading.Thread(target=read_ahead, daemon=True).start()
    settings: dict[str, Any] = {"train": {"steps": 3, "global_batch": 24}}
    of_all = nn.modules.module._global_forward_pre_hooks
    task = HooksWhatItHas()
    try:
        train(task, job(**settings), new_run(tmp_path, **settings))
        of_weight = task.teacher.get_parameter("0.weight")._backward_hooks
        assert [len(hooks or {}) for hooks in (task.teacher._forward_hooks, of_weight, of_all)] == [1, 1, 1]
    finally:
        of_all.clear()
        done.set()
