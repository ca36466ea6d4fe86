"""What would not come back from a checkpoint is refused in the first steps, of a task and of a script alike."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer, RMSprop
from train_ranks import run_ranks
from train_tasks import CLASSES, Plain, differences, final_state, job, new_run, train

from cluster_ddp.job import ClusterDDPError, JobSpec
from cluster_ddp.run.directory import RunDirectory
from cluster_ddp.run.events import read_events
from cluster_ddp.run.runs import create_run
from cluster_ddp.train import SampleStream, Task, TaskError, Trainer, broadcast_object, is_main_process, join_run
from cluster_ddp.train.ranks.distributed import find_world
from cluster_ddp.train.state.optimizer import OptimizerState


def run_of(spec: JobSpec, folder: Path) -> RunDirectory:
    run = broadcast_object(create_run(spec, runs_dir=folder, via="local", script=None) if is_main_process() else None)
    assert run is not None
    return run


class OfEachRank(Plain):
    """Its state is another on each rank, from the start or from a later step on."""

    def __init__(self, since: int, as_tensor: bool) -> None:
        self.since, self.as_tensor, self.calls = since, as_tensor, 0

    def eval_data(self) -> None:
        return None

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        self.calls += 1
        return super().loss(model, batch)

    def state_dict(self) -> dict[str, Any]:
        own = find_world().rank if self.calls >= self.since else 7
        return {"seen": OrderedDict(mean=torch.tensor([own])) if self.as_tensor else own, "calls": self.calls}

    def load_state_dict(self, state: Any) -> None:
        self.calls = state["calls"]


def refusal_of(task: Task, folder: Path) -> tuple[str, int]:
    spec = job(train={"steps": 9, "global_batch": 24}, checkpoint={"every_steps": 6})
    trainer = None
    try:
        trainer = Trainer(spec, task, run_of(spec, folder))
        trainer.run()
    except TaskError as error:
        return str(error), 0 if trainer is None else trainer.step
    return "", trainer.step


@pytest.mark.parametrize(
    ("since", "as_tensor", "step", "words"),
    [
        (2, False, 2, "after step 2 the state differs between the ranks: task.seen (0 on rank 0, 1 on rank 1)"),
        (
            6,
            True,
            6,
            "after step 6 the state differs between the ranks: task.seen.mean (different on rank 1 than on rank 0)",
        ),
    ],
)
def test_a_state_of_the_task_that_differs_by_rank_is_refused(
    since: int, as_tensor: bool, step: int, words: str, tmp_path: Path
) -> None:
    for message, at in run_ranks(refusal_of, 2, OfEachRank(since, as_tensor), tmp_path):
        assert at == step
        assert words in message


class WithBuffer(Plain):
    """Has a buffer of some kind in its model."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def eval_data(self) -> None:
        return None

    def model(self) -> nn.Module:
        made = super().model()
        if self.kind == "shaped by a batch":
            made.register_buffer("largest", torch.empty(0))
            made.register_forward_pre_hook(shape)
        elif self.kind == "filled at random":
            made.register_buffer("noise", None)
            made.register_forward_pre_hook(fill)
        elif self.kind == "sparse":
            made.register_buffer("table", torch.eye(2).to_sparse(), persistent=False)
        else:
            made.register_buffer("table", torch.zeros(2, dtype=getattr(torch, self.kind)))
        return made


def shape(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
    """As the observers of torch.ao.quantization do."""
    largest = inputs[0].amax(0)
    module.largest.resize_(largest.shape).copy_(largest)


def fill(module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    if module.noise is None:
        module.noise = torch.randn(12)
    return (inputs[0] + module.noise,)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("shaped by a batch", "other shape (1): model.largest [12], now [0]"),
        ("filled at random", "the state differs between the ranks: model.noise"),
        ("uint16", "the buffer table has dtype torch.uint16, which ranks cannot send"),
        ("sparse", "the buffer table is sparse, which DDP cannot send"),
        ("float8_e4m3fn", "the buffer table has dtype torch.float8_e4m3fn, which ranks cannot send"),
    ],
)
def test_a_buffer_that_the_ranks_cannot_share_is_refused(kind: str, words: str, tmp_path: Path) -> None:
    for message, _ in run_ranks(refusal_of, 2, WithBuffer(kind), tmp_path):
        assert words in message


class Grouped(Plain):
    """Holds all parameters, or all but those of the first layer, in its optimizer."""

    def __init__(self, part: bool, kind: Callable[..., Optimizer]) -> None:
        self.part, self.kind = part, kind

    def eval_data(self) -> None:
        return None

    def optimizer(self, model: nn.Module, lr: float) -> Optimizer:
        return self.kind(
            [weight for name, weight in model.named_parameters() if not (self.part and name[0] == "0")], lr
        )


