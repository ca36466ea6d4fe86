"""Recording which rank failed, on which host, and what it said last."""

from __future__ import annotations

import contextlib
import signal
import socket
import sys
import time
from dataclasses import dataclass

from cluster_ddp.launch.agent import Agent
from cluster_ddp.launch.ranks import LocalRanks, Rank, last_words
from cluster_ddp.run.board import Phase
from cluster_ddp.run.events import RANK_FAILED, EventWriter

# Ranks of one node that die within this time died of one cause; torchrun's exit codes come within it, too.
_SAME_CAUSE_SECONDS = 2.0
_LONGEST_ERROR = 4000


@dataclass(frozen=True)
class _Death:
    rank: Rank
    noticed: float  # Unix seconds
    step: int | None


class Failures:
    """Turns the deaths of ranks into events, one for each cause."""

    def __init__(self, ranks: LocalRanks, agent: Agent, events: EventWriter, attempt: int, node_rank: int) -> None:
        self._ranks = ranks
        self._agent = agent
        self._events = events
        self._attempt = attempt
        self._node_rank = node_rank
        self._silent: list[_Death] = []  # not on the board: only torchrun's exit code tells whether they failed
        self._deaths: list[_Death] = []

    def note(self, gone: list[Rank], *, agent_ended: bool) -> None:
        """Take in the ranks that have ended since the last call, and record failures that are complete."""
        now = time.time()
        for rank in gone:
            death = _Death(rank, now, self._ranks.step(rank))
            phase = self._ranks.phase(rank)
            if phase is None:
                self._silent.append(death)
            elif phase is not Phase.DONE:
                self._deaths.append(death)
        failed = [death for death in self._silent if self._agent.exit_codes.get(death.rank.pid)]
        self._silent = [death for death in self._silent if death not in failed]
        self._deaths += failed
        if self._deaths and (agent_ended or now - self._deaths[0].noticed > _SAME_CAUSE_SECONDS):
            self._record()

    def _record(self) -> None:
        death = min(self._deaths, key=self._order)
        others = sorted(other.rank.rank for other in self._deaths if other is not death)
        self._deaths = []
        code = self._agent.exit_codes.get(death.rank.pid)
        error = (last_words(death.rank).error or _without_words(code))[-_LONGEST_ERROR:]
        host = socket.gethostname()
        self._events.write(
            RANK_FAILED,
            attempt=self._attempt,
            step=death.step,
            node=self._node_rank,
            host=host,
            rank=death.rank.rank,
            error=error,
            exit_code=code,
            signal=signal.Signals(-code).name if code is not None and code < 0 else None,
            failed_at=self._moment(death),
            others=others,
            log=str(death.rank.stderr) if death.rank.stderr else None,
        )
        with contextlib.suppress(OSError):
            print(f"cluster-ddp: rank {death.rank.rank} on {host} failed:\n{error}", file=sys.stderr, flush=True)

    def _order(self, death: _Death) -> tuple[bool, bool, float]:
        """The cause first: who was killed by a signal, then who said nothing, then who spoke first.

        A rank that is killed says nothing; its peers complain about the lost connection. SIGTERM comes from torchrun,
        which ends the others.
        """
        code = self._agent.exit_codes.get(death.rank.pid, 0)
        words = last_words(death.rank)
        killed = code < 0 and code != -signal.SIGTERM
        return not killed, words.error is not None, self._moment(death)

    def _moment(self, death: _Death) -> float:
        return last_words(death.rank).time or death.noticed


def _without_words(code: int | None) -> str:
    if code is not None and code < 0:
        name = signal.Signals(-code).name
        hint = ", perhaps because the node ran out of memory" if -code == signal.SIGKILL else ""
        return f"ended by {name}{hint}; it left no message"
    if code:
        return f"ended with exit status {code}; it left no message"
    return "ended without a message; killed from outside, perhaps because the node ran out of memory"
