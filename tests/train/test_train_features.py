"""What the job file can switch on: formats, scaler, EMA, checkpointing, hooks, profiler."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from train_ranks import run_ranks
from train_tasks import (
    CLASSES,
    FEATURES,
    Everything,
    Exploding,
    Plain,
    StopAt,
    differences,
    final_state,
    job,
    new_run,
    train,
)

from cluster_ddp.run.phase import Phase
from cluster_ddp.run.reading import parse_lines
from cluster_ddp.train import DataError, TaskError, TrainError
from cluster_ddp.train.model import prepare_model
from cluster_ddp.train.ranks.process import RankProcess
from cluster_ddp.train.trainer import Trainer

CPU = torch.device("cpu")


def test_fp16_skips_what_overflows_and_the_schedule_waits(tmp_path: Path) -> None:
    """The first two updates are skipped: the learning rates go on as if they had not been there."""
    sections: dict[str, Any] = {
        "train": {
            "steps": 8,
            "global_batch": 24,
            "precision": "fp16",
            "warmup_steps": 5,
            "lr": 0.01,
            "scaler": {"initial": 512.0, "growth_interval": 3, "growth_factor": 4.0, "backoff_factor": 0.25},
        },
        "log": {"every_steps": 1},
    }
    run = new_run(tmp_path, **sections)
    trainer, _ = train(Exploding(0, 1), job(**sections), run)
    rows = [row for row in parse_lines(run.metrics_file.read_bytes()) if "train/loss" in row]
    assert [row["lr"] for row in rows] == pytest.approx([0.002] * 3 + [0.004, 0.006, 0.008, 0.01, 0.01])
    assert [row["skipped_updates"] for row in rows] == [1, 2, 2, 2, 2, 2, 2, 2]
    assert [row["scale"] for row in rows] == [128, 32, 32, 32, 128, 128, 128, 512]
    assert trainer.state.collect()[1]["scaler"]["scale"] == 512
    assert rows[0]["train/loss"] is None and rows[-1]["train/loss"] > 0


def test_fp16_is_resumed_exactly(tmp_path: Path) -> None:
    sections: dict[str, Any] = {
        "train": {"steps": 12, "global_batch": 24, "precision": "fp16", "scaler": {"growth_interval": 2}}
    }
    whole, _ = train(Plain(), job(**sections))
    run = new_run(tmp_path, **sections)
    assert not train(Plain(), job(**sections), run, stop_at=5)[1].completed
    part, _ = train(Plain(), job(**sections), run, attempt=1)
    assert differences(final_state(whole), final_state(part)) == []
    assert whole.state.collect()[1] == part.state.collect()[1]


def test_bf16_computes_in_bf16() -> None:
    seen: list[torch.dtype] = []

    class Seeing(Plain):
        def loss(self, model: nn.Module, batch: Any) -> Tensor:
            seen.append(model(batch[0]).dtype)
            return super().loss(model, batch)

    trainer, _ = train(Seeing(), job(train={"steps": 1, "global_batch": 8, "precision": "bf16"}))
    assert seen == [torch.bfloat16]
    assert {parameter.dtype for parameter in trainer.model.parameters()} == {torch.float32}


def test_ema_is_the_average_by_hand() -> None:
    """And evaluation sees the average, not the weights."""
    weights: list[Tensor] = []
    evaluated: list[Tensor] = []

    class Watched(Plain):
        def loss(self, model: nn.Module, batch: Any) -> Tensor:
            weights.append(model[0].weight.detach().clone())
            return super().loss(model, batch)

        def evaluate(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
            evaluated.append(model[0].weight.detach().clone())
            return super().evaluate(model, batch)

    train_section = {"steps": 6, "global_batch": 24, "ema_decay": 0.8, "lr": 0.1, "evaluate_every": "end"}
    trainer, _ = train(Watched(), job(train=train_section))
    after_updates = [*weights[1:], trainer.model[0].weight.detach()]
    average = after_updates[0]
    for update in after_updates[1:]:
        average = 0.8 * average + 0.2 * update
    state = final_state(trainer)
    torch.testing.assert_close(state["ema.0.weight"], average)
    assert torch.equal(evaluated[-1], state["ema.0.weight"])
    assert not torch.equal(state["ema.0.weight"], state["model.0.weight"])


class Normed(Plain):
    """A net with BatchNorm."""

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(FEATURES, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, CLASSES))


def test_sync_batchnorm_stays_batchnorm_on_the_cpu() -> None:
    with pytest.warns(UserWarning, match="BatchNorm stays"):
        model = prepare_model(Normed().model(), job(train={"sync_batchnorm": True}).train, CPU)
    assert isinstance(model[1], nn.BatchNorm1d)


def test_a_model_without_anything_to_train() -> None:
    model = nn.Linear(2, 2).requires_grad_(False)
    with pytest.raises(TaskError, match="no trainable parameter"):
        prepare_model(model, job().train, CPU)


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.branch = nn.Linear(FEATURES, CLASSES), nn.Linear(FEATURES, CLASSES)

    def forward(self, inputs: Tensor, both: bool) -> Tensor:
        scores: Tensor = self.body(inputs)
        return scores + self.branch(inputs) if both else scores


class Branching(Plain):
    """Leaves a branch out in every other step."""

    def __init__(self, calls: int = 0) -> None:
        self.calls = calls

    def model(self) -> nn.Module:
        return Branches()

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        self.calls += 1
        inputs, labels = batch
        return F.cross_entropy(model(inputs, self.calls % 2 == 0), labels)

    def eval_data(self) -> None:
        return None


def ddp_options() -> dict[str, Any]:
    """Train with each of DDP's options; what is different from a plain training, and what was really set."""
    from torch.nn.parallel import DistributedDataParallel

    base = {"steps": 5, "global_batch": 24, "lr": 0.01}
    plain = final_state(train(Everything(), job(train=base))[0])
    found: dict[str, Any] = {}
    graph = {"static_graph": True}
    for name, options in {
        "static_graph": graph,
        "no_view": {"gradient_as_bucket_view": False},
        "fp16": {"comm_hook": "fp16"},
    }.items():
        trainer, _ = train(Everything(), job(train={**base, **options}))
        assert isinstance(trainer.wrapped, DistributedDataParallel)
        state = final_state(trainer)
        names = [name for name in state if state[name].is_floating_point()]
        apart = max(float((state[name] - plain[name]).abs().max()) for name in names)
        found[name] = (apart, trainer.wrapped.static_graph, trainer.wrapped.gradient_as_bucket_view)

    parts = {**base, "batch_size": 4}  # of a step, which DDP sums only at its end
    accumulated = [final_state(train(Everything(), job(train={**parts, **static}))[0]) for static in ({}, graph)]
    found["accumulated"] = differences(*accumulated)

    trainer, outcome = train(Branching(), job(train={**base, "find_unused_parameters": True}))
    found["unused"] = outcome.completed
    try:
        train(Plain(), job(train={**base, "comm_hook": "bf16"}))
    except TrainError as error:
        found["bf16"] = str(error)
    for name, task, options in (
        ("refused", Branching(), base),
        ("refused_at_last", Branching(), parts),
        ("refused_second", Branching(calls=1), base),
        ("refused_second_at_last", Branching(calls=1), parts),
    ):
        try:
            train(task, job(train=options))
        except TaskError as error:
            found[name] = str(error)
    return found


