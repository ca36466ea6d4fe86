"""``cluster-ddp local``: the same job on this machine, without Slurm."""

from __future__ import annotations

import shlex
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from cluster_ddp.cli.answer import answer, remark

if TYPE_CHECKING:
    from cluster_ddp.submit import local


def command(
    job: Annotated[str, typer.Argument(metavar="JOB", help="Job file, or a template's name.")],
    nodes: Annotated[int | None, typer.Option(min=1, help="Nodes to simulate; they meet on loopback.")] = None,
    procs: Annotated[
        int | None, typer.Option(min=1, help="Ranks per node. Default: the job file's, or one per GPU.")
    ] = None,
    gpus: Annotated[
        str | None, typer.Option(help="Devices, such as 0,1,3, divided among the nodes; none for CPUs. Default: all.")
    ] = None,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a setting: train.lr=0.1.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the torchrun commands; start nothing.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one line of JSON at the end, all else to standard error.")
    ] = False,
) -> None:
    """Train on this machine, without Slurm. Ctrl-C saves a checkpoint and ends; `resume` goes on."""
    from cluster_ddp.spec import load_job
    from cluster_ddp.submit import local

    loaded = load_job(job, overrides or ())
    remark(loaded.warnings)
    start = local.plan_local(loaded.spec, nodes=nodes, procs=procs, gpus=gpus)
    if dry_run:
        _print_commands(start)
        return
    run, status = local.start_local(start, show=sys.stderr if as_json else sys.stdout)
    local.print_summary(run, status)
    if as_json:
        answer(run, None, status.state.value)
    raise typer.Exit(local.exit_status(status))


def _print_commands(start: local.LocalStart) -> None:
    from cluster_ddp.network import resolve
    from cluster_ddp.run.directory import runs_dir_of
    from cluster_ddp.submit.local import say

    network = resolve(start.spec.network)
    directory = str(runs_dir_of(start.spec) / f"{start.spec.name}-DATE-TIME-ID")
    for node in range(start.nodes):
        print(shlex.join(start.node_torchrun(directory, 0, node)))
        variables = {**network.variables, **start.variables(node)}
        say(f"# node {node}: " + " ".join(f"{name}={shlex.quote(value)}" for name, value in variables.items()))
    remark(network.remarks)
