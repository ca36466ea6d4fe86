"""docs/own-code.md tells the truth: its programs, changed as their diffs say, go on exactly where they were left."""

from __future__ import annotations

import contextlib
import importlib.util
import multiprocessing
import os
import runpy
import shutil
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from documented import FINDS_RANKS, PATIENCE, PROJECT, Call, block, finish, rank_0, stop_in_the_middle
from own_loops import begin_attempt, new_run
from safetensors.numpy import load_file
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook
from train_ranks import preload, run_ranks, start_program
from waiting import wait_for

from cluster_ddp.launch.ports import free_port
from cluster_ddp.run.directory import RunDirectory
from cluster_ddp.run.events import read_events
from cluster_ddp.train.ranks.distributed import broadcast_object

FOLDER = PROJECT / "docs" / "own-code"
PAGE = (PROJECT / "docs" / "own-code.md").read_text()
# Arguments; updates of the whole training, and those after which it is killed and stopped: in the middle of an epoch.
PROGRAMS = {
    "ddp": (["3"], 24, 11, 18),
    "imagenet": (["--epochs", "3", "--workers", "2", "--seed", "1"], 24, 11, 18),
    "dcgan": (["3"], 48, 23, 36),
    "nanogpt": (["19"], 20, 7, 13),
    "accelerated": (["4"], 20, 8, 13),
    # Two epochs end after the stop: what is done there is seen in the last.
    "hf_trainer": (["3"], 18, 7, 9),
    "lit": (["3"], 18, 7, 9),
}
# Batches of an update; a batch counts as a step.
BATCHES = {"accelerated": 2, "dcgan": 0.5}
# The batch that one rank takes instead of two, where the program says what each rank takes.
ONE_RANK = {
    "ddp": {"batch_size=16": "batch_size=32"},
    "accelerated": {"batch_size=8": "batch_size=16"},
    "dcgan": {"batch_size=8": "batch_size=16"},
}
# What a program needs that may not be installed, and what its ranks import of it, which takes seconds.
NEEDS = {
    "accelerated": ("accelerate", "accelerate"),
    "hf_trainer": ("transformers", "transformers.trainer", "transformers.models.bert.modeling_bert"),
    "lit": ("lightning",),
}


def expect_here(name: str) -> None:
    """Skip where a library is not installed; else let ranks be forked from a process that has imported it."""
    library, *modules = NEEDS.get(name, ("torch",))
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed")
    if modules:
        preload(*modules)


def changed(name: str, folder: Path) -> Path:
    """The program with its diff applied."""
    program = folder / f"{name}.py"
    program.write_text((FOLDER / f"{name}.py").read_text())
    subprocess.run(["git", "apply", str(FOLDER / f"{name}.diff")], cwd=folder, check=True)
    return program


