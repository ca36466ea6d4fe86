"""Errors raised on a rank that the user can fix."""

from __future__ import annotations

from cluster_ddp.errors import ClusterDDPError


class TrainError(ClusterDDPError):
    """Training cannot start or continue; the message names the setting to change."""

    exit_status = 1


class TaskError(TrainError):
    """The task does not fulfil its contract: its model, loss, metrics or state."""


class DataError(TrainError):
    """The data set or its batches cannot be trained on."""


class NonFiniteError(TrainError):
    """The loss or the gradients were not finite for more steps than `train.max_bad_steps` allows."""


class DistributedError(TrainError):
    """The ranks cannot find each other, or cannot be started from here."""


class SecondLoopError(TrainError):
    """A program has more than one loop in blocks of `join_run`, but a run has only one."""

    comes_back = True

    def __init__(self) -> None:
        super().__init__(
            "a run has one loop: resumable(), steps() or resume() was called before, in this block of join_run() or "
            "in an earlier one. Put a second training, such as fine-tuning, into a separate program and run; if an "
            "epoch should use different samples, let a sampler with set_epoch(epoch) choose them"
        )
