"""What can be wrong with a run."""

from __future__ import annotations

from cluster_ddp.job.errors import ClusterDDPError


class RunError(ClusterDDPError):
    """A run cannot be used as asked."""

    exit_status = 2


class RunNotFound(RunError):
    """No run, or more than one, goes by the name given."""


class RunAlive(RunError):
    """Another attempt of the run is alive, so no second one may write to it."""


class RunGone(RunError):
    """The directory of a run has vanished under its training."""

    exit_status = 4


class ElementWithdrawn(RunError):
    """The sweep of an element was stopped or cancelled before the element had begun."""

    exit_status = 76  # as of a run that only a person may start again


class RunEnded(RunError):
    """The run is completed, cancelled, stalled or failed; only a person's `resume` starts it again."""

    def __init__(self, message: str, state: str) -> None:
        super().__init__(message)
        self.state = state