@pytest.mark.parametrize("kind", [SGD, AdamW])
@pytest.mark.parametrize(("part", "words"), [(True, "without 0.bias, 0.weight"), (False, "with 0.bias, 0.weight")])
def test_parameters_that_an_optimizer_gains_or_loses_between_attempts_are_named(
    part: bool, words: str, kind: Callable[..., Optimizer], tmp_path: Path
) -> None:
    first, second = (job(train={"steps": steps, "global_batch": 24}) for steps in (3, 6))
    run = run_of(first, tmp_path)
    Trainer(first, Grouped(not part, kind), run).run()
    with pytest.raises(TaskError, match=words):
        Trainer(second, Grouped(part, kind), run, 1).run()


def test_another_optimizer_is_refused_the_state_of_the_one_before(tmp_path: Path) -> None:
    """SGD went on with the momentum of nobody, and without a word."""
    first, second = (job(train={"steps": steps, "global_batch": 24}) for steps in (3, 6))
    run = run_of(first, tmp_path)
    Trainer(first, Grouped(False, AdamW), run).run()
    with pytest.raises(TaskError, match="contains the state of AdamW, which SGD cannot continue with"):
        Trainer(second, Grouped(False, SGD), run, 1).run()


@pytest.mark.parametrize(
    ("kind", "missing"),
    [(partial(AdamW, amsgrad=True), "max_exp_avg_sq"), (partial(RMSprop, momentum=0.9), "momentum_buffer")],
)
def test_settings_by_which_an_optimizer_keeps_more_than_was_saved_are_refused(
    kind: partial[Optimizer], missing: str, tmp_path: Path
) -> None:
    first, second = (job(train={"steps": steps, "global_batch": 24}) for steps in (3, 6))
    run = run_of(first, tmp_path)
    Trainer(first, Grouped(False, kind.func), run).run()
    with pytest.raises(TaskError, match=f"needs {missing} of each parameter, which the checkpoint does not hold"):
        Trainer(second, Grouped(False, kind), run, 1).run()


class Ranks:
    """Counts by name what it has seen, as an allocator of ranks does, beginning when `begins` says so."""

    def __init__(self, begins: bool) -> None:
        self.seen = {"weight": 0} if begins else {}

    def count(self, *_: Any) -> None:
        self.seen["weight"] += 1


class Counted(Grouped):
    def __init__(self, ranks: Ranks) -> None:
        super().__init__(False, AdamW)
        self.ranks = [ranks]

    def optimizer(self, model: nn.Module, lr: float) -> Optimizer:
        made = super().optimizer(model, lr)
        made.register_step_post_hook(self.ranks[0].count)
        return made


def test_what_a_hook_of_the_optimizer_lacks_is_not_taken_for_its_settings(tmp_path: Path) -> None:
    first, second = (job(train={"steps": steps, "global_batch": 24}) for steps in (3, 6))
    run = run_of(first, tmp_path)
    Trainer(first, Counted(Ranks(begins=True)), run).run()
    with pytest.raises(KeyError, match="weight"):
        Trainer(second, Counted(Ranks(begins=False)), run, 1).run()


class Also:
    """State of a script: the second number is kept, or forgotten."""

    def __init__(self, forgets: bool) -> None:
        self.forgets, self.calls, self.sums = forgets, 0, torch.zeros(2)

    def state_dict(self) -> dict[str, Any]:
        return {"calls": self.calls, "sums": self.sums}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.sums = state["sums"]
        if not self.forgets:
            self.calls = state["calls"]


