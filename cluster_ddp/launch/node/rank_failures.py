"""Records which rank failed, on which host, and with which error."""

from __future__ import annotations

import itertools
import re
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass

from cluster_ddp.errors import Cause
from cluster_ddp.launch.logs import if_disk_is_full, last_lines
from cluster_ddp.launch.node.ranks import LocalRanks, Rank, read_error
from cluster_ddp.launch.torchrun.exits import RankExits
from cluster_ddp.printing import say
from cluster_ddp.process import host_name
from cluster_ddp.run.causes import cause_of_message, cause_of_signal, describe_failure, shortened
from cluster_ddp.run.directory import AttemptDirectory
from cluster_ddp.run.events import RANK_FAILED, EventWriter
from cluster_ddp.run.phase import Phase

# Ranks of one node that die within this time died of the same cause.
_SAME_CAUSE_SECONDS = 2.0
# If a rank left no message, torchrun knows how it ended only once it has ended the others, which may take a while.
_TORCHRUN_SECONDS = 15.0
_FATAL = "Fatal Python error: "  # begins what faulthandler writes: the stacks of all threads, and much more
_ABORTED = f"{_FATAL}Aborted"
_MAX_LINES = 1000
_TORCH_LOG = re.compile(r"(\[rank\d+\]: ?)?\[[IW]\d{4} ")  # torch's infos and warnings are not the cause of an exit


@dataclass(frozen=True)
class _Death:
    rank: Rank
    noticed: float  # Unix seconds
    step: int | None


