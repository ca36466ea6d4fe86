"""Whether the task or script can be imported by the interpreter that will run it, asked in a process of its own."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from cluster_ddp.launch.variables import SAFE_PATH_VARIABLE
from cluster_ddp.submit.base import SubmitError

if TYPE_CHECKING:
    from cluster_ddp.job import JobSpec, LoadedJob

_SECONDS = 60.0  # torch alone takes so long from a cold shared file system
_LAST = 800  # characters of what an interpreter says that fails


def check_program(loaded: LoadedJob, remark: Callable[[Iterable[str]], None]) -> int | None:
    """Import the task, or look for what the script imports.

    Returns
    -------
    int | None
        Bytes of a checkpoint, where that can be told.

    Raises
    ------
    SubmitError
        It cannot be imported, and no line of launch.setup may change that.
    """
    spec = loaded.spec
    python = spec.launch.python or sys.executable
    if spec.launch.container is not None:
        return None
    if shutil.which(python) is None:
        remark([f"launch.python: {python} is not on this machine, and so it was not seen whether the job can begin"])
        return None
    try:
        said = _ask(python, spec)
    except subprocess.TimeoutExpired:
        remark([f"it was not seen whether the job can begin: {python} has not imported it in {_SECONDS:.0f} s"])
        return None
    if "error" not in said:
        return _whole(said.get("bytes"), spec)
    key = "task" if spec.task is not None else "script"
    place = next((f"{origin.place}: " for origin in loaded.origins if origin.key == key), "")
    what = f"{place}{key}: {python} cannot import it: {said['error']}"
    if not spec.launch.setup:
        raise SubmitError(f"{what}\n(--no-check submits it all the same.)")
    remark([f"{what} (only a note: the lines of launch.setup may change that)"])
    return None


def _ask(python: str, spec: JobSpec) -> dict[str, Any]:
    train = spec.train
    task = {"task": spec.task, "params": spec.params, "lr": train.lr, "weight_decay": train.weight_decay}
    child = subprocess.Popen(
        [python, "-m", "cluster_ddp.train.probe"],
        env={**os.environ, SAFE_PATH_VARIABLE: "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,  # so that what it starts is ended with it
    )
    try:
        question = json.dumps(task if spec.task is not None else {"script": spec.script})
        out, err = child.communicate(question.encode(), timeout=_SECONDS)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
    with contextlib.suppress(ValueError):
        said = json.loads(out)
        if isinstance(said, dict):
            return said
    return {"error": err.decode(errors="replace").strip()[-_LAST:] or f"it ended with status {child.returncode}"}


def _whole(size: Any, spec: JobSpec) -> int | None:
    if not isinstance(size, int):
        return None
    return size + (size // 3 if spec.train.ema_decay is not None else 0)  # beside two states of AdamW
