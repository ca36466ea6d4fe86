"""Workers: what goes wrong in one is told, and they live as long as their rank."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, default_collate
from train_tasks import CPU, fetch

from cluster_ddp.errors import Cause
from cluster_ddp.train.data import loader
from cluster_ddp.train.data.fetch import Fetcher
from cluster_ddp.train.data.loader import Loader, from_workers, set_up_worker
from cluster_ddp.train.own.data.loader_copy import LoaderCopy
from cluster_ddp.train.ranks.failure import cause_of


class Broken(Dataset[Tensor]):
    def __getitem__(self, index: int) -> Tensor:
        class NoSuchSample(Exception):
            pass

        raise NoSuchSample("of this index")


@pytest.mark.timeout(60)
def test_an_error_that_cannot_be_pickled_is_told() -> None:
    """A worker could not send it, and its rank waited for the batch until the watchdog ended it."""
    with pytest.raises(RuntimeError, match="NoSuchSample: of this index"):
        fetch(Broken(), (0, [4, 5]), workers=1)


class Unsendable(Dataset[Any]):
    def __getitem__(self, index: int) -> Any:
        return torch.zeros(1), (lambda: index)

    def __len__(self) -> int:
        return 4


@pytest.mark.timeout(60)
def test_a_batch_that_cannot_be_sent_is_told() -> None:
    """A worker's queue only prints such an error, and the rank waited for the batch until the watchdog ended it."""
    loader = DataLoader(Unsendable(), 2, num_workers=1, worker_init_fn=set_up_worker, collate_fn=list)
    with pytest.raises(Exception, match=r"could not send a batch(.*\n)*.*lambda"):
        next(iter(loader))


class Dying(Dataset[Tensor]):
    def __getitem__(self, index: int) -> Tensor:
        os.kill(os.getpid(), index)
        return torch.zeros(1)


@pytest.mark.timeout(60)
def test_a_worker_that_is_killed_is_told_with_the_signal() -> None:
    with pytest.raises(RuntimeError, match=r"exited unexpectedly: ended by SIGKILL, killed from outside") as raised:
        fetch(Dying(), (0, [int(signal.SIGKILL)]), workers=1)
    assert cause_of(raised.value) is Cause.HOST


class Garbage:
    """Cannot be freed in a worker, as a tensor on a GPU cannot: it would be aborted."""

    def __init__(self, mark: Path) -> None:
        self.itself, self.mark, self.rank = self, mark, os.getpid()

    def __del__(self) -> None:
        if os.getpid() != self.rank:
            self.mark.touch()


class Collecting(Dataset[Tensor]):
    def __getitem__(self, index: int) -> Tensor:
        gc.collect()
        return torch.tensor(float(gc.isenabled()))

    def __len__(self) -> int:
        return 2


@pytest.mark.parametrize(
    "start",
    [
        lambda: from_workers(Collecting(), [0, 1], workers=1, device=CPU),
        lambda: LoaderCopy(DataLoader(Collecting(), None, num_workers=1)),
    ],
    ids=["task", "own loop"],
)
def test_a_worker_leaves_the_garbage_of_its_rank_alone(start: Callable[[], Iterable[Tensor]], tmp_path: Path) -> None:
    gc.disable()  # else it could be collected here
    Garbage(tmp_path / "freed")
    gc.enable()
    assert [float(is_enabled) for is_enabled in start()] == [1.0, 1.0] and gc.isenabled()
    assert not (tmp_path / "freed").exists()


class Pids(Dataset[Tensor]):
    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor(os.getpid())


class Programs(Dataset[Tensor]):
    """Starts a program for each sample, such as a decoder, and ends it."""

    def __getitem__(self, index: int) -> Tensor:
        with subprocess.Popen(["sleep", "20"]) as program:
            program.terminate()
        return torch.tensor(program.returncode)


def test_a_program_that_a_worker_starts_can_be_terminated() -> None:
    """It ignored SIGTERM like its worker, which waited for it forever."""
    assert [int(status) for status in fetch(Programs(), (0, [4]), workers=1)] == [-signal.SIGTERM]


def test_workers_survive_the_signals_of_a_stop() -> None:
    """A signal to the process group reaches workers too; they go on, and are gone when the loader is closed."""
    plans = [(0, np.array([number])) for number in range(60)]
    loader = Loader(Fetcher(Pids(), default_collate, 1), plans, lambda plan: plan, workers=1, device=CPU)
    batches = iter(loader)
    worker = int(next(batches)[1][0])
    assert worker != os.getpid()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
        os.kill(worker, number)
    assert {int(batch[0]) for _, batch in (next(batches) for _ in range(30))} == {worker}
    loader.close()
    with pytest.raises(ProcessLookupError):
        os.kill(worker, 0)


WITH_A_FORK_SERVER = """
import multiprocessing, os, signal, sys, time, torch
from multiprocessing import forkserver
from cluster_ddp.train.data.loader import from_workers

class Numbers(torch.utils.data.Dataset):
    def __getitem__(self, index):
        return index

if __name__ == "__main__":
    multiprocessing.set_start_method("forkserver")
    multiprocessing.set_forkserver_preload(["json"])
    if "tracked" in sys.argv:
        lock = multiprocessing.Lock()
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, lambda *_: None)  # as a rank has handlers
    batches = from_workers(Numbers(), range(60), workers=1, device=torch.device("cpu"))
    first = next(batches)
    os.killpg(0, signal.SIGUSR1)
    os.killpg(0, signal.SIGTERM)
    print([first, *batches] == list(range(60)))
    own = multiprocessing.Process(target=time.sleep, args=(100,))
    own.start()
    own.terminate()
    own.join(20)
    print(own.exitcode)
    own.kill()
    print(forkserver._forkserver._preload_modules[0])
"""


@pytest.mark.parametrize("tracked", [("tracked",), ()])
def test_a_signal_to_the_process_group_leaves_the_server_that_forks_workers(
    tmp_path: Path, tracked: tuple[str, ...]
) -> None:
    """So workers start from Python 3.14 on; without the server all of them would seem to be dead.

    What the program itself starts ends on SIGTERM.
    """
    program = tmp_path / "program.py"
    program.write_text(WITH_A_FORK_SERVER)
    done = subprocess.run(
        [sys.executable, program, *tracked], capture_output=True, text=True, timeout=200, start_new_session=True
    )
    assert done.stdout == "True\n-15\njson\n", done.stderr


def test_what_a_queue_of_a_worker_s_own_cannot_send_is_printed(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(loader, "get_worker_info", lambda: SimpleNamespace(id=1))
    sent: list[Any] = []
    for message in (("loss", 1), (), (3, "of", "another form"), (3, "a batch")):
        try:
            raise ValueError(message)
        except ValueError as error:
            loader.send_instead(SimpleNamespace(put=sent.append), error, message)  # type: ignore[arg-type]
    assert [number for number, _ in sent] == [3]
    assert capfd.readouterr().err.count("\nValueError: ") == 3
