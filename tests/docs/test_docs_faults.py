"""docs/faults.md names settings, events and states that exist."""

from __future__ import annotations

import re

from documented import PROJECT
from fault_page import page_with, read_results, table

from cluster_ddp.job import JobSpec
from cluster_ddp.launch.attempt import ROOM_SECONDS
from cluster_ddp.launch.reaper import SAVE_SECONDS
from cluster_ddp.launch.stopping import SHORT_GRACE_SECONDS
from cluster_ddp.launch.watchdog import SHORTEST_LEARNED
from cluster_ddp.run import events
from cluster_ddp.run.ending import RunState

PAGE = (PROJECT / "docs" / "faults.md").read_text()


def test_settings_exist() -> None:
    job = JobSpec(name="a", script="a.py").model_dump()
    named = re.findall(r"`(launch|requeue|train|checkpoint)\.(\w+)`", PAGE)
    assert len(named) > 5
    assert [f"{section}.{key}" for section, key in named if key not in job[section]] == []


def test_states_and_events_exist() -> None:
    upper = set(re.findall(r"\b[A-Z]{5,}\b", PAGE)) - {"SIGTERM", "CANCEL", "PREEMPTED"}
    assert upper <= {state.value for state in RunState}
    assert set(re.findall(r"`(checkpoint-\w+)`", PAGE)) == {events.CHECKPOINT_FAILED}


def test_seconds_are_those_of_the_program() -> None:
    assert f"with {SHORT_GRACE_SECONDS:.0f} s or less" in PAGE
    assert f"have {SAVE_SECONDS:.0f} s to save" in PAGE
    assert f"waits {ROOM_SECONDS / 60:.0f} minutes for room" in PAGE
    assert SHORTEST_LEARNED == 60


def test_the_table_is_that_of_the_faults_with_what_was_measured() -> None:
    assert page_with(PAGE, table(read_results())) == PAGE, "python tests/cluster/fault_page.py build/chaos/faults"
