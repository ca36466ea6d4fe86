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
from cluster_ddp.run.directory import AttemptDirectory
from cluster_ddp.run.events import RANK_FAILED, EventWriter

# Ranks of one node that die within this time died of one cause.
_SAME_CAUSE_SECONDS = 2.0
# How a rank ended that says nothing itself, torchrun tells when it has ended the others, which may take a while.
_TORCHRUN_SECONDS = 15.0
_LONGEST_ERROR = 4000


@dataclass(frozen=True)
class _Death:
    rank: Rank
    noticed: float  # Unix seconds
    step: int | None


class Failures:
    """Turns the deaths of ranks into events, one for each cause."""

    def __init__(
        self, ranks: LocalRanks, agent: Agent, events: EventWriter, attempt: AttemptDirectory, node_rank: int
    ) -> None:
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
        failed = [death for death in self._silent if self._code(death)]
        self._silent = [death for death in self._silent if death not in failed]
        self._deaths += [*failed, *self._missed(now)]
        patience = _SAME_CAUSE_SECONDS if all(map(self._is_explained, self._deaths)) else _TORCHRUN_SECONDS
        if self._deaths and (agent_ended or now - self._deaths[0].noticed > patience):
            self._record()

    def _is_explained(self, death: _Death) -> bool:
        """Whether all is known that will be; the rank that nobody has seen stands in torchrun's summary, at its end."""
        if self._rank(death) is None:
            return False
        return self._code(death) is not None or self._follows(death) or last_words(death.rank).error is not None

    def _follows(self, death: _Death) -> bool:
        """Whether it ended only because another rank had failed: by its own words, or told to by torchrun."""
        words = last_words(death.rank)
        return words.follows or (words.error is None and death.rank.pid in self._agent.ended)

    def _rank(self, death: _Death) -> int | None:
        if death.rank.rank >= 0:
            return death.rank.rank
        known = self._agent.exits.get(death.rank.pid)
        return known.rank if known is not None else None

    def _missed(self, now: float) -> list[_Death]:
        """Ranks that failed so soon that only torchrun has seen them."""
        logs = self._attempt.logs(self._node_rank)
        unseen = [one for one in self._agent.exits.values() if one.pid not in self._ranks.seen]
        ranks = [self._ranks.missed(one.pid, one.local_rank, one.rank, logs) for one in unseen]
        return [_Death(rank, now, None) for rank in ranks if self._ranks.phase(rank) is not Phase.DONE]

    def _code(self, death: _Death) -> int | None:
        known = self._agent.exits.get(death.rank.pid)
        return known.code if known is not None else None

    def _record(self) -> None:
        death = min(self._deaths, key=self._order)
        if self._follows(death):
            self._deaths = []
            return  # the cause was on another node, which records it
        number = self._rank(death)
        others = [self._rank(other) for other in self._deaths if other is not death]
        self._deaths = []
        code = self._code(death)
        error = (last_words(death.rank).error or _without_words(code))[-_LONGEST_ERROR:]
        host = socket.gethostname()
        self._events.write(
            RANK_FAILED,
            attempt=self._attempt.number,
            step=death.step,
            node=self._node_rank,
            host=host,
            rank=number,
            error=error,
            exit_code=code,
            signal=signal.Signals(-code).name if _is_kill(code) and code is not None else None,
            failed_at=self._moment(death),
            others=sorted(other for other in others if other is not None),
            log=str(death.rank.stderr) if death.rank.stderr else None,
        )
        who = "a rank" if number is None else f"rank {number}"
        with contextlib.suppress(OSError):
            print(f"cluster-ddp: {who} on {host} failed:\n{error}", file=sys.stderr, flush=True)

    def _order(self, death: _Death) -> tuple[int, float]:
        """The cause first: who was killed, then who spoke first, then who ended without a word.

        A rank that is killed says nothing, and torchrun may not tell of it yet; its peers complain about the lost
        connection.
        """
        code = self._code(death)
        if _is_kill(code):
            kind = 0
        elif self._follows(death):
            kind = 4
        elif last_words(death.rank).error is not None:
            kind = 2
        else:
            kind = 1 if code is None else 3
        return kind, self._moment(death)

    def _moment(self, death: _Death) -> float:
        return last_words(death.rank).time or death.noticed


def _is_kill(code: int | None) -> bool:
    """Whether a signal ended a rank that was meant for it; by SIGTERM the peers of a failed rank are ended."""
    return code is not None and code < 0 and code != -signal.SIGTERM


def _without_words(code: int | None) -> str:
    if code is not None and code < 0:
        name = signal.Signals(-code).name
        hint = ", perhaps because the node ran out of memory" if -code == signal.SIGKILL else ""
        return f"ended by {name}{hint}; it left no message"
    if code:
        return f"ended with exit status {code}; it left no message"
    return "ended without a message; killed from outside, perhaps because the node ran out of memory"
