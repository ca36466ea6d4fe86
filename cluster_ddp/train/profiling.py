"""Runs torch.profiler for a range of steps."""

from __future__ import annotations

import torch
from torch.profiler import ProfilerActivity, profile

from cluster_ddp.job import ProfileSpec
from cluster_ddp.run.directory import RunDirectory
from cluster_ddp.train.ranks.distributed import World


class Profiler:
    """Writes a trace of a range of steps, including the last one, into the attempt's folder.

    Only rank 0 is traced, in Chrome's format (``trace-steps-10-20.json``): open it at ui.perfetto.dev.
    """

    def __init__(self, settings: ProfileSpec | None, run: RunDirectory | None, attempt: int, world: World) -> None:
        self._range = settings.steps if settings is not None and run is not None and world.is_main else None
        self._folder = run.attempt(attempt).path if run is not None else None
        self._profile: profile | None = None

    def begin(self, step: int) -> None:
        """Call before each step, with its number counted from 0."""
        if self._range is None:
            return
        first, last = self._range
        if self._profile is None and first <= step <= last:
            activities = [ProfilerActivity.CPU]
            if torch.cuda.is_available():
                activities.append(ProfilerActivity.CUDA)
            self._profile = profile(activities=activities)
            self._profile.start()

    def end(self, step: int) -> None:
        """Call after each step."""
        if self._range is not None and step == self._range[1]:
            self.close()

    def close(self) -> None:
        """Write the trace if one was started."""
        if self._profile is None or self._range is None or self._folder is None:
            return
        self._profile.stop()
        self._folder.mkdir(parents=True, exist_ok=True)
        first, last = self._range
        self._profile.export_chrome_trace(str(self._folder / f"trace-steps-{first}-{last}.json"))
        self._profile = self._range = None
