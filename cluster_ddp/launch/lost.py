"""Nodes that failed under an attempt: nobody on them could say so, but Slurm knows."""

from __future__ import annotations

import subprocess

from cluster_ddp.run.directory import AttemptDirectory
from cluster_ddp.run.events import NODE_FINISHED, NODE_LOST, NODE_STARTED, EventWriter
from cluster_ddp.run.history import History

_SINFO_SECONDS = 10.0


def record_lost_nodes(history: History, attempt: AttemptDirectory, writer: EventWriter) -> bool:
    """Ask Slurm which of the attempt's nodes that never signed off are down, and record them; whether there are any."""
    events = history.of_attempt(attempt.number)
    if any(event["event"] == NODE_LOST for event in events):
        return False
    finished = {event.get("node") for event in events if event["event"] == NODE_FINISHED}
    started = [event for event in events if event["event"] == NODE_STARTED and event.get("node") not in finished]
    silent = {str(event["host"]).split(".")[0]: event.get("node") for event in started if event.get("host")}
    lost = _down(sorted(silent)) if silent else []
    for host in lost:
        reason = f"node {host} failed: Slurm calls it down"
        writer.write(NODE_LOST, attempt=attempt.number, node=silent.get(host), host=host, reason=reason)
    return bool(lost)


def _down(hosts: list[str]) -> list[str]:
    """Those of the hosts that Slurm takes for dead; none when it cannot be asked."""
    command = ["sinfo", "--noheader", "--Node", "--format=%N", "--states=down,fail", f"--nodes={','.join(hosts)}"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SINFO_SECONDS, check=False)
    except (OSError, subprocess.SubprocessError):
        return []
    return sorted(set(done.stdout.split()) & set(hosts)) if done.returncode == 0 else []