class Counting(SGD):
    """Keeps a tensor in itself, which its state_dict() does not give."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.steps_made = torch.zeros(())

    def step(self, closure: Any = None) -> Any:
        self.steps_made += 1
        return super().step(closure)


class Filled(nn.Linear):
    """Has a buffer that is only there from its first forward pass on."""

    def __init__(self) -> None:
        super().__init__(3, 1)
        self.register_buffer("mean", None)

    def forward(self, inputs: Tensor) -> Tensor:
        self.mean = inputs.detach().mean()
        return super().forward(inputs)


class Locked(nn.Linear):
    """Holds what cannot be copied, and a weight that was computed."""

    def __init__(self) -> None:
        super().__init__(3, 1)
        self.lock, self.doubled = threading.Lock(), self.weight * 2


def script(place: Path, what: str) -> int | None:
    os.environ.update(CLUSTER_DDP_RUN=str(place), CLUSTER_DDP_ATTEMPT="0")
    torch.manual_seed(0)
    model = {"buffer": Filled, "lock": Locked}.get(what, lambda: nn.Linear(3, 1))()
    optimizer = (Counting if what == "optimizer" else SGD)(model.parameters(), lr=0.1, momentum=0.9)
    also = Also(forgets=what == "also")
    try:
        with join_run(folder="nowhere") as run:
            order = SampleStream(16, 4, 0)
            run.resume(model, optimizer, order, total_steps=6, also=also)
            while run.step < 6:
                run.begin_step()
                model(torch.ones(2, 3)).sum().backward()
                optimizer.step()
                also.calls += 1
                also.sums += 1
                if run.end_step():
                    break
            assert (also.calls, also.sums.tolist()) == (6, [6.0, 6.0])
    except SystemExit as end:
        return int(str(end.code))
    return None


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("nothing", ""),
        ("lock", ""),
        ("also", "does not restore what its state_dict() returned before the first step: calls"),
        ("optimizer", "optimizer.steps_made: different values come back"),
        ("buffer", "model.mean"),
    ],
)
def test_what_a_script_hands_over_comes_back_or_is_refused_in_its_first_steps(
    what: str, words: str, tmp_path: Path
) -> None:
    run = create_run(JobSpec(name="own", script="own.py"), runs_dir=tmp_path, via="local", script=None)
    run.attempt(0).path.mkdir(parents=True)
    assert run_ranks(script, 1, run.path, what) == [1 if words else None]
    failed = [event for event in read_events(run) if event["event"] == "failed"]
    if words:
        assert failed[0]["step"] == 2
        assert words in failed[0]["error"]
    else:
        assert not failed


class WithExtraState(nn.Linear):
    """Counts its forward passes in state of its own, which decides what it computes."""

    def __init__(self, extra: Any) -> None:
        super().__init__(3, 1)
        self.extra = extra

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


class Extra(Plain):
    def __init__(self, extra: Any) -> None:
        self.extra = extra

    def model(self) -> nn.Module:
        model = super().model()
        model.register_module("side", WithExtraState(self.extra))
        model.forward = lambda inputs: nn.Sequential.forward(model[:-1], inputs)
        return model


def test_extra_state_that_a_checkpoint_cannot_hold_is_refused_at_the_start() -> None:
    spec = job(train={"steps": 3, "global_batch": 24})
    with pytest.raises(ClusterDDPError, match=r"extra\.side\._extra_state\.call is of type builtins\.function"):
        Trainer(spec, Extra({"call": lambda: 0}))


def keeping_a_word(word: str) -> OptimizerState:
    weight = nn.Parameter(torch.ones(2))
    optimizer = SGD([weight], lr=0.1)
    optimizer.word = word  # type: ignore[attr-defined]
    return OptimizerState(optimizer, {id(weight): "weight"})


def test_the_device_in_an_attribute_of_an_optimizer_is_no_state() -> None:
    """What is trained on a GPU is compared with what is made once more on the CPU."""
    trained = keeping_a_word("cuda:0")
    assert list(trained.hidden_differences(keeping_a_word("cpu"))) == []
    assert list(trained.hidden_differences(keeping_a_word("later"))) == [
        ("word", "'cuda:0' now, 'later' after a resume")
    ]


class MadeLate(Plain):
    """Makes a mean of the logits in its first step; a state from before that gives it nothing."""

    mean: Tensor | None = None

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        inputs, labels = batch
        scores = model(inputs)
        was = torch.zeros(CLASSES) if self.mean is None else self.mean
        self.mean = 0.9 * was + 0.1 * scores.detach().mean(0)
        return nn.functional.cross_entropy(scores - self.mean, labels)

    def state_dict(self) -> dict[str, Any]:
        return {"mean": self.mean}

    def load_state_dict(self, state: Any) -> None:
        if state["mean"] is not None:
            self.mean = state["mean"].clone()


class MadeLateOfNone(MadeLate):
    def __init__(self) -> None:
        self.mean = None


@pytest.mark.parametrize("task", [MadeLate, MadeLateOfNone])
def test_what_the_first_step_makes_is_not_refused_after_a_resume(task: type[MadeLate], tmp_path: Path) -> None:
    sections: dict[str, Any] = {"train": {"steps": 8, "global_batch": 8}}
    whole, broken = (new_run(tmp_path / name, **sections) for name in ("whole", "broken"))
    calm, _ = train(task(), job(**sections), whole)
    train(task(), job(**sections), broken, stop_at=4)
    resumed, _ = train(task(), job(**sections), broken, 1)
    assert differences(final_state(calm), final_state(resumed)) == []
