"""What the job file's switches reach: DDP's buckets and synchronisation, clipping, formats, the group's timeout."""

from __future__ import annotations

import datetime
import os
import queue
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset, get_worker_info
from train_ranks import run_ranks
from train_tasks import FEATURES, Everything, Plain, job, new_run, train

from cluster_ddp.job import BatchPlan
from cluster_ddp.run.reading import parse_lines
from cluster_ddp.train.data.streams import MapStream
from cluster_ddp.train.ema import Ema
from cluster_ddp.train.metrics import loggers
from cluster_ddp.train.metrics.progress import Bar
from cluster_ddp.train.model import synchronised_batchnorm
from cluster_ddp.train.precision import choose_precision
from cluster_ddp.train.ranks import process
from cluster_ddp.train.ranks.distributed import World
from cluster_ddp.train.ranks.process import join_ranks
from cluster_ddp.train.state.counts import Counts


class Synchronising(Everything):
    """Notes for each micro-batch whether its gradients will be summed over the ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.summed: list[bool] = []

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        if isinstance(model, DistributedDataParallel):
            self.summed.append(model.require_backward_grad_sync)
        return super().loss(model, batch)


def synchronised() -> tuple[list[bool], int, int]:
    task = Synchronising()
    settings = {"steps": 3, "global_batch": 24, "accumulation_steps": 4, "bucket_mb": 0.02, "evaluate_every": "end"}
    trainer, _ = train(task, job(train=settings))
    assert isinstance(trainer.wrapped, DistributedDataParallel)
    laid_out: str = trainer.wrapped._get_ddp_logging_data()["rebuilt_bucket_sizes"]  # type: ignore[no-untyped-call]
    return task.summed, trainer.wrapped.bucket_bytes_cap, len(laid_out.split(","))


def test_gradients_are_summed_once_a_step_in_buckets_of_the_size_asked_for() -> None:
    """Only the last of a step's four micro-batches sums; what settles the buckets leaves no trace."""
    for summed, bytes_cap, buckets in run_ranks(synchronised, 2):
        assert summed == [False, False, False, True] * 3
        assert bytes_cap == int(0.02 * 2**20) and buckets > 1


class Queueing(nn.Linear):
    """Counts its passes in an object of Python's library, which is its extra state."""

    def __init__(self) -> None:
        super().__init__(FEATURES, FEATURES)
        self.queue = queue.SimpleQueue[int]()

    def forward(self, inputs: Tensor) -> Tensor:
        self.queue.put(0)
        return super().forward(inputs)

    def get_extra_state(self) -> int:
        return self.queue.qsize()

    def set_extra_state(self, state: Any) -> None:
        self.queue = queue.SimpleQueue()
        for _ in range(state):
            self.queue.put(0)


class Drifting(Plain):
    """Its loss moves a frozen parameter, as that of a momentum encoder moves."""

    def model(self) -> nn.Module:
        made = nn.Sequential(Queueing(), super().model())
        self.drift = nn.Parameter(torch.zeros(1), requires_grad=False)
        made.register_parameter("drift", self.drift)
        return made

    def eval_data(self) -> None:
        return None

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        self.drift.data += 1
        return super().loss(model, batch)


class Loading(Plain):
    """Its loss changes a setting of the optimizer, and it counts how often a state is loaded."""

    steps = loaded = 0

    def optimizer(self, model: nn.Module, lr: float) -> torch.optim.Optimizer:
        self.made = super().optimizer(model, lr)
        return self.made

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        self.steps += 1
        self.made.param_groups[0]["weight_decay"] += 1.0
        return super().loss(model, batch)

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.steps = state["steps"]
        self.loaded += 1


def loaded() -> tuple[float, int, int]:
    task = Loading()
    train(task, job(train={"steps": 3, "global_batch": 24, "weight_decay": 0.0}))
    return task.made.param_groups[0]["weight_decay"], task.steps, task.loaded


def test_settings_are_undone_after_these_passes_and_no_state_is_loaded_that_is_there() -> None:
    assert run_ranks(loaded, 2) == [(3.0, 3, 0), (3.0, 3, 0)]


def drifted() -> tuple[float, int]:
    trainer, _ = train(Drifting(), job(train={"steps": 3, "global_batch": 24}))
    return float(trainer.model.get_parameter("drift")), int(trainer.model.get_submodule("0").get_extra_state())


