"""Records the nodes of an attempt that could not report their own end."""

from __future__ import annotations

from cluster_ddp.launch.keeper.running_job_step import START_SECONDS, RunningJobStep
from cluster_ddp.launch.torchrun.agent_failure import MORE_FILES, TOO_MANY_FILES
from cluster_ddp.run.directory import AttemptDirectory
from cluster_ddp.run.events import (
    HANG,
    NODE_FAILED,
    NODE_FINISHED,
    NODE_LOST,
    NODE_STARTED,
    NODE_TAKEN,
    RANK_FAILED,
    REQUEUED,
    RESUMED,
    STARTED,
    STOP_REQUESTED,
    EventWriter,
)
from cluster_ddp.run.history import Event, History, read_history
from cluster_ddp.run.node_outcome import not_signed_off
from cluster_ddp.run.stopfile import FINAL_REASONS, TERMINATED, read_stop
from cluster_ddp.slurm.control import boot_times, down_nodes, taken_hosts
from cluster_ddp.slurm.nodelist import short_name
from cluster_ddp.slurm.start import SlurmStart

_DOWN = "Slurm calls it down"


def record_lost_nodes(
    history: History, attempt: AttemptDirectory, writer: EventWriter, *, restarted: bool = False
) -> bool:
    """Record the nodes that never signed off and that Slurm reports as down; return whether there are any.

    Parameters
    ----------
    restarted
        Whether to look for nodes that were rebooted meanwhile, too. For an attempt whose job Slurm has restarted: if
        the job needs the very nodes that failed, or all of them failed at once, they are up again by then. Not used if
        the attempt's end is known, as the nodes may have been rebooted after it.
    """
    if history.of_attempt(attempt.number, NODE_LOST, NODE_TAKEN):
        return False
    silent = _silent(history, attempt.number)
    names = sorted({*silent, *(str(event["host"]) for event in silent.values())})  # Slurm may know full ones
    lost = dict.fromkeys(map(short_name, down_nodes(names) if names else []), _DOWN)
    if silent and not lost and restarted and not history.of_attempt(attempt.number, STOP_REQUESTED, REQUEUED):
        booted = {short_name(host): at for host, at in boot_times(names).items()}
        meanwhile = [host for host, event in silent.items() if booted.get(host, 0.0) > float(event["time"])]
        lost = dict.fromkeys(sorted(meanwhile), "it was restarted while it trained")
    for host, why in lost.items():
        _record_lost(attempt, writer, silent[host].get("node"), host, why)
    return bool(lost)


def _record_lost(attempt: AttemptDirectory, writer: EventWriter, node: object, host: str, why: str) -> None:
    writer.write(NODE_LOST, attempt=attempt.number, node=node, host=host, reason=f"node {host} failed: {why}")


def record_silent_node(attempt: AttemptDirectory, writer: EventWriter, node: int, host: str | None) -> None:
    """Record a node that no longer gave a sign of life after others had signed off."""
    who = f"node {node} ({host})" if host else f"node {node}"
    reason = f"{who} was lost: no sign of life while others had finished"
    writer.write(NODE_LOST, attempt=attempt.number, node=node, host=host, reason=reason)


def record_failed_nodes(
    attempt: AttemptDirectory, writer: EventWriter, start: SlurmStart, job_step: RunningJobStep, *, job_ends: bool
) -> None:
    """Record the nodes that could not report their own end, for a job step that has ended.

    A node program that never reported its start is named with the last line it printed. One that was ended before it
    had come up, because a different one had failed or the job was stopped, is not recorded.

    Parameters
    ----------
    job_ends
        Whether Slurm ends the job, and its node programs with it.
    """
    hosts = [short_name(host) for host in start.hosts]
    if down := list(dict.fromkeys(map(short_name, job_step.output.down))):  # what became of the others follows from it
        for host in down:
            _record_lost(attempt, writer, hosts.index(host) if host in hosts else None, host, _DOWN)
        return
    if not job_ends and (error := _ended_from_outside(job_step, start)):
        writer.write(NODE_FAILED, attempt=attempt.number, host=start.batch_host, error=error, suspect=False)
        return
    history = read_history(attempt.run, strict=True)  # a node whose events cannot be read is not to blame
    is_known = False
    if not job_ends and not _record_taken_nodes(history, attempt, writer, start):
        is_known = _record_killed_node(history, attempt, writer, start, job_step)
    for node in job_step.lost:
        record_silent_node(attempt, writer, node, hosts[node] if node < len(hosts) else None)
    if not job_step.lost:
        _record_missing_nodes(history, attempt, writer, start, job_step, is_known=is_known)


