"""The defaults of a site: a user's file that every job file overrides.

The file is `$CLUSTER_DDP_CONFIG`, else ``cluster-ddp/site.yaml`` in the XDG configuration folder. A group shares one
with the key ``extends:`` in its members' files. It sets where and how jobs run, but not what they train.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

from cluster_ddp.job.document import Node, Place, fault, mapping
from cluster_ddp.job.merge import absolute, merge, read_extended
from cluster_ddp.job.site_file import RUNS_VARIABLE, site_file

KEYS = ("runs_dir", "slurm", "launch", "network", "requeue", "storage")


def site_defaults() -> Node | None:
    """Read the site file and what it extends; None if there is none.

    Raises
    ------
    JobFileError
        It cannot be read, anybody may write it, or it sets what a job trains.
    """
    file = site_file()
    if file is None:
        return None
    root = read_extended((file,))
    entries = mapping(root)
    for written in sorted({file, *_files(root)}):
        if written.stat().st_mode & stat.S_IWOTH:
            raise fault(Place(written, 0), "this file is world-writable, and its setup lines run in your jobs",
                        f"chmod o-w {written}")  # fmt: skip
    for key, node in entries.items():
        if key not in KEYS:
            raise fault(node.place, f"{key}: cannot have a default in the site file", ", ".join(KEYS))
    if os.environ.get(RUNS_VARIABLE):  # an exported variable beats a default
        entries.pop("runs_dir", None)
    return Node(entries, root.place)


def over_site(job: Node) -> Node:
    """Return the job laid over the site's defaults. An empty section (``slurm:``) keeps its defaults."""
    site = site_defaults()
    if site is None:
        return job
    sections = mapping(site)
    said = {
        key: node
        for key, node in mapping(job).items()
        if node.value is not None or not isinstance(sections.get(key, node).value, dict)
    }
    return merge(site, Node(said, job.place))


def site_runs_dir() -> str | None:
    """Return the absolute `runs_dir` of the site file, if it has one."""
    root = site_defaults()
    node = mapping(root).get("runs_dir") if root is not None else None
    return absolute(node.value, node.place) if node is not None and isinstance(node.value, str) else None


def _files(node: Node) -> Iterator[Path]:
    if node.place.file is not None:
        yield node.place.file
    for below in mapping(node).values():
        yield from _files(below)
