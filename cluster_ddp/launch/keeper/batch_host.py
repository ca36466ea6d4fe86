"""The batch host as the keeper sees it: clocks, incoming signals, background work, and the job step."""

from __future__ import annotations

import queue
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from cluster_ddp import printing
from cluster_ddp.launch.keeper.running_job_step import RunningJobStep
from cluster_ddp.run.directory import AttemptDirectory

T = TypeVar("T")

_GLANCE_SECONDS = 1.0
_LOOK_SECONDS = 0.5  # between checks whether to wait any longer


class Signal(NamedTuple):
    """A signal, and when it arrived, in monotonic time."""

    number: int
    since: float


class Answer(NamedTuple):
    """Slurm's explanation of a signal: why the job ends, and the seconds left, if known."""

    signal: Signal
    reason: str
    seconds: float | None


News = Signal | Answer
_Done = tuple[T | None, Exception | None]


def _result(done: _Done[T]) -> T | None:
    result, error = done
    if error is not None:
        raise error
    return result


class BatchHost:
    """Everything that a keeper waits for or that takes time, in one place, so that tests can replace it.

    Signals and answers arrive as news, one at a time, in order of arrival.
    """

    def __init__(self) -> None:
        self._news: queue.SimpleQueue[News] = queue.SimpleQueue()
        self._blocked: queue.SimpleQueue[Any] | None = None  # where the result of a glance that is blocked will be put

    def now(self) -> float:
        """Return monotonic seconds."""
        return time.monotonic()

    def unix_time(self) -> float:
        """Return Unix seconds, as Slurm uses them."""
        return time.time()

    def sleep(self, seconds: float) -> None:
        """Wait."""
        time.sleep(seconds)

    def listen(self, *numbers: int) -> None:
        """Receive these signals as news from now on."""
        for number in numbers:
            signal.signal(number, self._note)

    def ignore(self, *numbers: int) -> None:
        """Ignore these signals from now on, so that they interrupt no Slurm command; earlier ones still count."""
        for number in numbers:
            signal.signal(number, signal.SIG_IGN)

    def _note(self, number: int, _frame: Any) -> None:
        if number == signal.SIGTERM:
            self.ignore(signal.SIGTERM)  # Slurm sends it more than once, to scontrol too
        self._news.put(Signal(number, self.now()))

    def post(self, news: News) -> None:
        """Add news from a background thread."""
        self._news.put(news)

    def next_news(self, seconds: float) -> News | None:
        """Return the next news; None if none arrives within that time."""
        try:
            return self._news.get(timeout=max(0.0, seconds))
        except queue.Empty:
            return None

    def in_background(self, do: Callable[[], None]) -> None:
        """Do something slow in the background, or here and now if the system allows no more threads."""
        try:
            threading.Thread(target=do, daemon=True).start()
        except RuntimeError:
            do()

    def within(self, seconds: float, do: Callable[[], T], *, unless: Callable[[], bool] = lambda: False) -> T | None:
        """Return the result of `do`, or None if it takes longer: shared storage may block a process indefinitely.

        Its error is raised here. What is not waited for any longer ends in the background, or with this process.

        Parameters
        ----------
        unless
            Called while waiting; once it is true, `do` is not waited for any longer.
        """
        done = self._begin(do)
        until = time.monotonic() + seconds
        while True:
            try:
                return _result(done.get(timeout=min(_LOOK_SECONDS, max(0.0, until - time.monotonic()))))
            except queue.Empty:
                if time.monotonic() >= until or unless():
                    return None

    @property
    def waits_for_storage(self) -> bool:
        """Whether the last glance is still blocked."""
        return self._blocked is not None and self._blocked.empty()

    def glance(self, do: Callable[[], T]) -> T | None:
        """Return the result of `do`, or None if shared storage does not let it end at once: time may be short.

        It then ends in the background, and until it has, every further glance returns None without doing anything.
        """
        if self.waits_for_storage:
            return None
        done = self._begin(do)
        try:
            return _result(done.get(timeout=_GLANCE_SECONDS))
        except queue.Empty:
            self._blocked = done
            return None

    def _begin(self, do: Callable[[], T]) -> queue.SimpleQueue[_Done[T]]:
        """Begin to do something in the background; return where its result will be put."""
        done: queue.SimpleQueue[_Done[T]] = queue.SimpleQueue()

        def put() -> None:
            try:
                done.put((do(), None))
            except Exception as error:
                done.put((None, error))

        self.in_background(put)
        return done

    def start_job_step(
        self, command: Sequence[str], environment: Mapping[str, str], attempt: AttemptDirectory, nodes: int, parent: int
    ) -> RunningJobStep:
        """Start the job step; see `RunningJobStep`."""
        return RunningJobStep(command, environment, attempt, nodes, parent)


_printer = BatchHost()


def say(words: str) -> None:
    """Print for people what the keeper does, if that does not block: the job's output may be on shared storage."""
    _printer.glance(lambda: printing.say(f"cluster-ddp: {words}"))
