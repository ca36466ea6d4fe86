"""The path of the site file; nothing is read here."""

from __future__ import annotations

import os
from pathlib import Path

from cluster_ddp.printing import say_if_slow

CONFIG_VARIABLE = "CLUSTER_DDP_CONFIG"
RUNS_VARIABLE = "CLUSTER_DDP_RUNS"


def site_file() -> Path | None:
    """Return the site file; None if there is none, or the variable is set to an empty string."""
    named = os.environ.get(CONFIG_VARIABLE)
    if named is not None:
        return Path(os.path.expanduser(named)) if named else None
    file = default_site_file()
    with say_if_slow(f"cluster-ddp: waiting for the file system of {file} to answer"):
        return file if os.path.isfile(file) else None  # noqa: PTH113 - Path.is_file raises for some


def default_site_file() -> Path:
    """Return the path of the site file if no variable names one."""
    folder = os.environ.get("XDG_CONFIG_HOME") or "~/.config"
    return Path(os.path.expanduser(folder), "cluster-ddp", "site.yaml")
