"""`cluster-ddp launch`: several machines without Slurm, each of which is given the same command."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from light_agent import LIGHT_AGENT
from same_training import newest_tensors, training_values
from slurm_cluster import why_unavailable
from training_job import write_job
from virtual_hosts import Network
from waiting import PATIENCE, wait_for

from cluster_ddp.run.attempt_record import list_attempts
from cluster_ddp.run.directory import RunDirectory
from cluster_ddp.submit.arrivals import parse_arrival

HERE = Path(__file__).parent
PROJECT = HERE.parents[1]
ON_LOOPBACK = ("--master-addr", "127.0.0.1")

Call = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def call(tmp_path: Path) -> Iterator[Call]:
    """Start `cluster-ddp ...`, on another machine if `within` says so; `light` where torchrun is not meant."""
    # Ranks of other folders meet on GLOO_SOCKET_IFNAME=lo, which their conftest.py sets; two hosts never would.
    foreign = ("SLURM_", "CUDA_", "GLOO_", "NCCL_", "MASTER_")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
    environment |= {"PYTHONPATH": str(PROJECT), "OMP_NUM_THREADS": "1"}
    environment.pop("CLUSTER_DDP_RUNS", None)
    started: list[subprocess.Popen[str]] = []

    def start(*arguments: str, within: tuple[str, ...] = (), light: bool = False) -> subprocess.Popen[str]:
        command = [*within, sys.executable, "-m", "cluster_ddp", *arguments]
        env = environment | ({"PYTHONPATH": LIGHT_AGENT} if light else {})
        pipe = subprocess.PIPE
        started.append(subprocess.Popen(command, cwd=tmp_path, env=env, text=True, stdout=pipe, stderr=pipe))
        return started[-1]

    yield start
    for process in started:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        process.communicate()


@pytest.fixture
def hosts() -> Iterator[Network]:
    if reason := why_unavailable():
        pytest.skip(reason)
    network = Network(["first", "second"])
    network.start()
    yield network
    network.stop()


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """A job that trains nothing, but takes part as any script does."""
    job = tmp_path / "job.yaml"
    job.write_text(f"name: by-hand\nscript: {HERE / 'beating_rank.py'}\nargs: ['30']\nlaunch: {{procs_per_node: 1}}\n")
    return job


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=PATIENCE)
    return process.returncode, out, err


def trained(run: RunDirectory) -> int:
    """How many steps were logged."""
    return run.metrics_file.read_text().count("\n") if run.metrics_file.exists() else 0


def launch(node: int, *options: str, run: str = "pair", job: str = "job.yaml") -> list[str]:
    size = ("--nnodes", "2", "--node-rank", str(node))
    return ["launch", job, "--run", run, *size, *(options or ON_LOOPBACK)]


def arrivals(folder: Path) -> list[int]:
    """The nodes that wait for others."""
    with contextlib.suppress(OSError):
        names = os.listdir(folder / "runs/pair/arrivals")
        return sorted(found.node for name in names if (found := parse_arrival(name)))
    return []


@pytest.mark.timeout(900)
@pytest.mark.parametrize("losses", [0, pytest.param(1, marks=pytest.mark.chaos)])
def test_two_machines_train_stop_and_go_on_by_the_same_commands(
    tmp_path: Path, call: Call, hosts: Network, losses: int
) -> None:
    job = str(write_job(tmp_path, braked=True, train={"epochs": 2}, launch={"procs_per_node": 1}))
    master = ("--master-addr", hosts.hosts["first"].address)

    def start(*, light: bool = False) -> list[subprocess.Popen[str]]:
        inside = [tuple(machine.enter()) for machine in hosts.hosts.values()]
        return [call(*launch(node, *master, job=job), within=inside[node], light=light) for node in (1, 0)]

    def look() -> dict[str, Any]:
        status, out, err = finish(call("status", str(run.path), "--json"))
        assert status == 0, err
        found: dict[str, Any] = json.loads(out)
        return found

    run = RunDirectory(tmp_path / "runs/pair")
    nodes = start()
    if losses:
        wait_for(lambda: trained(run) > 12 or nodes[1].poll() is not None, "it trains beyond a checkpoint")
        hosts.hosts["second"].kill_all()
        status, _, err = finish(nodes[1])
        assert status == 4 and "FAILED" in err and "second" in err and "run the same commands again" in err, err
        found = look()
        assert found["state"] == "FAILED" and "node 1 (second) was lost" in found["reason"], found
        nodes = start()
    before = trained(run)
    wait_for(lambda: trained(run) > before + 3 or nodes[1].poll() is not None, "it trains")
    assert look()["state"] == "RUNNING"
    status, _, err = finish(
        call(*launch(1, *master, job=job))
    )  # from a third machine, while the run lives on those two
    assert status == 2 and f"is alive: attempt {losses} on host first" in err
    assert finish(call("stop", str(run.path)))[0] == 0
    assert [finish(node)[0] for node in nodes] == [5, 5]
    status, _, err = finish(call("resume", str(run.path)))
    assert status == 2 and "cluster-ddp launch" in err and "--master-addr first" in err

    (tmp_path / "brake").unlink()
    ended = [finish(node) for node in start(light=True)]
    assert [status for status, *_ in ended] == [0, 0], ended
    assert all("COMPLETED" in err for *_, err in ended)
    again = finish(call(*launch(1, *master, job=job)))
    assert again[0] == 0 and "is complete" in again[2]

    assert finish(call("local", "job.yaml", "--nodes", "2", light=True))[0] == 0
    (other,) = (path for path in (tmp_path / "runs").iterdir() if path != run.path)
    here, there = newest_tensors(run.path), newest_tensors(other)
    assert here.keys() == there.keys() and all(here[name].equal(there[name]) for name in here)
    assert training_values(run.path) == training_values(other)
    assert len(list_attempts(run)) == 2 + losses
    assert arrivals(tmp_path) == []


def test_node_that_does_not_come_is_named_and_costs_no_attempt(tmp_path: Path, call: Call, script: Path) -> None:
    elsewhere = ("--master-addr", "192.0.2.1")  # of no machine, see RFC 5737
    status, _, err = finish(call(*launch(0, *elsewhere, "--set", "launch.join_timeout=1")))
    assert status == 4
    assert "192.0.2.1 is not an address of this machine" in err
    assert "node 1 (rank 1)" in err and "launch.join_timeout" in err and "--node-rank" in err
    assert "Traceback" not in err
    run = RunDirectory(tmp_path / "runs/pair")
    assert list_attempts(run) == [] and arrivals(tmp_path) == []
    status, out, _ = finish(call("status", "pair", "--json"))
    assert json.loads(out)["state"] == "PENDING"
    status, _, err = finish(call("stop", "pair"))
    assert status == 2 and "waiting for each other" in err and "queue" not in err


def test_node_0_of_a_name_that_is_unknown_is_refused_at_once(tmp_path: Path, call: Call, script: Path) -> None:
    status, _, err = finish(call(*launch(1, "--master-addr", "no-such-node.invalid")))
    assert status == 2 and "--master-addr no-such-node.invalid: " in err and "cannot resolve that name" in err
    assert not (tmp_path / "runs/pair").exists()


def test_second_job_and_another_size_are_refused_while_the_first_waits(
    tmp_path: Path, call: Call, script: Path
) -> None:
    waiting = call(*launch(1), light=True)
    wait_for(lambda: arrivals(tmp_path) == [1], "node 1 waits")
    status, _, err = finish(call(*launch(0, *ON_LOOPBACK, "--set", "train.lr=0.5")))
    assert status == 2 and "belongs to another job: train.lr is 0.001 there, 0.5 here" in err
    status, _, err = finish(call(*launch(0, *ON_LOOPBACK, "--procs", "2")))
    assert status == 2 and "1 ranks, and node 0 here for 2 of 2" in err
    twin = call(*launch(1))
    wait_for(lambda: arrivals(tmp_path) == [1, 1], "node 1 was started twice")
    first = call(*launch(0), light=True)
    assert first.stderr is not None
    assert "one of the 2 starts of node 1 to end" in first.stderr.readline()
    twin.kill()
    assert finish(first)[0] == 0
    status, _, err = finish(waiting)
    assert status == 0 and "COMPLETED" in err, err


def test_cancelling_ends_the_waiting(tmp_path: Path, call: Call, script: Path) -> None:
    waiting = call(*launch(1))
    wait_for(lambda: arrivals(tmp_path) == [1], "node 1 waits")
    assert finish(call("cancel", "pair"))[0] == 0
    status, _, err = finish(waiting)
    assert status == 2 and "was cancelled while its nodes waited" in err
    assert arrivals(tmp_path) == []


def test_failure_on_one_machine_ends_the_other_and_is_named_on_both(tmp_path: Path, call: Call, script: Path) -> None:
    (tmp_path / "bad.py").write_text("import os, time\nif os.environ['RANK'] == '1': raise KeyError('lr')\n")
    settings = [*ON_LOOPBACK, "--set", "script=bad.py", "--set", "args=[]"]
    nodes = [call(*launch(node, *settings)) for node in (0, 1)]
    for status, _, err in map(finish, nodes):
        assert status == 4 and "FAILED" in err and "KeyError: 'lr'" in err, err
        assert "run the same commands again" in err


def test_printed_commands_are_those_of_all_nodes(tmp_path: Path, call: Call, script: Path) -> None:
    status, out, err = finish(call("launch", "job.yaml", "--run", "pair", "--nnodes", "2", *ON_LOOPBACK, "--print"))
    assert status == 0
    environment = {**os.environ, "PYTHONPATH": str(PROJECT)}
    for node, line in enumerate(out.splitlines()):
        there = subprocess.run(
            ["bash", "-c", f"{line} --dry-run"], cwd="/", env=environment, text=True, capture_output=True, check=True
        )
        assert f"is_host={int(node == 0)}" in there.stdout and "--rdzv-id=pair.0" in there.stdout
    assert not (tmp_path / "runs").exists()
    pdsh = shlex.split(err.splitlines()[-1].lstrip("# "))
    assert pdsh[:3] == ["or:", "pdsh", "-w"]
    assert pdsh[-1].replace("%n", "1") == out.splitlines()[1]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--run", "../else", "--node-rank", "0"], "--run ../else"),
        (["--run", "pair", "--node-rank", "2"], "numbered from 0 to 1"),
        (["--run", "pair"], "--node-rank"),
    ],
)
def test_wrong_calls_are_refused(call: Call, script: Path, options: list[str], words: str) -> None:
    status, _, err = finish(call("launch", "job.yaml", "--nnodes", "2", *ON_LOOPBACK, *options))
    assert status == 2 and words in err and "Traceback" not in err
