"""The job templates that ship with the package."""

from __future__ import annotations

from pathlib import Path

import cluster_ddp
from cluster_ddp.job.errors import JobFileError
from cluster_ddp.job.nearest import nearest

SUFFIXES = (".yaml", ".yml")


def template_names() -> list[str]:
    """Return the names of the templates, sorted."""
    return sorted(file.stem for file in _folder().glob("*.yaml"))


def template_file(name: str) -> Path:
    """Return the file of a template; the error for an unknown name lists the nearest one and all others."""
    names = template_names()
    if name not in names:
        hint = nearest(name, names)
        raise JobFileError(
            f'there is no template "{name}"'
            + (f"\n    did you mean: {hint}" if hint else "")
            + f"\n    allowed: {', '.join(names)}, or the path of a job file (with a / or ending in .yaml)"
        )
    return _folder() / f"{name}.yaml"


def is_path(text: str) -> bool:
    """Whether a job is given as a path rather than a template's name."""
    return "/" in text or text.endswith(SUFFIXES)


def _folder() -> Path:
    package = Path(cluster_ddp.__file__).parent
    shipped = package / "job_templates"  # in an installed package; in a source checkout they are next to it
    return shipped if shipped.is_dir() else package.parent / "job_templates"
