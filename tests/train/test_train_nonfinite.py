"""What is no number never gets into the weights, and never into a checkpoint."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from train_ranks import run_ranks
from train_tasks import Exploding, Plain, final_state, job, losses, new_run, train

from cluster_ddp.run.directory import RunDirectory
from cluster_ddp.run.reading import parse_lines
from cluster_ddp.train import NonFiniteError, TaskError, Trainer
from cluster_ddp.train.ema import Ema
from cluster_ddp.train.optimizer import start_momentum
from cluster_ddp.train.update import Update, any_not_finite, any_not_finite_on_device


def bad_steps(steps: tuple[int, ...], most: int) -> tuple[str, int, bool]:
    task = Exploding(*steps, rank=1)
    spec = job(train={"steps": 9, "global_batch": 24, "max_bad_steps": most})
    try:
        trainer, _ = train(task, spec)
    except NonFiniteError as error:
        return str(error), -1, True
    finite = all(bool(torch.isfinite(parameter).all()) for parameter in trainer.model.parameters())
    return "", trainer.update.skipped, finite


def test_an_update_that_is_no_number_is_skipped_on_all_ranks() -> None:
    assert run_ranks(bad_steps, 3, (2, 5), 2) == [("", 2, True)] * 3


def test_a_fused_sgd_begins_without_momentum_when_its_first_update_is_skipped() -> None:
    """It takes memory as it finds it for the momentum of the first update."""

    def train(gradients: list[float], *, fused: bool) -> Tensor:
        parameter = nn.Parameter(torch.ones(1000))
        optimizer = torch.optim.SGD([parameter], lr=0.1, momentum=0.9, fused=fused)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        update = Update(optimizer, [parameter], clip_norm=None, scaler=scaler)
        for gradient in gradients:
            torch.full((1000,), 1e30)  # what it may find
            scaler.scale((parameter * gradient).sum()).backward()  # type: ignore[no-untyped-call]
            update.clip()
            update.step()
        return parameter.detach()

    found = train([float("inf"), 1.0, 2.0], fused=True)
    torch.testing.assert_close(found, train([1.0, 2.0], fused=False))
    dampened = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1, momentum=0.9, dampening=0.5, fused=True)
    with pytest.raises(TaskError, match="fused=False"):
        start_momentum(dampened, spoilt=True)


def test_a_fused_sgd_takes_a_parameter_whose_first_gradient_comes_late() -> None:
    """Torch's own fails at it with a TypeError, in whatever step that is."""

    def train(*, fused: bool) -> Tensor:
        early, late = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
        optimizer = torch.optim.SGD([early, late], lr=0.1, momentum=0.9, fused=fused)
        update = Update(optimizer, [early, late], clip_norm=None, scaler=None)
        for step in range(3):
            ((early + late if step else early) * 2.0).sum().backward()  # type: ignore[no-untyped-call]
            update.clip()
            update.step()
        return torch.cat([early, late]).detach()

    torch.testing.assert_close(train(fused=True), train(fused=False))


def test_too_many_bad_updates_name_the_step_and_the_rank() -> None:
    messages = {message for message, *_ in run_ranks(bad_steps, 3, (2, 3, 4, 5, 6, 7, 8), 3)}
    assert len(messages) == 1
    (message,) = messages
    assert message.startswith("step 5: 3 updates in a row") and "rank 1 (loss inf)" in message
    assert "rank 0" not in message and "train.max_bad_steps" in message


def test_the_last_good_checkpoint_stays(tmp_path: Path) -> None:
    sections: dict[str, Any] = {
        "train": {"steps": 9, "global_batch": 24, "max_bad_steps": 2},
        "checkpoint": {"every_steps": 2},
    }
    run = new_run(tmp_path, **sections)
    with pytest.raises(NonFiniteError):
        train(Exploding(*range(5, 9)), job(**sections), run)
    trainer, outcome = train(Plain(), job(**sections), run, attempt=1)
    assert outcome.completed and all(bool(torch.isfinite(value).all()) for value in final_state(trainer).values())


def test_the_losses_before_a_failure_are_in_the_metrics(tmp_path: Path) -> None:
    sections: dict[str, Any] = {
        "train": {"steps": 9, "global_batch": 24, "max_bad_steps": 2},
        "log": {"every_steps": 1},
    }
    run = new_run(tmp_path, **sections)
    with pytest.raises(NonFiniteError):
        train(Exploding(*range(5, 9)), job(**sections), run)
    assert [step for step, _ in losses(run)] == [1, 2, 3, 4, 5, 6, 7]


LOGGED: dict[str, Any] = {
    "train": {"steps": 300, "global_batch": 24, "max_bad_steps": 2, "evaluate_every": "end"},
    "log": {"every_steps": 1},
}


class Raising(Exploding):
    """Raises where `Exploding` explodes."""

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        if self.calls - 1 in self.steps and int(os.environ["RANK"]) == self.rank:
            raise RuntimeError("this rank has had enough")
        return super().loss(model, batch)


