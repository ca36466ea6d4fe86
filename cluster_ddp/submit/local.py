"""Starting a run on this machine, without Slurm: N node programs that meet on loopback, and one supervisor.

Each node program runs a torchrun agent of its own and the agents meet by c10d rendezvous, so what runs is the path of
several nodes.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from cluster_ddp.launch.address import LOOPBACK
from cluster_ddp.launch.attempt import speak_for_script
from cluster_ddp.launch.environment import usable_cpus
from cluster_ddp.launch.ports import free_port
from cluster_ddp.launch.processes import die_with_parent, present
from cluster_ddp.launch.torchrun import fill_in, torchrun_command
from cluster_ddp.launch.variables import ADDRESS_VARIABLE, SAFE_PATH_VARIABLE, TERMINAL_VARIABLE
from cluster_ddp.network import NetworkPlan, resolve
from cluster_ddp.printing import say
from cluster_ddp.run.attempt import begin_attempt
from cluster_ddp.run.attempt_record import end_attempt
from cluster_ddp.run.directory import AttemptDirectory, RunDirectory
from cluster_ddp.run.events import EventWriter, login_writer
from cluster_ddp.run.runs import create_run, runs_dir_of
from cluster_ddp.run.status import RunStatus, describe
from cluster_ddp.run.stopfile import AGENT_LOST, AT_ONCE, PERSON, SAVE_AND_END, TERMINATED, request_stop
from cluster_ddp.run.storage import open_append
from cluster_ddp.submit.base import SubmitError, check_writable, note_submitted

if TYPE_CHECKING:
    from cluster_ddp.job import JobSpec

VIA = "local"

_POLL_SECONDS = 0.2
# When one node has failed the others notice by themselves, as their collectives fail; if they do not, they are ended.
_OTHERS_SECONDS = 10.0
_OTHERS_GRACE = 20.0
_GPU_SECONDS = 20.0
_ANSWERS = (
    "saving a checkpoint, then ending (once more: at once)",
    "saving at once (once more: without saving)",
    "ending without saving",
)
_LOOPBACK_INTERFACE = "lo0" if sys.platform == "darwin" else "lo"


@dataclass(frozen=True)
class LocalStart:
    """A run's start on this machine: what a dry run prints and what `supervise` runs."""

    spec: JobSpec
    # nodes, procs: simulated nodes, and ranks on each
    nodes: int
    procs: int
    # The devices of each node; empty tuples on a machine without, or where CPUs are wanted
    gpus: tuple[tuple[str, ...], ...]
    hide_gpus: bool  # CPUs are wanted though there may be GPUs
    port: int  # of the rendezvous, on loopback
    python: str  # the interpreter of the node programs and their ranks

    @property
    def network(self) -> NetworkPlan:
        """The network variables that every node gets in addition to this process's environment."""
        return resolve(self.spec.network, os.environ)

    def torchrun(self, run_directory: str, attempt: int) -> list[str]:
        """The torchrun line with its placeholders, as the node programs get it."""
        return torchrun_command(
            self.spec,
            run_directory=run_directory,
            nodes=self.nodes,
            procs=self.procs,
            rdzv_id=f"{Path(run_directory).name}.{attempt}",
            endpoint=f"{LOOPBACK}:{self.port}",
        )

    def node_torchrun(self, run_directory: str, attempt: int, node: int) -> list[str]:
        """The torchrun line as one node runs it."""
        logs = RunDirectory(Path(run_directory)).attempt(attempt).logs(node)
        line = self.torchrun(run_directory, attempt)
        return fill_in(line, is_host=node == 0, local_addr=LOOPBACK, log_dir=str(logs))

    def variables(self, node: int) -> dict[str, str]:
        """What is set for one node in addition to this process's environment."""
        share = max(1, usable_cpus() // (self.nodes * self.procs))
        variables = {
            ADDRESS_VARIABLE: LOOPBACK,
            "NCCL_SOCKET_IFNAME": _LOOPBACK_INTERFACE,
            "GLOO_SOCKET_IFNAME": _LOOPBACK_INTERFACE,
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS") or str(share),
        }
        if self.hide_gpus or self.gpus[node]:
            variables["CUDA_VISIBLE_DEVICES"] = ",".join(self.gpus[node])
        return variables


def plan_local(
    spec: JobSpec,
    *,
    nodes: int | None = None,
    procs: int | None = None,
    gpus: str | None = None,
    global_batch: int | None = None,
) -> LocalStart:
    """Decide how a job runs on this machine.

    Parameters
    ----------
    nodes
        Nodes to simulate; default 1.
    procs
        Ranks on each; default `launch.procs_per_node`, or for ``auto`` one for each GPU, one where there is none.
    gpus
        Devices such as ``0,1,3``, divided among the nodes; ``none`` for CPUs. Default: all that are visible.
    global_batch
        Of a run that has begun already.

    Raises
    ------
    SubmitError
        The devices do not divide among the nodes, or are fewer than the ranks; or the interpreter is not here.
    BatchError
        The global batch cannot be divided among the ranks.
    """
    from cluster_ddp.job import plan_batch

    count = nodes or 1
    devices = _devices(gpus)
    if len(devices) % count:
        raise SubmitError(
            f"{len(devices)} GPUs ({','.join(devices)}) cannot be divided among {count} nodes.\n"
            "Give other --gpus or --nodes"
        )
    share = len(devices) // count
    asked = procs or (spec.launch.procs_per_node if isinstance(spec.launch.procs_per_node, int) else None)
    ranks = asked or share or 1
    if devices and ranks > share:
        raise SubmitError(
            f"{ranks} ranks on each of {count} nodes need {ranks * count} GPUs, and there are {len(devices)} "
            f"({','.join(devices)}).\nGive --procs {share} or fewer, other --gpus, or --gpus none to train on CPUs"
        )
    if spec.task is not None:
        plan_batch(spec.train, count * ranks, global_batch)
    split = tuple(tuple(devices[node * share : (node + 1) * share]) for node in range(count))
    hide_gpus = gpus is not None and not devices
    port = spec.launch.port if isinstance(spec.launch.port, int) else free_port()
    return LocalStart(spec, count, ranks, split, hide_gpus=hide_gpus, port=port, python=_python(spec))


def _python(spec: JobSpec) -> str:
    """The interpreter that ``launch.python`` names, or this one."""
    if spec.launch.python is None:
        return sys.executable
    found = shutil.which(spec.launch.python)
    if found is None:
        raise SubmitError(
            f"launch.python: {spec.launch.python} is not on this machine.\nFor this Python: --set launch.python=null"
        )
    return found


def start_local(start: LocalStart, *, show: TextIO) -> tuple[RunDirectory, RunStatus]:
    """Make the run directory of a new run and run its first attempt to the end, in the foreground."""
    runs_dir = runs_dir_of(start.spec)
    check_writable(runs_dir)
    run = create_run(start.spec, runs_dir=runs_dir, via=VIA, script=None)
    note_submitted(run, VIA, None)
    return run, run_attempt(run, start, show=show)


def run_attempt(run: RunDirectory, start: LocalStart, *, show: TextIO) -> RunStatus:
    """Run one attempt to its end and judge it; `RunAlive` and `RunEnded` as from `begin_attempt`."""
    attempt = begin_attempt(run, host=os.uname().nodename, pid=os.getpid(), nodes=start.nodes, procs=start.procs)
    supervisor = Supervisor(attempt, start, show=show)
    supervisor.run()
    speak_for_script(attempt, EventWriter(run, login_writer()))
    try:
        end_attempt(attempt)
    except OSError as error:
        say(f"cannot note the end of attempt {attempt.number} in {attempt.record_file}: {error.strerror}")
    return describe(run, None)


class Supervisor:
    """Runs the node programs of one attempt and passes on what the person at the keyboard wants.

    The first Ctrl-C, SIGTERM or SIGHUP asks to save and end, the second to save at once, the third ends it.
    """

    def __init__(self, attempt: AttemptDirectory, start: LocalStart, *, show: TextIO) -> None:
        self._attempt = attempt
        self._start = start
        self._show = show
        self._signals: list[signal.Signals] = []
        self._asked = 0
        self._children: list[subprocess.Popen[bytes]] = []
        self._failed_at: float | None = None

    def run(self) -> None:
        """Start all node programs and wait until the last has ended."""
        handled = present("SIGINT", "SIGTERM", "SIGHUP")
        before = {number: signal.signal(number, self._note) for number in handled}
        try:
            self._children = [self._start_node(node) for node in range(self._start.nodes)]
            while any(child.poll() is None for child in self._children):
                self._pass_on()
                self._look_after()
                time.sleep(_POLL_SECONDS)
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _note(self, number: int, _frame: object) -> None:
        self._signals.append(signal.Signals(number))

    def _start_node(self, node: int) -> subprocess.Popen[bytes]:
        run = str(self._attempt.run.path)
        number = self._attempt.number
        logs = self._attempt.logs(node)
        logs.mkdir(parents=True, exist_ok=True)
        parent = os.getpid()
        command = [self._start.python, "-m", "cluster_ddp.launch.node", f"--run={run}", f"--attempt={number}"]
        with os.fdopen(open_append(logs / "node.log"), "ab") as log:
            return subprocess.Popen(
                [*command, f"--node-rank={node}", "--", *self._start.torchrun(run, number)],
                env=self._environment(node),
                stdin=subprocess.DEVNULL,
                stdout=self._show.fileno(),
                stderr=log,
                start_new_session=True,  # Ctrl-C is for the supervisor
                preexec_fn=lambda: die_with_parent(parent),
            )

    def _environment(self, node: int) -> dict[str, str]:
        # This may be a shell inside an allocation: its Slurm variables say nothing about these nodes.
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
        terminal = {TERMINAL_VARIABLE: os.ttyname(self._show.fileno())} if self._show.isatty() else {}
        return {**inherited, **self._start.variables(node), **terminal, SAFE_PATH_VARIABLE: "1"}

    def _pass_on(self) -> None:
        while self._signals:
            number = self._signals.pop(0)
            self._asked += 1
            by = "Ctrl-C" if number is signal.SIGINT else number.name
            reason = PERSON if number is signal.SIGINT else TERMINATED
            level = SAVE_AND_END if self._asked == 1 else AT_ONCE
            self._ask(reason, level, 0.0 if self._asked > 2 else None, by)
            say(f"\n{by}: {_ANSWERS[min(self._asked, len(_ANSWERS)) - 1]}")

    def _ask(self, reason: str, level: int, grace: float | None, by: str) -> None:
        """Ask all nodes to stop: by the stop file, or by a signal where that cannot be written."""
        try:
            request_stop(self._attempt, reason=reason, level=level, grace=grace, by=by)
        except OSError as error:
            say(f"\ncannot write {self._attempt.stop_file} ({error.strerror}): the nodes are signalled instead")
            for child in self._children:
                if child.poll() is None:
                    child.send_signal(signal.SIGTERM if grace is None else signal.SIGKILL)

    def _look_after(self) -> None:
        """End the other nodes when one has failed and they do not notice."""
        now = time.monotonic()
        if self._failed_at is None and any(child.poll() for child in self._children):
            self._failed_at = now
        if self._failed_at is not None and now - self._failed_at > _OTHERS_SECONDS:
            self._failed_at = float("inf")
            with contextlib.suppress(OSError):
                request_stop(self._attempt, reason=AGENT_LOST, level=AT_ONCE, grace=_OTHERS_GRACE, by="the supervisor")


def _devices(gpus: str | None) -> list[str]:
    if gpus is not None:
        return [] if gpus.strip().lower() in ("", "none") else _named_devices(gpus)
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return [device.strip() for device in visible.split(",") if device.strip() not in ("", "-1")]
    return _all_devices()


def _named_devices(gpus: str) -> list[str]:
    devices = [device.strip() for device in gpus.split(",")]
    if not all(devices) or len(set(devices)) != len(devices):
        raise SubmitError(f"--gpus {gpus}: give each device once, such as 0,1,3, or none")
    return devices


def _all_devices() -> list[str]:
    try:
        done = subprocess.run(
            ["nvidia-smi", "--query-gpu=index", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=_GPU_SECONDS,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return []
    return done.stdout.split()
