"""``cluster-ddp local``: the same job on this machine, without Slurm."""

from __future__ import annotations

import shlex
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from cluster_ddp.cli.options import GpusHere, Job, JsonLine, ProcsHere, Settings, SimulatedNodes
from cluster_ddp.cli.output import inform, print_json_line, remark, show
from cluster_ddp.cli.run_states import report_ended

if TYPE_CHECKING:
    from cluster_ddp.submit import local


def command(
    job: Job,
    nodes: SimulatedNodes = None,
    procs: ProcsHere = None,
    gpus: GpusHere = None,
    settings: Settings = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the torchrun commands; start nothing.")] = False,
    as_json: JsonLine = False,
) -> None:
    """Train on this machine, without Slurm. Ctrl-C saves a checkpoint and exits; `resume` continues."""
    from cluster_ddp.job import load_job
    from cluster_ddp.submit import local

    loaded = load_job(job, settings or ())
    remark(loaded.warnings)
    start = local.plan_local(loaded.spec, nodes=nodes, procs=procs, gpus=gpus)
    remark(start.network.remarks)
    if dry_run:
        _print_commands(start)
        return
    run, status = local.start_local(start, show=sys.stderr if as_json else sys.stdout)
    exit_status = report_ended(run, status)
    if as_json:
        print_json_line(run, None, status.state)
    raise typer.Exit(exit_status)


def _print_commands(start: local.LocalStart) -> None:
    from cluster_ddp.job import describe_training, plan_batch
    from cluster_ddp.run.runs import runs_dir_of

    if start.spec.task is not None:
        plan = plan_batch(start.spec.train, start.nodes * start.procs)
        inform(f"# {describe_training(start.spec.train, plan)}")
    directory = str(runs_dir_of(start.spec) / f"{start.spec.name}-DATE-TIME-ID")
    for node in range(start.nodes):
        show(shlex.join(start.node_torchrun(directory, 0, node)))
        variables = {**start.network.variables, **start.variables(node)}
        inform(f"# node {node}: " + " ".join(f"{name}={shlex.quote(value)}" for name, value in variables.items()))
