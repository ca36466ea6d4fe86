"""Starting a run on this machine, without Slurm: N node programs that meet on loopback, and one supervisor.

Each node program runs a separate torchrun agent and the agents meet by c10d rendezvous, so the same code is used as on
several nodes.
"""

from __future__ import annotations

import os
import signal
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from cluster_ddp.launch.address import LOOPBACK, ON_LOOPBACK
from cluster_ddp.launch.environment import busy_beside, omp_threads
from cluster_ddp.launch.keeper.script_outcome import record_script_outcome
from cluster_ddp.launch.notice import give_notice
from cluster_ddp.launch.ports import free_port
from cluster_ddp.launch.torchrun.command import fill_in, torchrun_command
from cluster_ddp.launch.variables import STOP_AFTER_VARIABLE
from cluster_ddp.network import NetworkPlan, resolve
from cluster_ddp.run.attempt import begin_attempt
from cluster_ddp.run.condense import conclude
from cluster_ddp.run.directory import RunDirectory
from cluster_ddp.run.errors import RunGone
from cluster_ddp.run.events import EventWriter, login_writer
from cluster_ddp.run.run_state import RunState
from cluster_ddp.run.runs import create_run, runs_dir_of
from cluster_ddp.run.status.report import RunStatus, describe
from cluster_ddp.run.via import LOCAL
from cluster_ddp.submit.base import SubmitError, check_writable, note_submitted
from cluster_ddp.submit.machine import devices_here, interpreter
from cluster_ddp.submit.supervisor import Supervisor, noting_stops

if TYPE_CHECKING:
    from cluster_ddp.job import JobSpec


@dataclass(frozen=True)
class LocalStart:
    """A run's start on this machine: what a dry run prints and what `Supervisor` runs."""

    spec: JobSpec
    # nodes, procs: simulated nodes, and ranks per node
    nodes: int
    procs: int
    # The devices of each node; empty tuples on a machine without any, or if CPUs were requested
    gpus: tuple[tuple[str, ...], ...]
    hide_gpus: bool  # whether CPUs were requested though there may be GPUs
    port: int  # of the rendezvous, on loopback
    python: str  # the interpreter of the node programs and their ranks
    stop_after: int | None = None  # the step after which to stop, as if asked to

    @property
    def nodes_here(self) -> range:
        """The ranks of the nodes on this machine: all of them."""
        return range(self.nodes)

    @property
    def network(self) -> NetworkPlan:
        """The network variables that every node gets in addition to this process's environment."""
        return resolve(self.spec.network, os.environ)

    def torchrun(self, run_directory: str, attempt: int) -> list[str]:
        """Return the torchrun command line with its placeholders, as the node programs get it."""
        return torchrun_command(
            self.spec,
            run_directory=run_directory,
            nodes=self.nodes,
            procs=self.procs,
            rdzv_id=f"{Path(run_directory).name}.{attempt}",
            endpoint=f"{LOOPBACK}:{self.port}",
        )

    def node_torchrun(self, run_directory: str, attempt: int, node: int) -> list[str]:
        """Return the torchrun command line as one node runs it."""
        line = self.torchrun(run_directory, attempt)
        return fill_in(line, is_host=node == 0, local_addr=LOOPBACK, log_dir=tempfile.gettempdir())

    def variables(self, node: int) -> dict[str, str]:
        """Return the variables set for one node in addition to this process's environment."""
        variables = {
            **ON_LOOPBACK,
            "OMP_NUM_THREADS": omp_threads(
                self.nodes * self.procs, busy_beside(self.spec, on_gpus=bool(self.gpus[node]))
            ),
        }
        if self.hide_gpus or self.gpus[node]:
            variables["CUDA_VISIBLE_DEVICES"] = ",".join(self.gpus[node])
        if self.stop_after is not None:
            variables[STOP_AFTER_VARIABLE] = str(self.stop_after)
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
        Ranks per node; default `launch.procs_per_node`, where ``auto`` means one per GPU, or one without GPUs.
    gpus
        Devices such as ``0,1,3``, divided among the nodes; ``none`` for CPUs. Default: all that are visible.
    global_batch
        That of a run that has already begun.

    Raises
    ------
    SubmitError
        The devices cannot be divided among the nodes, or are fewer than the ranks; or the interpreter does not exist
        here.
    BatchError
        The global batch cannot be divided among the ranks.
    """
    from cluster_ddp.job import plan_batch

    count = nodes or 1
    devices = devices_here(gpus)
    if len(devices) % count:
        raise SubmitError(
            f"{len(devices)} GPUs ({','.join(devices)}) cannot be divided among {count} nodes.\n"
            "Use different --gpus or --nodes"
        )
    share = len(devices) // count
    ranks = procs or spec.launch.fixed_procs or share or 1
    if devices and ranks > share:
        raise SubmitError(
            f"{ranks} ranks on each of {count} nodes need {ranks * count} GPUs, and there are {len(devices)} "
            f"({','.join(devices)}).\nGive --procs {share} or fewer, other --gpus, or --gpus none to train on CPUs"
        )
    if spec.task is not None:
        plan_batch(spec.train, count * ranks, global_batch)
    split = tuple(tuple(devices[node * share : (node + 1) * share]) for node in range(count))
    hide_gpus = gpus is not None and not devices
    port = spec.launch.fixed_port or free_port()
    return LocalStart(spec, count, ranks, split, hide_gpus=hide_gpus, port=port, python=interpreter(spec))


def start_local(start: LocalStart, *, show: TextIO) -> tuple[RunDirectory, RunStatus]:
    """Make the run directory of a new run and run its first attempt to the end, in the foreground."""
    runs_dir = runs_dir_of(start.spec)
    check_writable(runs_dir)
    run = create_run(start.spec, runs_dir=runs_dir, via=LOCAL, script=None)
    note_submitted(run, LOCAL, None)
    return run, run_attempt(run, start, show=show)


def run_attempt(run: RunDirectory, start: LocalStart, *, show: TextIO) -> RunStatus:
    """Run one attempt to its end and conclude it.

    Raises
    ------
    RunAlive, RunEnded
        As for `begin_attempt`.
    RunGone
        Its directory has vanished meanwhile.
    """
    signals: list[signal.Signals] = []
    with noting_stops(signals):  # else a Ctrl-C in between leaves an attempt that is lost
        attempt = begin_attempt(run, host=os.uname().nodename, pid=os.getpid(), nodes=start.nodes, procs=start.procs)
        Supervisor(attempt, start, show=show, signals=signals).run()
    if not run.exists():
        raise RunGone(
            f"{run.path} is gone: it was removed or renamed, or its storage is unavailable. The training has ended.\n"
            "To continue from what was saved, wherever the directory is now: cluster-ddp resume DIRECTORY"
        )
    record_script_outcome(attempt, EventWriter(run, login_writer()))
    not_noted = conclude(attempt)
    give_notice(run, writer=login_writer())
    status = describe(run, None)
    # An attempt whose end is not recorded looks alive as long as this process lives.
    return replace(status, state=RunState.LOST, reason=not_noted) if not_noted and status.state.alive else status
