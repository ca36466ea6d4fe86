"""The batch host as a keeper sees it: clocks, incoming signals, work in the background, and the step."""

from __future__ import annotations

import queue
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from cluster_ddp import printing
from cluster_ddp.launch.running_job_step import RunningJobStep
from cluster_ddp.run.directory import AttemptDirectory

T = TypeVar("T")


class Signal(NamedTuple):
    """A signal that came, and when, on the monotonic clock."""

    number: int
    since: float


class Answer(NamedTuple):
    """Slurm's explanation of a signal: why the job ends, and the seconds that are left, if known."""

    signal: Signal
    reason: str
    seconds: float | None


News = Signal | Answer


class BatchHost:
    """Everything that a keeper waits for or that takes time, in one place: its decisions depend on nothing else.

    Signals and answers arrive as news, one at a time, in the order in which they came.
    """

    def __init__(self) -> None:
        self._news: queue.SimpleQueue[News] = queue.SimpleQueue()

    def now(self) -> float:
        """Monotonic seconds."""
        return time.monotonic()

    def unix_time(self) -> float:
        """Seconds by the clock that Slurm goes by, too."""
        return time.time()

    def sleep(self, seconds: float) -> None:
        """Wait."""
        time.sleep(seconds)

    def listen(self, *numbers: int) -> None:
        """Take these signals in as news from now on."""
        for number in numbers:
            signal.signal(number, self._note)

    def ignore(self, *numbers: int) -> None:
        """From here on these interrupt no call of Slurm's commands; those that have come still count."""
        for number in numbers:
            signal.signal(number, signal.SIG_IGN)

    def _note(self, number: int, _frame: Any) -> None:
        if number == signal.SIGTERM:
            self.ignore(signal.SIGTERM)  # Slurm sends it more than once, to scontrol too
        self._news.put(Signal(number, self.now()))

    def post(self, news: News) -> None:
        """Add news from something that runs in the background."""
        self._news.put(news)

    def next_news(self, seconds: float) -> News | None:
        """The next news; None if there is none within that time."""
        try:
            return self._news.get(timeout=max(0.0, seconds))
        except queue.Empty:
            return None

    def beside(self, do: Callable[[], None]) -> None:
        """Do something that may take long in the background; here and now where the system gives no more threads."""
        try:
            threading.Thread(target=do, daemon=True).start()
        except RuntimeError:
            do()

    def within(self, seconds: float, do: Callable[[], T]) -> T | None:
        """What `do` returns, or None when it takes longer: shared storage may keep a process waiting without end."""
        done: queue.SimpleQueue[T] = queue.SimpleQueue()
        self.beside(lambda: done.put(do()))
        try:
            return done.get(timeout=seconds)
        except queue.Empty:
            return None

    def start_job_step(
        self, command: Sequence[str], environment: Mapping[str, str], attempt: AttemptDirectory, nodes: int, parent: int
    ) -> RunningJobStep:
        """Start the job step; see `RunningJobStep`."""
        return RunningJobStep(command, environment, attempt, nodes, parent)


def say(words: str) -> None:
    """Print for people what the keeper does."""
    printing.say(f"cluster-ddp: {words}")
