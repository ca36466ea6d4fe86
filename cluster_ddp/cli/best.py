"""The best checkpoint of a run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cluster_ddp.run.directory import RunDirectory

if TYPE_CHECKING:
    from cluster_ddp.checkpoint.verify import CheckpointInfo


def best_checkpoint(run: RunDirectory, listed: list[CheckpointInfo]) -> int | None:
    """The step of the best checkpoint by ``checkpoint.keep_best``; None where that is not set, or it has no metric."""
    from cluster_ddp.checkpoint.folders import best_step
    from cluster_ddp.job import ClusterDDPError, load_resolved

    try:
        wanted = load_resolved(run.job_file).checkpoint.keep_best
    except ClusterDDPError:
        return None
    if wanted is None:
        return None
    metrics = {info.manifest.step: info.manifest.metrics for info in listed if info.manifest is not None}
    return best_step(list(metrics), metrics, wanted.metric, wanted.mode)
