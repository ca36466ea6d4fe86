"""The batch plan of this attempt: the run's global batch, divided among the ranks that are here now."""

from __future__ import annotations

from cluster_ddp.run.directory import RunDirectory
from cluster_ddp.run.record import read_record, update_record
from cluster_ddp.spec import BatchPlan, TrainSpec, plan_batch
from cluster_ddp.train.distributed import World, broadcast_object


def agree_on_batches(train: TrainSpec, run: RunDirectory | None, world: World) -> BatchPlan:
    """Plan the batches. The first attempt of a run resolves the global batch and records it; later ones keep it.

    Raises
    ------
    BatchError
        The global batch cannot be divided among this many ranks; the message says among how many it could.
    """
    recorded = read_record(run).global_batch if run is not None and world.is_main else None
    known = broadcast_object(recorded)
    plan = plan_batch(train, world.world_size, known)
    if run is not None and world.is_main and known is None:
        update_record(run, global_batch=plan.global_batch)
    return plan
