"""Starting a run on several machines without Slurm: a person runs the same command on each of them.

The machines share the run directory. The first one to start creates it; node 0 begins an attempt when all nodes have
arrived, and concludes it when all have ended.
"""

from __future__ import annotations

import ipaddress
import os
import re
import shlex
import socket
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from cluster_ddp.launch.address import ON_LOOPBACK
from cluster_ddp.launch.keeper.lost_nodes import record_silent_node
from cluster_ddp.launch.keeper.script_outcome import record_script_outcome
from cluster_ddp.launch.notice import give_notice
from cluster_ddp.launch.ports import free_port, is_free
from cluster_ddp.launch.sign_of_life import SILENT_SECONDS, SilentNodes, gives_sign_of_life
from cluster_ddp.launch.torchrun.command import fill_in, torchrun_command
from cluster_ddp.network import NetworkPlan, resolve
from cluster_ddp.printing import one_line, say
from cluster_ddp.run.attempt import attempt_is_alive, begin_attempt, refuse_alive, request_resume
from cluster_ddp.run.attempt_record import read_attempt
from cluster_ddp.run.condense import conclude
from cluster_ddp.run.directory import AttemptDirectory, RunDirectory
from cluster_ddp.run.ending import refuse_complete
from cluster_ddp.run.errors import RunEnded, resume_command
from cluster_ddp.run.events import (
    NODE_FAILED,
    NODE_FINISHED,
    NODE_STARTED,
    EventWriter,
    caller,
    login_writer,
)
from cluster_ddp.run.history import History, read_history
from cluster_ddp.run.record import read_record
from cluster_ddp.run.run_state import RunState
from cluster_ddp.run.runs import make_or_join, runs_dir_of
from cluster_ddp.run.status.report import RunStatus, describe
from cluster_ddp.run.via import LAUNCH
from cluster_ddp.submit.arrivals import Meeting, note_arrivals
from cluster_ddp.submit.base import SubmitError, check_writable, note_submitted
from cluster_ddp.submit.machine import devices_here, interpreter
from cluster_ddp.submit.supervisor import Supervisor

if TYPE_CHECKING:
    from cluster_ddp.job import JobSpec

_RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_LOOK_SECONDS = 2.0
_DIFFERENCES_SHOWN = 4


@dataclass(frozen=True)
class ManualStart:
    """One node's part in a start: what a dry run prints and what the supervisor runs."""

    spec: JobSpec
    run: RunDirectory  # need not exist yet
    # nodes, node, procs: the number of nodes, the number of this one, and ranks per node
    nodes: int
    node: int
    procs: int
    master: str  # where the others reach node 0
    port: int  # node 0's counts
    python: str  # the interpreter of the node program and its ranks

    @property
    def nodes_here(self) -> tuple[int, ...]:
        """The rank of the node that this machine is."""
        return (self.node,)

    @property
    def network(self) -> NetworkPlan:
        """The network variables that the node gets in addition to this process's environment."""
        return resolve(self.spec.network, os.environ)

    def torchrun(self, run_directory: str, attempt: int) -> list[str]:
        """Return the torchrun command line with its placeholders, as the node program gets it."""
        host = f"[{self.master}]" if ":" in self.master else self.master
        return torchrun_command(
            self.spec,
            run_directory=run_directory,
            nodes=self.nodes,
            procs=self.procs,
            rdzv_id=f"{self.run.id}.{attempt}",
            endpoint=f"{host}:{self.port}",
        )

    def node_torchrun(self) -> list[str]:
        """Return the first attempt's torchrun command line as this node runs it; its address is found at the start."""
        line = self.torchrun(str(self.run.path), 0)
        return fill_in(line, is_host=self.node == 0, local_addr="{local_addr}", log_dir=tempfile.gettempdir())

    def variables(self, node: int) -> dict[str, str]:
        """Return the variables set in addition to this process's environment: all nodes may be on this machine."""
        return dict(ON_LOOPBACK) if _is_loopback(self.master) else {}


