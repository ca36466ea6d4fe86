"""A row of the table of faults."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fault_harms import BAD, STRUCK_AT, Harm

WAYS = ("sbatch", "submitit")


@dataclass(frozen=True)
class Row:
    """A fault.

    Attributes
    ----------
    follows
        What happens then, for docs/faults.md.
    strike, at
        Does the harm to a run that has come to a step, a little after a checkpoint; 0: at once.
    before, undo
        Does harm before the run is submitted, and takes it away.
    state, attempts
        How the run ends.
    lost
        The most steps that may be trained again.
    words
        What `status` says at some moment, each of them.
    excluded
        The host that the job is kept from in the end.
    job
        Sections of the job file; ``FOLDER`` in text stands for the run's folder.
    task
        A file and class besides the paced digits, with parameters of its own.
    options
        Of the submission; ``FIRST`` stands for the run that was submitted before it.
    ways
        The ways to submit that have what the fault needs.
    short
        Of these, the ones that are part of the default run.
    light
        Whether its attempts have light agents: torchrun is not meant.
    """

    follows: str
    strike: Harm | None = None
    at: int = STRUCK_AT
    before: Harm | None = None
    undo: Harm | None = None
    state: str = "COMPLETED"
    attempts: int = 2
    lost: int = 0
    words: tuple[str, ...] = ()
    excluded: str | None = None
    job: Mapping[str, Any] = field(default_factory=dict)
    task: tuple[str, Mapping[str, Any]] | None = None
    options: tuple[str, ...] = ()
    ways: tuple[str, ...] = WAYS
    short: tuple[str, ...] = ()
    light: bool = False


def paced(seconds: float) -> tuple[str, Mapping[str, Any]]:
    """The paced digits with so many seconds for each step."""
    return "paced_digits.py:PacedDigits", {"seconds": seconds, "brake": "FOLDER/brake"}


def bad(before: Harm, undo: Harm, words: str, **more: Any) -> Row:
    """A node that cannot take part: the run goes on without it."""
    return Row(
        "the node is named, with its last output; requeued, and after the second failure without it if the partition "
        "has enough others",
        before=before,
        undo=undo,
        attempts=3,
        words=(f"node {BAD} failed", words),
        **more,
    )
