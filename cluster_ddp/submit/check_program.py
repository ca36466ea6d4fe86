"""Checks, in a separate process, that the interpreter that will run the task or script can import it."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from cluster_ddp.job.elements import which_elements
from cluster_ddp.launch.variables import SAFE_PATH_VARIABLE
from cluster_ddp.submit.base import SubmitError
from cluster_ddp.submit.save_time import SMALL

if TYPE_CHECKING:
    from cluster_ddp.job import JobSpec, LoadedJob

_SECONDS = 60.0  # torch alone may take that long from a cold shared file system
_SECONDS_OF_ELEMENTS = 1.0  # spent building models of a sweep's elements
_MAX_STATES = 16  # the maximum size of a checkpoint, in sizes of the model; 3 with AdamW
_LAST = 800  # characters shown of the output of an interpreter that fails


class ProgramCheck:
    """An import of the task, or a search for what the script imports, in the background.

    Leaving its block ends it, whether or not anybody has waited for the result.
    """

    def __init__(self) -> None:
        self._child: subprocess.Popen[bytes] | None = None
        self._begun = False
        self._question: int | None = None  # the write end of the pipe that carries the request

    def __enter__(self) -> ProgramCheck:
        return self

    def __exit__(self, *_: object) -> None:
        if self._question is not None:
            os.close(self._question)
        if self._child is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._child.pid, signal.SIGKILL)
            with self._child:  # closes its pipes
                self._child.wait()

    def begin(self, spec: JobSpec) -> None:
        """Start the interpreter of a job, which imports torch before it receives a request."""
        self._begun = True
        python = _interpreter(spec)
        if shutil.which(python) is None or spec.launch.container is not None:
            return
        theirs, self._question = os.pipe()
        try:
            self._child = subprocess.Popen(
                [python, "-m", "cluster_ddp.train.probe", "script" if spec.task is None else "task"],
                env={**os.environ, SAFE_PATH_VARIABLE: "1"},
                stdin=theirs,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,  # so that its child processes are ended with it
            )
        finally:
            os.close(theirs)

    def ask(self, loaded: LoadedJob, elements: Sequence[JobSpec] = ()) -> None:
        """Request a check of a job and, for a sweep, of the parameters of all its elements."""
        if not self._begun:
            self.begin(loaded.spec)
        self._loaded = loaded
        self._names: dict[str, list[int]] = {}  # the elements that have these parameters
        for number, spec in enumerate(elements or (loaded.spec,)):
            self._names.setdefault(json.dumps(spec.params, sort_keys=True), []).append(number)
        self._of_many = len(elements) > 1
        if self._question is not None:
            question, self._question = self._question, None
            asked = json.dumps(_question(loaded.spec, list(map(json.loads, self._names)))).encode()
            # A pipe's buffer is small, and the interpreter reads only after its imports.
            threading.Thread(target=_send, args=(question, asked), daemon=True).start()

    def result(self, remark: Callable[[Iterable[str]], None]) -> int | None:
        """Wait for the result.

        Returns
        -------
        int | None
            Size of a checkpoint in bytes, if it is known and not small.

        Raises
        ------
        SubmitError
            The program cannot be imported or takes no such parameters, and no line of launch.setup may change that.
        """
        spec = self._loaded.spec
        python = _interpreter(spec)
        if spec.launch.container is not None:
            return None
        if self._child is None:
            remark([f"launch.python: {python} is not on this machine, so whether the job can start was not checked"])
            return None
        try:
            said = _answer(self._child)
        except subprocess.TimeoutExpired:
            remark([f"could not check whether the job can start: {python} had not imported it after {_SECONDS:.0f} s"])
            return None
        wrong = self._what_is_wrong(said)
        if wrong and not spec.launch.setup:
            raise SubmitError("\n".join([*wrong, "(--no-check submits it anyway.)"]))
        remark(f"{what} (only a note: the lines of launch.setup may change that)" for what in wrong)
        if untried := said.get("untried"):
            remark(
                [f"{untried} of {len(self._names)} different params were not tried: building the models takes too long"]
            )
        return _whole(said.get("bytes"), spec)

    def _what_is_wrong(self, said: dict[str, Any]) -> list[str]:
        key = "task" if self._loaded.spec.task is not None else "script"
        place = next((f"{origin.place}: " for origin in self._loaded.origins if origin.key == key), "")
        if "wrong" in said:
            return [f"{place}{key}: {said['wrong']}"]
        if "error" in said:
            return [f"{place}{key}: {_interpreter(self._loaded.spec)} cannot import it: {said['error']}"]
        numbers = list(self._names.values())
        of: dict[str, list[int]] = {}
        for index, error in said.get("refused", []):
            of.setdefault(error, []).extend(numbers[index])
        return [
            f"{f'{which_elements(sorted(found))}: ' if self._of_many else place}{key}: {error}"
            for error, found in of.items()
        ]


def _interpreter(spec: JobSpec) -> str:
    return spec.launch.python or sys.executable


def _question(spec: JobSpec, params: list[dict[str, Any]]) -> dict[str, Any]:
    if spec.task is None:
        return {"script": spec.script}
    train = spec.train
    asked = {"task": spec.task, "params": params, "lr": train.lr, "weight_decay": train.weight_decay}
    return {**asked, "small": SMALL // _MAX_STATES, "seconds": _SECONDS_OF_ELEMENTS}


def _send(question: int, asked: bytes) -> None:
    with contextlib.suppress(OSError), open(question, "wb") as pipe:
        pipe.write(asked)


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
    return size + (size // 3 if spec.train.ema_decay is not None else 0)  # besides the two states of AdamW