class Failures:
    """Turns the deaths of ranks into events, one per cause."""

    def __init__(
        self,
        ranks: LocalRanks,
        exits: RankExits,
        events: EventWriter,
        attempt: AttemptDirectory,
        node_rank: int,
        *,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._ranks = ranks
        self._exits = exits
        self._events = events
        self._attempt = attempt
        self._node_rank = node_rank
        self._clock = clock
        self._unclear: list[_Death] = []  # without a heartbeat: only the exit code shows whether they failed
        self._deaths: list[_Death] = []

    def note(self, gone: list[Rank], *, agent_ended: bool) -> None:
        """Note the ranks that have ended since the last call, and record a failure once its cause is clear."""
        self._exits.read()
        now = self._clock()
        for rank in gone:
            death = _Death(rank, now, self._ranks.step(rank))
            phase = self._ranks.phase(rank)
            if phase is None:
                self._unclear.append(death)
            elif phase is not Phase.DONE:
                self._deaths.append(death)
        failed = [death for death in self._unclear if self._code(death)]
        self._unclear = [death for death in self._unclear if death not in failed]
        self._deaths += [*failed, *self._unseen(now)]
        patience = _SAME_CAUSE_SECONDS if all(map(self._is_explained, self._deaths)) else _TORCHRUN_SECONDS
        if self._deaths and (agent_ended or now - self._deaths[0].noticed > patience):
            self._record(min(self._deaths, key=self._order))
            self._deaths = []

    def after_work(self) -> list[str]:
        """Describe the ranks that failed once their work was done, as in a script's lines below its block.

        A signal does not count: a process that is shutting down may abort.
        """
        self._exits.read()
        done = [rank for rank in self._ranks.seen.values() if self._ranks.phase(rank) is Phase.DONE]
        codes = {known.pid: known.exit_code for known in self._exits.failed.values() if known.exit_code > 0}
        return [self._describe(rank, codes[rank.pid]) for rank in done if rank.pid in codes]

    def _describe(self, rank: Rank, code: int) -> str:
        error = read_error(rank)
        said = _without_message(code, rank)[0] if error is None else error.message
        return describe_failure({"event": RANK_FAILED, "rank": rank.rank, "host": host_name(), "error": said})

    def _unseen(self, now: float) -> list[_Death]:
        """Return ranks that failed before they were ever seen alive."""
        logs = self._exits.log_dir
        unseen = [known for known in self._exits.failed.values() if known.pid not in self._ranks.seen]
        ranks = [self._ranks.add_unseen(known.pid, known.rank, known.local_rank, logs) for known in unseen]
        return [_Death(rank, now, None) for rank in ranks if self._ranks.phase(rank) is not Phase.DONE]

    def _is_explained(self, death: _Death) -> bool:
        """Whether everything that can be known about a death is known."""
        return self._code(death) is not None or self._follows(death) or read_error(death.rank) is not None

    def _follows(self, death: _Death) -> bool:
        """Whether a rank ended only because a different one had failed: it says so itself, or torchrun ended it."""
        if self._ranks.cause(death.rank) is Cause.FOLLOWS:
            return True
        return death.rank.pid in self._exits.ended_by_agent and read_error(death.rank) is None

    def _code(self, death: _Death) -> int | None:
        if death.rank.pid in self._exits.left:
            return 0
        known = self._exits.failed.get(death.rank.pid)
        return known.exit_code if known is not None else None

    def _was_killed(self, death: _Death) -> bool:
        """Whether a signal aimed at this rank ended it: not one with which torchrun ends the peers of a failed rank."""
        code = self._code(death)
        by_torchrun = death.rank.pid in self._exits.ended_by_agent
        return code is not None and code < 0 and code != -signal.SIGTERM and not by_torchrun

    def _order(self, death: _Death) -> tuple[int, float]:
        """Sort key that puts the cause first: a kill, then an exit without a message, then errors, the earliest first.

        A rank that is killed leaves no message, and torchrun may not have noticed yet, while its peers complain about
        the lost connection. They do the same if a rank exits with a status and no message.
        """
        code, error = self._code(death), read_error(death.rank)
        if self._follows(death):
            kind = 5
        elif self._was_killed(death):
            kind = 0
        elif code == 0:
            kind = 1
        elif error is not None:
            kind = 2 if self._explain(death)[1] is Cause.PROGRAM else 4
        else:
            kind = 1 if code is None else 3
        return kind, self._moment(death)

    def _moment(self, death: _Death) -> float:
        error = read_error(death.rank)
        return death.noticed if error is None else error.time

    def _explain(self, death: _Death) -> tuple[str, Cause]:
        """Return how a rank failed, and why: as it says itself, else by its error or by how it ended."""
        error = read_error(death.rank)
        if error is None:
            message, cause = _without_message(self._code(death), death.rank)
        else:
            message, cause = error.message, cause_of_message(error.message)
        return message, self._ranks.cause(death.rank) or cause

    def _record(self, first: _Death) -> None:
        if self._follows(first):
            return  # the cause was on a different node, which records it
        rank, code = first.rank, self._code(first)
        message, cause = self._explain(first)
        message = shortened(message)
        host = host_name()
        self._events.write(
            RANK_FAILED,
            attempt=self._attempt.number,
            step=first.step,
            node=self._node_rank,
            host=host,
            rank=rank.rank,
            error=message,
            cause=cause.value,
            exit_code=code,
            signal=signal.Signals(-code).name if code is not None and self._was_killed(first) else None,
            failed_at=self._moment(first),
            others=sorted(other.rank.rank for other in self._deaths if other is not first),
            log=str(self._attempt.log_file(self._node_rank)),
        )
        say(f"cluster-ddp: rank {rank.rank} on {host} failed:\n{message}")


def _without_message(code: int | None, rank: Rank) -> tuple[str, Cause]:
    """Describe the end of a rank that left no error of its own, and return its cause."""
    if code == -signal.SIGKILL:
        return "ended by SIGKILL, perhaps because the node ran out of memory; it left no message", Cause.HOST
    if code is None:
        why = "killed from outside, perhaps because the node ran out of memory"
        return f"ended without a message; {why}", Cause.HOST
    if code == 0:
        how = "ended with exit status 0 before its training was over, as by os._exit(0)"
        return f"{how}; it left no message", Cause.PROGRAM
    said = _last_said(rank)
    words = f"what it wrote last to stderr: {said}" if said else "it left no message"
    if code > 0:  # as argparse and sys.exit(text) do
        full = if_disk_is_full()
        return f"ended with exit status {code}; {words}{full}", Cause.HOST if full else cause_of_message(said)
    name = signal.Signals(-code).name  # a library may say why before it aborts
    if code == -signal.SIGBUS:
        name += ", perhaps because /dev/shm (shared memory) or a disk is full"
    return f"ended by {name}; {words}{if_disk_is_full()}", cause_of_signal(signal.Signals(-code).name, said)


def _last_said(rank: Rank) -> str:
    """Return what a rank wrote last to stderr, with the place of a fatal error; empty if it wrote nothing."""
    lines = last_lines(rank.stderr, _MAX_LINES) if rank.stderr is not None else []
    said = [line for line in lines if not _TORCH_LOG.match(line)]
    fatal = next((number for number, line in enumerate(said) if line.startswith(_FATAL)), None)
    where = ""
    if fatal is not None:
        current = itertools.dropwhile(lambda line: not line.startswith("Current thread"), said[fatal:])
        where = next((f" ({line.strip()})" for line in current if line.startswith("  File ")), "")
        said = said[: fatal + 1]
        if said[1:] and said[-1] == _ABORTED:  # a library has said why before it aborted
            said.pop()
    return f"{said[-1]}{where}" if said else ""