def failing(kind: type[Exploding], run: RunDirectory) -> str:
    trainer = Trainer(job(**LOGGED), kind(*range(102, 300), rank=1), run, 0)
    try:
        trainer.run()
    except Exception as error:
        return type(error).__name__
    return ""


@pytest.mark.parametrize(
    ("kind", "error", "last", "last_loss"), [(Exploding, "NonFiniteError", 102, 102), (Raising, "RuntimeError", 100, 1)]
)
def test_the_last_steps_before_a_failure_are_in_the_metrics_of_many_ranks(
    tmp_path: Path, kind: type[Exploding], error: str, last: int, last_loss: int
) -> None:
    """Of a failure on all ranks with the losses; of one rank's own, of the other ranks' at least the steps."""
    run = new_run(tmp_path, **LOGGED)
    assert run_ranks(failing, 2, kind, run) == [error] * 2
    steps = [row["step"] for row in parse_lines(run.metrics_file.read_bytes())]
    assert steps == list(range(1, len(steps) + 1)) and len(steps) >= last
    assert len(losses(run)) >= last_loss


class Branch(nn.Module):
    """A net, and beside it a weight whose own gradient is no number as soon as it is zero: the loss stays finite."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Plain().model()
        self.beside = nn.ParameterList([torch.ones(1)])  # the last of the weights

    def forward(self, inputs: Tensor) -> Tensor:
        return self.net(inputs) + 0.0 * self.beside[0].sqrt()


class Branched(Plain):
    """Its side branch breaks at the given step."""

    def model(self) -> nn.Module:
        return Branch()

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        self.calls = getattr(self, "calls", 0) + 1
        if self.calls == 6:
            with torch.no_grad():
                model.beside[0].zero_()
        return super().loss(model, batch)


def test_a_branch_whose_own_gradient_is_no_number_is_found() -> None:
    trainer, _ = train(Branched(), job(train={"steps": 9, "global_batch": 24}))
    assert trainer.update.tally() == (4, 4)
    assert all(bool(torch.isfinite(weight).all()) for weight in trainer.model.parameters())


class BadGradient(torch.autograd.Function):
    """Hands its input on, and NaN back."""

    @staticmethod
    def forward(context: Any, value: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:
        return gradient * torch.nan


class Towers(nn.ModuleDict):
    """First a scale that is clamped, as CLIP's, with gradient 0; then two towers, dead units, a late layer."""

    def __init__(self) -> None:
        super().__init__(
            {"one": Plain().model(), "two": Plain().model(), "dead": nn.Linear(3, 3), "late": nn.Linear(3, 3)}
        )
        self.scale = nn.Parameter(torch.tensor(200.0))
        self.register_parameter("phase", nn.Parameter(torch.ones(3, dtype=torch.complex64)))

    def forward(self, inputs: Tensor, bad: str) -> Tensor:
        hurt = {
            name: BadGradient.apply if name == bad else nn.Identity() for name in ("one", "two", "dead", "late", "all")
        }
        one, two = hurt["one"](self["one"](inputs)), hurt["two"](self["two"](inputs))
        dead = torch.relu(hurt["dead"](-self["dead"](one).abs() - 1))
        late = hurt["late"](self["late"]((one + two).detach()))
        sums = one + two + dead + late * self.phase.real
        return hurt["all"](sums) * self.scale.clamp(max=100.0) / 100


class Hurt(Plain):
    """In its seventh step some gradients are NaN."""

    def __init__(self, bad: str, rank: int = 0) -> None:
        self.bad, self.rank, self.calls = bad, rank, 0

    def model(self) -> nn.Module:
        return Towers()

    def eval_data(self) -> None:
        return None

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        self.calls += 1
        now = self.calls == 7 and int(os.environ.get("RANK", 0)) == self.rank
        loss = nn.functional.cross_entropy(model(batch[0], self.bad if now else ""), batch[1])
        if now and self.bad == "loss":  # only the loss tells: its gradient is 0
            return torch.where(loss > 1e9, loss, torch.inf) + 0 * loss.clamp(max=-1e9)
        return loss


def hurt(bad: str, rank: int, **settings: Any) -> tuple[tuple[int, int], bool]:
    """Skipped updates, and whether all weights are finite."""
    trainer, _ = train(Hurt(bad, rank), job(train={"steps": 9, "global_batch": 24, "lr": 0.01, **settings}))
    finite = all(bool(torch.isfinite(weight).all()) for weight in trainer.model.parameters())
    return trainer.update.tally(), finite


@pytest.mark.filterwarnings("ignore:Casting complex values")
@pytest.mark.parametrize("bad", ["one", "two", "late", "all", "loss"])
@pytest.mark.parametrize("settings", [{}, {"clip_norm": 1.0}], ids=str)
def test_gradients_that_are_no_numbers_are_found_wherever_they_are(bad: str, settings: dict[str, Any]) -> None:
    assert hurt(bad, 0, **settings) == ((1, 0), True)


