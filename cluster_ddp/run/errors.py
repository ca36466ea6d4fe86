"""The errors of a run."""

from __future__ import annotations

import shlex
from pathlib import Path

from cluster_ddp import exit_statuses
from cluster_ddp.errors import ClusterDDPError
from cluster_ddp.run.run_state import RunState


class RunError(ClusterDDPError):
    """A run cannot be used as asked."""


class RunNotFound(RunError):
    """No run, or more than one, matches the given name."""


class RunAlive(RunError):
    """Another attempt of the run is alive, so no second one may write to it."""


class RunGone(RunError):
    """The directory of a run has vanished while it was training."""

    exit_status = exit_statuses.RUN_FAILED


class ElementWithdrawn(RunError):
    """The sweep of an element was stopped or cancelled before the element began."""

    exit_status = exit_statuses.RUN_ENDED


class RunEnded(RunError):
    """The run is completed, cancelled, stalled or failed; only a person's `resume` restarts it."""

    def __init__(self, message: str, state: RunState) -> None:
        super().__init__(message)
        self.state = state


def resume_command(run: Path | str) -> str:
    """Return the command that continues a run or a sweep, given its directory, its id or its settings."""
    return f"cluster-ddp resume {shlex.quote(str(run))}"


def to_continue(run: Path | str) -> str:
    """Return the sentence that tells a person how to continue a run or a sweep, to put at the end of an error."""
    return f"To continue: {resume_command(run)}"
