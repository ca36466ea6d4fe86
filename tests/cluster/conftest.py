from __future__ import annotations

import fcntl
from typing import Any

import pytest
from light_agent import LIGHT_AGENT
from slurm_cluster import SlurmCluster
from small_job import ONE_RANK, PATIENCE, CalmRun, submit


@pytest.fixture
def light(cluster: SlurmCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """What this test submits or resumes has light agents: it is about Slurm, the keeper or the ranks."""
    monkeypatch.setitem(cluster.env, "PYTHONPATH", LIGHT_AGENT)


@pytest.fixture(scope="session")
def calm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> CalmRun:
    """The small run that nothing happens to."""
    return _made_once("calm", request, tmp_path_factory)


@pytest.fixture(scope="session")
def calm_alone(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> CalmRun:
    """The same on one rank."""
    return _made_once("calm-alone", request, tmp_path_factory, **ONE_RANK)


def _made_once(name: str, request: pytest.FixtureRequest, factory: pytest.TempPathFactory, **sections: Any) -> CalmRun:
    """A calm run; of several workers the first that asks for it makes it, for all."""
    folder = factory.getbasetemp()
    if hasattr(request.config, "workerinput"):  # each worker has a folder of its own in that of the session
        folder = folder.parent
    place = folder / name
    with (folder / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not place.is_symlink():
            cluster: SlurmCluster = request.getfixturevalue("cluster")
            with pytest.MonkeyPatch.context() as patch:
                patch.setitem(cluster.env, "PYTHONPATH", LIGHT_AGENT)
                training = submit(cluster, factory.mktemp(name), **sections)
            training.finish(timeout=PATIENCE)
            place.symlink_to(training.run)
    return CalmRun(place.resolve())
