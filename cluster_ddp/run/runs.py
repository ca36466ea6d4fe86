"""Creating a run's folder with its job and its batch script, and finding runs by path, id or prefix."""

from __future__ import annotations

import contextlib
import os
import re
import stat
import time
from pathlib import Path
from typing import TYPE_CHECKING

from cluster_ddp.job.site_file import RUNS_VARIABLE, site_file
from cluster_ddp.printing import say_if_storage_is_slow
from cluster_ddp.process import limit_umask
from cluster_ddp.run.directory import SETUP_GUARD, START_FAILED, SWEEP_RECORD, RunDirectory
from cluster_ddp.run.errors import RunError, RunNotFound

if TYPE_CHECKING:
    from cluster_ddp.job import JobSpec
    from cluster_ddp.run.code import Code
    from cluster_ddp.run.storage import Storage

_SOURCES = {START_FAILED: "requeue/start_failed.sh", SETUP_GUARD: "setup_guard.sh"}
_MAX_CANDIDATES_SHOWN = 10


def runs_dir_of(spec: JobSpec | None) -> Path:
    """Return the absolute runs folder: the job's `runs_dir`, else $CLUSTER_DDP_RUNS, else the site file's, else ./runs.

    A job that was loaded contains what the site file says.
    """
    chosen = (spec.runs_dir if spec is not None else None) or os.environ.get(RUNS_VARIABLE)
    if not chosen and spec is None and site_file() is not None:
        from cluster_ddp.job.site import site_runs_dir

        chosen = site_runs_dir()
    return _absolute(chosen or "runs")


def name_for_commands(run: RunDirectory) -> str:
    """Return how commands find a run: by its id, or outside of the runs folder by its directory."""
    return run.id if run.path.parent == runs_dir_of(None) else str(run.path)


def create_run(
    spec: JobSpec, *, runs_dir: Path, via: str, script: str | None, folder: str | None = None
) -> RunDirectory:
    """Create the folder of a new run and everything in it that is known before it starts.

    Parameters
    ----------
    folder
        Its name; by default the job's name, the time and four digits that no other run has.

    Raises
    ------
    RunError
        It cannot be created.
    """
    from cluster_ddp.run.storage import Storage

    storage = Storage()
    code = _code_of(spec, runs_dir)
    try:
        runs_dir.mkdir(parents=True, exist_ok=True)
        limit_umask()
        run = _new_folder(storage, runs_dir, spec.name) if folder is None else RunDirectory(runs_dir / folder)
        if folder is not None:
            storage.mkdir(run.path)
    except OSError as error:
        raise _cannot_make(runs_dir, error) from error
    try:
        _fill(storage, run, spec, run_id=run.id, via=via, script=script, code=code)
    except OSError as error:
        with contextlib.suppress(OSError):
            storage.rmtree(run.path)
        raise _cannot_make(runs_dir, error) from error
    return run


def keep_script(storage: Storage, script: Path, text: str, *, mode: int) -> None:
    """Write a batch script, and next to it what it calls: `start-failed.sh`, and `setup-guard.sh` for launch.setup."""
    from cluster_ddp.run.storage import replace_file

    for name in (START_FAILED, *([SETUP_GUARD] if SETUP_GUARD in text else [])):
        source = Path(__file__).parent / _SOURCES[name]
        replace_file(storage, script.with_name(name), source.read_bytes(), mode=mode & 0o660)
    replace_file(storage, script, text.encode(), mode=mode)


def share_with_group(folder: Path) -> None:
    """Let the group of a folder change its contents, now and later."""
    folder.chmod(stat.S_IMODE(folder.stat().st_mode) | stat.S_IRWXG | stat.S_ISGID)


def make_or_join(spec: JobSpec, path: Path, *, via: str) -> tuple[RunDirectory, bool]:
    """Return the run in exactly that folder, and whether it was made here: one of several machines makes it.

    Raises
    ------
    RunError
        The folder cannot be made, or contains something else.
    """
    from cluster_ddp.run.storage import Storage

    storage, run = Storage(), RunDirectory(path)
    if not os.path.lexists(path):
        code = _code_of(spec, path.parent)
        draft = RunDirectory(path.with_name(f".{path.name}-{os.urandom(6).hex()}"))
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            limit_umask()
            storage.mkdir(draft.path)
            _fill(storage, draft, spec, run_id=run.id, via=via, script=None, code=code)
            storage.rename(draft.path, path)  # fails if a different machine was first, as the folder is then not empty
            storage.fsync_dir(path.parent)
        except OSError as error:
            with contextlib.suppress(OSError):
                storage.rmtree(draft.path)
            if not run.exists():
                raise _cannot_make(path.parent, error) from error
        else:
            return run, True
    if path.is_symlink() or not run.exists():
        raise RunError(f"{path} exists and is not a run; choose another name, or move it elsewhere")
    return run, False


def _cannot_make(runs_dir: Path, error: OSError) -> RunError:
    from cluster_ddp.run.storage import FULL_ERRORS

    what = "Set runs_dir in the job file, or CLUSTER_DDP_RUNS, to a folder on storage that all nodes share"
    if error.errno in FULL_ERRORS:
        what = "Free some space there"
    return RunError(f"runs cannot be written to {runs_dir}: {error.strerror or error}. {what}.")


def _code_of(spec: JobSpec, runs_dir: Path) -> Code | None:
    """Return the user's code that a run is to copy; None if it uses the code as it is at each start."""
    if not spec.launch.snapshot:
        return None
    from cluster_ddp.run.code import find_code
    from cluster_ddp.run.record import code_folder

    return find_code(code_folder(spec), leave_out=runs_dir.resolve())


