"""Everything that rank 0 tells: metrics.jsonl, the display, the loggers. Other ranks tell nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from cluster_ddp.train.loggers import Logger
from cluster_ddp.train.metrics import MetricsFile
from cluster_ddp.train.progress import Display


class Report:
    """Passes numbers on to all that show or keep them.

    Attributes
    ----------
    latest
        The last value of each metric, on every rank that was told.
    """

    def __init__(
        self, file: MetricsFile | None = None, display: Display | None = None, loggers: Sequence[Logger] = ()
    ) -> None:
        self.latest: dict[str, float] = {}
        self._file = file
        self._display = display
        self._loggers = loggers

    def log(
        self, *, step: int, samples: int, epoch: int, values: Mapping[str, float], measured: float | None = None
    ) -> None:
        """Keep the values of a step, which were measured then (Unix seconds; by default now)."""
        self.latest.update(values)
        if self._file is not None:
            self._file.write(step=step, samples=samples, epoch=epoch, values=values, measured=measured)
        for logger in self._loggers:
            logger.log(step, values)

    def show(self, step: int, epoch: int, values: Mapping[str, float]) -> None:
        """Show how far training is."""
        if self._display is not None:
            self._display.update(step, epoch, values)

    def say(self, text: str) -> None:
        """Show a line."""
        if self._display is not None:
            self._display.say(text)

    def close(self, *, failed: bool, wait: bool = True) -> None:
        """Let go of all; with `wait` false the loggers, which may need a network, are left as they are."""
        if self._display is not None:
            self._display.close()
        if self._file is not None:
            self._file.close()
        loggers, self._loggers, self._file, self._display = self._loggers, (), None, None
        if wait:
            for logger in loggers:
                logger.close(failed=failed)