class Updates:
    """What a program does until it ends: by update, the rows that the model was given.

    Parameters
    ----------
    at, number
        After so many updates this process gets that signal.
    """

    def __init__(self, at: int | None, number: int) -> None:
        self.made: list[set[bytes]] = []
        self._at, self._number = at, number
        self._rows: set[bytes] = set()
        self._handles = [register_module_forward_pre_hook(self._read), register_optimizer_step_post_hook(self._count)]

    def end(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _read(self, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        """Data is what has no gradient; whatever the layers make of it has one."""
        if module.training and torch.is_grad_enabled():
            for value in inputs:
                if isinstance(value, Tensor) and not value.requires_grad and value.dim() > 1:
                    self._rows.update(row.numpy().tobytes() for row in value)

    def _count(self, *_: Any) -> None:
        self.made.append(self._rows)
        self._rows = set()
        if len(self.made) == self._at:
            os.kill(os.getpid(), self._number)


def be_rank(
    program: Path, arguments: list[str], place: Path, attempt: int, at: int | None = None, number: int = 0
) -> list[set[bytes]]:
    """Run a program as a rank; after update `at` of this attempt it gets the signal. The data of each update."""
    if dist.is_initialized():  # the program does that
        port = broadcast_object(free_port())
        dist.destroy_process_group()
        os.environ["MASTER_PORT"] = str(port)
    # As ranks of torchrun do. A rank of these tests would have its own fork server, which imports everything again.
    multiprocessing.set_start_method("fork", force=True)
    begin_attempt(place, attempt)
    os.environ.update(ACCELERATE_USE_CPU="true", HF_HUB_OFFLINE="1", TORCHELASTIC_RUN_ID="as torchrun sets it")
    updates = Updates(at, number)
    os.chdir(program.parent)
    sys.argv = [str(program), *arguments]
    try:
        runpy.run_path(str(program), run_name="__main__")
    except SystemExit as end:  # a framework's program without a block ends there when it is stopped
        assert end.code == 0
    updates.end()
    return updates.made


def tensors(place: Path) -> dict[str, bytes]:
    """The bytes of all tensors of the last checkpoint."""
    last = max((place / "checkpoints").glob("step-*"))
    return {name: array.tobytes() for shard in last.glob("*.safetensors") for name, array in load_file(shard).items()}


def on_one_rank(program: Path, name: str) -> Path:
    """The program with the batches of both ranks in one; those that name the batch of all ranks stay as they are."""
    text = program.read_text()
    for before, after in ONE_RANK.get(name, {}).items():
        assert text.count(before) == 1
        text = text.replace(before, after)
    changed = program.with_stem(f"{name}_on_one_rank")
    changed.write_text(text)
    return changed


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_changed_program_goes_on_exactly_after_a_kill_and_a_stop_and_on_fewer_ranks(
    name: str, tmp_path: Path
) -> None:
    expect_here(name)
    program = changed(name, tmp_path)
    arguments, total, killed, stopped = PROGRAMS[name]
    calm, broken = new_run(tmp_path / "calm").path, new_run(tmp_path / "broken", every=4)
    read = run_ranks(be_rank, 2, program, arguments, calm, 0)
    assert [len(of_rank) for of_rank in read] == [total] * 2
    with contextlib.suppress(AssertionError):  # of ranks that died
        run_ranks(be_rank, 2, program, arguments, broken.path, 0, killed, signal.SIGKILL)
        raise RuntimeError("it was not killed")
    batches = BATCHES.get(name, 1)
    first = int((batches * killed - 1) // 4 * 4 // batches)  # it died before the step of its last update was over
    last = stopped + int(max(1, 1 // batches))  # two ranks agree in the step after the signal
    assert run_ranks(be_rank, 2, program, arguments, broken.path, 1, stopped - first, signal.SIGUSR1) == [
        of_rank[first:last] for of_rank in read
    ]
    fewer = shutil.copytree(broken.path, tmp_path / "fewer" / broken.path.name)
    assert run_ranks(be_rank, 2, program, arguments, broken.path, 2) == [of_rank[last:] for of_rank in read]
    told = [event["event"] for event in read_events(broken) if event["event"] not in ("checkpoint", "stop-requested")]
    assert told == ["started", "resumed", "stopped", "resumed", "completed"]
    assert tensors(broken.path) == tensors(calm)
    (alone,) = run_ranks(be_rank, 1, on_one_rank(program, name), arguments, fewer, 2)
    assert len(alone) == total - last
    if name == "nanogpt":  # each rank draws its own
        return
    together = [rows | others for rows, others in zip(*read, strict=True)]
    if name == "dcgan":  # each rank draws its own noise, which never comes twice
        times = Counter(row for rows in together for row in rows)
        alone = [{row for row in rows if times[row] > 1} for rows in alone]
        together = [{row for row in rows if times[row] > 1} for rows in together]
        assert all(len(rows) > 2 for rows in together[0::2])  # more than the two labels
    assert alone == together[last:]


def newest(run: Path) -> int:
    """The step of the newest checkpoint."""
    return max((int(path.name.rpartition("-")[2]) for path in run.glob("checkpoints/step-*")), default=0)


@FINDS_RANKS
@pytest.mark.timeout(600)
@pytest.mark.chaos  # on Slurm, by the same commands: test_cluster_scripts.py
@pytest.mark.parametrize(("name", "epochs", "every"), [("ddp", 60, 50), ("lit", 20, 10)])
def test_a_changed_program_goes_on_exactly_by_the_commands(
    name: str, epochs: int, every: int, tmp_path: Path, call: Call
) -> None:
    """`cluster-ddp local` starts torchrun, whose ranks the frameworks find by themselves."""
    expect_here(name)
    changed(name, tmp_path)
    text = f"script: {name}.py\nargs: ['{epochs}']\nlaunch: {{procs_per_node: 2}}\n"
    (tmp_path / "job.yaml").write_text(f"{text}checkpoint: {{every_steps: {every}}}\n")
    finish(call("cluster_ddp", "local", "job.yaml"))
    (calm,) = tmp_path.glob("runs/*")
    running = call("cluster_ddp", "local", "job.yaml")
    (run,) = wait_for(lambda: set(tmp_path.glob("runs/*")) - {calm})
    stop_in_the_middle(call, running, run.name, run)
    reached = newest(run)
    assert [event["step"] for event in read_events(RunDirectory(run)) if event["event"] == "stopped"] == [reached]
    running = call("cluster_ddp", "resume", run.name)
    wait_for(lambda: newest(run) > reached)
    os.kill(wait_for(lambda: rank_0(run)), signal.SIGKILL)
    finish(running, status=4)
    assert newest(run) < newest(calm)
    finish(call("cluster_ddp", "resume", run.name))
    assert tensors(run) == tensors(calm)


def test_a_changed_program_runs_without_the_launcher(
    tmp_path: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = changed("nanogpt", tmp_path)
    torchrun = ("torch.distributed.run", "--standalone", "--nproc-per-node=2", program.name, "4")
    assert "iter 0: loss" in finish(call(*torchrun))
    assert (tmp_path / "nanogpt.run" / "checkpoints" / "step-00000005").is_dir()
    monkeypatch.chdir(tmp_path)
    again = start_program({**os.environ, "CUDA_VISIBLE_DEVICES": ""}, tmp_path / "log", program, "4")
    again.join(PATIENCE)
    again.kill()
    assert "all 5 steps of this run are done" in (tmp_path / "log").read_text()


# A cell is run in an interpreter that stays. The button sends SIGINT to it.
NOTEBOOK = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
cell = sys.stdin.read()
for interrupted_in in 4, 0:
    os.mkdir(str(interrupted_in))
    os.chdir(str(interrupted_in))
    names = {"interrupted_in": interrupted_in}
    exec(cell, names)
    if interrupted_in:
        assert "trained" not in names and signal.getsignal(signal.SIGINT) is signal.default_int_handler
        names["interrupted_in"] = 0
        exec(cell, names)
    os.chdir("..")
    print("trained", names["trained"])
"""
CELL = """
import os, signal, torch
from torch.utils.data import DataLoader, TensorDataset
from cluster_ddp.train import join_run

with join_run() as run:
    data = TensorDataset(torch.rand(72, 4))  # nothing seeds it but the block
    if "loader" not in globals():  # as where another cell makes it
        loader = DataLoader(data, batch_size=8, shuffle=True)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.5), torch.nn.Linear(4, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    loader = run.resumable(loader, model=model, optimizer=optimizer, epochs=1)
    for _ in loader.epochs():
        for step, (inputs,) in loader.enumerate():
            optimizer.zero_grad()
            model(inputs).square().mean().backward()
            optimizer.step()
            if step and step == interrupted_in:
                os.kill(os.getpid(), signal.SIGINT)
    trained = [float(weight.sum()) for weight in model.parameters()]
"""


def test_the_cell_of_a_notebook_goes_on_when_it_is_run_again(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", NOTEBOOK], input=CELL, cwd=tmp_path, text=True, capture_output=True,
        env={**os.environ, "PYTHONPATH": str(PROJECT), "CUDA_VISIBLE_DEVICES": ""}, timeout=PATIENCE,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("stopped as requested: run the same program, or the cell, again") == 1
    for folder, saved in (("0", {"step-00000009"}), ("4", {"step-00000005", "step-00000009"})):
        assert {path.name for path in (tmp_path / folder / "python.run" / "checkpoints").glob("step-*")} == saved
    interrupted, calm = (line for line in done.stdout.splitlines() if line.startswith("trained"))
    assert calm == interrupted


BEFORE_THE_DIFF = """
import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
dist.init_process_group("gloo")
data, model = TensorDataset(torch.rand(24, 4), torch.rand(24, 1)), torch.nn.Linear(4, 1)
"""


@pytest.mark.parametrize("dropped", "+-")
def test_the_diff_that_the_page_begins_with_is_of_a_loop_that_trains(dropped: str, tmp_path: Path) -> None:
    lines = block("docs/own-code.md", "diff").splitlines()
    program = tmp_path / "loop.py"
    program.write_text(BEFORE_THE_DIFF + "\n".join(line[1:] for line in lines if not line.startswith(dropped)))
    run = new_run(tmp_path / "run").path
    (made,) = run_ranks(be_rank, 1, program, [], run, 0)
    assert len(made) == 20 * 3
    assert newest(run) == (0 if dropped == "+" else 60)


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_page_says_how_many_lines_a_program_needs(name: str) -> None:
    lines = (FOLDER / f"{name}.diff").read_text().splitlines()
    added, removed = (sum(line[0] == sign and line[:3] != sign * 3 for line in lines) for sign in "+-")
    assert f"(own-code/{name}.diff) | -{removed} +{added} |" in PAGE
