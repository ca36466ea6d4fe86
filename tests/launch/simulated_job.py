"""A world of its own for a keeper: a clock, signals, training and a Slurm that answers late, with half a line or not.

Nothing of the keeper is replaced: it gets another host, allocation and step. Time passes only when it waits.
"""

from __future__ import annotations

import contextlib
import json
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from simulated_world import KILL_WAIT, World
from starts import start

from cluster_ddp.launch.keeper.batch_host import BatchHost, News, Signal
from cluster_ddp.launch.keeper.deciding import KeptStart
from cluster_ddp.launch.keeper.keeper import Keeper
from cluster_ddp.run.attempt import begin_attempt
from cluster_ddp.run.directory import AttemptDirectory, RunDirectory
from cluster_ddp.run.errors import RunAlive, RunEnded
from cluster_ddp.run.events import EventWriter
from cluster_ddp.run.history import read_history
from cluster_ddp.run.stopfile import PERSON, TERMINATED, read_stop, request_stop
from cluster_ddp.slurm.commands import SlurmError, SlurmRefused
from cluster_ddp.slurm.job_info import JobInfo, parse_job, seconds_until_kill, why_it_ends
from cluster_ddp.slurm.start import SlurmStart

T = TypeVar("T")
_WATCHDOG = 300.0  # what hangs is ended by its node program
STEP = ["srun", "python", "-m", "x", "--attempt", "{attempt}", "--", "torchrun", "--rdzv-id=7.{attempt}",
        "--rdzv-endpoint=n1:29000"]  # fmt: skip


class Killed(BaseException):
    """SIGKILL: nothing of a keeper's runs after it."""


class SimulatedAllocation:
    """See `Allocation`: Slurm, as the life of this start has it."""

    kill_wait = KILL_WAIT

    def __init__(self, world: World, host: SimulatedHost) -> None:
        self._world, self._host = world, host
        self.ends_at = world.life.limit

    @property
    def start(self) -> SlurmStart:
        return replace(start(restart=self._world.restart, nodes="n1"), nodes=1)

    def environment(self) -> dict[str, str]:
        return {}

    def ask_ahead(self) -> bool:
        return False

    def _show(self, seconds: float) -> JobInfo | None:
        begins, ends = self._world.life.silent
        if begins <= self._world.now < ends:
            self._host.sleep(min(seconds, ends - self._world.now))
            if self._world.now < ends:
                return None
        self._host.sleep(min(seconds, late := self._world.life.latency))
        if seconds < late:
            return None
        fate = self._world.answers.pop(0) if self._world.answers else "ok"
        if fate in ("none", "late"):
            self._host.sleep(seconds if fate == "none" else min(seconds, 4.0))
        if fate == "none":
            return None
        return parse_job("JobId=77 JobName=x JobSta") if fate == "half" else self._world.shown()

    def why_it_ends(self, seconds: float) -> str | None:
        job = self._show(seconds)
        return None if job is None else why_it_ends(job, self._world.restart)

    def end(self, since: float, seconds: float) -> tuple[str, float | None] | None:
        job = self._show(seconds)
        if job is None:
            return None
        waited = self._host.now() - since
        seconds_left = seconds_until_kill(job, max(0.0, KILL_WAIT - waited), waited)
        return why_it_ends(job, self._world.restart), seconds_left

    def missing_command(self) -> None:
        """It is there."""

    def requeue(self) -> None:
        self._host.sleep(self._world.life.latency)
        fate = self._world.requeues.pop(0) if self._world.requeues else "ok"
        if fate == "away":
            self._host.sleep(9.0)
            raise SlurmError("Unable to contact slurm controller")
        if fate == "refused" or self._world.happened("node down") is not None:
            raise SlurmRefused("Requested operation is presently disabled")
        self._world.check_requeue()
        if fate == "unheard":
            raise SlurmError("scontrol gave no answer in 60 s")

    def prevent_restart(self, *, unwanted: bool) -> None:
        self._world.left_queue = unwanted

    def has_enough_others(self, bad: Sequence[str]) -> bool:
        return False

    def exclude(self, bad: Sequence[str], link: str | None = None) -> bool:
        return False


class SimulatedStep:
    """The step: training on one node, which saves when it is asked to stop."""

    lost: tuple[int, ...] = ()
    unstarted = stood_still = False
    own_error = killed_by = cut_off = None
    down: tuple[str, ...] = ()
    cancelled = False

    def __init__(self, world: World, attempt: AttemptDirectory) -> None:
        self._world, self._attempt = world, attempt
        self._ends_at, self._asked = world.now + world.life.lasts, False
        self._over = False
        self._tell("node-started", node=0, host="n1")
        self._tell("started", step=0, world_size=1, total_steps=100)
        self.output = self

    def failures(self) -> list[Any]:
        return []

    def first_to_end(self) -> None:
        """Nothing that srun says tells of a node program that was killed."""

    def due(self) -> float:
        """When it ends, as far as is known now."""
        told = read_stop(self._attempt) is not None or self._world.happened("TERM to the step") is not None
        if not self._asked and not self._over and told:
            self._asked, saves_in = True, self._world.life.saves_in
            self._ends_at = self._world.now + (_WATCHDOG if saves_in is None else saves_in)
        return self._ends_at

    @property
    def has_exited(self) -> bool:
        return self._world.now >= self.due()

    def end_unbegun(self) -> bool:
        return False

    def has_ended(self) -> bool:
        if not self._over and self._world.now >= self.due():
            self._over = True
            self._end()
        return self._over

    def _end(self) -> None:
        step = 10 * self._attempt.number + 10
        request = read_stop(self._attempt)
        if self._asked and self._world.life.saves_in is None:
            self._tell("hang", step=step, reason="rank 0 hangs")
        elif self._asked:
            self._tell("checkpoint", step=step, samples=step)
            self._tell("stopped", step=step, reason=request.reason if request else TERMINATED)
        elif self._world.life.training == "completes":
            self._tell("completed", step=100)
        elif self._world.life.training == "crashes":
            self._tell("checkpoint", step=step, samples=step)
            self._tell("failed", step=step, rank=0, error="RuntimeError: the fault of the test")
        elif self._world.life.training == "is killed":
            self._tell("rank-failed", rank=0, host="n1", signal="SIGKILL", error="ended by SIGKILL")
        else:
            return
        self._tell("node-finished", node=0, host="n1", outcome="stopped", status=0)

    def _tell(self, event: str, **fields: Any) -> None:
        EventWriter(self._attempt.run, "rank-0").write(event, attempt=self._attempt.number, **fields)