def test_what_loss_does_to_parameters_and_extra_state_is_undone_after_the_passes_that_settle_the_buckets() -> None:
    assert run_ranks(drifted, 2) == [(3.0, 3), (3.0, 3)]


class Closing(Plain):
    """A hook of its model refers to the model by itself."""

    def model(self) -> nn.Module:
        made = super().model()
        made.register_forward_pre_hook(lambda *_: made.zero_grad())
        return made


def test_a_function_that_has_closed_over_the_model_is_named_with_averaged_weights(
    capfd: pytest.CaptureFixture[str],
) -> None:
    for task, decay in ((Plain(), 0.9), (Closing(), None)):
        train(task, job(train={"steps": 1, "global_batch": 24, "ema_decay": decay}))
        assert "has closed over the model" not in capfd.readouterr().err
    train(Closing(), job(train={"steps": 1, "global_batch": 24, "ema_decay": 0.9}))
    assert "Closing.model.<locals>.<lambda>, a function in the model, has closed over" in capfd.readouterr().err


class Descending(Plain):
    """Plain gradient descent, so that an update is the gradient."""

    def optimizer(self, model: nn.Module, lr: float) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr)


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_gradients_are_clipped_at_their_true_size(tmp_path: Path, precision: str) -> None:
    """Under fp16 they are 65,536 times as large until the scaler gives them back their size; then they are clipped."""

    def update(**settings: Any) -> tuple[Tensor, float]:
        sections: dict[str, Any] = {
            "train": {"steps": 1, "global_batch": 24, "lr": 1.0, "precision": precision, **settings},
            "log": {"every_steps": 1},
        }
        run = new_run(tmp_path, **sections)
        task = Descending()
        torch.manual_seed(0)
        trainer, _ = train(task, job(**sections), run)
        before, _ = train(task, job(train={"steps": 1, "global_batch": 24, "lr": 1e-30}))
        pairs = zip(trainer.model.parameters(), before.model.parameters(), strict=True)
        moved = torch.cat([(after - start).detach().flatten() for after, start in pairs])
        norm = parse_lines(run.metrics_file.read_bytes())[0].get("grad_norm", float("nan"))
        return moved, norm

    free, _ = update()
    clipped, norm = update(clip_norm=0.01)
    loose, _ = update(clip_norm=1000.0)
    assert float(free.norm()) > 0.02
    assert norm == pytest.approx(float(free.norm()), rel=1e-2)
    assert float(clipped.norm()) == pytest.approx(0.01, rel=1e-2)
    torch.testing.assert_close(clipped / clipped.norm(), free / free.norm(), rtol=0.02, atol=1e-3)
    torch.testing.assert_close(loose, free)


@pytest.mark.parametrize(
    ("device", "computes_in_bf16", "name"),
    [("cpu", True, "fp32"), ("mps", True, "fp32"), ("cuda", True, "bf16"), ("cuda", False, "fp16")],
)
def test_auto_picks_the_format_by_the_device(
    monkeypatch: pytest.MonkeyPatch, device: str, computes_in_bf16: bool, name: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: computes_in_bf16)
    assert choose_precision(job(train={"precision": "auto"}).train, torch.device(device)).name == name


def test_batchnorm_is_converted_on_a_gpu_and_keeps_its_names() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    names = list(model.state_dict())
    converted = synchronised_batchnorm(model, torch.device("cuda"))
    assert isinstance(converted.get_submodule("1"), nn.SyncBatchNorm) and list(converted.state_dict()) == names


def test_the_group_has_the_job_files_backend_and_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, datetime.timedelta]] = []

    def init(backend: str, **arguments: Any) -> None:
        asked.append((backend, arguments["timeout"]))

    monkeypatch.setattr(dist, "init_process_group", init)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    for backend in ("auto", "gloo", "nccl"):
        join_ranks(job(network={"backend": backend, "timeout": "17m"}))
    limit = datetime.timedelta(minutes=17)
    assert asked == [("gloo", limit), ("gloo", limit), ("cpu:gloo,cuda:nccl", limit)]


