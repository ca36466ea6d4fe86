"""Refuses what the models accept but a person may not write: secrets, and what sbatch refuses or misreads.

These checks are not in the models, so that a run that was submitted before a check existed continues with its job.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from cluster_ddp.job.document import Node, fault, plain, without_value
from cluster_ddp.job.errors import JobFileError
from cluster_ddp.job.models import JobSpec
from cluster_ddp.job.options import meant_by
from cluster_ddp.job.report import find
from cluster_ddp.job.secrets import secrets_in

_ADVICE = (
    "no secrets in a job file: export it in the shell you submit from (Slurm passes the environment on), let a line "
    "of launch.setup read it from a file of mode 600, or keep it in ~/.netrc. If this is not a secret: not_secret: "
    "[{key}]"
)
_DIRECTIVE = "is a directive that sbatch may obey"
_NO_DIRECTIVE = "a line of bash; sbatch options belong in the section slurm, or in slurm.extra"


class _Refusal(NamedTuple):
    path: tuple[str, ...]
    what: str
    allowed: str


def refuse(spec: JobSpec, root: Node, *, before: Node | None = None) -> None:
    """Refuse what a person may not write.

    Parameters
    ----------
    root
        The job with the places of its values.
    before
        The job of the run from which `root` was made: what it already contains is not refused.

    Raises
    ------
    JobFileError
        Names everything that is refused. Values are not repeated: they may be secrets.
    """
    errors = []
    for path, what, allowed in _refusals(spec):
        node = find(root, path)
        if before is None or plain(find(before, path)) != plain(node):
            errors.append(fault(without_value(node.place), f"{'.'.join(path)}: {what}", allowed))
    if errors:
        count = [f"{len(errors)} errors:"] if len(errors) > 1 else []
        raise JobFileError("\n".join([*count, *map(str, errors)]))


def _refusals(spec: JobSpec) -> Iterator[_Refusal]:
    for path, what in secrets_in(spec):
        yield _Refusal(path, what, _ADVICE.format(key=".".join(path)))
    if "." in (spec.slurm.mem or ""):
        yield _Refusal(
            ("slurm", "mem"), "a fraction, which sbatch does not accept", 'a whole number, such as "1536M" for 1.5G'
        )
    for name in spec.slurm.extra:
        if meant := meant_by(name):
            yield _Refusal(("slurm", "extra", name), f"is short for {meant} to sbatch", "the whole name of an option")
    for number, line in enumerate(spec.launch.setup):
        if re.search(r"^\s*#(SBATCH|SLURM|PBS|BSUB)", line, re.MULTILINE):
            yield _Refusal(("launch", "setup", str(number)), _DIRECTIVE, _NO_DIRECTIVE)
