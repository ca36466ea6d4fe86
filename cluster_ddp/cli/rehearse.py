"""``cluster-ddp rehearse``: does this program resume exactly?"""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from cluster_ddp.cli.options import GpusHere, Job, JsonLine, ProcsHere, Settings, SimulatedNodes
from cluster_ddp.cli.output import inform, remark, show
from cluster_ddp.exit_statuses import RUN_FAILED
from cluster_ddp.words import listed

if TYPE_CHECKING:
    from pathlib import Path

    from cluster_ddp.submit.rehearsal import Finding

_NAMES_SHOWN = 8


def command(
    job: Job,
    steps: Annotated[int, typer.Option(min=2, metavar="N", help="Steps to train.")] = 20,
    stop_after: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Steps before the stop. Default: half of them.")
    ] = None,
    nodes: SimulatedNodes = None,
    procs: ProcsHere = None,
    gpus: GpusHere = None,
    settings: Settings = None,
    as_json: JsonLine = False,
) -> None:
    """Train a few steps here, do it again with a stop and a resume in between, and compare the results bit by bit."""
    from cluster_ddp.errors import ClusterDDPError
    from cluster_ddp.job import load_job
    from cluster_ddp.submit.local import plan_local
    from cluster_ddp.submit.rehearsal import Rehearsal

    middle = steps // 2 if stop_after is None else stop_after
    if middle >= steps:
        raise ClusterDDPError(f"--stop-after {middle} must be less than --steps {steps}")
    loaded = load_job(job, settings or ())
    remark(loaded.warnings)
    start = plan_local(loaded.spec, nodes=nodes, procs=procs, gpus=gpus)
    remark(start.network.remarks)
    rehearsal = Rehearsal(
        start,
        steps=steps,
        stop_after=middle,
        show=sys.stderr if as_json else sys.stdout,
        announce=lambda part: inform(f"\n--- {part}"),
    )
    finding = rehearsal.run()
    inform("", *_in_words(finding, middle, rehearsal.folder))
    if as_json:
        fields = {
            "exact": finding.is_exact,
            "step": finding.step,
            "different": list(finding.different),
            "repeats": finding.repeats,
            "directory": None if finding.is_exact else str(rehearsal.folder),
        }
        show(json.dumps(fields))
    raise typer.Exit(0 if finding.is_exact else RUN_FAILED)


def _in_words(finding: Finding, stop_after: int, folder: Path) -> list[str]:
    compared = finding.compared
    if finding.is_exact:
        return [
            f"EXACT  stopped after step {stop_after} and resumed, the run has the same bits after step {finding.step} "
            f"as one without a stop: {compared.tensors} tensors, {compared.values} other values"
        ]
    if not finding.repeats:
        cause = (
            "the program: two runs without a stop differ. Seed its random numbers; on GPUs, set "
            "train.deterministic: true"
        )
    else:
        cause = (
            "the resume: two runs without a stop agree. Something that steps depend on is not restored; the warnings "
            "above may name it, and docs/exactness.md says what a resume restores"
        )
    different = finding.different
    lines = [
        f"NOT EXACT  stopped after step {stop_after} and resumed, the run differs after step {finding.step}",
        f"  cause      {cause}",
        f"  different  {len(different)} of {compared.tensors + compared.values}: {listed(different, _NAMES_SHOWN)}",
    ]
    if (first := finding.first) is not None:
        lines.append(f"  first      {first.name} of step {first.step}: {first.resumed} instead of {first.straight}")
    return [*lines, f"  runs       {folder}"]
