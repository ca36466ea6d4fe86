"""The keeper of a job: one program on the batch host, for one start of the job, from its beginning to what follows.

    python -m cluster_ddp.launch.keeper --run DIRECTORY --warning USR1 -- srun ... --attempt {attempt} -- torchrun ...

It is the process that Slurm signals: the batch script hands over to it by ``exec``, submitit calls it. What it decides
it decides from what the run has recorded and what Slurm says about the job; the exit status of the step says nothing,
since torchrun turns every outcome into 0 or 1. It is plain Python, without torch and pydantic until it judges.

Exit status: 0 when the run is complete, was stopped, or is queued again; 1 when Slurm refuses to queue it again; 4 when
it has failed or stalled; 75 when another attempt is alive; 76 when only a person may start the run again.
"""

from __future__ import annotations

import argparse
import os
import queue
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar

from cluster_ddp.job.errors import ClusterDDPError
from cluster_ddp.launch.allocation import Allocation, SlurmAllocation
from cluster_ddp.launch.attempt import begin_when_there_is_room, judge
from cluster_ddp.launch.bad_hosts import hosts_to_avoid, record_failed_nodes, suspects
from cluster_ddp.launch.ports import NoFreePort, attempt_port, free_port
from cluster_ddp.launch.queueing import RequeueFailed, queue_again
from cluster_ddp.launch.running_step import RunningStep
from cluster_ddp.launch.step import leaves_port_open, with_attempt
from cluster_ddp.process import fast_exit, limit_umask
from cluster_ddp.run.attempt_record import is_superseded
from cluster_ddp.run.directory import AttemptDirectory, RunDirectory
from cluster_ddp.run.errors import RunAlive, RunEnded
from cluster_ddp.run.events import REQUEUE_DELAYED, REQUEUE_FAILED, EventWriter
from cluster_ddp.run.history import read_history
from cluster_ddp.run.stopfile import request_stop
from cluster_ddp.slurm.shown import CANCEL, PREEMPTION, REQUEUED, TERMINATED, TIME_LIMIT
from cluster_ddp.slurm.start import this_start

if TYPE_CHECKING:
    from cluster_ddp.run.requeue import Decision

ALIVE_STATUS = 75
ENDED_STATUS = 76
FAILED_STATUS = 4

_MARGIN_SECONDS = 3.0  # before SIGKILL: by then the decision must be made, whether all is saved or not
_JUDGE_SECONDS = 60.0
_HURRIED_JUDGE_SECONDS = 2.0
_RECORD_SECONDS = 20.0
_POLL_SECONDS = 5.0  # should a SIGCHLD be lost
_ASK_PAUSE_SECONDS = 2.0
_SURVIVED_SECONDS = 15.0  # past KillWait: what is alive then is not being ended by Slurm
_NEARLY_OVER_SECONDS = 10.0  # before the time limit: time to say that the requeue has failed
_ENDLESS_SECONDS = 24 * 3600.0  # of trying to be queued again where there is no time limit
_QUICK_SECONDS = 5.0  # for an answer that can be done without

Follows = Literal["end", "start again", "fail"]


class _Answer(NamedTuple):
    """What Slurm has said about a signal."""

    number: int
    since: float
    reason: str
    seconds: float | None


@dataclass(frozen=True)
class Kept:
    """How a start of the job ended.

    Attributes
    ----------
    follows
        end: the job is over, and that is right. start again: it is queued again. fail: it is over, and has failed.
    word
        What was decided about the run: done, stop, requeue, fail, stall.
    reason
        Why, in words for people.
    """

    follows: Follows
    word: str
    reason: str


def what_follows(word: str | None, *, reason: str | None, out_of_time: bool) -> Follows:
    """What becomes of the job, from what was decided about the run.

    Parameters
    ----------
    word
        The decision; None when none could be made.
    reason
        Why Slurm ends the job; None when it does not.
    out_of_time
        Whether SIGKILL is near. Then a start that could not judge is followed by one that can.
    """
    if word in ("done", "stop"):
        return "end"
    if word == "requeue" or (word is None and out_of_time):
        return "end" if reason == CANCEL else "start again"  # the owner wanted it to end
    return "fail"


