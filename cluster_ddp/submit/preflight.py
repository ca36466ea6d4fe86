"""The checks before a job is queued: the cheap ones first, Slurm's own check last.

Each query to Slurm has five seconds; one without an answer is reported and skipped.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from cluster_ddp.run.runs import runs_dir_of
from cluster_ddp.slurm.commands import SlurmError, SlurmRefused, try_script
from cluster_ddp.slurm.partitions import Partition, ask_nodes, ask_partitions
from cluster_ddp.submit.base import Submission, SubmitError, check_writable
from cluster_ddp.submit.check_program import ProgramCheck
from cluster_ddp.submit.partition_limits import Misfit, find_partition, misfits
from cluster_ddp.submit.refused import NO_NODE_FITS, advised
from cluster_ddp.submit.save_time import what_does_not_fit

if TYPE_CHECKING:
    from cluster_ddp.job import JobSpec, LoadedJob


T = TypeVar("T")
_SECONDS = 5.0
# A job that is actually submitted then waits until nodes are back; whether any node fits at all was checked before.
_MAY_CHANGE = (NO_NODE_FITS, "DOWN, DRAINED")


def check_before_queue(
    loaded: LoadedJob,
    sending: Submission,
    remark: Callable[[Iterable[str]], None],
    program: ProgramCheck | None = None,
) -> None:
    """Find everything that would make a job fail at its start or wait forever.

    Parameters
    ----------
    remark
        Called with what may be wrong, and what could not be checked.
    program
        A check of the task or script that is already running; by default one is started here.

    Raises
    ------
    SubmitError
        Names everything that the partition does not allow, and what it allows.
    SlurmRefused
        ``sbatch --test-only`` refuses the script.
    """
    spec = loaded.spec
    runs_dir = runs_dir_of(spec)
    check_writable(runs_dir)
    reason = why_not_shared(runs_dir)
    if reason is not None and spec.slurm.nodes > 1:
        remark([f"runs_dir: {runs_dir} may not be visible on the nodes: {reason}. It must be on shared storage"])
    sending.check()
    with contextlib.ExitStack() as until_then:
        if program is None:
            program = until_then.enter_context(ProgramCheck())
            program.ask(loaded)  # takes longest, and runs in the background
        slurm = _Slurm(remark)
        partition = _check_partition(loaded, slurm, remark) if sending.to_slurm else None
        saved = program.result(remark)
    if saved is not None:
        remark(what_does_not_fit(spec, runs_dir, saved, partition, seconds=_SECONDS))
    if sending.to_slurm:
        slurm.try_script(sending.batch_script)


class _Slurm:
    """Asks Slurm. Once it gives no answer, nothing more is asked until the job is submitted."""

    def __init__(self, remark: Callable[[Iterable[str]], None]) -> None:
        self._remark = remark
        self._away = False

    def ask(self, what: str, ask: Callable[[], T]) -> T | None:
        """Return the answer; None without one."""
        try:
            return None if self._away else ask()
        except SlurmError as error:
            self._away = not isinstance(error, SlurmRefused)
            said = str(error).splitlines()[0]
            why = said.partition(": ")[0] if self._away else said  # without an answer, the rest is repeated by sbatch
            self._remark([f"could not check {what} of the cluster: {why}"])
            return None

    def try_script(self, text: str) -> None:
        """Have sbatch check the script; raises `SlurmRefused` if it can never be queued."""
        try:
            if not self._away:
                with advised():
                    try_script(text, seconds=_SECONDS)
        except SlurmRefused as error:
            if not any(sign in str(error) for sign in _MAY_CHANGE):
                raise
            self._remark([f"{error}\nIf nodes are only down or drained at the moment, the job waits for them"])
        except SlurmError as error:
            self._remark([f"could not test the script with sbatch --test-only: {error}"])


def _check_partition(loaded: LoadedJob, slurm: _Slurm, remark: Callable[[Iterable[str]], None]) -> Partition | None:
    spec = loaded.spec
    partitions = slurm.ask("the partitions", lambda: ask_partitions(seconds=_SECONDS))
    if not partitions:
        return None
    partition = find_partition(spec.slurm, partitions)
    if isinstance(partition, Partition):
        _check_fit(loaded, partition, slurm, remark)
        return partition
    if partition is not None:
        raise _misfit_error(loaded, [partition])
    return None


def _check_fit(loaded: LoadedJob, partition: Partition, slurm: _Slurm, remark: Callable[[Iterable[str]], None]) -> None:
    nodes = slurm.ask("the nodes", lambda: ask_nodes(partition.name, seconds=_SECONDS)) or []
    found = list(misfits(loaded.spec, partition, nodes))
    if found:
        raise _misfit_error(loaded, found)
    if not partition.up:
        remark([f"partition {partition.name} is not up: the job waits until it is (sinfo -p {partition.name})"])
    _remark_on_preemption(loaded.spec, partition, remark)


def _remark_on_preemption(spec: JobSpec, partition: Partition, remark: Callable[[Iterable[str]], None]) -> None:
    if partition.preempted and not spec.requeue.max_requeues:
        remark(
            [
                f"jobs of partition {partition.name} may be preempted, and with requeue.max_requeues: 0 a preempted "
                "run does not continue by itself"
            ]
        )


def _misfit_error(loaded: LoadedJob, found: list[Misfit]) -> SubmitError:
    places = {origin.key: f"{origin.place}: " for origin in loaded.origins}
    lines = [f"{places.get(key, '')}{key}: {what}" for key, what in found]
    return SubmitError("\n".join([*lines, "The job would never start. (--no-check submits it anyway.)"]))


_MOUNTS = Path("/proc/self/mountinfo")
_OF_ONE_NODE = frozenset({"tmpfs", "ramfs", "ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "overlay", "squashfs"})


def why_not_shared(folder: Path) -> str | None:
    """Say why other machines may not see a folder, which need not exist yet; None if there is no sign of that."""
    path = os.path.realpath(folder)
    for place in ("/tmp", "/var/tmp", "/dev/shm"):
        if f"{path}/".startswith(f"{place}/"):
            return f"{place} is local to each machine"
    kind = _file_system(path)
    return f"its file system ({kind}) is local to this machine, unless it is exported" if kind in _OF_ONE_NODE else None


def _file_system(path: str) -> str:
    """Return the type of the file system that contains a path; empty if unknown."""
    try:
        lines = _MOUNTS.read_text().splitlines()
    except (OSError, UnicodeDecodeError):
        return ""
    best, kind = "", ""
    for line in lines:
        mount, _, about = line.partition(" - ")
        place = mount.split(" ")[4].replace("\\040", " ") if mount.count(" ") >= 4 else ""
        inside = f"{path}/".startswith(f"{place.rstrip('/')}/")
        if place and inside and len(place) >= len(best):
            best, kind = place, about.split(" ")[0]
    return kind
