"""How an attempt ended, as far as its own events and its stop file tell."""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass
from typing import Any

from cluster_ddp.run.errors import RunEnded
from cluster_ddp.run.events import (
    CHECKPOINT,
    COMPLETED,
    FAILED,
    HANG,
    NODE_LOST,
    PREEMPTED,
    RANK_FAILED,
    RESUMED,
    STALLED,
    STARTED,
    STOPPED,
)
from cluster_ddp.run.history import Event, History, as_step
from cluster_ddp.run.metrics import read_latest
from cluster_ddp.run.stopfile import AGENT_LOST, CANCEL, PERSON, PREEMPTION, TERMINATED, TIME_LIMIT, read_stop

# What stands behind a stop, the most telling first. A SIGTERM reaches every process at once, so the ranks may have
# stopped for "terminated" before the batch script found out what it meant and said so in the stop file. Ranks whose
# agent was killed get one from the kernel, too.
_STOP_PRECEDENCE = (CANCEL, PERSON, PREEMPTION, TIME_LIMIT, AGENT_LOST)

# Errors that a program gets from its surroundings: a peer that died, the network, the machine. Starting again helps,
# unlike after an error of the program itself.
_SURROUNDINGS = re.compile(
    r"\bsignal\b|killed from outside|SIG(KILL|TERM|ABRT|BUS|SEGV)|connection|broken pipe|socket|timed? ?out|\bpeer\b|"
    r"rendezvous|NCCL|gloo|Dist(Network|Store|Backend)Error|unreachable|\bECC\b|CUDA-capable device|CUDA driver|"
    r"busy or unavailable|no space left|input/output error|stale file handle|read-only file system",
    re.IGNORECASE,
)
_PROGRAM = re.compile(
    r"^(\w+\.)*((Import|ModuleNotFound|Syntax|Indentation|Name|Type|Attribute|Key|Value|Index|Assertion|FileNotFound|"
    r"NotImplemented|ZeroDivision|OutOfMemory|JobFile|Batch|Checkpoint)Error)\b",
    re.MULTILINE,
)


class Ending(enum.Enum):
    """How an attempt ended."""

    COMPLETED = "completed"
    CANCELLED = "cancelled"
    STOPPED_BY_PERSON = "stopped by a person"
    STOPPED = "stopped"
    FAILED_AT_START = "failed at start-up"
    FAILED = "failed"
    HUNG = "hung"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class Outcome:
    """How an attempt ended, and why in words for people."""

    ending: Ending
    reason: str
    stop_reason: str | None = None


def outcome_of(history: History, number: int) -> Outcome:
    """How an attempt ended. For one that is still alive: how it would have ended were it gone now."""
    events = history.of_attempt(number)
    names = {event["event"] for event in events}
    if COMPLETED in names:
        return Outcome(Ending.COMPLETED, "training is complete")
    if history.cancelled is not None:
        return Outcome(Ending.CANCELLED, f"cancelled by {history.cancelled.get('by', 'its owner')}", CANCEL)
    stop_reason, said_by = _stop_reason(history, number, events)
    if stop_reason == CANCEL:
        return Outcome(Ending.CANCELLED, "its job was cancelled", CANCEL)
    if stop_reason == PERSON:
        return Outcome(Ending.STOPPED_BY_PERSON, "stopped by " + (said_by or "a person"), PERSON)
    failures = failures_of(history, number)
    own_fault = any(not _is_surroundings(event) for event in failures)
    if stop_reason is not None and (STOPPED in names or not own_fault):
        return Outcome(Ending.STOPPED, f"stopped: {stop_reason}", stop_reason)
    if hangs := [event for event in events if event["event"] == HANG]:
        return Outcome(Ending.HUNG, str(hangs[-1].get("reason") or "no step was finished for too long"))
    if failures:
        at_start = own_fault and not _has_progressed(history, number)
        ending = Ending.FAILED_AT_START if at_start else Ending.FAILED
        return Outcome(ending, describe_failure(root_failure(failures)))
    lost = [str(event.get("reason")) for event in events if event["event"] == NODE_LOST]
    return Outcome(Ending.UNKNOWN, "; ".join(lost) or "it ended without a word (killed, or its node failed)")


