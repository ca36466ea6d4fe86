"""docs/faults.md names settings, events and states that exist."""

from __future__ import annotations

import re

from documented import PROJECT
from fault_page import VERSIONS, page_with, read_results, table
from fault_rows import ROWS

from cluster_ddp.job import JobSpec
from cluster_ddp.launch.keeper.patience import PASSING_SECONDS, ROOM_SECONDS
from cluster_ddp.launch.node.reaper import SAVE_SECONDS
from cluster_ddp.launch.node.stopping import SHORT_GRACE_SECONDS
from cluster_ddp.launch.node.watchdog import SHORTEST_LEARNED
from cluster_ddp.run import events
from cluster_ddp.run.run_state import RunState

PAGE = (PROJECT / "docs" / "faults.md").read_text()


def test_settings_exist() -> None:
    job = JobSpec(name="a", script="a.py").model_dump()
    named = re.findall(r"`(launch|requeue|train|checkpoint)\.(\w+)`", PAGE)
    assert len(named) > 5
    assert [f"{section}.{key}" for section, key in named if key not in job[section]] == []


def test_states_and_events_exist() -> None:
    upper = set(re.findall(r"\b(?!SIG)[A-Z]{5,}\b", PAGE)) - {"CANCEL", "PREEMPTED"}
    assert upper <= {state.value for state in RunState}
    assert set(re.findall(r"`(checkpoint-\w+)`", PAGE)) == {events.CHECKPOINT_FAILED}


def test_seconds_are_those_of_the_program() -> None:
    assert f"with {SHORT_GRACE_SECONDS:.0f} s or less" in PAGE
    assert f"have {SAVE_SECONDS:.0f} s to save" in PAGE
    assert f"waits {ROOM_SECONDS / 60:.0f} minutes for free space" in PAGE
    assert f"tried again for {PASSING_SECONDS:.0f} s" in PAGE
    assert SHORTEST_LEARNED == 60


def test_the_table_is_that_of_the_faults_with_what_was_measured() -> None:
    assert page_with(PAGE, table(read_results())) == PAGE, "python tests/cluster/fault_page.py build/chaos/faults"


def test_what_was_measured_is_of_faults_and_versions_that_the_page_shows() -> None:
    results = read_results()
    assert set(results) <= set(VERSIONS)
    cases = {f"{name}: {via}" for name in ROWS for via in ("sbatch", "submitit")}
    assert {case for found in results.values() for case in found} <= cases


def test_a_figure_stands_with_its_version_and_its_way() -> None:
    name, other = list(ROWS)[:2]
    measured = {
        "22.05": {f"{name}: sbatch": {"lost": 3, "seconds": 56.4}},
        "26.05": {
            f"{name}: sbatch": {"lost": 7, "seconds": 41.2},
            f"{name}: submitit": {"lost": 0, "seconds": None},
        },
    }
    first, second = table(measured).splitlines()[2:4]
    assert first.startswith(f"| {name} |") and first.endswith("| 7 · 0 | 56 · ? | ? | 41 · – |")
    assert second.startswith(f"| {other} |") and second.endswith("| ? | ? | ? | ? |")