def test_a_group_gets_its_timeout_in_the_public_way_where_torch_has_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in torch 2.14, in which the private way warns."""
    asked: list[datetime.timedelta] = []
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "set_timeout", asked.append, raising=False)
    monkeypatch.setattr(process, "setup_distributed", lambda *_, **__: None)
    join_ranks(job(network={"timeout": "17m"}))
    assert asked == [datetime.timedelta(minutes=17)]


def test_a_single_process_uses_a_macs_gpu_and_several_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert World(0, 0, 1).device.type == "mps" and World(0, 0, 2).device.type == "cpu"


def test_the_average_has_the_buffers_of_the_model() -> None:
    """And its parameters of whole numbers, which have no average."""
    model = nn.BatchNorm1d(3)
    code = nn.Parameter(torch.tensor([1]), requires_grad=False)
    model.register_parameter("code", code)
    ema = Ema(model, 0.5)
    for _ in range(3):
        model(torch.randn(4, 3))
        code.data += 1
        ema.update(False)
    kept = ema.tensors()
    for name in ("running_mean", "running_var", "num_batches_tracked", "code"):
        assert torch.equal(kept[name], model.state_dict()[name]), name
    assert int(kept["num_batches_tracked"]) == 3 and int(kept["code"]) == 4


class Rows(Dataset[Tensor]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor(float(index))


class Workers(Plain):
    """Leaves a file for each process in which it makes a batch."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def collate(self, samples: list[Any]) -> Any:
        if get_worker_info() is not None:
            (self.folder / str(os.getpid())).touch()
        return super().collate(samples)


def test_workers_live_through_the_epochs(tmp_path: Path) -> None:
    settings = job(train={"epochs": 4, "global_batch": 4, "workers": 1}).train
    task, plan = Workers(tmp_path), BatchPlan(4, 1, 1, 4)
    stream = MapStream(Rows(), task, settings, plan, World(0, 0, 1), torch.device("cpu"), print)
    batches = stream.batches(0, Counts())
    next(batches)
    at_first = set(tmp_path.iterdir())
    assert len(list(batches)) == 7 and set(tmp_path.iterdir()) == at_first
    stream.close()


def test_the_bar_on_a_terminal(tmp_path: Path) -> None:
    terminal = tmp_path / "terminal"
    bar = Bar(terminal.open("w"), "digits", 100, 0)
    values = {"train/loss": 0.25, "lr": 0.001, "samples_per_second": 1234.0, "seconds_per_step": 2.0}
    bar.update(40, 1, values)
    bar.say("step 40  val/accuracy 0.9000")
    bar.close()
    shown = terminal.read_text()
    for text in ("digits", "40/100", "loss 0.2500", "lr 0.001", "1,234 samples/s", "0:02:00 left", "accuracy 0.9000"):
        assert text in shown, text


def test_a_terminal_is_where_the_bar_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from cluster_ddp.train.metrics.progress import Lines, open_display

    assert isinstance(open_display("digits", 10, 0), Lines)
    with monkeypatch.context() as patch:
        patch.setattr("sys.stdout", SimpleNamespace(write=print))  # the user's own, which need not be a file
        assert isinstance(open_display("digits", 10, 0), Lines)
    monkeypatch.setenv("CLUSTER_DDP_TERMINAL", str(tmp_path / "terminal"))
    display = open_display("digits", 10, 0)
    assert isinstance(display, Bar)
    display.close()


def _end(stop_at: int | None) -> Callable[[Path], None]:
    def one(folder: Path) -> None:
        sections = {"train": {"steps": 4, "global_batch": 24}, "log": {"wandb": {"mode": "offline"}}}
        train(Plain(), job(**sections), new_run(folder, **sections), stop_at=stop_at)

    return one


def _fail(folder: Path) -> None:
    class Failing(Plain):
        def loss(self, model: nn.Module, batch: Any) -> Tensor:
            raise ValueError("wrong")

    sections = {"train": {"steps": 4, "global_batch": 24}, "log": {"wandb": {"mode": "offline"}}}
    with pytest.raises(ValueError, match="wrong"):
        train(Failing(), job(**sections), new_run(folder, **sections))


@pytest.mark.parametrize(
    ("ending", "failed"), [(_end(None), False), (_end(2), False), (_fail, True)], ids=["done", "stop", "failure"]
)
def test_wandb_is_finished_however_training_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: Callable[[Path], None], failed: bool
) -> None:
    closed: list[bool] = []

    class Noting:
        def __init__(self, *arguments: Any) -> None:
            pass

        def log(self, step: int, values: Any) -> None:
            pass

        def close(self, *, failed: bool) -> None:
            closed.append(failed)

    monkeypatch.setattr(loggers, "Wandb", Noting)
    ending(tmp_path)
    assert closed == [failed]