def test_options_of_ddp() -> None:
    found = run_ranks(ddp_options, 2)[0]
    assert found["static_graph"][0] == 0.0 and found["static_graph"][1]
    assert found["accumulated"] == []
    assert found["no_view"][0] == 0.0 and not found["no_view"][2]
    assert 0.0 < found["fp16"][0] < 0.1  # gradients lose digits on the way
    assert "needs CUDA" in found["bf16"]
    assert found["unused"]
    assert "take no part in the loss, on rank 0: branch.weight, branch.bias" in found["refused"]
    assert "train.find_unused_parameters: true" in found["refused"]
    assert "take no part in the loss, on rank 0: branch.weight, branch.bias" in found["refused_second"]
    for name in ("refused_at_last", "refused_second_at_last"):
        assert "no part in the loss of the last micro-batch, on rank 0: branch.weight" in found[name]


def test_a_trace_of_the_steps_asked_for(tmp_path: Path) -> None:
    sections: dict[str, Any] = {"train": {"steps": 6, "global_batch": 24, "profile": {"steps": "2-3"}}}
    run = new_run(tmp_path, **sections)
    train(Plain(), job(**sections), run)
    trace = json.loads((run.attempt(0).path / "trace-steps-2-3.json").read_text())
    assert sum(event.get("name") == "aten::cross_entropy_loss" for event in trace["traceEvents"]) == 2


