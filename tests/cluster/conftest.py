from __future__ import annotations

import fcntl

import pytest
from small_job import PATIENCE, CalmRun, submit


@pytest.fixture(scope="session")
def calm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> CalmRun:
    """The small run that nothing happens to; of several workers the first that asks for it makes it, for all."""
    folder = tmp_path_factory.getbasetemp()
    if hasattr(request.config, "workerinput"):  # each worker has a folder of its own in that of the session
        folder = folder.parent
    place = folder / "calm"
    with (folder / "calm.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not place.is_symlink():
            training = submit(request.getfixturevalue("cluster"), tmp_path_factory.mktemp("calm"))
            training.finish(timeout=PATIENCE)
            place.symlink_to(training.run)
    return CalmRun(place.resolve())
