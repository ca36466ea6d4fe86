"""Whether the task or script can be imported by the interpreter that will run it, asked in a process of its own."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from cluster_ddp.launch.variables import SAFE_PATH_VARIABLE
from cluster_ddp.submit.base import SubmitError
from cluster_ddp.submit.save_time import SMALL

if TYPE_CHECKING:
    from cluster_ddp.job import JobSpec, LoadedJob

_SECONDS = 60.0  # torch alone takes so long from a cold shared file system
_MOST_STATES = 16  # times the bytes of a model that a checkpoint has at most; with AdamW 3
_LAST = 800  # characters of what an interpreter says that fails


class ProgramCheck:
    """An import of the task, or a look for what the script imports, that goes on while other things are asked.

    Begun when it is made; leaving its block ends it, whether or not anybody has waited for the verdict.
    """

    def __init__(self, loaded: LoadedJob) -> None:
        self._loaded = loaded
        launch = loaded.spec.launch
        self._python = launch.python or sys.executable
        self._here = shutil.which(self._python) is not None
        self._child = _begin(self._python, loaded.spec) if self._here and launch.container is None else None

    def __enter__(self) -> ProgramCheck:
        return self

    def __exit__(self, *_: object) -> None:
        if self._child is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._child.pid, signal.SIGKILL)
            with self._child:  # closes its pipes
                self._child.wait()

    def verdict(self, remark: Callable[[Iterable[str]], None]) -> int | None:
        """Wait for what was found.

        Returns
        -------
        int | None
            Bytes of a checkpoint, where that can be told and they are not few.

        Raises
        ------
        SubmitError
            It cannot be imported, and no line of launch.setup may change that.
        """
        spec, python = self._loaded.spec, self._python
        if spec.launch.container is not None:
            return None
        if self._child is None:
            remark(
                [f"launch.python: {python} is not on this machine, and so it was not seen whether the job can begin"]
            )
            return None
        try:
            said = _answer(self._child)
        except subprocess.TimeoutExpired:
            remark([f"it was not seen whether the job can begin: {python} has not imported it in {_SECONDS:.0f} s"])
            return None
        if "error" not in said:
            return _whole(said.get("bytes"), spec)
        key = "task" if spec.task is not None else "script"
        place = next((f"{origin.place}: " for origin in self._loaded.origins if origin.key == key), "")
        what = f"{place}{key}: {python} cannot import it: {said['error']}"
        if not spec.launch.setup:
            raise SubmitError(f"{what}\n(--no-check submits it all the same.)")
        remark([f"{what} (only a note: the lines of launch.setup may change that)"])
        return None


def _begin(python: str, spec: JobSpec) -> subprocess.Popen[bytes]:
    train = spec.train
    task = {"task": spec.task, "params": spec.params, "lr": train.lr, "weight_decay": train.weight_decay}
    task["small"] = SMALL // _MOST_STATES
    with tempfile.TemporaryFile() as question:  # of any length, and there when it is read
        question.write(json.dumps(task if spec.task is not None else {"script": spec.script}).encode())
        question.seek(0)
        return subprocess.Popen(
            [python, "-m", "cluster_ddp.train.probe"],
            env={**os.environ, SAFE_PATH_VARIABLE: "1"},
            stdin=question,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # so that what it starts is ended with it
        )


def _answer(child: subprocess.Popen[bytes]) -> dict[str, Any]:
    out, err = child.communicate(timeout=_SECONDS)
    with contextlib.suppress(ValueError):
        said = json.loads(out)
        if isinstance(said, dict):
            return said
    return {"error": err.decode(errors="replace").strip()[-_LAST:] or f"it ended with status {child.returncode}"}


def _whole(size: Any, spec: JobSpec) -> int | None:
    if not isinstance(size, int):
        return None
    return size + (size // 3 if spec.train.ema_decay is not None else 0)  # beside two states of AdamW
