"""``cluster-ddp init``: a first job file, and the defaults of this cluster."""

from __future__ import annotations

import os
from pathlib import Path

from cluster_ddp.cli.output import inform
from cluster_ddp.job.site_file import default_site_file, site_file
from cluster_ddp.slurm.commands import require
from cluster_ddp.submit.first_files import ask_cluster, first_job, site_values

_HEAD = "# Written by cluster-ddp init: defaults for all your job files on this cluster (docs/job-file.md)."


def command() -> None:
    """Ask Slurm what the cluster has, and write a first job.yaml and a site file; nothing is overwritten."""
    require("scontrol")
    cluster = ask_cluster()
    from cluster_ddp.job.document import dump

    site = site_file() or default_site_file()
    _write(site, f"{_HEAD}\n{dump(site_values(cluster, os.environ))}")
    _write(Path("job.yaml"), first_job(cluster))
    inform("next: cluster-ddp submit job.yaml --dry-run, then the same without --dry-run")


def _write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    try:
        with file.open("x") as new:
            new.write(text)
    except FileExistsError:
        inform(f"kept the existing {file}")
    else:
        inform(f"wrote {file}")