def _record_missing_nodes(
    history: History,
    attempt: AttemptDirectory,
    writer: EventWriter,
    start: SlurmStart,
    job_step: RunningJobStep,
    *,
    is_known: bool,
) -> None:
    """Record the nodes that have reported neither a start nor a failure, each with what it or srun said last.

    Parameters
    ----------
    is_known
        Whether a node is recorded already whose end explains why others had not come up.
    """
    spoke = {short_name(event.get("host")) for event in history.of_attempt(attempt.number, NODE_STARTED, NODE_FAILED)}
    if len(spoke) >= start.nodes:
        return
    if not spoke and TOO_MANY_FILES.search(job_step.output.own_error or ""):
        # srun itself, on the batch host: the nodes that it could not reach are not to blame.
        _record_srun_error(attempt, writer, start, job_step)
        return
    hosts = [short_name(host) for host in start.hosts]
    failures = reversed(job_step.output.failures())  # so that the first message of a host counts
    failed = {host: task.describe() for task in failures if (host := short_name(task.host)) not in spoke}
    if job_step.unstarted:
        failed = dict.fromkeys(
            hosts, f"neither did any other within {START_SECONDS / 60:.0f} min (see the Slurm output)"
        )
    trained = bool(history.of_attempt(attempt.number, STARTED, RESUMED))  # on all nodes
    what = "its node program could not record that it had started" if trained else "its node program did not start"
    if not failed and spoke and spoke <= set(hosts):
        if trained:
            failed = dict.fromkeys(hosts, "see whether the runs folder is full or read-only there")
        elif not is_known and not _explained(history, attempt.number):
            failed = dict.fromkeys(hosts, "it never reported that it had started")
    if not failed and not spoke:
        _record_srun_error(attempt, writer, start, job_step)
    for host in sorted(failed.keys() - spoke):
        error = f"{what}: {failed[host]}"
        writer.write(NODE_FAILED, attempt=attempt.number, host=host, error=error, suspect=True)


def _record_srun_error(
    attempt: AttemptDirectory, writer: EventWriter, start: SlurmStart, job_step: RunningJobStep
) -> None:
    """Record the error because of which srun started no node, unless the attempt was asked to stop."""
    own_error = job_step.output.own_error
    if not own_error or read_stop(attempt) is not None:
        return
    error = f"srun started nothing: {own_error}"
    if TOO_MANY_FILES.search(own_error):
        error += f"; {MORE_FILES}"
    if "option '--container-" in error:
        error += "; launch.container.runtime: pyxis needs that plugin in this cluster's Slurm"
    writer.write(NODE_FAILED, attempt=attempt.number, host=start.batch_host, error=error, suspect=False)


def _ended_from_outside(job_step: RunningJobStep, start: SlurmStart) -> str | None:
    """Say what ended a job step as a whole, for which no node is to blame; None if nothing did."""
    if job_step.killed_by:  # its node programs may live on until the job is requeued
        return f"srun was ended from outside, perhaps because memory ran out ({job_step.killed_by})"
    if job_step.cancelled:  # of its node programs, the first to end is no more to blame than others
        return f"the job step was cancelled from outside, for example by scancel {start.task}.0"
    if job_step.stood_still:
        return "srun was stopped by a signal (SIGSTOP) before any node had started, and nobody continued it (SIGCONT)"
    return None


def _record_taken_nodes(history: History, attempt: AttemptDirectory, writer: EventWriter, start: SlurmStart) -> bool:
    """Record nodes that were taken from the job, whose node programs Slurm has killed; return False if there are none.

    Nothing is wrong with them. The job restarts with as many nodes as it asks for.
    """
    silent = _silent(history, attempt.number)
    taken = [host for host in map(short_name, taken_hosts(start)) if host in silent] if silent else []
    for host in taken:
        reason = f"node {host} was taken from the job while it ran (scontrol update NumNodes=...)"
        writer.write(NODE_TAKEN, attempt=attempt.number, node=silent[host].get("node"), host=host, reason=reason)
    return bool(taken)


def _silent(history: History, number: int) -> dict[str, Event]:
    """Return the nodes of an attempt that have started but never signed off: by host, the event of the start."""
    silent = not_signed_off(history.of_attempt(number))
    return {short_name(event["host"]): event for event in silent if event.get("host")}


def _record_killed_node(
    history: History, attempt: AttemptDirectory, writer: EventWriter, start: SlurmStart, job_step: RunningJobStep
) -> bool:
    """Record the node whose program was the first to end without signing off, or to which srun lost its connection.

    Returns whether there is one.

    Either a signal ended it or an error of its own; the latter may be caused by storage that fails everywhere, so the
    node is not suspected then.
    """
    first, request = job_step.output.first_to_end(), read_stop(attempt)
    if job_step.lost or (request is not None and request.reason in FINAL_REASONS):
        return False
    node = job_step.output.cut_off
    if node is not None and node < len(start.hosts):  # srun then kills all the others, which are not to blame
        error = "srun lost its connection to it, and ended the job step: suspect its network, or slurmstepd there"
        writer.write(NODE_FAILED, attempt=attempt.number, node=node, host=start.hosts[node], error=error, suspect=True)
        return True
    if first is None:
        return False
    nodes = {
        event["event"]: event.get("node")
        for event in history.of_attempt(attempt.number, NODE_STARTED, NODE_FINISHED, NODE_FAILED, NODE_LOST)
        if short_name(event.get("host")) == short_name(first.host)
    }
    if nodes.keys() != {NODE_STARTED}:
        return False
    error = f"its node program ended without signing off: {first.describe()}"
    if first.by_signal:
        error = f"its node program was killed from outside, for example because memory ran out (srun: {first.how})"
    rank, suspect = nodes[NODE_STARTED], first.by_signal
    writer.write(NODE_FAILED, attempt=attempt.number, node=rank, host=first.host, error=error, suspect=suspect)
    return True


def _explained(history: History, number: int) -> bool:
    """Whether an attempt ended for a reason that explains why some of its nodes had not come up yet."""
    waited = [event for event in history.of_attempt(number, NODE_FAILED) if not event.get("suspect")]
    return any(
        event["event"] != STOP_REQUESTED or not waited or event.get("reason") != TERMINATED
        for event in history.of_attempt(number, STOP_REQUESTED, NODE_FAILED, NODE_LOST, NODE_TAKEN, RANK_FAILED, HANG)
        if event not in waited  # a node that the others waited for is the one to be found
    )
