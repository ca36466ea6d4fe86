"""Slurm's node lists: ``a[1-3,07],b12,rack[1-2]n[01-02]`` and their hosts, in Slurm's order.

``python -m cluster_ddp.slurm.nodelist LIST`` prints one host per line, as ``scontrol show hostnames LIST`` does, but
needs no Slurm; with ``--first`` the first one, of which scontrol is asked if the list cannot be read. ClusterShell
expands the ranges; the list is split here because ClusterShell sorts its node sets, and the first host of Slurm's list
is the one that runs the rendezvous.
"""

from __future__ import annotations

import itertools
import os
import re
import sys

from cluster_ddp.errors import ClusterDDPError

MAX_HOSTS = 1_000_000
"""More than any cluster has: a range beyond it is an error, and is refused before it fills the memory."""

SCONTROL_SECONDS = 20.0
"""How long scontrol may take; it hangs if the controller is away."""

_PIECE = re.compile(r"\[(?P<ranges>[^\[\]]*)\]|(?P<plain>[A-Za-z0-9._-]+)")
_RANGE = re.compile(r"(?P<first>[0-9]+)(?:-(?P<last>[0-9]+))?")


class NodeListError(ClusterDDPError):
    """The string is not a Slurm node list."""


def expand(node_list: str) -> list[str]:
    """Return the hosts of a node list, in its order, with leading zeros kept; raises `NodeListError` otherwise."""
    hosts: list[str] = []
    for item in _items(node_list):
        hosts.extend(_hosts(item, node_list))
        if len(hosts) > MAX_HOSTS:
            raise NodeListError(f"node list {_short(node_list)} names more than {MAX_HOSTS:,} hosts")
    return hosts


def first_host(node_list: str) -> str:
    """Return the first host of a job's node list, where Slurm runs the batch script and node 0: its MASTER_ADDR.

    Raises
    ------
    NodeListError
        Neither this module nor scontrol can read the list.
    """
    try:
        return next(iter(_hosts(_items(node_list)[0], node_list)))
    except (NodeListError, ImportError) as error:
        hosts = _hosts_by_scontrol(node_list)
        if not hosts:
            raise NodeListError(str(error)) from error
        # A site's wrapper of scontrol may print something before
        return hosts[-int(os.environ.get("SLURM_JOB_NUM_NODES") or len(hosts)) :][0]


def _hosts_by_scontrol(node_list: str) -> list[str]:
    """Return what scontrol makes of a node list; nothing if it does not answer."""
    from cluster_ddp.slurm.commands import SlurmError, call_once

    try:
        return call_once(["scontrol", "show", "hostnames", node_list], seconds=SCONTROL_SECONDS).split()
    except SlurmError:
        return []


def short_name(host: object) -> str:
    """Return a host's name in Slurm's form; a node may know itself by its full name."""
    return str(host or "").split(".")[0]


def _items(node_list: str) -> list[str]:
    """Split at the commas outside brackets."""
    items = re.split(r",(?![^\[\]]*\])", node_list.strip())
    if items == [""]:
        raise NodeListError("the node list is empty")
    if not all(items):
        raise NodeListError(f"node list {_short(node_list)}: a comma with nothing before or after it")
    return items


def _hosts(item: str, whole: str) -> list[str]:
    parts: list[list[str]] = []
    position = 0
    count = 1
    while position < len(item):
        piece = _PIECE.match(item, position)
        if piece is None:
            raise NodeListError(f"node list {_short(whole)}: unexpected {item[position]!r} in {_short(item)}")
        parts.append([piece["plain"]] if piece["plain"] else _numbers(piece["ranges"], whole))
        count *= len(parts[-1])
        position = piece.end()
    if count > MAX_HOSTS:
        raise NodeListError(f"node list {_short(whole)} names more than {MAX_HOSTS:,} hosts")
    if parts[0][0].startswith("-"):
        raise NodeListError(f"node list {_short(whole)}: no host's name begins with -")
    return ["".join(parts) for parts in itertools.product(*parts)]


def _numbers(ranges: str, whole: str) -> list[str]:
    from ClusterShell.RangeSet import RangeSet

    numbers: list[str] = []
    for part in ranges.split(","):
        found = _RANGE.fullmatch(part)
        if found is None:
            raise NodeListError(f"node list {_short(whole)}: {part!r} is not a number or a range such as 01-16")
        first, last = int(found["first"]), int(found["last"] or found["first"])
        if last < first:
            raise NodeListError(f"node list {_short(whole)}: the range {part} runs backwards")
        if last - first >= MAX_HOSTS:
            raise NodeListError(f"node list {_short(whole)} names more than {MAX_HOSTS:,} hosts")
        # Slurm pads to the width of the first number; ClusterShell wants both ends to have the same width.
        width = len(found["first"])
        numbers.extend(str(number).zfill(width) for number in RangeSet(f"{first}-{last}").intiter())
    return numbers


def _short(node_list: str) -> str:
    return repr(node_list if len(node_list) <= 80 else f"{node_list[:77]}...")


def main(arguments: list[str]) -> int:
    *options, node_list = arguments or [""]
    if options not in ([], ["--first"]) or not node_list:
        print("usage: python -m cluster_ddp.slurm.nodelist [--first] LIST", file=sys.stderr)
        return 2
    try:
        print(first_host(node_list) if options else "\n".join(expand(node_list)))
    except NodeListError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
