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
    """Return the file of a template; the error names the nearest, and all, when there is none of this name."""
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
    """Say whether a job is named by its path rather than by a template's name."""
    return "/" in text or text.endswith(SUFFIXES)


def _folder() -> Path:
    package = Path(cluster_ddp.__file__).parent
    shipped = package / "job_templates"  # in an installed package; a source checkout has them beside it
    return shipped if shipped.is_dir() else package.parent / "job_templates"
