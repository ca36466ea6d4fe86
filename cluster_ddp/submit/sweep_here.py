"""A sweep on this machine, without Slurm: its elements one after the other, or several at once.

Each element is a separate process, ``cluster-ddp resume`` of its run, with its output in the run's folder and a share
of the machine's GPUs.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from cluster_ddp.job import ClusterDDPError
from cluster_ddp.launch.environment import omp_threads
from cluster_ddp.launch.processes import die_with_parent
from cluster_ddp.printing import say
from cluster_ddp.run.directory import LOCAL_OUTPUT, RunDirectory
from cluster_ddp.run.errors import RunError
from cluster_ddp.run.status.report import RunStatus, describe
from cluster_ddp.run.status.sweep import TO_START
from cluster_ddp.run.storage import open_append
from cluster_ddp.run.sweep import Element, SweepDirectory, read_sweep
from cluster_ddp.run.via import LOCAL
from cluster_ddp.submit.base import SubmitError
from cluster_ddp.submit.element import run_of_element
from cluster_ddp.submit.machine import devices_here
from cluster_ddp.submit.supervisor import noting_stops
from cluster_ddp.submit.sweep import SweepPlan, element_states, prepare, release

_POLL_SECONDS = 0.2


@dataclass
class Place:
    """A slot for one element at a time."""

    gpus: tuple[str, ...]
    process: subprocess.Popen[bytes] | None = None
    run: RunDirectory | None = None


@dataclass
class SweepHere:
    """The elements of a sweep, as this machine runs them.

    Parameters
    ----------
    report
        Called with each element that has ended.
    claim
        The claim in the sweep's record by which this process starts elements.
    claim_seconds
        How often it looks whether it still has the claim.
    """

    sweep: SweepDirectory
    places: list[Place]
    nodes: int | None
    procs: int | None
    report: Callable[[RunStatus], None]
    claim: dict[str, Any] | None
    claim_seconds: float = 2.0
    _signals: list[signal.Signals] = field(default_factory=list)
    _closed: bool = False  # whether no more elements are started

    def run(self, elements: Sequence[Element]) -> None:
        """Run elements to their end; the first Ctrl-C, or other signal to stop, makes those that train save and end."""
        waiting = list(elements)
        looked = time.monotonic()
        with noting_stops(self._signals):
            while (waiting and not self._closed) or any(place.process for place in self.places):
                if time.monotonic() - looked >= self.claim_seconds:
                    looked = time.monotonic()
                    with contextlib.suppress(RunError):  # storage that is away for a moment
                        self._closed |= read_sweep(self.sweep).submitting != self.claim  # by `stop`, `cancel`, others
                self._pass_on()
                for place in self.places:
                    self._look_after(place)
                    if place.process is None and waiting and not self._closed:
                        self._try_to_start(place, waiting.pop(0))
                time.sleep(_POLL_SECONDS)

    def _pass_on(self) -> None:
        while self._signals:
            number = self._signals.pop(0)
            self._closed = True
            for place in self.places:
                if place.process is not None:
                    with contextlib.suppress(ProcessLookupError):
                        place.process.send_signal(number)

    def _look_after(self, place: Place) -> None:
        if place.process is not None and place.process.poll() is not None:
            assert place.run is not None
            place.process = None
            self.report(describe(place.run, None))

    def _try_to_start(self, place: Place, element: Element) -> None:
        try:
            self._start(place, element)
        except (ClusterDDPError, OSError) as error:  # such as a full disk, which is no reason to end those that train
            self._closed = True
            say(f"cluster-ddp: {element.name} cannot be started, and no further elements will be started: {error}")

    def _start(self, place: Place, element: Element) -> None:
        run = run_of_element(self.sweep, element, via=LOCAL, job=None)
        sizes = {"--nodes": self.nodes, "--procs": self.procs}
        options = [f"{name}={value}" for name, value in sizes.items() if value is not None]
        parent = os.getpid()
        with os.fdopen(open_append(run.path / LOCAL_OUTPUT), "ab") as output:
            place.process = subprocess.Popen(
                [sys.executable, "-m", "cluster_ddp", "resume", str(run.path), *options],
                env=self._environment(place),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,  # Ctrl-C is for this process, which passes it on
                preexec_fn=lambda: die_with_parent(parent),
            )
        place.run = run

    def _environment(self, place: Place) -> dict[str, str]:
        ranks = len(self.places) * (self.nodes or 1) * (self.procs or 1)
        threads = omp_threads(ranks, 1 if place.gpus else 0)  # one CPU of each is left for saving
        return {**os.environ, "OMP_NUM_THREADS": threads, "CUDA_VISIBLE_DEVICES": ",".join(place.gpus)}


def run_sweep(
    plan: SweepPlan,
    *,
    at_once: int,
    nodes: int | None,
    procs: int | None,
    gpus: str | None,
    report: Callable[[RunStatus], None],
) -> list[RunStatus]:
    """Run the elements of a sweep that are missing or unfinished; return the states of all of them afterwards.

    Parameters
    ----------
    at_once
        How many run at the same time. The GPUs are divided among them.
    nodes, procs, gpus
        For each element, as for `cluster_ddp.submit.local.plan_local`; `gpus` is shared by all.
    report
        Called with each element that has ended.

    Raises
    ------
    SubmitError
        The GPUs cannot be divided like that.
    RunError
        A different process has claimed the sweep, or it was submitted to Slurm.
    """
    devices = devices_here(gpus)
    share, rest = divmod(len(devices), at_once)
    if rest:
        raise SubmitError(
            f"{len(devices)} GPUs ({','.join(devices)}) cannot be divided among {at_once} elements at once.\n"
            "Use a different --at-once, different --gpus, or --gpus none"
        )
    places = [Place(tuple(devices[number * share : (number + 1) * share])) for number in range(at_once)]
    record = prepare(plan, LOCAL, at_once)
    try:
        states = {number: status.state for number, status in enumerate(element_states(plan.sweep))}
        waiting = [element for element in record.elements if states[element.number] in TO_START]
        SweepHere(plan.sweep, places, nodes, procs, report, record.submitting).run(waiting)
        return element_states(plan.sweep)
    finally:
        release(plan.sweep, record)
