"""docs/own-code.md tells the truth: its programs, changed as their diffs say, go on exactly where they were left."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import runpy
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from documented import PROJECT, Call, finish
from own_loops import begin_attempt, new_run
from safetensors.numpy import load_file
from torch.optim.optimizer import register_optimizer_step_post_hook
from train_ranks import free_port, preload, run_ranks

from cluster_ddp.run.events import read_events
from cluster_ddp.train.distributed import broadcast_object

FOLDER = PROJECT / "docs" / "own-code"
PAGE = (PROJECT / "docs" / "own-code.md").read_text()
# Arguments; updates of the whole training, and those after which it is killed and stopped: in the middle of an epoch.
PROGRAMS = {
    "ddp": (["3"], 24, 11, 18),
    "imagenet": (["--epochs", "3"], 24, 11, 18),
    "nanogpt": (["19"], 20, 7, 13),
    "accelerated": (["4"], 20, 8, 13),
    "hf_trainer": (["3"], 18, 13, 15),
    "lit": (["3"], 18, 13, 15),
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


def be_rank(program: Path, arguments: list[str], place: Path, attempt: int, at: int | None, number: int) -> int:
    """Run a program as a rank; after update `at` of this attempt it gets the signal. Returns the updates it made."""
    if dist.is_initialized():  # the program does that
        port = broadcast_object(free_port())
        dist.destroy_process_group()
        os.environ["MASTER_PORT"] = str(port)
    begin_attempt(place, attempt)
    os.environ.update(ACCELERATE_USE_CPU="true", HF_HUB_OFFLINE="1", TORCHELASTIC_RUN_ID="as torchrun sets it")
    made = 0

    def count(*_: Any) -> None:
        nonlocal made
        made += 1
        if made == at:
            os.kill(os.getpid(), number)

    handle = register_optimizer_step_post_hook(count)
    os.chdir(program.parent)
    sys.argv = [str(program), *arguments]
    try:
        runpy.run_path(str(program), run_name="__main__")
    except SystemExit as end:  # a framework's program without a block ends there when it is stopped
        assert end.code == 0
    handle.remove()
    return made


def tensors(place: Path) -> dict[str, bytes]:
    """The bytes of all tensors of the last checkpoint."""
    last = max((place / "checkpoints").glob("step-*"))
    return {name: array.tobytes() for shard in last.glob("*.safetensors") for name, array in load_file(shard).items()}


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_changed_program_goes_on_exactly_after_a_kill_and_a_stop(name: str, tmp_path: Path) -> None:
    expect_here(name)
    program = changed(name, tmp_path)
    arguments, total, killed, stopped = PROGRAMS[name]
    calm, broken = new_run(tmp_path / "calm").path, new_run(tmp_path / "broken", every=4)
    assert run_ranks(be_rank, 2, program, arguments, calm, 0, None, 0) == [total] * 2
    with contextlib.suppress(AssertionError):  # of ranks that died
        run_ranks(be_rank, 2, program, arguments, broken.path, 0, killed, signal.SIGKILL)
        raise RuntimeError("it was not killed")
    batches = 2 if name == "accelerated" else 1  # of an update; a batch counts as a step
    first = (batches * killed - 1) // 4 * 4 // batches  # it died before the step of its last update was over
    last = stopped + 1  # two ranks agree in the step after the signal
    made = run_ranks(be_rank, 2, program, arguments, broken.path, 1, stopped - first, signal.SIGUSR1)
    assert made == [last - first] * 2
    assert run_ranks(be_rank, 2, program, arguments, broken.path, 2, None, 0) == [total - last] * 2
    told = [event["event"] for event in read_events(broken) if event["event"] not in ("checkpoint", "stop-requested")]
    assert told == ["started", "resumed", "stopped", "resumed", "completed"]
    assert tensors(broken.path) == tensors(calm)


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", ["imagenet", "hf_trainer", pytest.param("lit", marks=pytest.mark.chaos)])
def test_a_changed_program_goes_on_with_fewer_ranks(name: str, tmp_path: Path) -> None:
    expect_here(name)
    program = changed(name, tmp_path)
    run = new_run(tmp_path / "run")
    arguments, total, stopped, _ = PROGRAMS[name]
    made = run_ranks(be_rank, 2, program, arguments, run.path, 0, stopped, signal.SIGUSR1)
    (rest,) = run_ranks(be_rank, 1, program, arguments, run.path, 1, None, 0)
    assert (made[0], made[0] + rest) == (stopped + 1, total)


def test_a_changed_program_runs_without_the_launcher(tmp_path: Path, call: Call) -> None:
    program = changed("nanogpt", tmp_path)
    assert "iter 0: loss" in finish(call(program.stem, "4"))
    assert "all 5 steps of this run are done" in finish(call(program.stem, "4"))
    assert (tmp_path / "nanogpt.run" / "checkpoints" / "step-00000005").is_dir()


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_page_says_how_many_lines_a_program_needs(name: str) -> None:
    lines = (FOLDER / f"{name}.diff").read_text().splitlines()
    added, removed = (sum(line[0] == sign and line[:3] != sign * 3 for line in lines) for sign in "+-")
    assert f"(own-code/{name}.diff) | -{removed} +{added} |" in PAGE
