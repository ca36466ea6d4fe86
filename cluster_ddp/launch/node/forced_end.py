"""Decides when to end a node's agent and ranks that do not end by themselves, and which outcome the node then has."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable

from cluster_ddp.launch.node.ranks import LocalRanks, Rank
from cluster_ddp.launch.node.stopping import Stopping
from cluster_ddp.launch.processes import KILL, catches, send
from cluster_ddp.printing import say
from cluster_ddp.run.directory import AttemptDirectory
from cluster_ddp.run.events import COMPLETED, read_events_of
from cluster_ddp.run.node_outcome import DONE, FAILED, KILLED, STOPPED
from cluster_ddp.run.phase import Phase
from cluster_ddp.run.stopfile import AGENT_LOST, AT_ONCE, SCRIPT_GRACE_SECONDS, TIME_LIMIT

_NO_RANKS_SECONDS = 2.0  # after a stop before there are ranks: the agent waits for other nodes, and nothing can be lost
_OTHERS_SECONDS = 10.0  # after the last rank has ended: agents end together, so that none loses the rendezvous too soon
_NO_OTHERS_SECONDS = 1.0  # the same if an agent is known to be gone: the others would wait for it
_COMPLETED_SECONDS = 60.0  # the same without a stop request: ranks elsewhere may still finish their uploads
_LINGERING_SECONDS = 600.0  # for ranks whose work is done to exit: the user's threads may still upload something
_LINGERING_STOPPED_SECONDS = 60.0  # the same after a stop request
_SAID_AFTER_SECONDS = 60.0  # after which the user is told what is being waited for
_FAILED_SECONDS = 60.0  # for a rank that has failed: the others wait for it, and may do so for half an hour
# The same for a script, which may do more after its block, while it does not compute: it may also wait for a rank on
# another node that does, which Gloo allows for half an hour.
_STANDSTILL_SECONDS = 1800.0
_STANDSTILL_LOOK_SECONDS = 60.0
_COMPUTING = 0.01  # of a CPU, in one process: threads of torch and NCCL wake up now and then
_IDLE_MARGIN_SECONDS = 600.0  # beyond join_timeout; torchrun waits half as long for other agents to end
_STARTING_SECONDS = 20.0  # after a stop while ranks are starting: they may end by themselves
_ENDING_SECONDS = 5.0  # a Python that is shutting down no longer handles signals
_SECOND_SIGNAL_SECONDS = 15.0  # a script may react to the first by saving and continuing


class ForcedEnd:
    """Decides how long to wait for this node to end."""

    def __init__(
        self,
        ranks: LocalRanks,
        stopping: Stopping,
        attempt: AttemptDirectory,
        *,
        trains_a_task: bool,  # with the trainer, which stops via the heartbeat; else the ranks are a user's script
        join_timeout: float,  # for which an agent waits for the others before it starts its ranks again
        warn: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._ranks = ranks
        self._stopping = stopping
        self._attempt = attempt
        self._trains_a_task = trains_a_task
        self._longest_idle = join_timeout + _IDLE_MARGIN_SECONDS
        self._warn = warn
        self._clock = clock
        self._sent: set[tuple[int, signal.Signals]] = set()
        self._looked = [clock()] * 2  # the last two times
        self._ended_at_once = False
        self._has_warned = False
        self._has_told = False
        self._failed_since: dict[int, float] = {}  # by process, when it was first seen to have failed
        self._cpu_seconds: dict[int, float] = {}  # by process, at the last look
        self._cpu_looked = self._computed = 0.0  # when that was, and when a process was last seen to compute

    @property
    def has_stopped_script(self) -> bool:
        """Whether a script's ranks were sent a signal that they handle: then they count as stopped in any case."""
        return bool(self._sent) or self._ended_at_once

    def note(self, gone: list[Rank], *, agent_ended: bool) -> None:
        """Note the ranks that have ended since the last call, and the agent; call it right after polling them.

        Slurm may signal all processes of a step: a script may have ended because of that before it was signaled here,
        even before it was seen. The signal may have come during the last look, after that had found the ranks alive.
        """
        before, self._looked = self._looked[0], [self._looked[1], self._clock()]
        signalled_at = self._stopping.signalled_at
        if signalled_at is not None and signalled_at >= before and not self._trains_a_task:
            was_unseen = agent_ended and not self._ranks.seen
            self._ended_at_once |= was_unseen or any(self._ranks.phase(rank) is None for rank in gone)

    def after_stop(self) -> str | None:
        """Return the outcome with which to end what is left after a stop request; None while it may end by itself."""
        if self._stopping.overdue:
            return KILLED
        if not self._ranks.living:
            return self._agent_alone()
        if not self._trains_a_task:
            return self._script()
        all_starting = not any(map(self._can_save, self._ranks.living))
        return STOPPED if all_starting and self._stopping.waited() > _STARTING_SECONDS else None

    def kill_failed_ranks(self) -> None:
        """Kill ranks that have reported their failure long ago but do not exit: torchrun notices only an exit."""
        for rank in self._ranks.living:
            if self._ranks.cause(rank) is None:
                continue
            since = self._failed_since.setdefault(rank.pid, self._clock())
            if self._clock() - since > _FAILED_SECONDS:
                self._failed_since[rank.pid] = math.inf
                self._warn(
                    f"rank {rank.rank} failed {_FAILED_SECONDS:.0f} s ago, but has not exited, and is killed: a thread "
                    "that is not a daemon or a process that it has started may still run"
                )
                send(rank.pid, KILL)

    def of_idle_agent(self) -> str | None:
        """Return the outcome with which to end an agent that has had no ranks for too long; None while it may wait.

        Once all is done, torchrun would hold the machines for minutes. An agent that does not end long after its ranks
        have failed does nothing any more, as one that was stopped (SIGSTOP) or waits for its disk.
        """
        alone = self._alone_for()
        if alone > _COMPLETED_SECONDS and (self._ranks.all_done() or self._run_is_complete()):
            return DONE
        return FAILED if alone > self._longest_idle else None

    def of_lingering_ranks(self) -> str | None:
        """Return the outcome with which to end ranks that have done their work but do not exit; None while they may.

        A thread that is not a daemon may keep them, or a function registered with `atexit`. A script may do more after
        the block of `join_run`, and as long as it computes it is only ended if it is asked to stop.
        """
        done_for = self._ranks.done_for()
        if done_for is None:
            return None
        if self._stopping.reason is None:
            lingers = done_for if self._trains_a_task else min(done_for, self._stands_still_for())
            patience = _LINGERING_SECONDS if self._trains_a_task else _STANDSTILL_SECONDS
            if lingers > _SAID_AFTER_SECONDS and not self._has_told:
                self._has_told = True
                who = ", ".join(map(str, sorted(rank.rank for rank in self._ranks.living)))
                say(
                    f"cluster-ddp: training is over, but rank {who} has not exited yet: a non-daemon thread or "
                    f"a process that it has started may still run. It is killed after {patience / 60:.0f} minutes"
                )
            return DONE if lingers > patience else None
        patience = _ENDING_SECONDS if self._stopping.level == AT_ONCE else _LINGERING_STOPPED_SECONDS
        return STOPPED if min(done_for, self._stopping.waited()) > patience else None

    def _stands_still_for(self) -> float:
        """Return the seconds for which no process of the ranks has computed, as far as was looked at."""
        now = self._clock()
        if now - self._cpu_looked >= _STANDSTILL_LOOK_SECONDS:
            before, self._cpu_seconds = self._cpu_seconds, self._ranks.cpu_seconds()
            most = _COMPUTING * (now - self._cpu_looked)
            if any(used - before.get(pid, -most) >= most for pid, used in self._cpu_seconds.items()):
                self._computed = now
            self._cpu_looked = now
        return now - self._computed

    def _agent_alone(self) -> str | None:
        """Return the outcome of an agent whose ranks are gone: they have saved what there was to save."""
        if not self._ranks.seen:
            overdue = self._stopping.waited() > _NO_RANKS_SECONDS
        else:
            others_lost = self._stopping.reason == AGENT_LOST and self._ranks.all_done()
            overdue = self._alone_for() > (_NO_OTHERS_SECONDS if others_lost else _OTHERS_SECONDS)
        if not overdue:
            return None
        self._stopping.tell_others()  # they would wait for the ranks of this node until network.timeout
        return STOPPED

    def _script(self) -> str | None:
        """Send ranks without a heartbeat the signals that they handle, and give all of them time to end."""
        unregistered = self._ranks.unregistered()
        if len(unregistered) < len(self._ranks.living):
            return None  # some use the heartbeat and the others will: a script that joins the run
        urgent = self._stopping.level == AT_ONCE
        heard = True in [self._signal(rank, urgent=urgent) for rank in unregistered]
        if not heard and not urgent:
            self._warn_unheard(min(rank.since for rank in unregistered))
        if heard and self._stopping.deadline is not None:
            return None  # it has until the deadline
        return STOPPED if urgent or self._stopping.waited() > SCRIPT_GRACE_SECONDS else None

    def _signal(self, rank: Rank, *, urgent: bool) -> bool:
        """Send a rank the first signal that it handles, later or if urgent all of them; False if it handles none.

        One that has been sent a signal has heard it, even if its handler has restored what was there before.

        The warning of the time limit is sent as the signal in the job file's ``requeue.signal``, as Slurm itself sends
        it; any other request as SIGTERM.
        """
        ways = [signal.SIGTERM, self._stopping.warning]
        if self._stopping.reason == TIME_LIMIT:
            ways.reverse()
        handled = [number for number in ways if catches(rank.pid, number)]
        late = urgent or self._stopping.waited() > _SECOND_SIGNAL_SECONDS
        for number in handled if late else handled[:1]:
            if (rank.pid, number) not in self._sent:
                self._sent.add((rank.pid, number))
                send(rank.pid, number)
        return bool(handled) or any((rank.pid, number) in self._sent for number in ways)

    def _warn_unheard(self, since: float) -> None:
        starts = self._clock() - since <= _STARTING_SECONDS  # it may still install a handler
        if not self._has_warned and not starts and self._stopping.waited() > _ENDING_SECONDS:
            self._has_warned = True
            self._warn(
                f"the script handles neither SIGTERM nor {self._stopping.warning.name}: it is killed "
                f"{SCRIPT_GRACE_SECONDS:.0f} s after it was asked to stop, if it has not ended by then, and what it "
                "has not saved itself is lost"
            )

    def _can_save(self, rank: Rank) -> bool:
        return self._ranks.phase(rank) not in (None, Phase.STARTING)

    def _alone_for(self) -> float:
        """Return the seconds that the agent has been without ranks, waiting for other nodes' ranks."""
        return 0.0 if self._ranks.none_since is None else self._clock() - self._ranks.none_since

    def _run_is_complete(self) -> bool:
        return bool(read_events_of(self._attempt, COMPLETED))
