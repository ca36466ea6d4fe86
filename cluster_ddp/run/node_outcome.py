"""How the node programs of an attempt ended: the values of `outcome` in `node-finished`, and which have none."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from cluster_ddp.run.events import NODE_FINISHED, NODE_STARTED

DONE = "done"
STOPPED = "stopped"
FAILED = "failed"
KILLED = "killed"
HUNG = "hang"
SUPERSEDED = "superseded"  # a newer attempt of the run had begun


def signed_off(events: Iterable[dict[str, Any]]) -> set[object]:
    """Return, of an attempt's events, the nodes that have finished."""
    return {event.get("node") for event in events if event["event"] == NODE_FINISHED}


def not_signed_off(events: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return, of an attempt's events, those with which nodes have started that have not finished."""
    events = list(events)
    finished = signed_off(events)
    return [event for event in events if event["event"] == NODE_STARTED and event.get("node") not in finished]
