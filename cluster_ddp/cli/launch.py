"""``cluster-ddp launch``: one node of a run on several machines without Slurm."""

from __future__ import annotations

import shlex
import sys
from typing import Annotated

import typer

from cluster_ddp.cli.options import Job, JsonLine, Settings
from cluster_ddp.cli.output import inform, print_json_line, remark, show
from cluster_ddp.cli.run_states import report_ended
from cluster_ddp.run.errors import RunEnded
from cluster_ddp.run.run_state import RunState


def command(
    job: Job,
    run: Annotated[str, typer.Option("--run", metavar="NAME", help="The run's folder in runs_dir, or its path.")],
    nodes: Annotated[int, typer.Option("--nnodes", min=1, metavar="N", help="How many machines take part.")],
    master: Annotated[
        str, typer.Option("--master-addr", metavar="HOST", help="The address at which the others reach node 0.")
    ],
    node: Annotated[
        int | None, typer.Option("--node-rank", min=0, metavar="R", help="The number of this machine, from 0.")
    ] = None,
    port: Annotated[
        int | None,
        typer.Option("--master-port", min=1024, max=65535, metavar="P", help="Default: a free port on node 0."),
    ] = None,
    procs: Annotated[
        int | None, typer.Option(min=1, metavar="P", help="Ranks per node. Default: the job file's, or one per GPU.")
    ] = None,
    settings: Settings = None,
    print_all: Annotated[bool, typer.Option("--print", help="Print the command of every node; start nothing.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the torchrun command; start nothing.")] = False,
    as_json: JsonLine = False,
) -> None:
    """Train on several machines without Slurm; run this on each of them. To continue the run, repeat the commands."""
    from cluster_ddp.job import load_job
    from cluster_ddp.submit import manual
    from cluster_ddp.submit.base import SubmitError

    loaded = load_job(job, settings or ())
    if node is None and not print_all:
        raise SubmitError(
            f"--node-rank is missing: which of the {nodes} nodes is this? Node 0 is the one at --master-addr"
        )
    start = manual.plan_manual(loaded.spec, run, nodes=nodes, node=node or 0, master=master, port=port, procs=procs)
    if print_all:
        *commands, with_pdsh = manual.all_commands(start, job, tuple(settings or ()), port=port)
        show(*commands)
        inform(f"# or: pdsh -w HOSTS {shlex.quote(with_pdsh)}")
        return
    remark(loaded.warnings)
    remark(start.network.remarks)
    if dry_run:
        show(shlex.join(start.node_torchrun()))
        return
    try:
        status = manual.start_manual(start, show=sys.stderr if as_json else sys.stdout)
    except RunEnded as error:
        if error.state is not RunState.COMPLETED:
            raise
        inform(str(error))
        state, exit_status = RunState.COMPLETED, 0
    else:
        state, exit_status = status.state, report_ended(start.run, status)
    if as_json:
        print_json_line(start.run, None, state)
    raise typer.Exit(exit_status)
