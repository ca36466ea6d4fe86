"""What failed in an attempt, which of it caused the rest, and how that is said in one line."""

from __future__ import annotations

import itertools
import re

from cluster_ddp.errors import Cause
from cluster_ddp.run.events import FAILED, HANG, NODE_FAILED, NODE_LOST, NODE_TAKEN, RANK_FAILED, RESUMED, STARTED
from cluster_ddp.run.history import Event, History
from cluster_ddp.run.reading import as_whole

# What Python, torch, NCCL, CUDA and the kernel say of errors that were caused from outside the program: by a peer that
# died, the network, the machine. A restart helps, unlike after an error of the program itself.
_OUTSIDE = re.compile(
    r"\bsignal\b|SIG(KILL|TERM|ABRT|BUS|SEGV)|connection|broken pipe|socket|timed? ?out|"
    r"\bpeer\b|rendezvous|NCCL|gloo|Dist(Network|Store|Backend)Error|unreachable|\bECC\b|CUDA-capable device|"
    r"CUDA driver|CUDA unknown error|system not yet initialized|driver/library version mismatch|GPU is lost|"
    r"busy or unavailable|resource temporarily unavailable|can't start new thread|no space left|quota exceeded|"
    r"input/output error|remote I/O error|stale file handle|read-only file system|transport endpoint",
    re.IGNORECASE,
)
_PROGRAM = re.compile(
    r"^(\w+\.)*((Import|ModuleNotFound|Syntax|Indentation|Name|Type|Attribute|Key|Value|Index|Assertion|FileNotFound|"
    r"NotImplemented|ZeroDivision|OutOfMemory)Error)\b",
    re.MULTILINE,
)
# Those that a host causes in its own ranks. Network errors are not among them: they show on the host that survives.
_HOST = re.compile(
    r"is killed by signal: (Killed|Bus error|Segmentation fault|Illegal instruction)|"
    r"CUDA unknown error|system not yet initialized|driver/library version mismatch|GPU is lost|"
    r"\bECC\b|CUDA-capable device|CUDA driver|busy or unavailable|input/output error|stale file|"
    r"read-only file system|</torch_\w+>: No space left|"
    r"No space left on device: '/(dev/shm|tmp)/",
    re.IGNORECASE,
)
_SIGNALS_OF_HOST = frozenset({"SIGKILL", "SIGBUS", "SIGSEGV", "SIGILL"})

_MAX_ERROR = 4000
_MAX_LINES = 3
_CAUSED = "\n\nThe above exception was the direct cause of the following exception:\n\n"
_MEANWHILE = "During handling of the above exception, another exception occurred:"


def failures_of(history: History, number: int) -> list[Event]:
    """Return what failed in an attempt since training last (re)started in it, in the order it happened."""
    failures: list[Event] = []
    first = True
    for event in history.of_attempt(number, STARTED, RESUMED, FAILED, RANK_FAILED, NODE_FAILED):
        if event["event"] in (FAILED, RANK_FAILED, NODE_FAILED):
            failures.append(event)
            continue
        # The ranks were restarted inside the allocation and training continued. A failure at a later step happened
        # after the first start, whatever its time stamp: the clocks of the hosts may differ.
        begun = as_whole(event.get("step")) or 0
        failures = [failed for failed in failures if first and (as_whole(failed.get("step")) or 0) > begun]
        first = False
    return failures


def causes_of(failures: list[Event]) -> list[Event]:
    """Return the likely causes among the failures, the most likely first; empty if there are no failures.

    The order: the program's own error, a node that did not come up, a kill, a node program or job step that ended by
    itself, then the first failure: lost connections are mostly consequences.
    """
    own = [event for event in failures if not came_from_outside(event)]
    nodes = [event for event in failures if event["event"] == NODE_FAILED]
    suspects = [event for event in nodes if event.get("suspect")]
    killed = [event for event in failures if event.get("signal") is not None]
    return [some[0] for some in (own, suspects, killed, nodes, failures) if some]


def root_failure(failures: list[Event]) -> Event:
    """Return the failure that most likely caused the others."""
    return causes_of(failures)[0]


def cause_of_hang(hangs: list[Event]) -> Event:
    """Return the rank that the others most likely wait for: one whose process was stopped, else the furthest behind."""

    def order(event: Event) -> tuple[bool, int]:
        step = as_whole(event.get("step"))
        return event.get("stopped") is not True, -1 if step is None else step

    return min(reversed(hangs), key=order)


