"""The table of faults on a real Slurm, whichever way the run was submitted: `make chaos` for all, a few by default.

What each fault cost is left in the folder CHAOS_TABLES; `python tests/cluster/fault_page.py` makes the page of it.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from chaos_faults import small_disk
from fault_harms import Scene
from fault_rows import ROWS
from fault_table import check, endure, write_result
from light_agent import LIGHT_AGENT
from same_training import assert_same_training
from slurm_cluster import SlurmCluster, why_unavailable
from small_job import CalmRun

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A small disk that all nodes see, so that it can be filled."""
    if reason := why_unavailable():
        pytest.skip(reason)
    with small_disk(tmp_path_factory.mktemp("faults") / "disk") as folder:
        yield folder


@pytest.fixture(scope="module")
def disk_cluster(disk: Path) -> Iterator[SlurmCluster]:
    """A cluster that was started when the disk was there already."""
    with SlurmCluster() as running:
        yield running


def cases() -> list[object]:
    return [
        pytest.param(name, via, marks=[] if via in row.short else [pytest.mark.chaos])
        for name, row in ROWS.items()
        for via in row.ways
    ]


@pytest.mark.parametrize(("name", "via"), cases())
def test_fault(
    disk_cluster: SlurmCluster,
    calm: CalmRun,
    disk: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    via: str,
) -> None:
    if ROWS[name].light:
        monkeypatch.setitem(disk_cluster.env, "PYTHONPATH", LIGHT_AGENT)
    scene = Scene(disk_cluster, via, disk / f"{list(ROWS).index(name):02}-{via}", disk)
    try:
        result = endure(scene, name)
        check(result, scene.run)
        if result.state == "COMPLETED":
            assert_same_training(scene.run.run, calm.run)
        if tables := os.environ.get("CHAOS_TABLES"):
            write_result(result, Path(tables) / "faults")
    except BaseException:
        shutil.copytree(scene.folder, tmp_path / "kept", ignore_dangling_symlinks=True)  # the disk goes
        raise
    finally:
        disk_cluster.reset()
        shutil.rmtree(scene.folder, ignore_errors=True)