class SimulatedHost(BatchHost):
    """The keeper's machine: time passes when it waits, and what happens meanwhile happens then."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self._world = world
        self._rest = list(world.life.events)
        self._listened: set[int] = set()
        self._posted: list[tuple[float, News]] = []
        self._step: SimulatedStep | None = None
        self._in_background = False

    def now(self) -> float:
        return self._world.now

    unix_time = now

    def sleep(self, seconds: float) -> None:
        self._pass_until(self._world.now + seconds)

    def listen(self, *numbers: int) -> None:
        self._listened |= set(numbers)

    def ignore(self, *numbers: int) -> None:
        self._listened -= set(numbers)

    def post(self, news: News) -> None:
        self._posted.append((self._world.now, news))

    def in_background(self, do: Callable[[], None]) -> None:
        """What it takes does not pass for the keeper; what it finds out comes when it is found out."""
        before, self._in_background = self._world.now, True
        try:
            do()
        finally:
            self._world.now, self._in_background = before, False

    def within(self, seconds: float, do: Callable[[], T], *, unless: Callable[[], bool] = lambda: False) -> T | None:
        return do()

    def glance(self, do: Callable[[], T]) -> T | None:
        return do()

    def next_news(self, seconds: float) -> News | None:
        deadline = self._world.now + max(0.0, seconds)
        while True:
            self._posted.sort(key=lambda posted: posted[0])
            if self._posted and self._posted[0][0] <= self._world.now:
                return self._posted.pop(0)[1]
            if self._world.now >= deadline:
                return None
            due = self._step.due() if self._step is not None and not self._step.has_ended() else float("inf")
            moments = [deadline, due, *(at for at, _ in self._rest[:1]), *(at for at, _ in self._posted[:1])]
            self._pass_until(max(self._world.now, min(moments)))
            if self._step is not None and due <= self._world.now:
                self.post(Signal(signal.SIGCHLD, self._world.now))

    def start_job_step(
        self, command: Sequence[str], environment: Mapping[str, str], attempt: AttemptDirectory, nodes: int, parent: int
    ) -> Any:
        self._step = SimulatedStep(self._world, attempt)
        return self._step

    def _pass_until(self, moment: float) -> None:
        if self._in_background:
            self._world.now = moment
            return
        while self._rest and self._rest[0][0] <= moment:
            at, word = self._rest.pop(0)
            self._world.now = max(self._world.now, at)
            self._happen(word)
        killed_at = self._world.killed_at
        if killed_at is not None and killed_at <= moment:
            self._world.now = max(self._world.now, killed_at)
            raise Killed
        self._world.now = max(self._world.now, moment)

    def _happen(self, word: str) -> None:
        world, attempts = self._world, read_history(self._world.run).attempts
        if word == "stop":
            request_stop(world.run.attempt(attempts[-1].number), reason=PERSON, by="me")
        elif word == "second start":
            _begin_elsewhere(world.run, "77", world.restart + 1)
            world.queued = True
        elif word == "another job":
            with contextlib.suppress(RunAlive, RunEnded):
                _begin_elsewhere(world.run, "78", 0)
                last = attempts[-1]
                if last.ended is None and last.process is not None and last.process.pid:
                    world.faults.append(f"another job began at {world.now:.0f} s while an attempt was alive")
        elif word != "TERM to the step":
            sent = word.startswith("kill -")
            number = signal.Signals[f"SIG{word[6:]}"] if sent else signal.SIGTERM
            number = signal.SIGUSR1 if word == "warning" else number
            if sent and number != signal.SIGTERM and number not in self._listened:
                raise Killed
            if number in self._listened:
                self._listened -= {signal.SIGTERM} & {number}
                self.post(Signal(number, world.now))


def _begin_elsewhere(run: RunDirectory, job: str, restart: int) -> None:
    begin_attempt(run, slurm_job_id=job, restart_count=restart, host="n9", pid=0, nodes=1, procs=1)


def live(world: World) -> KeptStart | None:
    """Let a keeper keep this start to its end; None when it was killed before it had decided.

    Raises
    ------
    ClusterDDPError
        As `Keeper.keep` does.
    """
    host = SimulatedHost(world)
    keeper = Keeper(world.run, STEP, SimulatedAllocation(world, host), warning=signal.SIGUSR1, host=host)
    try:
        return keeper.keep()
    except Killed:
        return None
    finally:
        _bury(world.run)


def _bury(run: RunDirectory) -> None:
    """The keepers of this world are one process, which lives on; the attempt's record names one that has ended."""
    for file in run.attempts.glob("*/attempt.json"):
        record = json.loads(file.read_text())
        file.write_text(json.dumps({**record, "pid": 0}))