def refuse_ended(history: History) -> None:
    """Raise `RunEnded` for a run that only a person may start again.

    Cheap: it does not load the job, so the stall guard is what was recorded, not judged anew.
    """
    run_id = history.run.id
    if history.cancelled is not None:
        raise RunEnded(_ended_message(run_id, "was cancelled"), "CANCELLED")
    if history.current(COMPLETED):
        raise RunEnded(f"run {run_id} is complete: there is nothing left to train", "COMPLETED")
    if stalled := history.current(STALLED):
        raise RunEnded(_ended_message(run_id, f"has stalled: {stalled.get('reason')}"), "STALLED")
    last = history.last
    if last is None or last.number < history.first_number:
        return
    outcome = outcome_of(history, last.number)
    if outcome.ending is Ending.CANCELLED:
        raise RunEnded(_ended_message(run_id, "was cancelled"), "CANCELLED")
    if outcome.ending is Ending.STOPPED_BY_PERSON:
        raise RunEnded(_ended_message(run_id, "was stopped by a person"), "STOPPED")
    if outcome.ending is Ending.FAILED_AT_START:
        raise RunEnded(_ended_message(run_id, f"failed at start-up: {outcome.reason}"), "FAILED")


def failures_of(history: History, number: int) -> list[Event]:
    """What failed in an attempt since training last (re)started in it, in the order it happened."""
    failures: list[Event] = []
    for event in history.of_attempt(number, STARTED, RESUMED, FAILED, RANK_FAILED):
        if event["event"] in (FAILED, RANK_FAILED):
            failures.append(event)
        else:
            failures.clear()  # the ranks were restarted inside the allocation and it went on
    return failures


def root_failure(failures: list[Event]) -> Event:
    """The failure that the others most likely follow from: the program's own error, then a kill, then the first."""
    own = [event for event in failures if not _is_surroundings(event)]
    killed = [event for event in failures if event.get("signal") is not None]
    return (own or killed or failures)[0]


def describe_failure(event: Event) -> str:
    """A failure in one line, with where it was: rank, node or host, step."""
    rank, node, step = event.get("rank"), event.get("host") or event.get("node"), as_step(event.get("step"))
    where = [f"rank {rank}"] if rank is not None else []
    where += [f"on {node}"] if isinstance(node, str) else [f"on node {node}"] if node is not None else []
    where += [f"at step {step}"] if step is not None else []
    error = str(event.get("error") or event.get("reason") or "").strip() or "no error was recorded"
    return f"{' '.join(where) or 'a rank'} failed: {_telling_line(error)}"


def _telling_line(error: str) -> str:
    """The first line; of a traceback, the first below its last frame: a message may go on for more lines."""
    lines = error.splitlines()
    last_frame = max((number for number, line in enumerate(lines) if line.startswith("  File ")), default=None)
    if last_frame is None:
        return lines[0]
    return next((line for line in lines[last_frame + 1 :] if line and not line[0].isspace()), lines[-1])


def _is_surroundings(event: Event) -> bool:
    if event.get("signal") is not None or not event.get("error"):
        return True
    error = str(event["error"])
    return not _PROGRAM.search(error) and bool(_SURROUNDINGS.search(error))


def _has_progressed(history: History, number: int) -> bool:
    """Whether any attempt since a person's last request to resume, up to this one, finished a step."""
    logged = read_latest(history.run.metrics_file).steps
    numbers = range(history.first_number, number + 1)
    return any(_finished_a_step(history, one, logged.get(one)) for one in numbers)


def _finished_a_step(history: History, number: int, logged: int | None) -> bool:
    first: int | None = None
    reached = [logged] if logged is not None else []
    for event in history.of_attempt(number, STARTED, RESUMED, CHECKPOINT, STOPPED, FAILED, RANK_FAILED):
        step = as_step(event.get("step"))
        if event["event"] in (STARTED, RESUMED):
            first = step if first is None else first
        elif step is not None:
            reached.append(step)
    return any(step > (first or 0) for step in reached)


def _ended_message(run_id: str, what: str) -> str:
    return f"run {run_id} {what}. It starts again only when a person asks for it: cluster-ddp resume {run_id}"


def _stop_reason(history: History, number: int, events: list[Event]) -> tuple[str | None, str]:
    """Why the attempt was to stop, and who said so; None when nothing asked it to."""
    said: dict[str, Any] = {}
    for event in events:
        if event["event"] == STOPPED:
            said.setdefault(str(event.get("reason") or TERMINATED), event.get("by"))
        elif event["event"] == PREEMPTED:
            said.setdefault(PREEMPTION, None)
    request = read_stop(history.run.attempt(number))
    if request is not None and request.reason != HANG:  # a hang ends the other nodes by the stop file, too
        said[request.reason] = request.by
    if not said:
        return None, ""
    reason = next((one for one in _STOP_PRECEDENCE if one in said), next(iter(said)))
    return reason, str(said[reason] or "")
