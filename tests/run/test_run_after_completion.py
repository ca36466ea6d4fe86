"""A program may fail when its training is complete: in another block of join_run, or as its ranks end."""

from __future__ import annotations

import pytest
from run_builders import begin_dead

from cluster_ddp.run.directory import RunDirectory
from cluster_ddp.run.ending import Ending, outcome_of
from cluster_ddp.run.events import COMPLETED, FAILED, STARTED, EventWriter
from cluster_ddp.run.history import read_history


@pytest.mark.parametrize(("phase", "ending"), [("ready", Ending.FAILED), ("done", Ending.COMPLETED)])
def test_only_a_later_block_makes_a_complete_training_a_failed_run(
    run: RunDirectory, phase: str, ending: Ending
) -> None:
    begin_dead(run)
    rank = EventWriter(run, "rank-0")
    rank.write(STARTED, attempt=0, step=0, total_steps=300)
    rank.write(COMPLETED, attempt=0, step=300)
    rank.write(FAILED, attempt=0, step=300, rank=0, error="RuntimeError: x", phase=phase)
    assert outcome_of(read_history(run), 0).ending is ending
