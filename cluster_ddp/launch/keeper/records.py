"""What a keeper records about its start of the job, as far as storage lets it: the job does not depend on that."""

from __future__ import annotations

import os
from collections.abc import Callable

from cluster_ddp.launch.keeper.allocation import Allocation
from cluster_ddp.launch.keeper.batch_host import BatchHost, say
from cluster_ddp.process import host_name
from cluster_ddp.run.attempt_record import list_attempts, read_attempt
from cluster_ddp.run.directory import AttemptDirectory, RunDirectory
from cluster_ddp.run.events import START_REFUSED, EventWriter, on_this_host
from cluster_ddp.run.requeue.decision import Decision, record_decision

RECORD_SECONDS = 20.0


class KeeperRecords:
    """Writes the events of one start of the job on the batch host.

    Attributes
    ----------
    attempt
        The attempt of this start; None until it has begun.
    """

    def __init__(self, run: RunDirectory, allocation: Allocation, host: BatchHost) -> None:
        self._run = run
        self._allocation = allocation
        self._host = host
        self.attempt: AttemptDirectory | None = None

    @property
    def host_name(self) -> str:
        """What Slurm calls this host."""
        start = self._allocation.start
        return (start.batch_host if start else "") or host_name()

    @property
    def writer(self) -> str:
        """The name under which this process writes events."""
        start = self._allocation.start
        return on_this_host(f"batch-{start.job_id if start else os.getpid()}")

    def write(self, event: str, **fields: object) -> None:
        """Write an event about this attempt, or about the one before it if this start gives its nodes back first."""

        def write() -> None:
            attempts = [self.attempt] if self.attempt is not None else list_attempts(self._run)
            number = attempts[-1].number if attempts else None
            EventWriter(self._run, self.writer).write(event, attempt=number, **fields)

        self.if_possible(write)

    def write_decision(self, attempt: AttemptDirectory, decision: Decision) -> None:
        """Write what was decided about an attempt, and that it is over."""
        self.if_possible(lambda: record_decision(attempt, decision, writer=self.writer))

    def write_refused_start(self) -> None:
        """Record that no attempt begins in this job, for example in one of a chain whose dependency was removed."""
        self.if_possible(self._write_refused_start)

    def _write_refused_start(self) -> None:
        start, attempts = self._allocation.start, list_attempts(self._run)
        if start is None or not attempts or read_attempt(attempts[-1]).slurm_job_id == start.task:
            return  # of two starts of one job, the newer one trains
        alive = attempts[-1].number
        message = (
            f"Slurm job {start.task} was started while attempt {alive} was alive: it has ended, and nothing of the run "
            "began in it"
        )
        events = EventWriter(self._run, self.writer)
        events.write(START_REFUSED, attempt=alive, slurm_job_id=start.task, message=message)

    def if_possible(
        self,
        record: Callable[[], object],
        *,
        seconds: float = RECORD_SECONDS,
        unless: Callable[[], bool] = lambda: False,
    ) -> None:
        """Do something that the job does not depend on."""
        try:
            self._host.within(seconds, record, unless=unless)
        except Exception as error:
            say(f"what happened to this start of the job cannot be recorded: {type(error).__name__}: {error}")