class Keeper:
    """Keeps one start of a job.

    Parameters
    ----------
    step
        The command that runs one node program on each node, with the placeholder of the attempt.
    warning
        The signal by which the end of the job is announced.
    """

    def __init__(
        self, run: RunDirectory, step: Sequence[str], allocation: Allocation, *, warning: signal.Signals
    ) -> None:
        self._run = run
        self._step = step
        self._allocation = allocation
        self._warning = warning
        self._news: queue.SimpleQueue[tuple[int, float] | _Answer] = queue.SimpleQueue()  # signals, and Slurm's answers
        self._attempt: AttemptDirectory | None = None
        self._reason: str | None = None  # why the attempt has to end early; None when it does not
        self._unanswered: float | None = None  # since when, on the monotonic clock, a SIGTERM waits for its reason
        self._lets_it_run = False  # Slurm has sent no SIGTERM, or whoever did is not ending the job
        self._decide_at: float | None = None  # on the monotonic clock, when SIGKILL is near

    def keep(self) -> Kept:
        """Keep the job from here to the end.

        Raises
        ------
        RunAlive, RunEnded, RunError
            The attempt cannot begin.
        RequeueFailed
            Slurm does not queue the job again.
        """
        try:
            kept = self._keep()
        except ClusterDDPError:
            self._allocation.stay_ended()
            raise
        if kept.follows != "start again":
            self._allocation.stay_ended()
        return kept

    def _keep(self) -> Kept:
        self._listen()
        bad = self._hosts_to_leave()
        if bad:
            return self._start_again(None, bad, "hosts that failed more than once")
        attempt = self._begin()
        self._train(attempt)
        self._stop_listening()
        if is_superseded(attempt):
            return Kept("end", "stop", "a newer attempt has begun: what this one did beyond its place does not count")
        self._find_out_why()
        decision, bad = self._judge(attempt)
        return self._act_on(attempt, decision, bad)

    # -- the beginning -------------------------------------------------------------------------------------------------

    def _hosts_to_leave(self) -> list[str]:
        """The hosts for whose sake this allocation is given back before anything is trained on it."""
        start = self._allocation.start
        bad = hosts_to_avoid(self._run, start) if start is not None else []
        if not bad:
            return []
        names = " ".join(bad)
        if not self._allocation.has_enough_others(bad):
            _say(f"{names} failed more than once, but the partition has too few other nodes: going on")
            return []
        _say(f"this allocation has hosts that failed more than once ({names}): starting again without")
        self._react_to_all()
        return bad

    def _begin(self) -> AttemptDirectory:
        self._attempt = begin_when_there_is_room(self._run, self._allocation.start, pid=os.getpid())
        if self._reason is not None:  # the signal came before the attempt had its folder
            self._ask_to_stop(None)
        self._react_to_all()
        return self._attempt

    # -- the step, and what happens meanwhile --------------------------------------------------------------------------

    def _train(self, attempt: AttemptDirectory) -> None:
        """Run the step until it ends, or until there is no time left to wait for it."""
        command, environment = self._step, self._allocation.environment()
        start = self._allocation.start
        try:
            port = None
            if leaves_port_open(command):
                port = attempt_port(int(start.job_id), attempt.number) if start else free_port()
                environment["MASTER_PORT"] = str(port)
            command = with_attempt(command, attempt.number, port)
            step = RunningStep(command, environment, attempt, start.nodes if start else 1, parent=os.getpid())
        except (OSError, NoFreePort) as error:
            _say(f"the step cannot be started: {error}")
            return
        threading.Thread(target=self._ask_ahead, daemon=True).start()
        while not step.has_ended() and not self._out_of_time():
            self._react_to_next()
        if start is not None and step.has_ended():
            writer = EventWriter(self._run, self._writer)
            _within(_RECORD_SECONDS, lambda: record_failed_nodes(attempt, writer, start, step))

    def _listen(self) -> None:
        for number in (self._warning, signal.SIGTERM, signal.SIGCHLD):
            signal.signal(number, self._note)

    def _note(self, number: int, _frame: Any) -> None:
        if number == signal.SIGTERM:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # Slurm sends it more than once, to scontrol too
        self._news.put((number, time.monotonic()))

    def _stop_listening(self) -> None:
        """From here on no signal may end a call of Slurm's commands; those that have come count."""
        for number in (self._warning, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        self._react_to_all()

    def _ask_ahead(self) -> None:
        """A signal that came while the setup lines ran, or while Python started, is lost; but Slurm remembers."""
        if self._allocation.ask_ahead():
            self._news.put((signal.SIGTERM, time.monotonic()))

    def _ask_why(self, number: int, since: float) -> None:
        """Ask until Slurm answers, and never in the way of what has to be done meanwhile."""

        def ask() -> None:
            while (answer := self._allocation.end(since)) is None:
                time.sleep(_ASK_PAUSE_SECONDS)
            self._news.put(_Answer(number, since, *answer))

        threading.Thread(target=ask, daemon=True).start()

    def _react_to_next(self, wait: float = _POLL_SECONDS) -> None:
        if self._decide_at is not None:
            wait = min(wait, max(0.0, self._decide_at - time.monotonic()))
        try:
            self._react(self._news.get(timeout=wait))
        except queue.Empty:
            return

    def _react_to_all(self) -> None:
        while not self._news.empty():
            self._react(self._news.get())

    def _react(self, news: tuple[int, float] | _Answer) -> None:
        if isinstance(news, _Answer):
            if news.number == signal.SIGTERM:
                self._end_is_explained(news)
            elif news.reason == PREEMPTION and self._reason == TIME_LIMIT:
                self._reason = PREEMPTION  # where Slurm has preempt_send_user_signal
                self._ask_to_stop(news.seconds)
            return
        number, since = news
        if number == signal.SIGTERM and self._unanswered is None:
            self._end_has_come(since)
        elif number == self._warning and self._reason is None:
            self._end_is_near(since)

    def _end_is_near(self, since: float) -> None:
        """Stop at the warning."""
        self._reason = TIME_LIMIT
        self._ask_to_stop(None)
        _say("the end of the job is near: asking training to save and end")
        self._ask_why(self._warning, since)

    def _end_has_come(self, since: float) -> None:
        """Stop at a SIGTERM. Slurm knows what it means, and may take its time to say so."""
        self._unanswered = since
        if self._reason is None:
            ends_at = self._allocation.ends_at
            self._reason = TIME_LIMIT if ends_at is not None and time.time() >= ends_at else TERMINATED
        self._ask_to_stop(None)
        self._ask_why(signal.SIGTERM, since)

    def _end_is_explained(self, answer: _Answer) -> None:
        self._unanswered = None
        if answer.reason == TERMINATED:  # it lets the job run: somebody has sent a signal
            self._lets_it_run = True
            _say("a SIGTERM came that is none of Slurm's: asking training to save and end")
            return
        self._reason = answer.reason
        within = "" if answer.seconds is None else f", in {answer.seconds:.0f} s"
        _say(f"Slurm ends the job ({self._reason}){within}: asking training to save and end")
        self._ask_to_stop(answer.seconds)
        if answer.seconds is not None and self._reason != CANCEL:
            self._decide_at = time.monotonic() + max(1.0, answer.seconds - _MARGIN_SECONDS)

    def _ask_to_stop(self, seconds: float | None) -> None:
        """Ask the node programs, which look for the stop file, to save and end."""
        if self._attempt is None or self._reason is None:
            return
        reason = PREEMPTION if self._reason == REQUEUED else self._reason
        try:
            request_stop(self._attempt, reason=reason, grace=seconds, by=f"the keeper on {socket.gethostname()}")
        except OSError as error:
            _say(f"cannot ask training to stop: {error}")

    def _out_of_time(self) -> bool:
        return self._decide_at is not None and time.monotonic() >= self._decide_at

    # -- done, failed, or once more? -----------------------------------------------------------------------------------

    def _find_out_why(self) -> None:
        """Wait for what Slurm has to say of a SIGTERM, which decides whether the job may be queued again."""
        if self._reason is None and self._allocation.why_it_ends(_QUICK_SECONDS) == PREEMPTION:
            # Only the steps were told. Slurm does not requeue a preempted job whose script has ended.
            self._reason = PREEMPTION
            self._ask_to_stop(None)
        while self._unanswered is not None and self._reason == TERMINATED:
            left = self._unanswered + self._allocation.kill_wait + _SURVIVED_SECONDS - time.monotonic()
            if left <= 0:
                self._unanswered, self._lets_it_run = None, True
                return
            self._react_to_next(min(left, _POLL_SECONDS))

    def _judge(self, attempt: AttemptDirectory) -> tuple[Decision | None, list[str]]:
        """The decision about the run and the hosts that it had better leave; None when it cannot be made in time."""

        def judged() -> tuple[Decision | None, list[str]]:
            try:
                decision = judge(
                    attempt, self._allocation.start, job_runs=lambda: self._lets_it_run, writer=self._writer
                )
                bad = suspects(read_history(self._run), attempt.number) if decision.action == "requeue" else []
            except (ClusterDDPError, OSError) as error:
                _say(f"attempt {attempt.number} cannot be judged: {error}")
                return None, []
            return decision, bad

        return _within(_HURRIED_JUDGE_SECONDS if self._out_of_time() else _JUDGE_SECONDS, judged) or (None, [])

    @property
    def _writer(self) -> str:
        start = self._allocation.start
        return f"batch-{start.job_id if start else os.getpid()}"

    def _act_on(self, attempt: AttemptDirectory, decision: Decision | None, bad: list[str]) -> Kept:
        word = decision.action if decision else None
        why = decision.reason if decision else "it could not be judged in time"
        follows = what_follows(word, reason=self._reason, out_of_time=self._out_of_time())
        _say(f"attempt {attempt.number} ends: {word or follows}{f' ({self._reason})' if self._reason else ''}: {why}")
        if follows == "start again":
            return self._start_again(attempt, bad, why)
        if decision is not None:
            self._record(attempt, decision)
        return Kept(follows, word or "fail", why)

    def _start_again(self, attempt: AttemptDirectory | None, bad: list[str], why: str) -> Kept:
        """Have the job queued again, and only then say so: an event tells what was accepted, not what was meant."""
        from cluster_ddp.run.requeue import Decision

        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # what Slurm sends for the requeue would end scontrol, too
        try:
            queued = self._reason == REQUEUED or queue_again(  # Slurm has queued it again already
                self._allocation, known=self._reason, until=self._give_up_at(), delayed=self._say_delayed
            )
        except RequeueFailed as error:
            self._write(REQUEUE_FAILED, reason=str(error).splitlines()[0])
            raise RequeueFailed(f"{error}\nGo on with: cluster-ddp resume {self._run.path}") from error
        if not queued:
            self._reason = CANCEL
            self._ask_to_stop(None)
            if attempt is not None:
                self._record(attempt, Decision("stop", "cancelled meanwhile"))
            return Kept("end", "stop", "cancelled meanwhile")
        if attempt is not None:
            self._record(attempt, Decision("requeue", why))
        if bad and self._allocation.has_enough_others(bad) and self._allocation.keep_from(bad):
            _say(f"{' '.join(bad)} failed more than once: excluded from now on")
        return Kept("start again", "requeue", why)

    def _give_up_at(self) -> float:
        """When trying to be queued again ends, on the monotonic clock: shortly before the allocation does."""
        if self._decide_at is not None:
            return self._decide_at + _MARGIN_SECONDS - 1.0
        ends_at = self._allocation.ends_at
        left = _ENDLESS_SECONDS if ends_at is None else ends_at - time.time() - _NEARLY_OVER_SECONDS
        return time.monotonic() + left

    def _say_delayed(self, reason: str) -> None:
        _say(f"cannot be queued again yet, and keeps trying: {reason}")
        self._write(REQUEUE_DELAYED, reason=reason)

    def _write(self, event: str, **fields: object) -> None:
        number = None if self._attempt is None else self._attempt.number
        _within(_RECORD_SECONDS, lambda: EventWriter(self._run, self._writer).write(event, attempt=number, **fields))

    def _record(self, attempt: AttemptDirectory, decision: Decision) -> None:
        from cluster_ddp.run.requeue import record_decision

        _within(_RECORD_SECONDS, lambda: record_decision(attempt, decision, writer=self._writer))


_T = TypeVar("_T")


def _within(seconds: float, do: Callable[[], _T]) -> _T | None:
    """What `do` returns, or None when it takes longer: shared storage may keep a process waiting without end."""
    done: queue.SimpleQueue[_T] = queue.SimpleQueue()
    threading.Thread(target=lambda: done.put(do()), daemon=True).start()
    try:
        return done.get(timeout=seconds)
    except queue.Empty:
        return None


def _say(words: str) -> None:
    """Print for people; a full disk behind the output must not end the job."""
    try:
        print(f"cluster-ddp: {words}", file=sys.stderr, flush=True)
    except OSError:
        return


def _arguments(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m cluster_ddp.launch.keeper", description=(__doc__ or "").split("\n\n")[0]
    )
    parser.add_argument("--run", required=True, type=Path, help="the run directory")
    parser.add_argument("--warning", required=True, help="the signal that announces the job's end, such as USR1")
    parser.add_argument("step", nargs=argparse.REMAINDER, help="-- srun ...")
    parsed = parser.parse_args(arguments)
    parsed.step = parsed.step[1:] if parsed.step[:1] == ["--"] else parsed.step
    return parsed


def main(arguments: Sequence[str]) -> int:
    """Entry point of ``python -m cluster_ddp.launch.keeper``."""
    parsed = _arguments(arguments)
    limit_umask(parsed.run)
    start = this_start(os.environ)
    if start is None:
        _say("the keeper keeps a job of Slurm's, and there is no SLURM_JOB_ID here")
        return 2
    run, warning = RunDirectory(parsed.run.absolute()), signal.Signals[f"SIG{parsed.warning}"]
    try:
        kept = Keeper(run, parsed.step, SlurmAllocation(start), warning=warning).keep()
    except RunAlive as error:
        return _refuse(error, ALIVE_STATUS)
    except RunEnded as error:
        return _refuse(error, 0 if error.state == "COMPLETED" else ENDED_STATUS)
    except RequeueFailed as error:
        return _refuse(error, 1)
    except ClusterDDPError as error:
        return _refuse(error, error.exit_status)
    return FAILED_STATUS if kept.follows == "fail" else 0


def _refuse(error: ClusterDDPError, status: int) -> int:
    _say(str(error))
    return status


if __name__ == "__main__":
    fast_exit(main(sys.argv[1:]), at_once=True)
