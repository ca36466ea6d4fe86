"""Errors that are not this package's are explained where that helps, and else left as they are."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset
from train_tasks import Plain, job, samples, train

from cluster_ddp.errors import Cause
from cluster_ddp.job import ClusterDDPError
from cluster_ddp.train import TaskError, load_task
from cluster_ddp.train.errors import DistributedError, TrainError
from cluster_ddp.train.ranks.failure import cause_of, explain


@pytest.mark.skipif(sys.version_info < (3, 11), reason="groups of exceptions are new in Python 3.11")
def test_a_group_of_errors_is_told_with_the_first_of_them() -> None:
    group = ExceptionGroup("several", [ValueError("bad shard 7"), TypeError("b")])  # noqa: F821
    assert explain(group) == "ExceptionGroup: several (2 sub-exceptions); the first: ValueError: bad shard 7"


@pytest.mark.skipif(sys.version_info < (3, 11), reason="notes are new in Python 3.11")
def test_the_notes_of_an_error_are_told_with_it() -> None:
    error = ValueError("bad shape\nof x")
    error.add_note("in shard 7,\n  sample 3")  # type: ignore[attr-defined]
    assert explain(error) == "ValueError: bad shape; in shard 7, sample 3\nof x"


def test_an_error_without_words_is_told_by_its_name_alone() -> None:
    assert explain(KeyboardInterrupt()) == "KeyboardInterrupt"
    assert explain(MemoryError()).endswith("(MemoryError)")


def test_an_exit_is_told_as_such_unless_it_has_words_of_its_own() -> None:
    assert explain(SystemExit(0)).startswith("the program called sys.exit(0) before its training was over")
    assert explain(SystemExit("no data")) == "SystemExit: no data"


def test_a_single_sample_of_a_set_without_a_length_is_explained() -> None:
    with pytest.raises(ValueError, match="more than 1 value") as raised:
        nn.BatchNorm1d(3)(torch.ones(1, 3))
    assert "train.drop_last: true" in explain(raised.value)


def test_a_second_process_group_is_explained() -> None:
    error = ValueError("trying to initialize the default process group twice!")
    assert "call init_process_group() before the block of join_run()" in explain(error)


def test_a_graph_that_the_trainer_does_not_keep_is_explained() -> None:
    """torch_optimizer's Adahessian shows what it needs only by an error of its first step."""
    error = RuntimeError("When calling loss.backward(), make sure the option create_graph is set to True.")
    assert "the optimizer needs second derivatives" in explain(error)


@pytest.mark.parametrize("kind", [RuntimeError, DistributedError])
def test_a_limit_of_processes_is_explained(kind: type[Exception]) -> None:
    assert "ulimit -u" in explain(kind("can't start new thread"))


def raised_from(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


ITSELF = ValueError("x")


@pytest.mark.parametrize(("error", "cause"), [
    (TrainError("train.comm_hook: bf16 needs CUDA with NCCL; fp16 works with Gloo too"), Cause.PROGRAM),
    (ValueError("no such socket type"), Cause.PROGRAM),
    (ConnectionResetError(104, "Connection reset by peer"), Cause.OUTSIDE),
    (RuntimeError("CUDA error: uncorrectable ECC error encountered"), Cause.HOST),
    (raised_from(TaskError("the data cannot be read"), OSError(5, "Input/output error")), Cause.HOST),
    (raised_from(RuntimeError("shard 7"), ConnectionResetError(104, "Connection reset by peer")), Cause.OUTSIDE),
    (DistributedError("rank 0 cannot meet the others", cause=Cause.OUTSIDE), Cause.OUTSIDE),
    (raised_from(ITSELF, ITSELF), Cause.PROGRAM),
])  # fmt: skip
def test_our_own_words_do_not_decide_what_caused_an_error(error: Exception, cause: Cause) -> None:
    """A refusal that names NCCL was tried again as if the network had failed."""
    assert cause_of(error) is cause


FAULTY = """
from cluster_ddp.train import Task

class Wrong(Task):
    def __init__(self, size=1):
        self.size = size + "wide"
"""


def test_a_type_error_inside_init_is_the_users_own(tmp_path: Path) -> None:
    (tmp_path / "faulty_task.py").write_text(FAULTY)
    with pytest.raises(TypeError, match="unsupported operand"):
        load_task(f"{tmp_path}/faulty_task.py:Wrong", {})
    with pytest.raises(TaskError, match="does not take these params: got an unexpected keyword argument 'width'"):
        load_task(f"{tmp_path}/faulty_task.py:Wrong", {"width": 2})


class Collating(Plain):
    def train_data(self) -> Dataset[Any]:
        return TensorDataset(*samples())

    def collate(self, items: list[Any]) -> Any:
        return {"a": 1}["b"]


def test_a_key_error_in_collate_is_the_users_own() -> None:
    with pytest.raises(KeyError) as raised:
        train(Collating(), job(train={"steps": 6, "global_batch": 24}))
    assert "collate" in [entry.name for entry in raised.traceback]


def test_what_is_printed_of_an_error_begins_at_the_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    program = tmp_path / "mine.py"
    program.write_text("from cluster_ddp.train import join_run\n\nwith join_run('here'):\n    [][3]\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        runpy.run_path(str(program))
    head, first, *_ = capfd.readouterr().err.splitlines()
    assert (head, first) == ("Traceback (most recent call last):", f'  File "{program}", line 4, in <module>')


def test_a_refusal_names_the_line_of_the_program_that_led_to_it(tmp_path: Path) -> None:
    """Not the package's own, nor that of a library; also where the program lies in a folder with a like name."""
    program = tmp_path / "cluster_ddp_jobs" / "mine.py"
    program.parent.mkdir()
    program.write_text("from cluster_ddp.train import load_task\n\nload_task('nowhere.py:Mine', {})\n")
    with pytest.raises(ClusterDDPError) as refused:
        runpy.run_path(str(program))
    assert explain(refused.value).endswith("\n    (mine.py, line 3)")