def _hurt_cases(cases: list[tuple[str, dict[str, Any]]]) -> list[Any]:
    return [hurt(bad, 1, **settings) for bad, settings in cases]


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="the Gloo of older torch sends no complex parameters")
def test_gradients_that_are_no_numbers_are_found_on_all_ranks() -> None:
    cases = [(bad, {}) for bad in ("one", "two", "late", "all", "loss")]
    cases += [("late", {"comm_hook": "fp16"}), ("loss", {"comm_hook": "fp16", "accumulation_steps": 2})]
    for found in run_ranks(_hurt_cases, 3, cases):
        assert found == [((1, 0), True)] * len(cases)


def test_a_gradient_whose_sum_overflows_is_finite() -> None:
    """On the CPU a sum tells first; on a device the largest element does."""
    large, bad = torch.full((4,), 3e38), torch.tensor([1.0, torch.nan])
    sparse = torch.sparse_coo_tensor([[1, 1]], [3e38, 3e38], (4,), check_invariants=True)
    for gradients, wanted in (([large, torch.ones(3)], False), ([large, bad], True), ([sparse], True)):
        assert any_not_finite(gradients) is wanted
        assert bool(any_not_finite_on_device(gradients)) is wanted
    turned = torch.ones(2, dtype=torch.complex64)
    turned.imag[1] = torch.nan
    assert any_not_finite([turned]) and bool(any_not_finite_on_device([turned]))


class Writing(Plain):
    """Its loss is finite, but its sixth call writes what is no number into the model."""

    def __init__(self, where: str) -> None:
        self.where, self.calls = where, 0

    def model(self) -> nn.Module:
        model = super().model()
        model.register_buffer("mask", torch.full((3,), -torch.inf))
        model.register_buffer("mean", torch.zeros(3))
        model.register_parameter("phase", nn.Parameter(torch.ones(3, dtype=torch.complex64)))
        return model

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        self.calls += 1
        if self.calls == 6 and self.where == "imaginary":
            with torch.no_grad():
                model.phase.imag.fill_(torch.nan)
        elif self.calls == 6:
            model.mean.fill_(torch.inf)
        return super().loss(model, batch)


@pytest.mark.parametrize(("where", "name"), [("imaginary", "phase"), ("buffer", "mean")])
def test_what_is_no_number_is_never_saved(tmp_path: Path, where: str, name: str) -> None:
    """A mask that was infinite from the beginning is nothing to refuse."""
    sections: dict[str, Any] = {"train": {"steps": 9, "global_batch": 24}, "checkpoint": {"every_steps": 3}}
    run = new_run(tmp_path, **sections)
    with pytest.raises(NonFiniteError, match=rf"after step 6 weights or buffers of the model are not finite: {name}\n"):
        train(Writing(where), job(**sections), run)
    deadline = time.monotonic() + 20  # the save before is completed in the background
    while not list(run.checkpoints.glob("step-*")) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert [folder.name for folder in run.checkpoints.glob("step-*")] == ["step-00000003"]


def test_the_average_of_16_bit_weights_does_not_round_away() -> None:
    model = nn.Linear(2, 2).to(torch.bfloat16)
    ema = Ema(model, 0.999)
    ema.update(False)
    began = ema.tensors()["weight"].clone()
    with torch.no_grad():
        model.weight += 1
    for was_skipped in (False, True, torch.zeros(1), torch.ones(1)):
        ema.update(was_skipped)
    wanted = began.lerp(model.weight.float(), 0.001).lerp(model.weight.float(), 0.001)
    torch.testing.assert_close(ema.tensors()["weight"], wanted)
    assert ema.tensors()["weight"].dtype is torch.float32 and ema.model().weight.dtype is torch.bfloat16


class Summing(Plain):
    """A pair whose sum is large, while its mean is not."""

    def loss(self, model: nn.Module, batch: Any) -> Any:
        inputs, labels = batch
        return nn.functional.cross_entropy(model(inputs), labels, reduction="sum") * 1e6, len(labels) * 1e6


def summed(task: Plain, settings: dict[str, Any]) -> tuple[int, list[Tensor]]:
    trainer, _ = train(task, job(train={"steps": 6, "global_batch": 24, "lr": 0.01, **settings}))
    return trainer.update.tally()[0], [weight.detach() for weight in trainer.model.parameters()]


@pytest.mark.parametrize("accumulation_steps", [1, 3])
def test_a_pair_is_divided_before_it_is_sent_in_16_bits(accumulation_steps: int) -> None:
    settings = {"accumulation_steps": accumulation_steps}
    _, wanted = summed(Plain(), {})
    for was_skipped, weights in run_ranks(summed, 2, Summing(), {"comm_hook": "fp16", **settings}):
        assert was_skipped == 0
        for found, exact in zip(weights, wanted, strict=True):
            torch.testing.assert_close(found, exact, atol=2e-2, rtol=0)
