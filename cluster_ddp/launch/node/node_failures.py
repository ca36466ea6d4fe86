"""Records why the agent of this node gave up, and which nodes never came to the rendezvous."""

from __future__ import annotations

import time
from collections.abc import Callable

from cluster_ddp.launch.node.rank_output import AGENT_LOG, RankOutput
from cluster_ddp.launch.torchrun.agent_failure import agent_failure, lost_connection
from cluster_ddp.printing import say
from cluster_ddp.process import host_name
from cluster_ddp.run.directory import AttemptDirectory
from cluster_ddp.run.events import FAILED, HANG, NODE_FAILED, NODE_STARTED, RANK_FAILED, EventWriter, read_events_of
from cluster_ddp.run.history import Event

FIRST_TO_RECORD_SECONDS = 2.0


class NodeFailures:
    """Records failures of nodes as one node program sees them.

    Parameters
    ----------
    output
        Where the agent's log is.
    endpoint
        Where the agents meet.
    join_timeout
        Seconds that they have for that.
    """

    def __init__(
        self,
        attempt: AttemptDirectory,
        events: EventWriter,
        output: RankOutput,
        *,
        node_rank: int,
        endpoint: str,
        join_timeout: float,
    ) -> None:
        self._attempt = attempt
        self._events = events
        self._output = output
        self._node_rank = node_rank
        self._endpoint = endpoint
        self._join_timeout = join_timeout
        self._host = host_name()

    def record_agent_failure(self, agent_status: int | None) -> None:
        """Record why an agent gave up before starting any ranks, which only its log shows."""
        failure = agent_failure(self._output.folder / AGENT_LOG, agent_status, self._endpoint, self._join_timeout)
        say(f"cluster-ddp: node {self._host} failed: {failure.error}")
        missing = self._missing(failure.came)
        alone = len(missing) > 1 and failure.came == {self._host}
        # Once another node has failed, its peers lose their connections: by their clocks perhaps even earlier.
        self._record(failure.error, suspect=(failure.suspect or alone) and not self._suspected_hosts())
        if not alone and missing:
            if self._host != min(failure.came):  # which sees the same, and records it unless it has been lost, too
                time.sleep(FIRST_TO_RECORD_SECONDS)
            self._record_missing(missing)

    def record_lost_connection(self, *, unless: Callable[[], bool]) -> bool:
        """Record that the agent gave up, and ended its ranks, while nothing had failed; return whether that is so.

        Parameters
        ----------
        unless
            Whether the ranks were asked to stop, which then explains it.
        """
        exits = self._output.exits
        if exits.failed or not exits.ended_by_agent:
            return False
        time.sleep(FIRST_TO_RECORD_SECONDS)  # what failed elsewhere is the cause, or a stop
        if unless() or self._of_attempt(FAILED, RANK_FAILED, NODE_FAILED, HANG):
            return False
        why = lost_connection(self._output.folder / AGENT_LOG, self._endpoint)
        say(f"cluster-ddp: node {self._host} failed: {why}")
        self._record(why, suspect=False)
        return True

    def _record(self, error: str, *, suspect: bool) -> None:
        self._events.write(
            NODE_FAILED,
            attempt=self._attempt.number,
            node=self._node_rank,
            host=self._host,
            error=error,
            suspect=suspect,
        )

    def _record_missing(self, missing: dict[str, object]) -> None:
        """Record the nodes that never came to the rendezvous, unless another node has done so."""
        suspected = self._suspected_hosts()
        for host, node in missing.items():
            if host not in suspected:
                self._events.write(
                    NODE_FAILED,
                    attempt=self._attempt.number,
                    node=node,
                    host=host,
                    error=f"it has started, but did not reach {self._endpoint} within {self._join_timeout:.0f} s "
                    "(launch.join_timeout): see its /etc/hosts and DNS, its firewall, and network.socket_ifname",
                    suspect=True,
                )

    def _missing(self, came: frozenset[str]) -> dict[str, object]:
        """Return the nodes that have started but are not among those that came, by host."""
        if not came:
            return {}
        started = {str(event["host"]): event["node"] for event in self._of_attempt(NODE_STARTED)}
        return {host: node for host, node in started.items() if host not in came}

    def _suspected_hosts(self) -> set[object]:
        return {event.get("host") for event in self._of_attempt(NODE_FAILED) if event.get("suspect")}

    def _of_attempt(self, *names: str) -> list[Event]:
        return read_events_of(self._attempt, *names)