def plan_manual(
    spec: JobSpec, name: str, *, nodes: int, node: int, master: str, port: int | None = None, procs: int | None = None
) -> ManualStart:
    """Decide how one node of several takes part.

    Parameters
    ----------
    name
        Name of the run directory in `runs_dir`, or its path.
    nodes, node
        The number of machines, and the number of this one, from 0.
    master
        The name or address at which the others reach node 0.
    port
        Where all nodes meet; default `launch.port`, where ``auto`` means a free one that node 0 announces to the
        others.
    procs
        Ranks per node; default `launch.procs_per_node`, where ``auto`` means one per GPU, or one without GPUs.

    Raises
    ------
    SubmitError
        The name, the node's number, the ranks or the port cannot be used.
    BatchError
        The global batch cannot be divided among the ranks.
    """
    from cluster_ddp.job import plan_batch

    given = Path(os.path.expanduser(name))
    path = runs_dir_of(spec) / given
    if not _RUN_NAME.fullmatch(path.name) or (os.sep in name and not given.is_absolute()):
        raise SubmitError(f"--run {name}: give a name of letters, digits, '.', '_' and '-', or an absolute path")
    if not 0 <= node < nodes:
        raise SubmitError(f"--node-rank {node}: the {nodes} nodes are numbered from 0 to {nodes - 1}")
    devices = devices_here()
    ranks = procs or spec.launch.fixed_procs or len(devices) or 1
    if devices and ranks > len(devices):
        raise SubmitError(
            f"{ranks} ranks need {ranks} GPUs, and this node has {len(devices)} ({','.join(devices)}).\n"
            "Use fewer --procs, or export CUDA_VISIBLE_DEVICES= to train on CPUs"
        )
    if spec.task is not None:
        plan_batch(spec.train, nodes * ranks)
    fixed = port or spec.launch.fixed_port
    if fixed and node == 0 and not is_free(fixed):
        raise SubmitError(f"port {fixed} is in use on this node; use a different --master-port on all nodes")
    run = RunDirectory(Path(os.path.normpath(path)))
    return ManualStart(spec, run, nodes, node, ranks, master, fixed or free_port(""), interpreter(spec))


def all_commands(start: ManualStart, job: str, settings: tuple[str, ...], *, port: int | None) -> list[str]:
    """Return the commands to paste, one per node; the last one has ``%n`` instead of the node's number."""
    source = str(Path(job).absolute()) if Path(job).exists() else job
    words = [sys.executable, "-m", "cluster_ddp", "launch", source, *(f"--set={setting}" for setting in settings)]
    words += [f"--run={start.run.path}", f"--nnodes={start.nodes}", f"--procs={start.procs}"]
    words += [f"--master-addr={start.master}", *([f"--master-port={port}"] if port else [])]
    line = f"cd {shlex.quote(str(Path.cwd()))} && {shlex.join(words)}"
    return [f"{line} --node-rank={node}" for node in [*range(start.nodes), "%n"]]


def start_manual(start: ManualStart, *, show: TextIO) -> RunStatus:
    """Take part as one node, in the foreground, in the next attempt of the run; return how that ended.

    Raises
    ------
    RunEnded
        The run is complete.
    RunAlive
        An attempt of it is alive, here or elsewhere.
    NodesMissing
        Not all nodes arrived in time.
    SubmitError
        The run belongs to a different job, or the name of node 0 is unknown here.
    """
    _refuse_unknown_name(start.master)
    check_writable(start.run.path.parent)
    run, made = make_or_join(start.spec, start.run.path, via=LAUNCH)
    if made:
        note_submitted(run, LAUNCH, None)
    else:
        _refuse_other_job(run, start.spec)
    seen = read_history(run)
    refuse_complete(seen)
    _make_sure_it_is_over(seen)
    _warn_of_address(start)  # before it waits for the others
    attempt, start = _meet(start, seen)
    if start.node == 0:
        _keep(attempt, start, show)
    else:
        _take_part(attempt, start, show)
    return describe(run, None)


def _meet(start: ManualStart, seen: History) -> tuple[AttemptDirectory, ManualStart]:
    patience = start.spec.launch.join_timeout
    with Meeting(start.run, start.node, start.nodes, start.procs, lambda: _refuse_cancelled(seen)) as meeting:
        if start.node:
            attempt, port = meeting.attempt_begun(patience, after=seen.last_number)
            return attempt, replace(start, port=port)
        arrivals = meeting.all_there(patience)
        if seen.attempts or seen.cancels:  # running the commands again is a person's request that the run continue
            request_resume(start.run, by=caller(), seen=seen)
        host = socket.gethostname()
        attempt = begin_attempt(start.run, host=host, pid=os.getpid(), nodes=start.nodes, procs=start.procs)
        note_arrivals(attempt, arrivals, start.port)
        return attempt, start


# -- the attempt, from beginning to end --------------------------------------------------------------------------------


def _keep(attempt: AttemptDirectory, start: ManualStart, show: TextIO) -> None:
    """Run node 0 to its end, wait for the others, and conclude the attempt."""
    others = _Others(attempt, start)
    Supervisor(attempt, start, show=show, others_have_ended=others.have_ended).run()
    writer = EventWriter(attempt.run, login_writer())
    started = read_history(attempt.run).of_attempt(attempt.number, NODE_STARTED) if others.lost else []
    hosts = {event.get("node"): event.get("host") for event in started}
    for node in others.lost:
        record_silent_node(attempt, writer, node, hosts.get(node))
    record_script_outcome(attempt, writer)
    if not_noted := conclude(attempt):
        say(not_noted)
    give_notice(attempt.run, writer=login_writer())


