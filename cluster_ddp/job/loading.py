"""From a job file to a `JobSpec`, and from a `JobSpec` to the copy in the run directory and back."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from pydantic import BaseModel, ValidationError

from cluster_ddp.job.batch import plan_batch
from cluster_ddp.job.document import Node, Place, dump, fault, is_file, mapping, plain, read_document, without_value
from cluster_ddp.job.elements import which_elements
from cluster_ddp.job.errors import BatchError, JobFileError
from cluster_ddp.job.merge import absolute, apply_overrides, drop_nulls, read_extended
from cluster_ddp.job.models import JobSpec, SlurmSpec
from cluster_ddp.job.refusals import refuse
from cluster_ddp.job.report import find, job_file_error
from cluster_ddp.job.sections import as_written, known_part
from cluster_ddp.job.site import over_site
from cluster_ddp.job.target import TargetProblem, check_script, check_task, spawned_at
from cluster_ddp.job.templates import is_path, template_file
from cluster_ddp.job.units import format_slurm_time

_PATHS = (("runs_dir",), ("task",), ("script",), ("launch", "python"), ("launch", "container", "image"))
_FEW_MEGABYTES = 1024  # too little for a node that trains: such a number is meant in gigabytes
_IMAGE_FILES = (".sif", ".sqsh", ".simg", ".img")


class Origin(NamedTuple):
    """Where the value of a key was written."""

    key: str
    value: str
    place: Place


@dataclass(frozen=True)
class LoadedJob:
    """A valid job, and the warnings about it."""

    spec: JobSpec
    warnings: tuple[str, ...]
    origins: tuple[Origin, ...]  # of every value that is not a default, in the order of the keys


@dataclass(frozen=True)
class RunJob:
    """A run's job with settings laid over it."""

    # before, spec: the job of the run, without and with the settings
    before: JobSpec
    spec: JobSpec
    remarks: tuple[str, ...]  # one for each key that this version does not know and ignores


def load_job(source: str, overrides: Sequence[str] = (), *, check_target: bool = True) -> LoadedJob:
    """Load and check a job, over the defaults of the site.

    Parameters
    ----------
    source: path of a job file, or name of a template.
    overrides: ``a.b=c`` settings laid over it; the values are YAML 1.2 scalars, or lists and mappings in flow form.
        Relative paths in them are relative to the current folder, those in a file to that file.
    check_target: check whether the task or script exists. No user code is imported.

    Raises
    ------
    JobFileError
        With one message for everything that is wrong, each with its file and line.
    """
    file = _find_file(source)
    spec, root = _with_overrides(over_site(read_extended((file,))), overrides, file)
    refuse(spec, root)
    warnings = _warnings(spec, root, check_target=check_target)
    return LoadedJob(spec, warnings, tuple(_origins(root)))


@dataclass(frozen=True)
class Variants:
    """A job in several variants, each valid."""

    job: dict[str, Any]  # without what differs; written to a file, it is what `load_variant` reads
    first: LoadedJob
    specs: tuple[JobSpec, ...]  # of all variants


def load_variants(
    source: str,
    overrides: Sequence[str],
    variants: Sequence[Sequence[str]],
    *,
    check_target: bool = True,
    at_first: Callable[[JobSpec], None] | None = None,
) -> Variants:
    """Check every variant of a job as `load_job` would with the variant's settings as overrides.

    Parameters
    ----------
    at_first
        Called with the first valid one, before the others are checked.

    Raises
    ------
    JobFileError
        Names the variants that are wrong by their numbers from 0, and what is wrong with each.
    """
    file = _find_file(source)
    root = _prepared(apply_overrides(over_site(read_extended((file,))), overrides), file)
    found = _checked(root, variants, file, at_first)
    warnings = _warnings(found.first.spec, root, check_target=check_target)
    return replace(found, first=replace(found.first, warnings=warnings))


def load_stored_variants(file: Path, variants: Sequence[Sequence[str]]) -> Variants:
    """Check variants once more whose common job `load_variants` returned and somebody has written to a file.

    The site's defaults are already in the file.
    """
    return _checked(read_document(file), variants, file)


