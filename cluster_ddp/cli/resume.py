"""``cluster-ddp resume``: go on with a run, in the same run directory."""

from __future__ import annotations

from typing import Annotated

import typer

from cluster_ddp.cli.answer import answer, remark, tell
from cluster_ddp.cli.described import describe_runs
from cluster_ddp.run.directory import find_run, runs_dir_of
from cluster_ddp.run.history import read_history
from cluster_ddp.run.record import read_record
from cluster_ddp.spec import load_resolved, unknown_keys
from cluster_ddp.submit import resume


def command(
    run: Annotated[str, typer.Argument(metavar="RUN", help="Run directory, run id, or unique prefix of one.")],
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="A.B=C", help="Change a setting from here on. Repeatable.")
    ] = None,
    nodes: Annotated[int | None, typer.Option(min=1, metavar="N", help="Nodes. Default: the last attempt's.")] = None,
    procs: Annotated[
        int | None, typer.Option(min=1, metavar="P", help="Ranks per node. Default: the last attempt's.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="End with one line of JSON on standard output.")] = False,
) -> None:
    """Go on with a run from its last checkpoint: in the queue, or here if it is a local one."""
    found = find_run(run, runs_dir_of(None))
    seen = read_history(found)  # before it is judged: what happens from here on was not seen, and is not forgiven
    (status,) = describe_runs([found])
    resume.refuse_alive(found, status)
    local = read_record(found).via == "local"
    size = [] if local else _size(nodes, procs)
    before = load_resolved(found.job_file)
    remark(unknown_keys(found.job_file))
    spec, remarks, changed = resume.changed_job(found, [*(settings or ()), *size])
    if resume.nothing_to_do(found, status, before, spec):
        tell(f"run {found.id} is complete; to train on, give it more: --set train.epochs=... (or train.steps)")
        if as_json:
            answer(found, status.slurm_job_id, status.state.value)
        return
    remark(remarks)
    if local:
        exit_status = resume.resume_here(seen, spec, nodes, procs, changed=changed, quiet=as_json)
        if as_json:
            (status,) = describe_runs([found])
            answer(found, None, status.state.value)
        raise typer.Exit(exit_status)
    job_id = resume.send_again(seen, spec, changed=changed)
    from cluster_ddp.cli.submit import report_submitted

    report_submitted(found.id, str(found.path), job_id)
    if as_json:
        answer(found, job_id, "PENDING")


def _size(nodes: int | None, procs: int | None) -> list[str]:
    settings = {"slurm.nodes": nodes, "launch.procs_per_node": procs}
    return [f"{key}={value}" for key, value in settings.items() if value is not None]
