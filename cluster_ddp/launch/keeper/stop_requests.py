"""The requests to stop that the keeper leaves for the node programs, which watch the stop file."""

from __future__ import annotations

from dataclasses import dataclass

from cluster_ddp.launch.keeper.batch_host import BatchHost, say
from cluster_ddp.process import host_name
from cluster_ddp.run.directory import AttemptDirectory
from cluster_ddp.run.stopfile import FINAL_REASONS, PERSON, request_stop

_FINAL_SECONDS = 20.0


@dataclass(frozen=True)
class _Request:
    """A request that is not written yet; `ends_at` is the monotonic time at which its grace ends, if known."""

    attempt: AttemptDirectory
    reason: str
    ends_at: float | None


class StopRequests:
    """Writes requests to stop, and tries again with one that cannot be written, such as to a full disk.

    Otherwise training would notice the end of the job too late to save. The keeper does not wait for storage that is
    slow to take one, since it may have a few seconds to requeue the job.
    """

    def __init__(self, host: BatchHost) -> None:
        self._host = host
        self._unwritten: _Request | None = None
        self._has_failed = False

    @property
    def pending(self) -> bool:
        """Whether the last one is still to be written."""
        return self._unwritten is not None

    def write(self, attempt: AttemptDirectory, reason: str, seconds: float | None) -> None:
        """Ask an attempt to save and end, within `seconds` if that is known."""
        ends_at = None if seconds is None else self._host.now() + seconds
        self._unwritten = request = _Request(attempt, reason, ends_at)
        if reason in FINAL_REASONS:  # nothing is urgent any more, and this is what the run ends as
            self._host.within(_FINAL_SECONDS, lambda: self._write(request))
        else:
            self._host.glance(lambda: self._write(request))

    def retry(self) -> None:
        """Try again to write the one that could not be written, if there is one."""
        request = self._unwritten
        if request is not None:
            self._host.glance(lambda: self._write(request))

    def forget(self) -> None:
        """Give up on the one that could not be written: training has ended."""
        self._unwritten = None

    def _write(self, request: _Request) -> None:
        who = "SIGINT to the keeper" if request.reason == PERSON else "the keeper"
        grace = None if request.ends_at is None else max(0.0, request.ends_at - self._host.now())
        try:
            request_stop(request.attempt, reason=request.reason, grace=grace, by=f"{who} on {host_name()}")
        except OSError as error:
            if not self._has_failed:
                say(f"cannot write the stop request, trying again: {error}")
            self._has_failed = True
            return
        if self._has_failed:
            say("training has been asked to stop")
        self._has_failed = False
        if self._unwritten is request:  # else a newer one has come meanwhile
            self._unwritten = None
