"""Compares the steps that a resume repeats with what they were before it.

What the checks of the first steps cannot see, such as a file that one step writes and a later one reads, shows here:
the attempt that saved a checkpoint has usually computed some of the steps that follow it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import platform
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from cluster_ddp.job import JobSpec
from cluster_ddp.printing import say
from cluster_ddp.run.directory import RunDirectory
from cluster_ddp.run.reading import MAX_LINES, as_whole, parse_lines, read_tail
from cluster_ddp.train.metrics.file import LineFile
from cluster_ddp.train.metrics.losses import HostCopy
from cluster_ddp.train.optimizer import parameters_of
from cluster_ddp.train.ranks.distributed import World, all_gather_object
from cluster_ddp.train.step import gradients_of

_GRADIENTS = "the norm of the gradients at"
_RECORDED = 1000  # steps after each checkpoint
_RECORDED_WEIGHTS = 20  # the same, where the norm of the weights has to be computed for it

_Key = tuple[str, int]  # what a number is, and of which step


class RepeatedSteps:
    """A number of each of the first steps after a checkpoint: rank 0 records it, and compares it after a resume.

    Of the first of them, which may be the only one, the norm of the gradients is compared as well.

    Nothing is compared where the same bits are not promised: with other settings or arguments, more or fewer ranks or
    threads, another torch, other processors, or on GPUs without deterministic algorithms.

    Parameters
    ----------
    warn
        Reports a difference.

    Attributes
    ----------
    number
        What the number of a step is, for messages.
    resumed
        The step from which this attempt has resumed, on all ranks; None if it has begun from the start.
    """

    def __init__(
        self, job: JobSpec, run: RunDirectory | None, attempt: int, world: World, warn: Callable[[str], None]
    ) -> None:
        self.number = "the loss at"
        self._job, self._run, self._attempt, self._world, self._warn = job, run, attempt, world, warn
        self._circumstances: str | None = None  # a digest; None: nothing is recorded or compared
        self._saved: int | None = None  # the step of the last checkpoint of this attempt
        self.resumed: int | None = None
        self._source = 0  # the attempt that saved the checkpoint of this resume
        self._before: dict[_Key, float] = {}  # its numbers of the steps that follow
        self._repeated: list[int] = []  # steps that had the same number again
        self._noted: dict[_Key, Tensor | float] = {}
        self._copied: tuple[list[_Key], HostCopy] | None = None  # what is on its way from the device
        self._file: LineFile | None = None

    def begin(self) -> None:
        """Call before the first step, on all ranks."""
        if self._run is None:
            return
        device = self._world.device
        is_exact = device.type == "cpu" or torch.are_deterministic_algorithms_enabled()
        machines = all_gather_object((is_exact, _machine(device)))
        if self._world.is_main and all(exact for exact, _ in machines):
            training = self._job.model_dump(include={"task", "params", "script", "train"}, mode="json")
            ranks = [machine for _, machine in machines]
            self._circumstances = _digest([str(torch.__version__), ranks, training, sys.argv[1:]])

    def resume(self, step: int, source: int | None) -> None:
        """Call when the checkpoint of a step, saved by the attempt `source`, has been restored."""
        self.resumed = step
        if self._circumstances is not None and self._run is not None and source is not None:
            self._source = source
            found = _read(self._run.attempt(source).steps_file, self._circumstances)
            self._before = {key: number for key, number in found.items() if key[1] > step}

    def compare_nothing(self) -> None:
        """Drop the numbers of this resume: the next step was computed before an evaluation on which it depends."""
        self._before.clear()

    def save(self, step: int) -> None:
        """Call when a checkpoint is saved."""
        if self._circumstances is None:
            return
        if self._file is None:
            self._open()  # from here on, what an earlier process of this attempt wrote no longer counts
        if self._file is not None:
            self._saved = step

    def is_due(self, step: int, within: int = _RECORDED) -> bool:
        """Whether the number of this step is recorded or compared."""
        return (self.number, step) in self._before or (self._saved is not None and 0 < step - self._saved <= within)

    def note(self, step: int, number: Tensor | float) -> None:
        """Note the number of a step, counted from 1."""
        if self.is_due(step):
            self._note((self.number, step), number)

    def note_weights(self, step: int, optimizers: Iterable[Optimizer]) -> None:
        """Note the norm of what optimizers have updated in a step."""
        if self.is_due(step, _RECORDED_WEIGHTS):
            self._note_norm((self.number, step), parameters_of(*optimizers))

    def note_gradients(self, step: int, parameters: Iterable[nn.Parameter]) -> None:
        """Note the norm of the gradients of a step, if it is the first after a checkpoint."""
        key = _GRADIENTS, step
        if key in self._before or (self._saved is not None and step == self._saved + 1):
            self._note_norm(key, gradients_of(parameters))

    def _note_norm(self, key: _Key, tensors: Sequence[Tensor]) -> None:
        with contextlib.suppress(RuntimeError):  # of a dtype or layout that has no norm
            norms = torch._foreach_norm([tensor.detach() for tensor in tensors])
            self._note(key, torch.stack([norm.to(norms[0].device, torch.float32) for norm in norms]).sum())

    def _note(self, key: _Key, number: Tensor | float) -> None:
        if isinstance(number, Tensor) and not number.is_cpu:  # copied later, together with others
            self._noted[key] = number.detach().float()
        else:
            self._noted[key] = float(number)

    def pass_on(self) -> None:
        """Record and compare what was noted before the last call, and what is on the host already."""
        if self._copied is not None:
            keys, copy = self._copied
            self._copied = None
            self._take(dict(zip(keys, copy.read(), strict=True)))
        noted, self._noted = self._noted, {}
        tensors = {key: number for key, number in noted.items() if isinstance(number, Tensor)}
        self._take({key: number for key, number in noted.items() if not isinstance(number, Tensor)})
        if tensors:
            self._copied = list(tensors), HostCopy(torch.stack(list(tensors.values())))

    def close(self) -> None:
        """Record and compare what is left, and close the file."""
        with contextlib.suppress(Exception):  # an error of the device, which has ended training
            self.pass_on()
            self.pass_on()
        self._say()
        if self._file is not None:
            self._file.close()
            self._file = None

    def _take(self, numbers: dict[_Key, float]) -> None:
        if self._saved is not None:
            for what in dict.fromkeys(what for what, _ in numbers):
                self._record(what, {step: number for (of, step), number in numbers.items() if of == what})
        for key, number in numbers.items():
            if key in self._before:
                self._compare(key, number, self._before.pop(key))

    def _record(self, what: str, numbers: dict[int, float]) -> None:
        if self._file is not None:
            line = {"under": self._circumstances, "what": what, "steps": list(numbers)}
            self._file.write(json.dumps({**line, "numbers": [repr(number) for number in numbers.values()]}))

    def _open(self) -> None:
        assert self._run is not None
        folder = self._run.attempt(self._attempt)
        with contextlib.suppress(OSError):  # storage that fails is no reason to stop
            folder.path.mkdir(exist_ok=True)  # a library's attempt has none
            self._file = LineFile(folder.steps_file)
            self._file.write(json.dumps({"saves": self._circumstances}))

    def _compare(self, key: _Key, number: float, before: float) -> None:
        what, step = key
        if number == before or (math.isnan(number) and math.isnan(before)):
            if what == self.number:
                self._repeated.append(step)
            if not self._before:
                self._say()
            return
        self._before.clear()
        self._repeated.clear()
        self._warn(
            f"the resume is not exact: {what} step {step} was {before!r} in attempt {self._source} and is "
            f"{number!r} now. Training depends on something that no checkpoint contains, or its code or data have "
            "changed (see docs/exactness.md)"
        )

    def _say(self) -> None:
        if self._repeated:
            first, last = min(self._repeated), max(self._repeated)
            steps = f"step {first}" if first == last else f"steps {first} to {last}"
            say(f"cluster-ddp: {self.number} {steps} is the same as before the resume", sys.stdout)
            self._repeated.clear()


def _read(path: Path, circumstances: str) -> dict[_Key, float]:
    """The numbers that the last process to save wrote to a file, without those of other circumstances."""
    try:
        lines = parse_lines(read_tail(path, MAX_LINES))
    except OSError:
        return {}
    found: dict[_Key, float] = {}
    for line in lines:
        what, steps, numbers = str(line.get("what")), line.get("steps"), line.get("numbers")
        if "saves" in line:  # another process began to save
            found.clear()
        if line.get("under") == circumstances and isinstance(steps, list) and isinstance(numbers, list):
            pairs = ((as_whole(step), _as_float(number)) for step, number in zip(steps, numbers, strict=False))
            found |= {(what, step): number for step, number in pairs if step is not None and number is not None}
    return found


def _as_float(text: Any) -> float | None:
    try:
        return float(text) if isinstance(text, str) else None
    except ValueError:
        return None


def _machine(device: torch.device) -> str:
    """What the bits of a rank's results depend on: its processor and threads, and with a GPU also where it is."""
    threads = f"{torch.get_num_threads()} threads"
    if device.type == "cuda":
        return f"{platform.node()} {torch.cuda.get_device_name(device)} {threads}"
    model = ""
    with contextlib.suppress(OSError, StopIteration), Path("/proc/cpuinfo").open(encoding="utf-8") as lines:
        model = next(line for line in lines if line.startswith("model name"))
    return f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()} {model.strip()} {threads}"


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16]
