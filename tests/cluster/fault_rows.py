"""The table of faults: how each is struck on a real cluster, how the run is to end, and what `status` is to say.

docs/faults.md is this table with what was measured; `fault_page` makes it.
"""

from __future__ import annotations

from fault_harms import EVERY_STEPS, STRUCK_AT, as_in_chaos, damage_between
from fault_row import Row
from fault_rows_of_jobs import JOBS, STARTS
from fault_rows_on_nodes import NODES

STORAGE: dict[str, Row] = {
    "disk full for a while": Row(
        "a warning and `checkpoint-failed`; training continues, earlier checkpoints are kept, the next save is "
        "tried, lines for `metrics.jsonl` are kept in memory",
        as_in_chaos("full disk"),
        attempts=1,
    ),
    "newest checkpoint damaged": Row(
        "reported, set aside as `damaged-step-...`; the one before it is used",
        damage_between,
        at=STRUCK_AT + EVERY_STEPS,
        lost=3 * EVERY_STEPS,
        words=("is skipped",),
    ),
}

ROWS: dict[str, Row] = {**JOBS, **NODES, **STARTS, **STORAGE}
