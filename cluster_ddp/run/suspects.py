"""Which hosts a run had better not be given again."""

from __future__ import annotations

import re
from collections import Counter

from cluster_ddp.run.events import NODE_LOST
from cluster_ddp.run.history import History
from cluster_ddp.run.outcome import failures_of, root_failure

_ENOUGH = 2  # attempts: once may be bad luck
# What a host does to its ranks. An error of the network is not among it: it shows on the host that lives on.
_SIGNALS = ("SIGKILL", "SIGBUS", "SIGSEGV", "SIGILL")
_BROKEN = re.compile(
    r"killed from outside|\bECC\b|CUDA-capable device|CUDA driver|busy or unavailable|input/output error|stale file",
    re.IGNORECASE,
)


def suspects(history: History, upto: int) -> list[str]:
    """The hosts that ended more than one attempt, as far as can be told.

    Parameters
    ----------
    upto
        The last attempt to look at; those before a person's last request to resume do not count.
    """
    counts = Counter(host for number in range(history.first_number, upto + 1) for host in _culprits(history, number))
    return sorted(host for host, count in counts.items() if count >= _ENOUGH)


def _culprits(history: History, number: int) -> set[str]:
    lost = {str(event["host"]) for event in history.of_attempt(number, NODE_LOST) if event.get("host")}
    failures = failures_of(history, number)
    if lost or not failures:
        return lost
    root = root_failure(failures)
    host, error = root.get("host"), str(root.get("error") or "")
    broken = root.get("signal") in _SIGNALS or _BROKEN.search(error)
    # A rank may know its host by the full name, where Slurm and its lost nodes have the short one.
    return {host.split(".")[0]} if isinstance(host, str) and broken else set()
