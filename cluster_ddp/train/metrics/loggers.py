"""TensorBoard and Weights & Biases, on rank 0 only."""

from __future__ import annotations

import contextlib
import netrc
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Protocol

from cluster_ddp.job import JobSpec, WandbSpec
from cluster_ddp.printing import say
from cluster_ddp.run.directory import RunDirectory
from cluster_ddp.train.errors import TrainError


class Logger(Protocol):
    """Something that records metrics in addition to metrics.jsonl."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Log the values of a step."""

    def close(self, *, failed: bool) -> None:
        """Send what is left; may take as long as the network does."""


def open_loggers(job: JobSpec, run: RunDirectory, wandb_id: str, step: int) -> list[Logger]:
    """The loggers that the job file asks for, continuing from `step`."""
    loggers: list[Logger] = []
    if job.log.tensorboard:
        loggers.append(TensorBoard(run.tensorboard, step))
    if job.log.wandb is not None and job.log.wandb.mode != "disabled":
        loggers.append(Wandb(job, job.log.wandb, run, wandb_id))
    return loggers


class TensorBoard:
    """Writes event files; steps repeated after a crash are shown once."""

    def __init__(self, folder: Path, step: int) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise TrainError(
                f"log.tensorboard needs a package that is missing ({error}): pip install 'cluster_ddp[tensorboard]', "
                "or set log.tensorboard: false"
            ) from error
        self._writer = SummaryWriter(str(folder), purge_step=step + 1 if step else None)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self, *, failed: bool) -> None:
        self._writer.close()


class Wandb:
    """One wandb run for all attempts of a run, because its id is in the run's record.

    Steps are logged as a separate metric ("step"), so that steps repeated after a crash are drawn where they belong
    instead of being refused by wandb's own counter.
    """

    def __init__(self, job: JobSpec, settings: WandbSpec, run: RunDirectory, wandb_id: str) -> None:
        import wandb

        self._folder = run.path
        arguments: dict[str, Any] = {
            "project": settings.project or job.name,
            "id": wandb_id,
            "name": run.id,
            "resume": "allow",
            "dir": str(run.path),
            "config": job.model_dump(mode="json"),
        }
        options: dict[str, Any] = {"init_timeout": settings.init_timeout, "console": "off"}
        mode = wandb_mode(settings)
        try:
            self._run = wandb.init(**arguments, mode=mode, settings=wandb.Settings(**options))
        except (wandb.errors.CommError, wandb.errors.AuthenticationError, TimeoutError) as error:
            if mode == "offline":
                raise
            self._run = wandb.init(**arguments, mode="offline", settings=wandb.Settings(**options))
            say(
                f"cluster-ddp: wandb cannot be reached ({error}); logging offline. When it can be again: "
                f"wandb sync {Path(self._run.dir).parent}"
            )
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log({"step": step, **values})

    def close(self, *, failed: bool) -> None:
        self._run.finish(exit_code=1 if failed else 0)


def wandb_mode(settings: WandbSpec) -> Literal["online", "offline"]:
    """How to log: as set by the job file or $WANDB_MODE, else online if there is an API key."""
    wish = os.environ.get("WANDB_MODE") if settings.mode == "auto" else settings.mode
    if wish == "online":
        return "online"
    if wish == "offline":
        return "offline"
    return "online" if os.environ.get("WANDB_API_KEY") or _in_netrc() else "offline"


def _in_netrc() -> bool:
    host = os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai").partition("://")[2].partition("/")[0]
    with contextlib.suppress(OSError, netrc.NetrcParseError):
        file = os.environ.get("NETRC") or Path("~/.netrc").expanduser()  # written by `wandb login`
        return netrc.netrc(file).authenticators(host) is not None
    return False
