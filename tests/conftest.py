"""Fixtures for the whole house, and the rule that a cluster test may not be skipped where Slurm is required."""

from __future__ import annotations

import os
import sys
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).with_name("cluster")))

from slurm_cluster import SlurmCluster, why_unavailable

REQUIRE_SLURM = os.environ.get("REQUIRE_SLURM", "") not in ("", "0")


@pytest.fixture(scope="session")
def cluster(request: pytest.FixtureRequest) -> Iterator[SlurmCluster]:
    """A real Slurm of three nodes; "pgid" as an indirect parameter gives one with proctrack/pgid."""
    if reason := why_unavailable():
        pytest.skip(reason)
    with SlurmCluster(proctrack=getattr(request, "param", "linuxproc")) as running:
        yield running


@pytest.fixture(autouse=True)
def clean_cluster(request: pytest.FixtureRequest) -> Iterator[None]:
    """Each test leaves the cluster idle, with all nodes up, whatever happened in it."""
    yield
    running = request.node.funcargs.get("cluster")
    if isinstance(running, SlurmCluster):
        running.reset()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Whatever uses the cluster is marked so, and runs last: the quick tests speak first."""
    for item in items:
        if "cluster" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.cluster)
    items.sort(key=lambda item: item.get_closest_marker("cluster") is not None)


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
    running = getattr(item, "funcargs", {}).get("cluster")
    if report.failed and isinstance(running, SlurmCluster):
        report.sections.append(("Slurm's logs", running.logs()))
    return report
