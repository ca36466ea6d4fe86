from __future__ import annotations

from cluster_ddp.job import CheckpointSpec, JobSpec
from cluster_ddp.train.distributed import World
from cluster_ddp.train.saving import Saving


def test_a_checkpoint_is_due_every_so_many_steps_and_not_before_the_first() -> None:
    job = JobSpec(name="a", task="a.b:C", checkpoint=CheckpointSpec(every_steps=3))
    saving = Saving(job, None, None, 0, World(0, 0, 1))
    assert [step for step in range(10) if saving.is_due(step)] == [3, 6, 9]
