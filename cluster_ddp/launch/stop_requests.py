"""The requests to stop that the keeper leaves for the node programs, which watch the stop file."""

from __future__ import annotations

import contextlib

from cluster_ddp.launch.batch_host import BatchHost, say
from cluster_ddp.process import host_name
from cluster_ddp.run.directory import AttemptDirectory
from cluster_ddp.run.stopfile import PERSON, request_stop


class StopRequests:
    """Writes requests to stop, and tries again with one that cannot be written, such as to a full disk.

    Otherwise training would notice the end of the job too late to save.
    """

    def __init__(self, host: BatchHost) -> None:
        self._host = host
        # The last one that could not be written, with the monotonic time at which its grace ends.
        self._unwritten: tuple[AttemptDirectory, str, float | None] | None = None

    def leave(self, attempt: AttemptDirectory, reason: str, seconds: float | None) -> None:
        """Ask an attempt to save and end, within `seconds` if that is known."""
        self._unwritten = None
        try:
            self._write(attempt, reason, seconds)
        except OSError as error:
            say(f"cannot write the stop request, trying again: {error}")
            self._unwritten = attempt, reason, None if seconds is None else self._host.now() + seconds

    def retry(self) -> None:
        """Try again to write the one that could not be written, if there is one."""
        if self._unwritten is None:
            return
        attempt, reason, ends_at = self._unwritten
        with contextlib.suppress(OSError):
            self._write(attempt, reason, None if ends_at is None else max(0.0, ends_at - self._host.now()))
            self._unwritten = None
            say("training has been asked to stop")

    def forget(self) -> None:
        """Give up on the one that could not be written: training has ended."""
        self._unwritten = None

    def _write(self, attempt: AttemptDirectory, reason: str, seconds: float | None) -> None:
        who = "SIGINT to the keeper" if reason == PERSON else "the keeper"
        request_stop(attempt, reason=reason, grace=seconds, by=f"{who} on {host_name()}")
