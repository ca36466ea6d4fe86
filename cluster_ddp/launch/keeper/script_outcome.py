"""Records how a script ended that does not use this package, from what its node programs saw."""

from __future__ import annotations

from cluster_ddp.run import node_outcome
from cluster_ddp.run.directory import AttemptDirectory
from cluster_ddp.run.events import COMPLETED, NODE_FINISHED, NODE_STARTED, STOPPED, EventWriter, read_events_of
from cluster_ddp.run.stopfile import TERMINATED


def record_script_outcome(attempt: AttemptDirectory, writer: EventWriter) -> None:
    """Record that the script of an attempt has completed, or was stopped, unless it has recorded that itself."""
    events = read_events_of(attempt)
    started = {event.get("node") for event in events if event["event"] == NODE_STARTED and event.get("script")}
    finished = {event.get("node"): event for event in events if event["event"] == NODE_FINISHED}
    said = {event["event"] for event in events}
    if not started or said & {COMPLETED, STOPPED} or started != set(finished):
        return
    outcomes = {event.get("outcome") for event in finished.values()}
    if outcomes == {node_outcome.DONE}:
        writer.write(COMPLETED, attempt=attempt.number, step=None)
    elif outcomes <= {node_outcome.DONE, node_outcome.STOPPED, node_outcome.KILLED}:
        reasons = [event["reason"] for event in finished.values() if event.get("reason")]
        writer.write(STOPPED, attempt=attempt.number, step=None, reason=reasons[0] if reasons else TERMINATED)