def _take_part(attempt: AttemptDirectory, start: ManualStart, show: TextIO) -> None:
    """Run a node other than 0 to its end, and wait until node 0 has concluded the attempt, if it still can."""
    others = _Others(attempt, start)
    Supervisor(attempt, start, show=show, others_have_ended=others.have_concluded).run()


class _Others:
    """Whether the nodes on other machines have ended, according to shared storage; used once this node has ended."""

    def __init__(self, attempt: AttemptDirectory, start: ManualStart) -> None:
        self._attempt = attempt
        self._nodes = start.nodes
        self._this_node = start.node
        self._silent = SilentNodes(attempt, start.nodes, ended=[start.node])
        self._next_look = 0.0
        self._all_ended_since: float | None = None
        self.lost: set[int] = set()

    def have_ended(self) -> bool:
        """Whether every node has signed off, or is lost."""
        return self._look() and self._ended()

    def have_concluded(self) -> bool:
        """Whether node 0 has concluded the attempt, or will not."""
        if not self._look():
            return False
        if read_attempt(self._attempt).ended is not None or 0 in self.lost:
            return True
        if self._all_ended_since is None and self._ended():
            self._all_ended_since = time.monotonic()
        return self._all_ended_since is not None and time.monotonic() - self._all_ended_since > SILENT_SECONDS

    def _look(self) -> bool:
        """Update `lost` if it is time to check again; return whether that was done."""
        if time.monotonic() < self._next_look:
            return False
        self._next_look = time.monotonic() + _LOOK_SECONDS
        self.lost |= set(self._silent.look()) - self._over()
        return True

    def _ended(self) -> bool:
        return len(self._over() | self.lost) >= self._nodes

    def _over(self) -> set[Any]:
        events = read_history(self._attempt.run).of_attempt(self._attempt.number, NODE_FINISHED, NODE_FAILED)
        return {event.get("node") for event in events} | {self._this_node}


# -- reasons against a start -------------------------------------------------------------------------------------------


def _refuse_unknown_name(master: str) -> None:
    try:
        socket.getaddrinfo(master, None)
    except socket.gaierror as error:
        if error.errno == socket.EAI_AGAIN:  # the name service is away: the node program waits for it
            return
        raise SubmitError(_unknown_name(master, str(error.strerror))) from error
    except UnicodeError as error:
        raise SubmitError(_unknown_name(master, "not a host name")) from error


def _unknown_name(master: str, why: str) -> str:
    return (
        f"--master-addr {one_line(master)}: this machine ({socket.gethostname()}) cannot resolve that name ({why}).\n"
        "Give the name or address at which all nodes reach node 0, the same on each of them"
    )


def _refuse_other_job(run: RunDirectory, spec: JobSpec) -> None:
    from cluster_ddp.job import load_resolved

    run.refuse_links()
    via = read_record(run).via
    if via != LAUNCH:
        raise SubmitError(f"{run.path} was started by {via}: continue it with {resume_command(run.id)}")
    there, here = _flat(load_resolved(run.job_file).model_dump()), _flat(spec.model_dump())
    differing = sorted(key for key in there.keys() | here.keys() if there.get(key) != here.get(key))
    if differing:
        shown = [f"{key} is {there.get(key)!r} there, {here.get(key)!r} here" for key in differing[:_DIFFERENCES_SHOWN]]
        more = len(differing) - len(shown)
        raise SubmitError(
            f"run {run.id} in {run.path.parent} belongs to another job: "
            + one_line("; ".join(shown) + (f"; and {more} more" if more > 0 else ""))
            + "\nStart all nodes with the same job file and settings, or use a different --run for this job"
        )


def _flat(value: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, entry in value.items():
        if prefix + key == "runs_dir":  # --run sets the run's folder
            continue
        flat |= _flat(entry, f"{prefix}{key}.") if isinstance(entry, dict) and entry else {prefix + key: entry}
    return flat


def _make_sure_it_is_over(seen: History) -> None:
    last = seen.last
    if last is None:
        return
    alive = attempt_is_alive(seen, last)
    if alive is None:
        say(f"checking whether attempt {last.number} of {seen.run.id} is still alive elsewhere")
        alive = gives_sign_of_life(seen.run.attempt(last.number), last.nodes or 1)
    refuse_alive(seen, last, alive)


def _refuse_cancelled(seen: History) -> None:
    if len(read_history(seen.run).cancels) > len(seen.cancels):
        raise RunEnded(f"run {seen.run.id} was cancelled while its nodes waited for each other", RunState.CANCELLED)


def _warn_of_address(start: ManualStart) -> None:
    """Warn on node 0 if the others are sent to an address that none of its interfaces has."""
    if start.node:
        return
    try:
        family, kind, protocol, _, target = socket.getaddrinfo(start.master, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.bind(target)
    except OSError as error:
        say(
            f"note: --master-addr {one_line(start.master)} is not an address of this machine, which is node 0 "
            f"({error.strerror}); the others cannot reach it there, unless the address is translated"
        )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
