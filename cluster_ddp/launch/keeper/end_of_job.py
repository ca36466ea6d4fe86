"""How the keeper learns that its job is about to end: from signals, and from what Slurm says about them.

A signal announces the end, but rarely the reason. Slurm knows it, but may answer late or not at all. So training is
asked to save and end immediately, and whether the job may be requeued is settled once the answer arrives.
"""

from __future__ import annotations

import math
import signal
from collections.abc import Callable

from cluster_ddp.launch.keeper.allocation import Allocation
from cluster_ddp.launch.keeper.batch_host import Answer, BatchHost, News, Signal, say
from cluster_ddp.launch.keeper.requeueing import ENDLESS_SECONDS
from cluster_ddp.launch.keeper.stop_requests import StopRequests
from cluster_ddp.launch.processes import ASK_TO_END
from cluster_ddp.run.directory import AttemptDirectory
from cluster_ddp.run.events import STOPPED
from cluster_ddp.run.history import read_history
from cluster_ddp.run.stopfile import FINAL_REASONS, PERSON, read_stop
from cluster_ddp.slurm.control import BRIEF_SECONDS
from cluster_ddp.slurm.job_info import (
    CANCEL,
    NODE_DOWN,
    NODE_FAILURE,
    PREEMPTION,
    REQUEUED,
    TERMINATED,
    TIME_LIMIT,
)

_MARGIN_SECONDS = 3.0  # before SIGKILL: the decision must be made by then, whether or not everything is saved
_POLL_SECONDS = 5.0  # in case a SIGCHLD is lost
_ASK_PAUSE_SECONDS = 2.0
_ASK_AHEAD_SECONDS = 300.0  # the time limit may be changed while the job runs
_SURVIVED_SECONDS = 15.0  # beyond KillWait: Slurm is not ending what is still alive then
_FIRST_SECONDS = 12.0  # for an urgent one, as the call may be lost: Slurm itself gives up on a call after 10 s
_PATIENT_SECONDS = 40.0  # for one that decides whether the run continues
_LOOK_SECONDS = 1.0  # between checks for a person's stop request, while idle


