"""Fixtures for the whole house, and the rule that a cluster test may not be skipped where Slurm is required."""

from __future__ import annotations

import gc
import os
from collections.abc import Generator, Iterator

import pytest
from hypothesis import settings
from slurm_cluster import SlurmCluster, why_unavailable

# Small tasks on few cores: threads that wait for each other would cost more than they bring. Before torch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["CLUSTER_DDP_CONFIG"] = ""  # no defaults of the site where the tests run

gc.disable()  # until all is imported: a fifth of the time that this takes

# Beside other tests on few cores any example may take long; each test has its own bound.
settings.register_profile("tests", settings.default, deadline=None)
settings.load_profile("tests")

REQUIRE_SLURM = os.environ.get("REQUIRE_SLURM", "") not in ("", "0")
RUNNING: list[SlurmCluster] = []
LONG = ("zoo", "docs", "train")  # the folders whose files take longest, the longest file first
DISTRIBUTED = "PYTEST_XDIST_WORKER" in os.environ


def bring_up(proctrack: str, *, accounting: bool = False) -> Iterator[SlurmCluster]:
    if reason := why_unavailable(accounting=accounting):
        pytest.skip(reason)
    with SlurmCluster(proctrack, accounting=accounting) as running:
        RUNNING.append(running)
        yield running
        RUNNING.remove(running)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--cuda", action="store_true", help="train on the GPU of this machine: see `make test-cuda`")


def pytest_configure(config: pytest.Config) -> None:
    """Hide the GPUs from tests that are not about them, so that these are the same on every machine."""
    if not config.getoption("--cuda"):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


@pytest.fixture(scope="session")
def cluster() -> Iterator[SlurmCluster]:
    """A real Slurm of three nodes, under which every process of a step gets the step's signals."""
    yield from bring_up("linuxproc")


@pytest.fixture(scope="session")
def pgid_cluster() -> Iterator[SlurmCluster]:
    """Another one, under which only the process group that srun started gets them."""
    yield from bring_up("pgid")


@pytest.fixture(scope="module")
def accounting_cluster() -> Iterator[SlurmCluster]:
    """One with accounts, limits, and preemption by QOS."""
    yield from bring_up("linuxproc", accounting=True)


@pytest.fixture(autouse=True)
def clean_clusters(request: pytest.FixtureRequest) -> Iterator[None]:
    """Each test leaves the clusters idle, with all nodes up, whatever happened in it."""
    yield
    if request.node.get_closest_marker("cluster") is not None:
        for running in RUNNING:
            running.reset()


def _how_late(folder: str) -> int:
    return LONG.index(folder) if folder in LONG else len(LONG)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Whatever uses a cluster is marked so, and runs last: the quick tests speak first.

    With several workers it comes first, and after it what is long: each file goes to a worker as a whole (``--dist
    loadfile``), and a long one that begins late keeps the others waiting for its end.
    """
    for item in items:
        if {"cluster", "pgid_cluster", "accounting_cluster"} & set(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.cluster)
    if DISTRIBUTED:
        items.sort(key=lambda item: (item.get_closest_marker("cluster") is None, _how_late(item.path.parent.name)))
    else:
        items.sort(key=lambda item: item.get_closest_marker("cluster") is not None)


def pytest_collection_finish() -> None:
    """What the imports made is neither collected nor searched: a tenth of the time of what trains in this process."""
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Under REQUIRE_SLURM=1 a skipped cluster test is a failure; a failed one shows the daemons' logs."""
    report = yield
    if item.get_closest_marker("cluster") is None:
        return report
    if report.skipped and REQUIRE_SLURM and not hasattr(report, "wasxfail"):
        why = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        report.outcome = "failed"
        report.longrepr = f"{why}\nREQUIRE_SLURM is set: a cluster test that does not run is a failure."
    if report.failed:
        for running in RUNNING:
            report.sections.append((f"Slurm's logs (proctrack/{running.proctrack})", running.logs()))
    return report