def _fill(
    storage: Storage,
    run: RunDirectory,
    spec: JobSpec,
    *,
    run_id: str,
    via: str,
    script: str | None,
    code: Code | None,
) -> None:
    from cluster_ddp.job import dump_resolved  # loads pydantic, which most users of this module do not need
    from cluster_ddp.run.record import new_record, write_record
    from cluster_ddp.run.storage import replace_file

    if spec.storage.mode == "group":
        share_with_group(run.path)
    limit_umask(run.path)
    for folder in (run.events, run.attempts, run.checkpoints):
        storage.mkdir(folder)
    replace_file(storage, run.job_file, dump_resolved(spec).encode())
    if script is not None:
        keep_script(storage, run.script, script, mode=run.script_mode())
    if code is not None:
        from cluster_ddp.run.code import keep_code

        keep_code(run, code)
    write_record(storage, run, new_record(spec, run, run_id=run_id, via=via))  # last: it makes the folder a run


def _new_folder(storage: Storage, runs_dir: Path, name: str) -> RunDirectory:
    while True:
        run = RunDirectory(runs_dir / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}-{os.urandom(2).hex()}")
        try:
            storage.mkdir(run.path)
        except FileExistsError:
            continue  # made by somebody else in the same second: draw again
        return run


def list_runs(folder: Path) -> list[RunDirectory]:
    """List the runs in a folder, the oldest first; empty if the folder does not exist.

    Raises
    ------
    RunError
        The folder cannot be read.
    """
    try:
        entries = [entry for entry in folder.iterdir() if not entry.name.startswith(".") and entry.is_dir()]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise RunError(
            f"{folder} cannot be read: {error.strerror}. If your runs are elsewhere, set CLUSTER_DDP_RUNS to their "
            "folder"
        ) from error
    runs = [RunDirectory(entry) for entry in entries if RunDirectory(entry).exists()]
    return sorted(runs, key=lambda run: (_created(run), run.id))


@say_if_storage_is_slow
def find_run(name: str, runs_dir: Path) -> RunDirectory:
    """Return the run that `name` identifies: a run directory, a run id, or a unique prefix of one.

    Raises
    ------
    RunNotFound
        No run, or more than one, matches; the message lists what is there.
    RunError
        The folder of runs cannot be read.
    """
    if not name.strip():
        raise RunNotFound("no run given: give a run directory, a run id or a unique prefix of one")
    at_path = RunDirectory(_absolute(name))
    if at_path.exists():
        return at_path
    if os.sep in name:
        in_sweep = RunDirectory(runs_dir / name)  # an element, as its sweep's name and its own
        if in_sweep.exists() and not name.startswith(("~", os.pardir)):
            return in_sweep
        _refuse_sweep(at_path.path)
        for folder in (at_path.path, in_sweep.path):
            _refuse_not_begun(folder)
        raise RunNotFound(f"{name} is not a run directory (it has no run.json that you can read)")
    runs = list_runs(runs_dir)
    found = [run for run in runs if run.id == name] or [run for run in runs if run.id.startswith(name)]
    if len(found) == 1:
        return found[0]
    if found:
        raise RunNotFound(f"'{name}' matches {len(found)} runs in {runs_dir}; give more of the name:{_names(found)}")
    for other in _names_in(runs_dir):
        if other.startswith(name):
            _refuse_sweep(runs_dir / other)
    if not runs:
        raise RunNotFound(
            f"no run '{name}': there are no runs in {runs_dir}. Give the run's directory, or set CLUSTER_DDP_RUNS to "
            "the folder of your runs."
        )
    raise RunNotFound(f"no run '{name}' in {runs_dir}. The latest runs there:{_names(runs[::-1])}")


def find_run_to_change(name: str, runs_dir: Path) -> RunDirectory:
    """Return the run that `name` identifies, for a command that changes it, and set the umask to suit the run.

    Raises
    ------
    RunError
        As for `find_run`, or one of the run's folders is a link.
    """
    run = find_run(name, runs_dir)
    run.refuse_links()
    limit_umask(run.path)
    return run


def _refuse_sweep(folder: Path) -> None:
    """Raise if a folder contains a sweep, for a command that takes one run."""
    if not os.path.lexists(folder / SWEEP_RECORD):
        return
    elements = list_runs(folder)
    example = f", such as {folder}/{elements[0].id}" if elements else "; none of them has started"
    raise RunNotFound(
        f"{folder.name} is a sweep. Name one of its runs by its directory{example}\n"
        f"To list them: cluster-ddp status {folder.name}"
    )


def _refuse_not_begun(folder: Path) -> None:
    """Raise if a folder that does not exist may be an element of a sweep that has not started."""
    sweep = folder.parent
    if os.path.lexists(sweep / SWEEP_RECORD):
        raise RunNotFound(
            f"{folder.name} of sweep {sweep.name} has not started, so it has no run yet.\n"
            f"To see which Slurm job will start it: cluster-ddp status {sweep.name}; to remove it from the queue: "
            "scancel JOB"
        )


def _names_in(folder: Path) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []


def _absolute(path: str) -> Path:
    return Path(os.path.expanduser(path)).absolute()


def _created(run: RunDirectory) -> str:
    """Return the time in the run's id, as a string that sorts; empty if a person renamed the folder."""
    stamp = re.search(r"-(\d{8}-\d{6})-[0-9a-f]{4}$", run.id)
    return stamp.group(1) if stamp else ""


def _names(runs: list[RunDirectory]) -> str:
    shown = "".join(f"\n  {run.id}" for run in runs[:_MAX_CANDIDATES_SHOWN])
    more = len(runs) - _MAX_CANDIDATES_SHOWN
    return shown + (f"\n  and {more} more" if more > 0 else "")
