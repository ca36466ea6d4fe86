"""The copy of the user's code made with the run (``launch.snapshot``): ``<run>/code`` and ``<run>/code.json``.

It contains what git knows: the revision with local changes, and untracked files that are not ignored. The job keeps the
paths that the user wrote; whatever starts a program of the run asks this module where the copy is.
"""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from cluster_ddp.run.directory import RunDirectory
from cluster_ddp.run.errors import RunError
from cluster_ddp.run.reading import read_json_object
from cluster_ddp.run.storage import Storage, replace_file, write_json

MAX_BYTES = 200 << 20
_GIT_SECONDS = 60.0


class Code(NamedTuple):
    """What a snapshot will contain, determined before there is a run."""

    root: Path  # of the git repository
    files: tuple[str, ...]  # relative to the root
    revision: str
    changes: bytes  # the output of git diff


def find_code(near: Path, *, leave_out: Path) -> Code:
    """Determine what to copy of the repository that contains `near`, except what is in `leave_out`, the runs folder.

    Raises
    ------
    RunError
        There is no repository with a commit, git is missing, or there is too much to copy.
    """
    root = Path(os.fsdecode(_git(near, "rev-parse", "--show-toplevel")).rstrip("\n"))
    revision = _git(root, "rev-parse", "HEAD").decode().strip()
    files = tuple(name for name in _names(root) if leave_out not in (root / name).parents)
    size = sum(about.st_size for name in files if stat.S_ISREG((about := (root / name).lstat()).st_mode))
    if size > MAX_BYTES:
        largest = max(files, key=lambda name: (root / name).lstat().st_size)
        raise RunError(
            f"launch.snapshot: the code in {root} takes {size >> 20} MiB; at most {MAX_BYTES >> 20} MiB are kept.\n"
            f"The largest file is {largest}; list files that are not code in .gitignore"
        )
    return Code(root, files, revision, _git(root, "diff", "--binary", "HEAD")[:MAX_BYTES])


def keep_code(run: RunDirectory, code: Code) -> None:
    """Copy the code into a run.

    Raises
    ------
    OSError
        The storage refuses it.
    """
    storage = Storage()
    for name in code.files:
        target = run.code / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(code.root / name, target, follow_symlinks=False)
    replace_file(storage, run.changes_file, code.changes)
    about = {"root": str(code.root), "revision": code.revision, "files": len(code.files)}
    write_json(storage, run.code_file, about)  # last: from here on the copy is used


def kept_path(run: RunDirectory, path: str) -> str:
    """Return the path of the copy of a file or folder of the repository; the path itself if there is no copy."""
    root = _kept(run).get("root")
    real = os.path.realpath(path)
    if not isinstance(root, str) or not f"{real}/".startswith(f"{root}/"):
        return path
    copy = os.path.normpath(run.code / os.path.relpath(real, root))
    return copy if os.path.exists(copy) else path  # noqa: PTH110 - raises for some entries of sys.path


def kept_task(run: RunDirectory, task: str) -> str:
    """Return the task with its file in the copy; a task named by its module is found by `kept_search_path`."""
    file, colon, name = task.rpartition(":")
    return f"{kept_path(run, file)}:{name}" if colon and file.endswith(".py") else task


def kept_search_path(run: RunDirectory, places: Iterable[str]) -> list[str]:
    """Return the module search path, with places inside the repository replaced by those in the copy."""
    return [kept_path(run, place) if place else place for place in places]


def _kept(run: RunDirectory) -> dict[str, object]:
    usable = run.code.is_dir() and not run.code.is_symlink()
    return (read_json_object(run.code_file) or {}) if usable else {}


def _names(root: Path, below: str = "") -> Iterator[str]:
    """List the files that git tracks or would add, including those of submodules that are checked out."""
    listed = _git(root / below, "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--deduplicate")
    for raw in filter(None, listed.split(b"\0")):
        name = os.path.join(below, os.fsdecode(raw))  # noqa: PTH118 - names, as git has them
        path = root / name
        if path.is_dir() and not path.is_symlink():
            if (path / ".git").exists():
                yield from _names(root, name)
        elif os.path.lexists(path):
            yield name


def _git(folder: Path, *arguments: str) -> bytes:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments], stdin=subprocess.DEVNULL, capture_output=True, timeout=_GIT_SECONDS
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise RunError(f"launch.snapshot: cannot run git in {folder}: {error}") from error
    if done.returncode != 0:
        said = done.stderr.decode(errors="replace").strip()
        raise RunError(
            f"launch.snapshot: {folder}: {said}\n"
            "The code must be in a git repository with a commit. Otherwise, omit launch.snapshot"
        )
    return done.stdout
