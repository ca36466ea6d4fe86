"""Chaos on a real Slurm: whatever happens to a run, it completes by itself with the bits of a calm one.

``make chaos`` runs the long form: CHAOS_FAULTS faults (24) in an order drawn from CHAOS_SEED (1), under each way that
Slurm may track processes. What each fault cost is printed, and written to the folder CHAOS_TABLES.
"""

from __future__ import annotations

import os
import shutil
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from chaos import Cost, endure, most_repeated, submit_chaos, table
from chaos_faults import FAULTS, Scene, Strike, schedule, small_disk
from light_agent import LIGHT_AGENT
from same_training import assert_every_sample_once, assert_same_training
from slurm_cluster import SlurmCluster, why_unavailable
from training_job import SAMPLES, STEPS_PER_EPOCH

SEED = int(os.environ.get("CHAOS_SEED", "1"))
COUNT = int(os.environ.get("CHAOS_FAULTS", "24"))
SHORT = ["kill -9 of an agent", "damaged checkpoint", "full disk"]

pytestmark = pytest.mark.cluster


@pytest.fixture
def disk(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    if reason := why_unavailable():
        pytest.skip(reason)
    failed = request.session.testsfailed
    with small_disk(tmp_path / "disk") as folder:
        yield folder
        if request.session.testsfailed > failed:
            shutil.copytree(folder, tmp_path / "kept")  # the disk goes, and with it what would tell why


def test_schedule_is_repeatable_and_holds_every_kind() -> None:
    nodes = ("node1", "node2", "node3")
    strikes = schedule(5, 24, list(FAULTS), nodes)
    assert strikes == schedule(5, 24, list(FAULTS), nodes)
    assert strikes != schedule(6, 24, list(FAULTS), nodes)
    assert len(strikes) == 24
    assert {strike.kind for strike in strikes} == set(FAULTS)


@pytest.mark.timeout(900)
def test_short_chaos(disk: Path) -> None:
    suffer("linuxproc", disk, schedule(SEED, len(SHORT), SHORT, ("node1", "node2")), nodes=2)


@pytest.mark.chaos
@pytest.mark.timeout(4 * 3600)
@pytest.mark.parametrize("proctrack", ["linuxproc", "pgid"])
def test_long_chaos(proctrack: str, disk: Path) -> None:
    suffer(proctrack, disk, schedule(SEED, COUNT, list(FAULTS), ("node1", "node2", "node3")), nodes=3)


def suffer(proctrack: str, disk: Path, strikes: list[Strike], *, nodes: int) -> None:
    """Let a run and a calm twin of it train, the one under the faults, and compare."""
    with SlurmCluster(proctrack) as cluster:
        with pytest.MonkeyPatch.context() as patch:
            if nodes == 2:  # light agents do not know which one they are of more
                patch.setitem(cluster.env, "PYTHONPATH", LIGHT_AGENT)
            calm = submit_chaos(cluster, disk / "calm", faults=len(strikes), nodes=nodes, braked=False)
        calm.finish(timeout=600)
        began = time.monotonic()
        training = submit_chaos(cluster, disk / "chaos", faults=len(strikes), nodes=nodes, braked=True)
        costs = endure(Scene(cluster, training, disk), strikes)
        training.full_speed()
        status = training.finish(timeout=600)
        seconds = time.monotonic() - began
        report(costs, f"proctrack/{proctrack}, seed {SEED}: {len(costs)} faults in {seconds:.0f} s")
        assert status["state"] == "COMPLETED", training.story()
        assert_same_training(training.run, calm.run)
        assert_every_sample_once(training.run, SAMPLES, STEPS_PER_EPOCH)
        happened = Counter(event["event"] for event in training.events())
        kinds = Counter(strike.kind for strike in strikes)
        assert happened["checkpoint-damaged"] == kinds["damaged checkpoint"], training.story()
        # An attempt may end before it has resumed: a late message of Slurm's for the one before may reach it.
        restarts = sum(FAULTS[strike.kind].restarts for strike in strikes)
        assert restarts <= happened["resumed"] <= status["attempts"] - 1, training.story()
    assert [cost for cost in costs if cost.repeated > most_repeated(cost.strike)] == []


def report(costs: list[Cost], title: str) -> None:
    """Print what the faults cost, and keep it where the one who called `make chaos` finds it."""
    text = table(costs, title)
    print(f"\n{text}")
    if folder := os.environ.get("CHAOS_TABLES"):
        path = Path(folder) / f"{title.split(':')[0].replace('/', '-').replace(', ', '-').replace(' ', '-')}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