def test_the_best_checkpoint_stays(tmp_path: Path) -> None:
    sections: dict[str, Any] = {
        "train": {"steps": 10, "global_batch": 24, "evaluate_every": "2 steps", "lr": 0.3},
        "checkpoint": {"keep_best": {"metric": "val/loss", "mode": "min"}, "keep_last": 1},
    }
    run = new_run(tmp_path, **sections)
    train(Plain(), job(**sections), run)
    values = {row["step"]: row["val/loss"] for row in parse_lines(run.metrics_file.read_bytes()) if "val/loss" in row}
    best = min(values, key=lambda step: values[step])
    assert sorted(path.name for path in run.checkpoints.iterdir()) == sorted({f"step-{best:08d}", "step-00000010"})


class StoppedInEvaluation(Plain):
    """The score of its first evaluation is the best; a stop comes in the middle of that one."""

    def __init__(self, wish: StopAt) -> None:
        self.wish = wish

    def evaluate(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        trainer = self.wish.trainer
        assert trainer is not None
        if self.wish.step == trainer.step:
            self.wish.step = 0  # now
        return {"score": torch.full((len(batch[0]),), -float(trainer.step))}


def test_the_best_checkpoint_stays_when_a_stop_cut_its_evaluation_short(tmp_path: Path) -> None:
    sections: dict[str, Any] = {
        "train": {"steps": 6, "global_batch": 24, "evaluate_every": "2 steps"},
        "checkpoint": {"keep_best": {"metric": "val/score", "mode": "max"}, "keep_last": 1},
    }
    run = new_run(tmp_path, **sections)
    for attempt, stop_at in enumerate((2, 1000)):
        wish = StopAt()
        wish.trainer = Trainer(job(**sections), StoppedInEvaluation(wish), run, attempt, process=RankProcess(stop=wish))
        wish.step = stop_at
        wish.trainer.run()
    assert sorted(path.name for path in run.checkpoints.iterdir()) == ["step-00000002", "step-00000006"]


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda model, batch: (model(batch[0]).sum(), None), "NoneType as the weight"),
        (lambda model, batch: model(batch[0]), r"tensor of shape \(24, 3\); return a scalar"),
        (lambda model, batch: 3.0, "returned type float"),
        (lambda model, batch: torch.zeros(()), "depends on no parameter"),
        (lambda model, batch: (model(batch[0]).sum(),), r"the pair \(sum, weight\)"),
    ],
)
def test_losses_that_are_none(loss: Any, message: str) -> None:
    class Wrong(Plain):
        def loss(self, model: nn.Module, batch: Any) -> Any:
            return loss(model, batch)

    with pytest.raises(TaskError, match=message):
        train(Wrong(), job(train={"steps": 1, "global_batch": 24}))


class Giving(Plain):
    """Gives this for a loss."""

    def __init__(self, loss: Any) -> None:
        self.given = loss

    def loss(self, model: nn.Module, batch: Any) -> Any:
        return self.given


def give(losses: list[Any]) -> list[tuple[str, Phase]]:
    found = []
    for loss in losses:
        trainer = Trainer(job(train={"steps": 1, "global_batch": 24}), Giving(loss))
        with pytest.raises(TaskError) as error:
            trainer.run()
        found.append((str(error.value).partition(" returned")[0], trainer.session.beat.phase))
    return found


def test_losses_that_are_none_on_several_ranks() -> None:
    losses = [None, 3.0, torch.zeros(2), torch.zeros(())]
    assert run_ranks(give, 2, losses) == [[("loss()", Phase.TRAINING)] * len(losses)] * 2


@pytest.mark.parametrize(
    ("method", "message"),
    [
        ("model", r"model\(\) returned type NoneType; return Module"),
        ("optimizer", r"optimizer\(\) returned type NoneType; return Optimizer"),
        ("state_dict", r"state_dict\(\) of the task returned type NoneType; return dict"),
    ],
)
def test_methods_that_give_nothing(tmp_path: Path, method: str, message: str) -> None:
    wrong = type("Wrong", (Plain,), {method: lambda self, *arguments: None})
    with pytest.raises(TaskError, match=message):
        train(wrong(), job(train={"steps": 1, "global_batch": 24}), new_run(tmp_path))


