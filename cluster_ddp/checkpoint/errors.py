"""Errors about checkpoints."""

from __future__ import annotations

from dataclasses import dataclass

from cluster_ddp import exit_statuses
from cluster_ddp.errors import ClusterDDPError
from cluster_ddp.words import listed

_SHOWN = 12  # names of each kind of difference


class CheckpointError(ClusterDDPError):
    """A checkpoint cannot be written or read as asked."""

    exit_status = exit_statuses.RUN_FAILED


class NoSuchCheckpoint(CheckpointError):
    """The requested checkpoint was never saved, so the request is wrong."""

    exit_status = exit_statuses.WRONG_INPUT


class CannotExport(CheckpointError):
    """The file that was named for the weights cannot be written."""

    exit_status = exit_statuses.WRONG_INPUT


class CheckpointDamaged(CheckpointError):
    """A checkpoint differs from what was written."""

    def __init__(self, folder: str, problems: list[str]) -> None:
        super().__init__(f"checkpoint {folder} is damaged: {'; '.join(problems)}")
        self.problems = problems


class CheckpointOfAnotherRun(CheckpointError):
    """Another run saved the checkpoint; this run neither loads nor changes it."""

    def __init__(self, folder: str, theirs: str, ours: str) -> None:
        self.problem = f"of another run, {theirs}; this run is {ours}"
        super().__init__(f"checkpoint {folder} is {self.problem}")


class NoIntactCheckpoint(CheckpointError):
    """All checkpoints of a run are damaged and were set aside, so there is nothing to resume from."""

    comes_back = True


class AttemptSuperseded(CheckpointError):
    """A newer attempt of the run has begun, so this one no longer saves or removes anything."""

    def __init__(self, attempt: int) -> None:
        super().__init__(
            f"a newer attempt of this run has begun: attempt {attempt} ends, and what it did beyond the checkpoint "
            "that the newer one continues from does not count"
        )


class RanksDiverged(CheckpointError):
    """The ranks do not hold the same weights, so they cannot be saved as one checkpoint."""


class CheckpointUnreadable(CheckpointError):
    """A checkpoint cannot be read by this version; it may well be intact."""


@dataclass(frozen=True)
class Differences:
    """How the tensors of a checkpoint differ from the live ones."""

    missing: tuple[str, ...] = ()  # names of live tensors that the checkpoint does not contain
    unexpected: tuple[str, ...] = ()  # names in the checkpoint that have no live tensor
    # ``name stored, now live`` for each tensor whose shape or dtype differs
    shape: tuple[str, ...] = ()
    dtype: tuple[str, ...] = ()
    tied: tuple[str, ...] = ()  # pairs of names that share memory now but were stored separately

    def __bool__(self) -> bool:
        return any((self.missing, self.unexpected, self.shape, self.dtype, self.tied))

    def __str__(self) -> str:
        kinds = {
            "not in the checkpoint": self.missing,
            "in the checkpoint only": self.unexpected,
            "other shape": self.shape,
            "other dtype": self.dtype,
            "share memory now, but were stored separately": self.tied,
        }
        return "\n".join(f"  {kind} ({len(names)}): {listed(names, _SHOWN)}" for kind, names in kinds.items() if names)


class CheckpointMismatch(CheckpointError):
    """A checkpoint is intact but belongs to a different model or optimizer; `differences` lists how they differ."""

    comes_back = True

    def __init__(self, folder: str, differences: Differences) -> None:
        self.differences = differences
        super().__init__(
            f"checkpoint {folder} does not fit the model of this job. What differs:\n{differences}\n"
            "Change the model or the job back to what it was, or start a new run."
        )
