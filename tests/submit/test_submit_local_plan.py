"""Which devices and how many ranks each node of a local run gets."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest

from cluster_ddp.job import JobSpec
from cluster_ddp.submit import local, machine
from cluster_ddp.submit.base import SubmitError, check_writable

SCRIPT = JobSpec(name="a", script="train.py")


@pytest.mark.parametrize(
    ("arguments", "devices", "procs"),
    [
        ({"nodes": 2, "gpus": "0,1,3,5"}, (("0", "1"), ("3", "5")), 2),
        ({"nodes": 1, "gpus": "3", "procs": 1}, (("3",),), 1),
        ({"nodes": 2, "gpus": "none", "procs": 3}, ((), ()), 3),
        ({"gpus": "GPU-8f0a,MIG-11bb"}, (("GPU-8f0a", "MIG-11bb"),), 2),
    ],
)
def test_devices_are_divided_among_the_nodes(
    arguments: dict[str, Any], devices: Any, procs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "all_devices", lambda: ["0"])
    start = local.plan_local(SCRIPT, **arguments)
    assert (start.gpus, start.procs) == (devices, procs)
    for node, share in enumerate(devices):
        assert start.variables(node)["CUDA_VISIBLE_DEVICES"] == ",".join(share)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"nodes": 2, "gpus": "0,1,2"}, "divided among 2 nodes"),
        ({"gpus": "0,1", "procs": 3}, "--gpus none"),
        ({"gpus": "0,0"}, "once"),
        ({"gpus": "x"}, r"--gpus x is not a list of devices such as 0,1 \(or none\)"),
        ({"gpus": "0,"}, "is not a list of devices"),
        ({"gpus": "-1"}, "is not a list of devices"),
    ],
)
def test_devices_that_do_not_fit_are_refused(
    arguments: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "all_devices", lambda: ["0"])
    with pytest.raises(SubmitError, match=words):
        local.plan_local(SCRIPT, **arguments)


@pytest.mark.parametrize("has_gpu", [False, True])
def test_without_nvidia_smi_torch_knows_whether_there_are_gpus(has_gpu: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "all_devices", list)
    monkeypatch.setattr("torch.cuda.is_available", lambda: has_gpu)
    if has_gpu:
        assert local.plan_local(SCRIPT, gpus="0,1").procs == 2
        return
    with pytest.raises(SubmitError, match=r"--gpus 0,1: there is no GPU on this machine; --procs P instead"):
        local.plan_local(SCRIPT, gpus="0,1")


def test_visible_devices_are_used_and_without_any_there_is_one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    start = local.plan_local(SCRIPT)
    assert (start.gpus, start.procs) == ((("4", "6"),), 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    start = local.plan_local(SCRIPT)
    assert (start.gpus, start.procs) == (((),), 1)
    assert "CUDA_VISIBLE_DEVICES" not in start.variables(0)


def test_a_start_says_that_it_waits_for_storage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    timer, exists = threading.Timer, Path.exists
    monkeypatch.setattr(threading, "Timer", lambda _seconds, *what: timer(0.01, *what))
    monkeypatch.setattr(Path, "exists", lambda path: (time.sleep(0.1), exists(path))[1])
    check_writable(tmp_path)
    assert "waiting for the storage of the runs to answer" in capsys.readouterr().err
