"""``cluster-ddp templates``: the job files that ship with the package."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from cluster_ddp.cli.output import inform, show
from cluster_ddp.errors import ClusterDDPError
from cluster_ddp.job.templates import template_file, template_names


def command(
    action: Annotated[str | None, typer.Argument(metavar="[show]", help="show: print a template.")] = None,
    name: Annotated[str | None, typer.Argument(metavar="[NAME]", help="The template to print.")] = None,
) -> None:
    """List the job templates, or print one: `templates show multi-node`."""
    if action is None:
        for template in template_names():
            show(f"{template:<14}{_summary(template)}")
        inform("\nprint one: cluster-ddp templates show NAME     submit one: cluster-ddp submit NAME")
    elif action == "show" and name is not None:
        sys.stdout.write(template_file(name).read_text(encoding="utf-8"))
    else:
        raise ClusterDDPError("usage: cluster-ddp templates [show NAME]")


def _summary(template: str) -> str:
    """The first line of comment in the template."""
    first = template_file(template).read_text(encoding="utf-8").split("\n", 1)[0]
    return first.removeprefix("#").strip() if first.startswith("#") else ""
