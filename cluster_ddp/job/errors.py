"""What is wrong in a job file."""

from __future__ import annotations

from cluster_ddp.errors import ClusterDDPError


class JobFileError(ClusterDDPError):
    """The job file, an override of it, or something that it names is wrong."""


class BatchError(ClusterDDPError):
    """The global batch cannot be divided among the ranks."""