def test_an_iterable_set_to_evaluate_on() -> None:
    class Wrong(Plain):
        def eval_data(self) -> Any:
            return iter(())

    with pytest.raises(DataError, match=r"eval_data\(\) returned a set without a length; return a map-style set"):
        train(Wrong(), job(train={"steps": 1, "global_batch": 24}))


def test_all_batches_have_the_same_metrics() -> None:
    class Wrong(Plain):
        def evaluate(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
            return {f"of_{len(batch[0])}": torch.zeros(len(batch[0]))}

    with pytest.raises(TaskError, match=r"of_5 for one batch and of_6 for another.*the same names"):
        train(Wrong(), job(train={"steps": 1, "global_batch": 24, "batch_size": 6}))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"accuracy": torch.tensor(0.5)}, r"'accuracy' with shape \(\).*one value per sample"),
        ({"accuracy": 0.5}, r"'accuracy' with type float.*one value per sample"),
        ([0.5], r"evaluate\(\) returned type list; return a dict"),
        (None, r"evaluate\(\) returned type NoneType; return a dict"),
    ],
)
def test_metrics_have_one_value_per_sample(values: Any, message: str) -> None:
    class Wrong(Plain):
        def evaluate(self, model: nn.Module, batch: Any) -> Any:
            return values

    with pytest.raises(TaskError, match=message):
        train(Wrong(), job(train={"steps": 1, "global_batch": 24}))


def test_switches_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    from cluster_ddp.train.precision import set_backends

    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    torch.use_deterministic_algorithms(False)
    try:
        for wish in (True, False):
            set_backends(job(train={"tf32": wish}).train, torch.device("cuda"))
            assert torch.backends.cuda.matmul.allow_tf32 is wish and torch.backends.cudnn.allow_tf32 is wish
        assert not torch.are_deterministic_algorithms_enabled()
        set_backends(job().train, CPU)
        assert torch.are_deterministic_algorithms_enabled() and torch.is_deterministic_algorithms_warn_only_enabled()
        set_backends(job(train={"deterministic": True}).train, CPU)
        assert not torch.is_deterministic_algorithms_warn_only_enabled() and os.environ["CUBLAS_WORKSPACE_CONFIG"]
    finally:
        torch.use_deterministic_algorithms(False)
        os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)


def test_compile_marks_the_model_and_keeps_its_names() -> None:
    model = prepare_model(Plain().model(), job(train={"compile": True}).train, CPU)
    assert model._compiled_call_impl is not None
    assert list(model.state_dict()) == list(Plain().model().state_dict())


class Counting(nn.Module):
    """Computes with a count of steps: a number, for each of which torch compiles it again, or a tensor."""

    def __init__(self, count: int | Tensor) -> None:
        super().__init__()
        self.layer, self.count = nn.Linear(FEATURES, CLASSES), count

    def forward(self, inputs: Tensor) -> Tensor:
        return self.layer(inputs) / (1 + self.count)


class Compiled(Plain):
    """Compiles its model, without a compiler of C++."""

    def __init__(self, count: int | Tensor) -> None:
        self.net = Counting(count)

    def model(self) -> nn.Module:
        self.net.compile(backend="eager")
        return self.net

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        self.net.count += 1
        return super().loss(model, batch)


@pytest.mark.parametrize("count", [0, torch.zeros((), dtype=torch.int64)])
def test_a_task_that_torch_compiles_again_is_told(count: int | Tensor, capfd: pytest.CaptureFixture[str]) -> None:
    train(Compiled(count), job(train={"steps": 4, "global_batch": 8, "evaluate_every": 2}))
    said = capfd.readouterr().err
    assert said.count("torch has compiled something again in step 2 of training") == (type(count) is int)


def waiting_for_gradients() -> dict[str, float]:
    _, outcome = train(Everything(), job(train={"steps": 120, "global_batch": 24, "evaluate_every": "end"}))
    return dict(outcome.metrics)


def test_what_a_step_waits_for_is_in_the_metrics() -> None:
    metrics = run_ranks(waiting_for_gradients, 2)[0]
    assert 0.0 < metrics["communication_wait"] <= 1.0 and 0.0 < metrics["data_wait"] < 1.0
    assert metrics["samples_per_second"] == pytest.approx(24 / metrics["seconds_per_step"])
