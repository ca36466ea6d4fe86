from __future__ import annotations

import pytest
from slurm_cluster import SlurmCluster
from small_job import PATIENCE, submit
from training_job import TrainingJob


@pytest.fixture(scope="session")
def calm(cluster: SlurmCluster, tmp_path_factory: pytest.TempPathFactory) -> TrainingJob:
    """The small run that nothing happens to."""
    training = submit(cluster, tmp_path_factory.mktemp("calm"))
    training.finish(timeout=PATIENCE)
    return training
