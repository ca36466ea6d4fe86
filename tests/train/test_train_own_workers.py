"""The workers of an own loader, and the server that may fork them: what signals do to them, and when they end."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import time
from multiprocessing import forkserver
from pathlib import Path

import pytest
import torch
from own_loops import begin_attempt, new_run, tensors
from torch.utils.data import DataLoader, Dataset, TensorDataset
from train_ranks import run_ranks
from waiting import wait_for

from cluster_ddp.train import join_run
from cluster_ddp.train.own.data.loader_copy import LoaderCopy

PATIENCE = 60.0


class Protected(Exception):
    """In place of starting the server."""


@pytest.fixture
def _server(monkeypatch: pytest.MonkeyPatch) -> None:
    def start() -> None:
        raise Protected

    monkeypatch.setattr(forkserver, "ensure_running", start)


def loader(context: str | None) -> LoaderCopy:
    return LoaderCopy(DataLoader(tensors(), 22, num_workers=1, multiprocessing_context=context))


@pytest.mark.usefixtures("_server")
def test_a_server_that_the_loader_itself_asks_for_is_protected() -> None:
    with pytest.raises(Protected):
        list(loader("forkserver"))


@pytest.mark.usefixtures("_server")
def test_a_server_that_is_the_default_is_protected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(multiprocessing, "get_start_method", lambda: "forkserver")
    with pytest.raises(Protected):
        list(loader(None))
    assert len(list(loader("fork"))) == 2


def test_workers_that_the_program_has_used_before_are_not_taken_over() -> None:
    """Lightning has begun to iterate the loader by then, and a program may have computed statistics by it."""
    own = DataLoader(TensorDataset(torch.zeros(4)), 2, num_workers=1, persistent_workers=True)
    list(own)
    copied = LoaderCopy(own)
    copied.put(dataset=TensorDataset(torch.ones(4)))
    assert [float(batch.sum()) for (batch,) in copied] == [2.0, 2.0]
    copied.close()
    assert [float(batch.sum()) for (batch,) in own] == [0.0, 0.0]


class SlowFirst(Dataset[int]):
    """Samples of which the first is ready last."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        time.sleep(0.5 * (index == 0))
        return index


def test_batches_come_in_order_whichever_worker_is_ready_first() -> None:
    own = DataLoader(SlowFirst(), num_workers=2)
    own.in_order = False  # an argument since torch 2.6
    assert [int(batch) for batch in LoaderCopy(own)] == [0, 1, 2, 3]


@pytest.mark.timeout(60)
def test_a_worker_that_ends_is_told_with_its_status() -> None:
    copied = LoaderCopy(DataLoader(TensorDataset(torch.zeros(4)), num_workers=1, worker_init_fn=lambda _: os._exit(7)))
    with pytest.raises(RuntimeError, match=r"exited unexpectedly: exit status 7"):
        list(copied)


def forked_in_a_rank(place: Path) -> list[str]:
    """What Python reports of a rank from its first fork on."""
    reported: list[str] = []
    begin_attempt(place, 0)
    with join_run():
        sys.addaudithook(lambda event, _: reported.append(event))
        if (child := os.fork()) == 0:
            os._exit(0)
        os.waitpid(child, 0)
    return reported[reported.index("os.fork") :]


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="the fork of this Python does not hang")
def test_a_rank_forks_only_when_no_thread_holds_the_lock_that_its_worker_would_wait_for(tmp_path: Path) -> None:
    """In CI a worker hung so in two of three runs, with pyarrow and Gloo; in a trial 10 of 23,000 forks, and then 0."""
    (reported,) = run_ranks(forked_in_a_rank, 1, new_run(tmp_path).path)
    assert reported[:2] == ["os.fork", "sys._current_frames"]


# Tells its workers, and is killed.
KILLED = """
import multiprocessing, os, signal, sys, torch
from torch.utils.data import DataLoader, Dataset, TensorDataset
from cluster_ddp.train.own.data.loader_copy import LoaderCopy

if __name__ == "__main__":
    data = TensorDataset(torch.arange(64.0))
    batches = iter(LoaderCopy(DataLoader(data, 1, num_workers=1, multiprocessing_context=sys.argv[1])))
    next(batches)
    print(*(child.pid for child in multiprocessing.active_children()), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="asks /proc, which only Linux has")
@pytest.mark.parametrize("context", ["fork", "forkserver", pytest.param("spawn", marks=pytest.mark.chaos)])
def test_workers_end_with_a_rank_that_is_killed(context: str, tmp_path: Path) -> None:
    program = tmp_path / "killed.py"
    program.write_text(KILLED)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    with subprocess.Popen([sys.executable, program, context], env=environment, stdout=subprocess.PIPE) as rank:
        assert rank.stdout is not None
        workers = rank.stdout.readline().split()
    assert len(workers) == 1
    wait_for(lambda: not any(is_alive(worker.decode()) for worker in workers), "the end of the workers", PATIENCE)


def is_alive(process: str) -> bool:
    stat = Path("/proc", process, "stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"