class EndOfJob:
    """Why the job has to end before its training has, and how much time is left.

    Parameters
    ----------
    warning
        The signal that announces the end of the job.

    Attributes
    ----------
    reason
        One of the reasons in `cluster_ddp.slurm.job_info`; None as long as nothing ends the job.
    lets_it_run
        Whether Slurm has said that it is not ending the job, so that a SIGTERM came from someone else.
    """

    def __init__(self, allocation: Allocation, host: BatchHost, *, warning: signal.Signals) -> None:
        self._allocation = allocation
        self._host = host
        # The other signals that ask a program to end are treated as the warning: by default they would end this
        # process, and nothing would requeue the job.
        self._warnings = {warning, *ASK_TO_END}
        self._attempt: AttemptDirectory | None = None
        self._unanswered: float | None = None  # monotonic time since which a SIGTERM has been unexplained
        self._ask_ahead_at: float | None = None  # monotonic time of the next query
        self._decide_at: float | None = None  # monotonic time at which SIGKILL is near
        self._step_ended_at: float | None = None  # monotonic time
        self._found_out_at: float | None = None  # monotonic time at which the cause of the step's end was known
        self._requests = StopRequests(host)
        self.reason: str | None = None
        self.lets_it_run = False

    # -- incoming signals and answers ----------------------------------------------------------------------------------

    def listen(self) -> None:
        """Start listening for signals, including SIGCHLD for a job step that has ended."""
        self._host.listen(*self._warnings, signal.SIGTERM, signal.SIGINT, signal.SIGCHLD)

    def stop_listening(self) -> None:
        """Ignore signals once everything is decided, also in the commands started from then on."""
        self._host.ignore(*self._warnings, signal.SIGTERM, signal.SIGINT)

    def ask_ahead(self) -> None:
        """Query Slurm periodically for when the job ends, and whether that has already been announced.

        A signal that arrived while the setup lines ran, or while Python started, is lost, but Slurm remembers it.
        """
        self._ask_ahead_at = self._host.now() + _ASK_AHEAD_SECONDS

        def ask() -> None:
            if self._allocation.ask_ahead() and self.reason is None:
                self._host.post(Signal(signal.SIGTERM, self._host.now()))

        self._host.in_background(ask)

    def begin(self, attempt: AttemptDirectory) -> None:
        """From now on ask this attempt to stop, also for a signal that arrived before its folder existed."""
        self._attempt = attempt
        if self.reason is not None:
            self._request_stop(None)
        self.react_to_all()

    def job_step_has_ended(self) -> None:
        """Note that the job step has ended: what arrives from now on may end the job, but no longer the training."""
        self._step_ended_at = self._host.now()
        self._requests.forget()

    def react_to_next(self, wait: float = _POLL_SECONDS) -> None:
        """React to the next news, if any arrives before something else is due."""
        if self._ask_ahead_at is not None and self._host.now() >= self._ask_ahead_at:
            self.ask_ahead()
        self._requests.retry()
        if self._requests.pending:
            wait = min(wait, _LOOK_SECONDS)
        if self._decide_at is not None:
            wait = min(wait, self._decide_at - self._host.now())
        news = self._host.next_news(wait)
        if news is not None:
            self._react(news)

    def react_to_all(self) -> None:
        """React to everything that has already arrived."""
        while (news := self._host.next_news(0.0)) is not None:
            self._react(news)

    def pause(self, seconds: float) -> None:
        """Wait at most this long; return early on a signal, an answer from Slurm or a person's stop request."""
        until, before = self._host.now() + seconds, (self._unanswered, self.reason)
        while (left := until - self._host.now()) > 0 and before == (self._unanswered, self.reason):
            if self.unwanted():
                return
            news = self._host.next_news(min(left, _LOOK_SECONDS))
            if news is not None:
                self._react(news)

    def _react(self, news: News) -> None:
        if isinstance(news, Answer):
            if news.signal.number == signal.SIGTERM:
                self._end_is_explained(news)
            elif news.reason == PREEMPTION and self.reason == TIME_LIMIT:
                self.reason = PREEMPTION  # where Slurm has preempt_send_user_signal
                self._request_stop(news.seconds, of=news.signal)
        elif news.number == signal.SIGTERM and self._unanswered is None:
            self._end_has_come(news)
        elif news.number in self._warnings and self.reason is None:
            self._end_is_near(news)
        elif news.number == signal.SIGINT and self._attempt is not None:
            self._requests.write(self._attempt, PERSON, None)  # sent by a person, as in a terminal

    def _end_is_near(self, warning: Signal) -> None:
        """Stop because of the warning."""
        self.reason = TIME_LIMIT
        self._request_stop(None, of=warning)
        say(f"the job is about to end{self._stop_in_words}")
        self._ask_why(warning)

    def _end_has_come(self, term: Signal) -> None:
        """Stop because of a SIGTERM; Slurm knows the reason, but may take a while to answer."""
        self._unanswered = term.since
        if self.reason is None:
            ends_at = self._allocation.ends_at
            over = ends_at is not None and self._host.unix_time() >= ends_at
            self.reason = TIME_LIMIT if over else TERMINATED
        self._request_stop(None, of=term)
        self._ask_why(term)

    def _ask_why(self, signalled: Signal) -> None:
        """Ask Slurm in the background until it answers."""

        def ask() -> None:
            seconds = _FIRST_SECONDS
            while (answer := self._allocation.end(signalled.since, seconds)) is None:
                seconds = _PATIENT_SECONDS
                self._host.sleep(_ASK_PAUSE_SECONDS)
            self._host.post(Answer(signalled, *answer))

        self._host.in_background(ask)

    def _end_is_explained(self, answer: Answer) -> None:
        self._unanswered = None
        if answer.reason == TERMINATED:  # Slurm lets the job run: the signal came from someone else
            self.lets_it_run = True
            say(f"received a SIGTERM that Slurm did not send{self._stop_in_words}")
            return
        self.reason = answer.reason
        within = "" if answer.seconds is None else f", in {answer.seconds:.0f} s"
        say(f"Slurm ends the job ({self.reason}){within}{self._stop_in_words}")
        self._request_stop(answer.seconds, of=answer.signal)
        if answer.seconds is not None and self.reason != CANCEL:
            self._decide_at = self._host.now() + max(1.0, answer.seconds - _MARGIN_SECONDS)

    def _request_stop(self, seconds: float | None, *, of: Signal | None = None) -> None:
        """Ask the node programs, which watch the stop file, to save and end.

        The stop file also states why the attempt ended. So a signal that arrived too late to have ended it is left out,
        unless it was the owner's cancel, which decides what happens to the run.
        """
        if self._attempt is None or self.reason is None:
            return
        if of is not None and self.reason != CANCEL and self._came_too_late(of):
            return
        reason = {REQUEUED: PREEMPTION, NODE_DOWN: NODE_FAILURE}.get(self.reason, self.reason)
        self._requests.write(self._attempt, reason, seconds)

    @property
    def _stop_in_words(self) -> str:
        trains = self._attempt is not None and self._step_ended_at is None
        return ": asking training to save and end" if trains else ""

    def _came_too_late(self, came: Signal) -> bool:
        """Whether a signal played no part in the end of the job step.

        A SIGTERM reaches the processes of a job in any order, so the ranks may have ended because of it before it
        arrives here. The warning is sent to this process only.
        """
        end = self._step_ended_at if came.number in self._warnings else self._found_out_at
        return end is not None and came.since > end

    # -- what is known about the end -----------------------------------------------------------------------------------

    def certain_reason(self) -> str | None:
        """Return the reason as far as it is certain; None if the owner may have cancelled the job.

        A SIGTERM that Slurm has not explained may be a cancel, even at the end of the time limit, which may have been
        changed. After a SIGTERM that Slurm has explained, further ones are not noticed: a later cancel of a job that
        Slurm lets run, or that has a long grace, shows only when Slurm is queried. Without a SIGTERM there was no
        cancel.
        """
        self.react_to_all()
        in_grace = self._decide_at is not None and self._decide_at - self._host.now() > _PATIENT_SECONDS
        return None if self._unanswered is not None or self.lets_it_run or in_grace else self.reason

    def out_of_time(self) -> bool:
        """Whether SIGKILL is so near that there is no time to wait for anything."""
        return self.seconds_left() <= 0

    def has_come_too_near(self) -> bool:
        """Whether, with all that has arrived by now, SIGKILL is so near that there is no time to wait for anything."""
        self.react_to_all()
        return self.out_of_time()

    def seconds_left(self) -> float:
        """Return for how long anything may still be waited for; endless as long as nothing is known to end the job."""
        return math.inf if self._decide_at is None else self._decide_at - self._host.now()

    def job_goes_on(self) -> bool:
        """Whether the job may continue although a SIGTERM ended its step: Slurm lets it run, or ends it only for now.

        The stop file says so too, if there was space for it.
        """
        if self.lets_it_run or self.reason in (PREEMPTION, TIME_LIMIT, REQUEUED, NODE_FAILURE, NODE_DOWN):
            return True
        if self.reason is not None:
            return False
        return self._allocation.why_it_ends(_PATIENT_SECONDS) == TERMINATED

    def give_up_at(self) -> float | None:
        """Return when to give up on the requeue, in monotonic time: shortly before the allocation ends.

        None as long as nothing ends the job. Reaching the last known time limit is no reason to give up: the limit may
        have been changed, and enforcing it takes a running controller, which would also answer.
        """
        return None if self._decide_at is None else self._decide_at + _MARGIN_SECONDS - 1.0

    def find_out_why(self, delayed: Callable[[str], None]) -> None:
        """Wait for Slurm to explain a SIGTERM, which decides whether the job may be requeued.

        Parameters
        ----------
        delayed
            Called once, with the reason, when the answer may take long.
        """
        if self.reason is None:
            self._find_out_what_the_step_was_told(delayed)
        while self._unanswered is not None and self.reason == TERMINATED:
            left = self._unanswered + self._allocation.kill_wait + _SURVIVED_SECONDS - self._host.now()
            if left <= 0:
                self._unanswered, self.lets_it_run = None, True
                break
            self.react_to_next(min(left, _POLL_SECONDS))
        self._found_out_at = self._host.now()

    def _find_out_what_the_step_was_told(self, delayed: Callable[[str], None]) -> None:
        """Ask Slurm why the job step ended when this process has received no signal.

        Slurm may have sent SIGTERM to the steps only. If the ranks report one, the requeue depends on the answer.
        """
        why = self._allocation.why_it_ends(BRIEF_SECONDS)
        if why is None and self._ranks_had_a_sigterm():
            delayed("Slurm does not say why it has sent a SIGTERM")
            until = self._host.now() + ENDLESS_SECONDS
            while why is None and self.reason is None and not self.unwanted() and self._host.now() < until:
                self.pause(_ASK_PAUSE_SECONDS)
                why = self._allocation.why_it_ends(_PATIENT_SECONDS)
                self.react_to_all()
        if self.reason is not None:  # a signal has arrived meanwhile
            return
        self.lets_it_run = why == TERMINATED
        if why in (PREEMPTION, TIME_LIMIT, NODE_DOWN, CANCEL):  # Slurm does not requeue a job whose script has ended
            self.reason = why
            self._request_stop(None)

    def _ranks_had_a_sigterm(self) -> bool:
        """Whether ranks report that they stopped because of a SIGTERM of unknown origin."""
        if self._attempt is None:
            return False
        run, number = self._attempt.run, self._attempt.number
        stopped = self._host.glance(lambda: read_history(run).of_attempt(number, STOPPED))
        return any(event.get("reason") == TERMINATED for event in stopped or ())

    def unwanted(self) -> bool:
        """Whether a person has asked that the run not continue, possibly after the attempt had ended.

        If storage does not say, the next attempt finds the request and ends.
        """
        attempt = self._attempt
        request = None if attempt is None else self._host.glance(lambda: read_stop(attempt))
        return request is not None and request.reason in FINAL_REASONS

    def note_cancel(self) -> None:
        """Note that the owner has cancelled the job meanwhile, which overrides any other reason."""
        self.reason = CANCEL
        self._request_stop(None)