def _checked(
    root: Node,
    variants: Sequence[Sequence[str]],
    file: Path,
    at_first: Callable[[JobSpec], None] | None = None,
) -> Variants:
    specs, errors = [], dict[str, list[int]]()
    for number, settings in enumerate(variants):
        try:
            spec, changed = _with_overrides(root, settings, file)
            refuse(spec, changed)
            specs.append((spec, changed))
            if at_first is not None and len(specs) == 1:
                at_first(spec)
        except JobFileError as error:
            errors.setdefault(str(error), []).append(number)
    if errors:
        raise JobFileError("\n".join(f"{which_elements(numbers)}: {message}" for message, numbers in errors.items()))
    first, changed = specs[0]
    return Variants(plain(root), LoadedJob(first, (), tuple(_origins(changed))), tuple(spec for spec, _ in specs))


def load_variant(file: Path, settings: Sequence[str]) -> JobSpec:
    """Load a variant of a job that `load_variants` has checked; the site's defaults are already in the file."""
    return _with_overrides(read_document(file), settings, file)[0]


def load_run_job(path: Path, overrides: Sequence[str] = ()) -> RunJob:
    """Load the resolved job of a run directory and lay settings over it; the file is read once.

    Without settings nothing is merged, looked up or made absolute. What the run was submitted with is accepted as it
    is, even where a job file would be refused for it today.

    Raises
    ------
    JobFileError
        The file cannot be read, is not a valid job, or has an unknown setting that affects what is trained; for the
        settings as for `load_job`.
    """
    root, remarks = known_part(read_document(path))
    before = _validate(root)
    spec = before
    if overrides:
        spec, changed = _with_overrides(root, overrides, path)
        refuse(spec, changed, before=root)
    return RunJob(before, spec, remarks)


def load_resolved(path: Path) -> JobSpec:
    """Load the resolved job of a run directory with `load_run_job`, without keys that this version does not know."""
    return load_run_job(path).spec


def dump_resolved(spec: JobSpec) -> str:
    """Return the YAML that `load_resolved` reads back as an equal `JobSpec`; defaults are written out."""
    return dump(_plain(spec))


def _plain(value: Any) -> Any:
    if isinstance(value, BaseModel):
        settings = ((name, getattr(value, name)) for name in type(value).model_fields)
        entries = {name: _plain(setting) for name, setting in settings if setting is not None}
        if isinstance(value, SlurmSpec) and value.time is not None:
            entries["time"] = format_slurm_time(value.time)  # a bare number would be minutes
        return entries
    if isinstance(value, tuple):
        return list(value)
    return value


def _with_overrides(root: Node, overrides: Sequence[str], file: Path) -> tuple[JobSpec, Node]:
    root = _prepared(apply_overrides(root, overrides), file)
    spec = _validate(root)
    _check_batch(spec, root)
    return spec, root


def _origins(node: Node, path: tuple[str, ...] = ()) -> Iterator[Origin]:
    """Yield where each value was written; a value that is in a list or empty belongs to its key."""
    if isinstance(node.value, dict) and node.value:
        for key, below in node.value.items():
            yield from _origins(below, (*path, key))
    else:
        yield Origin(".".join(path), str(plain(node)), without_value(node.place))


def _prepared(root: Node, file: Path) -> Node:
    """Return the job in the form that is validated: named, without null values, strings and paths resolved."""
    return _with_name(as_written(_with_absolute_paths(drop_nulls(root))), file)


def _find_file(source: str) -> Path:
    if is_path(source) or is_file(Path(source)):
        return Path(os.path.expanduser(source))
    return template_file(source)


def _with_name(root: Node, file: Path) -> Node:
    """Name a job that has no name after its file."""
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", file.stem).strip("-._")[:64]
    if "name" in mapping(root) or not name:
        return root
    return replace(root, value={"name": Node(name, Place(file, 0)), **mapping(root)})