def what_failed(history: History, number: int) -> str | None:
    """Describe in one line what failed in an attempt since training last (re)started in it; None if nothing did."""
    failures = failures_of(history, number)
    hangs = history.of_attempt(number, HANG)
    if hangs and all(map(came_from_outside, failures)):
        return str(cause_of_hang(hangs).get("reason") or "no step was finished for too long")
    if (lost := lost_nodes(history, number)) and all(map(came_from_outside, failures)):
        return lost
    return describe_failure(root_failure(failures)) if failures else None


def lost_nodes(history: History, number: int) -> str:
    """Describe the nodes that an attempt lost, by what was recorded of each; empty if it lost none."""
    return "; ".join(str(event.get("reason")) for event in history.of_attempt(number, NODE_LOST, NODE_TAKEN))


def describe_failure(event: Event) -> str:
    """Describe a failure in one line, with its place: rank, node or host, step."""
    rank, node, step = event.get("rank"), event.get("host") or event.get("node"), as_whole(event.get("step"))
    where = [f"rank {rank}"] if rank is not None else []
    where += [f"on {node}"] if isinstance(node, str) else [f"on node {node}"] if node is not None else []
    where += [f"at step {step}"] if step is not None else []
    error = str(event.get("error") or event.get("reason") or "").strip() or "no error was recorded"
    if event["event"] == NODE_FAILED:
        return f"node {node} failed: {error}"
    return f"{' '.join(where) or 'a rank'} failed: {_last_words(error)}"


def _last_words(error: str) -> str:
    """Return what an error says; of one that was raised ``from`` another, with what that one says, if it does not."""
    *causes, last = error.split(_CAUSED)
    said = _message(last)
    cause = _message(causes[0]) if causes and _MEANWHILE not in last else ""
    return said if (cause.partition(": ")[2] or cause) in said else f"{said} (because of {cause})"


def _message(error: str) -> str:
    """Return the first line, with those that it introduces; of a traceback, what follows its last frame.

    Empty lines do not count: some libraries begin their messages with one.
    """
    lines = [line for line in error.splitlines() if line.strip()]
    said = [line.strip() for line in lines[_begin_of_message(lines) :]]
    if "Last error:" in said[:-1]:  # NCCL's own words, below an explanation of the kind of error
        return f"{said[0]}: {said[said.index('Last error:') + 1]}"
    introducing = itertools.takewhile(lambda line: line.endswith(":"), said[: _MAX_LINES - 1])
    return " ".join(said[: len(list(introducing)) + 1])


def _begin_of_message(lines: list[str]) -> int:
    """Return where the message begins: at the first line, or below the last frame of a traceback."""
    frames = [number for number, line in enumerate(lines) if line.startswith("  File ")]
    if not frames:
        return 0
    below = range(frames[-1] + 1, len(lines))
    return next((n for n in below if lines[n] and not lines[n][0].isspace()), len(lines) - 1)


def shortened(error: str) -> str:
    """Return an error as an event may hold it: with the beginning of a long message, not of its traceback."""
    if len(error) <= _MAX_ERROR:
        return error
    lines = error.splitlines()
    begin = _begin_of_message(lines)
    message = "\n".join(lines[begin:])
    if len(message) > _MAX_ERROR:
        return f"{message[:_MAX_ERROR]} ..."
    frames = "\n".join(lines[:begin])[len(message) - _MAX_ERROR :]
    return f"{frames}\n{message}" if "\n  File " in frames else message


def came_from_outside(event: Event) -> bool:
    """Whether a failure came from outside the program, so that a restart may help; else it is the program's own.

    One of an older version, which recorded no cause, counts as from outside.
    """
    return event.get("cause") != Cause.PROGRAM and event.get("comes_back") is not True


def cause_of_message(error: str) -> Cause:
    """Return the cause of an error that this package did not raise, by what Python, torch or another library says."""
    if _PROGRAM.search(error):
        return Cause.PROGRAM
    if _HOST.search(error):
        return Cause.HOST
    return Cause.OUTSIDE if _OUTSIDE.search(error) else Cause.PROGRAM


def cause_of_signal(name: str, said: str = "") -> Cause:
    """Return the cause of a process's end by a signal, given what it said before, if anything."""
    host = name in _SIGNALS_OF_HOST or cause_of_message(said) is Cause.HOST
    return Cause.HOST if host else Cause.OUTSIDE
