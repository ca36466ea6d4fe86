"""The arguments and options that several commands share, each declared once."""

from __future__ import annotations

import os
from typing import Annotated

import typer


def _runs(incomplete: str) -> list[str]:
    """The ids of runs in the runs folder that begin like this, for completion in the shell; only names are read."""
    from cluster_ddp.errors import ClusterDDPError
    from cluster_ddp.run.runs import runs_dir_of

    try:
        names = os.listdir(runs_dir_of(None))
    except (OSError, ClusterDDPError):
        return []
    return sorted(name for name in names if name.startswith(incomplete) and not name.startswith("."))


def _templates(incomplete: str) -> list[str]:
    """The templates that begin like this, for completion in the shell, which completes files itself."""
    from cluster_ddp.job.templates import template_names

    return [name for name in template_names() if name.startswith(incomplete)]


Job = Annotated[str, typer.Argument(metavar="JOB", autocompletion=_templates, help="A job file, or a template's name.")]
Run = Annotated[
    str,
    typer.Argument(metavar="RUN", autocompletion=_runs, help="Run: its directory, its id, or a unique prefix of one."),
]
RunOrSweep = Annotated[
    str,
    typer.Argument(
        metavar="RUN", autocompletion=_runs, help="Run or sweep: its directory, its id, or a unique prefix of one."
    ),
]
Runs = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[RUN]...",
        autocompletion=_runs,
        help="Runs or sweeps: their directories, ids, or unique prefixes. Default: all.",
    ),
]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="A.B=C", help="Override a setting, such as train.lr=0.1. Repeatable."),
]
JsonLine = Annotated[bool, typer.Option("--json", help="End with one line of JSON on standard output.")]
JsonStatus = Annotated[bool, typer.Option("--json", help="Print one JSON object; for several runs, a list.")]
JsonList = Annotated[bool, typer.Option("--json", help="Print a JSON list.")]
SimulatedNodes = Annotated[
    int | None, typer.Option("--nodes", min=1, metavar="N", help="Nodes to simulate; they meet on loopback.")
]
ProcsHere = Annotated[
    int | None,
    typer.Option("--procs", min=1, metavar="P", help="Ranks per node. Default: the job file's, or one per GPU."),
]
GpusHere = Annotated[
    str | None,
    typer.Option(
        "--gpus", metavar="LIST", help="Devices, such as 0,1,3, divided among the nodes; none for CPUs. Default: all."
    ),
]
NoCheck = Annotated[bool, typer.Option("--no-check", help="Skip the checks of the task, the storage and the cluster.")]