def _with_absolute_paths(root: Node, path: tuple[str, ...] = ()) -> Node:
    if isinstance(root.value, dict):
        return replace(root, value={key: _with_absolute_paths(node, (*path, key)) for key, node in root.value.items()})
    if path not in _PATHS or not isinstance(root.value, str):
        return root
    return replace(root, value=_located(path[-1], root.value, root.place))


def _located(key: str, text: str, place: Place) -> str:
    """Return the value of a key that may contain a path, with the path made absolute."""
    if key == "task":
        file, colon, name = text.rpartition(":")
        return f"{absolute(file, place)}:{name}" if colon and file.endswith(".py") else text
    if key == "python" and "/" not in text and not text.startswith("~"):
        return text  # a command, looked up on the node
    if key == "image" and ("://" in text or not (text.startswith((".", "~")) or text.endswith(_IMAGE_FILES))):
        return text  # an image in a registry
    return absolute(text, place) if text.strip() else text


def _validate(root: Node) -> JobSpec:
    with _without_plugins():
        try:
            return JobSpec.model_validate(plain(root))
        except ValidationError as error:
            raise job_file_error(error, root) from error


@contextmanager
def _without_plugins() -> Iterator[None]:
    """Keep pydantic from looking for plugins while it builds the models.

    To find them it reads the metadata of every installed package: 15 ms at best, seconds on a slow shared file system.
    Its own switch, an environment variable, avoids that but still imports the modules involved, which takes a tenth of
    the start-up time. With a pydantic that has no such module this has no effect.
    """
    loader = "pydantic.plugin._loader"
    if JobSpec.__pydantic_complete__ or loader in sys.modules:
        yield
        return
    stand_in = ModuleType(loader)
    vars(stand_in)["get_plugins"] = tuple
    sys.modules[loader] = stand_in
    try:
        yield
    finally:
        del sys.modules[loader]


def _check_batch(spec: JobSpec, root: Node) -> None:
    if spec.task is None:
        return
    try:
        plan_batch(spec.train, spec.world_size)
    except BatchError as error:
        place = find(root, ("train", "global_batch")).place
        raise fault(place, f"train.global_batch: {error}") from error


def _warnings(spec: JobSpec, root: Node, *, check_target: bool) -> tuple[str, ...]:
    memory = spec.slurm.mem or ""
    doubtful = memory.isdigit() and 0 < int(memory) < _FEW_MEGABYTES
    where = f"{without_value(find(root, ('slurm', 'mem')).place)}: slurm.mem: {memory}"
    units = (f"{where} is {memory} MB on each node, as for sbatch; for gigabytes: {memory}G",) if doubtful else ()
    return (*units, *(_check_target(spec, root) if check_target else ()))


def _check_target(spec: JobSpec, root: Node) -> tuple[str, ...]:
    """Return warnings; raise if the target is missing and would be missing where it runs, too."""
    key = "task" if spec.task is not None else "script"
    try:
        if spec.task is not None:
            check_task(spec.task)
        elif spec.script is not None:
            check_script(spec.script)
    except TargetProblem as problem:
        place = find(root, (key,)).place
        elsewhere = _runs_elsewhere(spec, problem)
        if elsewhere is None:
            raise fault(place, f"{key}: {problem}") from problem
        return (f"{place}: {key}: {problem} (only a warning: {elsewhere} may see it)",)
    if spec.script is not None and (line := spawned_at(spec.script)) is not None:
        return (
            f"{find(root, (key,)).place}: script: {spec.script}:{line} starts ranks itself, but torchrun does that "
            "here, and the ranks would wait for each other forever: call the function once instead of mp.spawn(), "
            "with the rank of os.environ['RANK'], and init_process_group() without rank, world_size and MASTER_PORT",
        )
    return ()


def _runs_elsewhere(spec: JobSpec, problem: TargetProblem) -> str | None:
    if spec.launch.container is not None:
        return "the container of launch.container"
    if spec.launch.python is not None and not problem.in_file:
        return "the interpreter of launch.python"
    return None
