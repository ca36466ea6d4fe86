"""Whether a folder lies on storage that other machines see, as far as this one can tell."""

from __future__ import annotations

import os
from pathlib import Path

_MOUNTS = Path("/proc/self/mountinfo")
_OF_ONE_NODE = frozenset({"tmpfs", "ramfs", "ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "overlay", "squashfs"})


def why_not_shared(folder: Path) -> str | None:
    """Why other machines may not see a folder, which need not exist yet; None where nothing speaks for that."""
    path = os.path.realpath(folder)
    for place in ("/tmp", "/var/tmp", "/dev/shm"):
        if f"{path}/".startswith(f"{place}/"):
            return f"{place} is each machine's own"
    kind = _file_system(path)
    return f"its file system ({kind}) is this machine's own, unless it is exported" if kind in _OF_ONE_NODE else None


def _file_system(path: str) -> str:
    """The type of the file system that a path lies on; empty where it cannot be told."""
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
