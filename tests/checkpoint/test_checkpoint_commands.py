"""The commands `checkpoints` and `export`, as a person calls them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from checkpoint_cases import checkpointer, save
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

from cluster_ddp.checkpoint import export, verify
from cluster_ddp.checkpoint.errors import CheckpointError
from cluster_ddp.checkpoint.format import Manifest
from cluster_ddp.checkpoint.verify import run_id_of
from cluster_ddp.job import JobSpec, dump_resolved
from cluster_ddp.job.models import CheckpointSpec, KeepBestSpec
from cluster_ddp.run.directory import RunDirectory
from cluster_ddp.train.ranks.distributed import World
from cluster_ddp.train.saving import Saving

RUN = "digits-20260101-000000-abcd"
JOB = JobSpec(name="digits", task="cluster_ddp.tasks.digits:Digits", train={"steps": 30})


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 4)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 10, bias=False)
        self.head.weight = self.embedding.weight


def tensors_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """The model's state, and averages that are one more than the weights."""
    averages = {f"ema.{name}": parameter.detach() + 1 for name, parameter in model.named_parameters()}
    return {**{f"model.{name}": value for name, value in model.state_dict().items()}, **averages}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with two checkpoints of a model with tied weights, BatchNorm and averages."""
    folder = tmp_path / RUN
    (folder / "checkpoints").mkdir(parents=True)
    record = {"id": RUN, "name": "digits", "created": 0, "via": "local", "wandb_id": "1"}
    (folder / "run.json").write_text(json.dumps(record))
    target = checkpointer(folder / "checkpoints", run_id=RUN)
    for step in (10, 20):
        torch.manual_seed(step)
        save(target, step, tensors_of(Tied()), **{"val/accuracy": step / 100})
    target.finish()
    return folder


def call(run: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "cluster_ddp", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=run.parent,
        env={**os.environ, "CLUSTER_DDP_RUNS": str(run.parent), "COLUMNS": "200"},
    )


def damage(run: Path) -> None:
    os.truncate(run / "checkpoints/step-00000020/shard-0000.safetensors", 100)


def test_list(run: Path) -> None:
    shown = call(run, "checkpoints", "digits")
    assert shown.returncode == 0, shown.stderr
    lines = shown.stdout.splitlines()
    assert len(lines) == 3 and "step-00000020" in lines[2] and "val/accuracy 0.2" in lines[2]
    rows = json.loads(call(run, "checkpoints", RUN, "--verify", "--json").stdout)
    assert [(row["step"], row["state"], row["samples"]) for row in rows] == [
        (10, "verified", 80),
        (20, "verified", 160),
    ]
    assert rows[0]["metrics"] == {"val/accuracy": 0.1} and rows[0]["problems"] == [] and rows[0]["bytes"] > 0


def test_the_best_is_marked_and_exported(run: Path) -> None:
    refused = call(run, "export", "digits", "--best", "-o", "best.safetensors")
    assert refused.returncode == 2 and "checkpoint.keep_best is not set" in refused.stderr
    best = KeepBestSpec(metric="val/accuracy", mode="min")
    job = JOB.model_copy(update={"checkpoint": CheckpointSpec(keep_best=best)})
    (run / "job.yaml").write_text(dump_resolved(job))
    lines = call(run, "checkpoints", "digits").stdout.splitlines()
    assert ["best  val/accuracy" in line for line in lines] == [False, True, False]
    rows = json.loads(call(run, "checkpoints", "digits", "--json").stdout)
    assert [row["best"] for row in rows] == [True, False]
    done = call(run, "export", "digits", "--best", "-o", "best.safetensors")
    assert "tensors of step 10" in done.stdout, done.stderr


def test_a_renamed_run_keeps_its_checkpoints(run: Path) -> None:
    renamed = run.rename(run.parent / "my-best-digits")
    rows = json.loads(call(renamed, "checkpoints", "my-best", "--verify", "--json").stdout)
    assert [(row["step"], row["state"]) for row in rows] == [(10, "verified"), (20, "verified")]
    assert run_id_of(RunDirectory(renamed)) == RUN
    done = call(renamed, "export", "my-best", "-o", "model.safetensors")
    assert done.returncode == 0 and "step 20" in done.stdout


def test_training_goes_on_in_a_renamed_run(run: Path) -> None:
    renamed = RunDirectory(run.rename(run.parent / "my-best-digits"))
    saving = Saving(JOB, renamed, None, 1, World(0, 0, 1))
    state: Any = SimpleNamespace(live=lambda: tensors_of(Tied()), load=lambda *_: None)
    restored = saving.restore(state)
    assert restored is not None and restored.step == 20


def test_a_checkpoint_of_another_run_is_named_and_is_no_damage(run: Path) -> None:
    other = checkpointer(run / "checkpoints", run_id="other-20260101-000000-0000")
    save(other, 30, {"model.x": torch.zeros(3)})
    other.finish()
    shown = call(run, "checkpoints", RUN, "--verify")
    assert shown.returncode == 0
    assert "other-run   of another run, other-20260101-000000-0000" in shown.stdout
    done = call(run, "export", RUN, "-o", "model.safetensors")
    assert done.returncode == 0 and "step 20" in done.stdout
    assert "skipped step-00000030: of another run" in done.stderr
    refused = call(run, "export", RUN, "--step", "30", "-o", "other.safetensors")
    assert refused.returncode == 4 and "of another run" in refused.stderr


def test_without_a_record_the_folder_tells_whose_they_are(run: Path) -> None:
    (run / "run.json").write_text("{}")
    assert call(run, "export", RUN, "-o", "model.safetensors").returncode == 0


def test_list_tells_damage(run: Path) -> None:
    shard = run / "checkpoints/step-00000020/shard-0000.safetensors"
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    assert call(run, "checkpoints", RUN).returncode == 0, "without --verify the bytes are not read"
    shown = call(run, "checkpoints", RUN, "--verify")
    assert shown.returncode == 4 and "shard-0000.safetensors: its checksum" in shown.stdout
    assert shard.exists(), "looking changes nothing"


def test_export_loads_into_the_bare_model(run: Path) -> None:
    done = call(run, "export", RUN, "-o", "model.safetensors")
    assert done.returncode == 0, done.stderr
    torch.manual_seed(20)
    wanted, model = Tied(), Tied()
    assert "20" in done.stdout
    model.load_state_dict(load_file(run.parent / "model.safetensors"))
    for name, value in wanted.state_dict().items():
        assert torch.equal(model.state_dict()[name], value), name
    with safe_open(run.parent / "model.safetensors", "pt") as opened:
        assert opened.metadata() == {"format": "pt", "run_id": RUN, "step": "20", "weights": "model"}
    assert "evaluation uses their moving average, which --ema exports" in done.stderr
    again = call(run, "export", RUN, "-o", "model.safetensors")
    assert again.returncode == 2 and "--force" in again.stderr
    assert call(run, "export", RUN, "-o", "model.safetensors", "--force", "--step", "10").returncode == 0
    torch.manual_seed(10)
    assert torch.equal(load_file(run.parent / "model.safetensors")["head.weight"], Tied().head.weight)


@pytest.mark.parametrize("target", [".", "folder", "/dev/null"])
def test_export_replaces_nothing_but_files(run: Path, target: str) -> None:
    (run.parent / "folder").mkdir()
    done = call(run, "export", RUN, "-o", target, "--force")
    assert done.returncode == 2
    assert "not a file" in done.stderr and "unexpected" not in done.stderr
    assert Path("/dev/null").is_char_device()


def test_export_of_the_averages(run: Path) -> None:
    done = call(run, "export", RUN, "--ema", "-o", "ema.safetensors")
    assert done.returncode == 0 and "which --ema exports" not in done.stderr
    torch.manual_seed(20)
    model = Tied()
    read = load_file(run.parent / "ema.safetensors")
    assert read.keys() == model.state_dict().keys()
    assert torch.equal(read["embedding.weight"], model.embedding.weight + 1)
    assert torch.equal(read["norm.running_var"], model.norm.running_var)


def test_a_file_in_the_place_of_the_checkpoints_is_told(run: Path) -> None:
    (run / "checkpoints").rename(run / "saved")
    (run / "checkpoints").write_text("")
    for command in (("checkpoints", RUN), ("export", RUN, "-o", "model.safetensors")):
        refused = call(run, *command)
        assert refused.returncode == 2 and f"{run}/checkpoints is not a folder: " in refused.stderr


def test_export_of_what_was_never_saved_is_a_wrong_call(run: Path) -> None:
    done = call(run, "export", RUN, "--step", "7", "-o", "model.safetensors")
    assert done.returncode == 2
    assert "no checkpoint of step 7" in done.stderr and "10" in done.stderr
    assert not (run.parent / "model.safetensors").exists()


def test_export_passes_over_damage(run: Path) -> None:
    damage(run)
    done = call(run, "export", RUN, "-o", "model.safetensors")
    assert done.returncode == 0 and "skipped step-00000020: shard-0000.safetensors" in done.stderr
    assert "step 10" in done.stdout
    refused = call(run, "export", RUN, "--step", "20", "-o", "other.safetensors")
    assert refused.returncode == 4 and "shard-0000.safetensors" in refused.stderr
    assert not (run.parent / "other.safetensors").exists()
    for target in ("nowhere/model.safetensors", "/proc/model.safetensors"):
        refused = call(run, "export", RUN, "-o", target)
        assert refused.returncode == 2 and f"cannot write {target}: " in refused.stderr


def test_checkpoints_that_training_removes_meanwhile_are_no_fault(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It keeps the newest ones only: the one being read goes, and the next is there."""
    places, verified = run / "checkpoints", verify.verify

    def rotating(path: Path, run_id: str) -> Manifest:
        if path.name == "step-00000020":
            path.rename(places / "step-00000030")  # as if saved now
        return verified(path, run_id)

    monkeypatch.setattr(verify, "verify", rotating)
    assert [info.state for info in verify.list_checkpoints(places, RUN, read_all=True)] == ["verified"]
    (places / "step-00000030").rename(places / "step-00000020")
    with pytest.raises(CheckpointError):  # it holds step 20, so it is not intact as step 30; step 10 was passed by
        verify.newest_intact(places, RUN, 30)
    path, manifest, _ = verify.newest_intact(places, RUN)
    assert (path.name, manifest.step) == ("step-00000010", 10)


def test_export_takes_the_next_one_when_the_one_it_reads_is_removed(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find, target = verify.newest_intact, tmp_path / "weights.safetensors"

    def removed(*arguments: Any) -> Any:
        found = find(*arguments)
        if found[0].name == "step-00000020":
            shutil.rmtree(found[0])
        return found

    monkeypatch.setattr(export, "newest_intact", removed)
    count, manifest, passed_over = export.export_newest(run / "checkpoints", RUN, target)
    assert (manifest.step, passed_over) == (10, [])
    assert len(load_file(target)) == count
    assert [path.name for path in tmp_path.iterdir() if "weights" in path.name] == [target.name]


@pytest.mark.parametrize("module", ["cluster_ddp.cli.checkpoints", "cluster_ddp.cli.export"])
def test_login_nodes_need_no_torch(module: str) -> None:
    program = (
        f"import sys, {module}, cluster_ddp.checkpoint.verify, cluster_ddp.checkpoint.export\n"
        "assert not {'torch', 'numpy'} & set(sys.modules), 'imports torch or numpy'"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)
