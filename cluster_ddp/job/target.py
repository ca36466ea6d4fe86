"""Checks whether the task or script of a job exists, without importing or running user code."""

from __future__ import annotations

import ast
import os
import sys
from collections.abc import Iterator
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

from cluster_ddp.job.document import is_file, why_no_file
from cluster_ddp.job.nearest import nearest

_SPAWNS = ("mp.spawn", "multiprocessing.spawn", "torch.multiprocessing.spawn")


class TargetProblem(Exception):
    """The target does not exist, as far as can be determined from here.

    `in_file` says that a file is missing, rather than a module of this Python: no interpreter would find it.
    """

    def __init__(self, message: str, *, in_file: bool) -> None:
        super().__init__(message)
        self.in_file = in_file


def check_script(script: str) -> None:
    """Raise `TargetProblem` if the script (an absolute path) is not a readable file, or certainly part of a package."""
    file = Path(script)
    _check_file(file)
    if file.suffix != ".py":
        return
    try:
        body = ast.parse(_source(file)).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return  # Python's own message is the best
    if any(isinstance(part, ast.Assign) and "__package__" in ast.unparse(part) for part in body):
        return
    for part in body:
        if isinstance(part, ast.ImportFrom) and part.level:
            top = file.parent
            while (top.parent / "__init__.py").is_file():
                top = top.parent
            module = ".".join(file.relative_to(top.parent).with_suffix("").parts)
            raise TargetProblem(
                f"{file}:{part.lineno}: {ast.unparse(part)}: a script does not belong to a package, unlike a module "
                f"run with python -m {module}. As script:, use a file next to the folder {top.name}/ that runs it: "
                f'import runpy; runpy.run_module("{module}", run_name="__main__")',
                in_file=True,
            )


def spawned_at(script: str) -> int | None:
    """Return the line in which a script is certain to start its own ranks by `torch.multiprocessing.spawn`, if any.

    If that depends on an argument, as in the ImageNet example, it cannot be known.
    """
    file = Path(script)
    try:
        tree = ast.parse(_source(file) if file.suffix == ".py" else "")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    if "init_process_group" not in ast.dump(tree):
        return None
    calls = (node for node in _unconditional(tree) if isinstance(node, ast.Call))
    return next((call.lineno for call in calls if ast.unparse(call.func) in _SPAWNS), None)


def _unconditional(node: ast.AST) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        yield child
        if not isinstance(child, ast.If) or "__name__" in ast.unparse(child.test):
            yield from _unconditional(child)


def check_task(task: str) -> None:
    """Raise `TargetProblem` if ``package.module:Class`` or ``/path/to/file.py:Class`` cannot be found.

    A module is looked up as ``python -m`` would from this folder: here, then on `sys.path`.
    """
    where, _, name = task.rpartition(":")
    if where.endswith(".py"):
        file = Path(where)
        _check_file(file)
        _check_class(_source(file), name, where, in_file=True)
        return
    spec = _find_module(where)
    if spec.origin is None:
        raise TargetProblem(f"{where} is a folder without __init__.py, not a module", in_file=False)
    if spec.origin.endswith(".py"):  # the names in a compiled module cannot be seen without importing it
        _check_class(_source(Path(spec.origin)), name, spec.origin, in_file=False)


def _check_file(file: Path) -> None:
    if not is_file(file):
        raise TargetProblem(f"{file}: {why_no_file(file)}", in_file=True)
    if not os.access(file, os.R_OK):
        raise TargetProblem(f"{file}: may not be read", in_file=True)


def _find_module(name: str) -> ModuleSpec:
    top, *below = name.split(".")
    spec = PathFinder.find_spec(top, [str(Path.cwd()), *sys.path]) or _from_other_finders(top)
    if spec is None:
        raise TargetProblem(f"no module {top} in this folder or on Python's path ({sys.executable})", in_file=False)
    found = top
    for part in below:
        # Looked up by its last name only: for a dotted one, a finder would require the parent packages to be imported.
        inside = PathFinder.find_spec(part, list(spec.submodule_search_locations or ()))
        if inside is None:
            raise TargetProblem(f"no module {part} in {found} ({spec.origin or 'a folder'})", in_file=False)
        spec, found = inside, f"{found}.{part}"
    return spec


def _from_other_finders(name: str) -> ModuleSpec | None:
    """Query the finders of editable installs, and those of built-in modules."""
    finders = [finder for finder in sys.meta_path if finder is not PathFinder and hasattr(finder, "find_spec")]
    return next((spec for finder in finders if (spec := finder.find_spec(name, None)) is not None), None)


def _source(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise TargetProblem(f"{file}: {error.strerror}", in_file=True) from error


def _check_class(source: bytes, name: str, where: str, *, in_file: bool) -> None:
    try:
        tree = ast.parse(source)
    except SyntaxError as error:
        raise TargetProblem(f"{where}:{error.lineno}: not Python: {error.msg}", in_file=in_file) from error
    except (ValueError, RecursionError, MemoryError) as error:
        raise TargetProblem(f"{where}: not Python: {error}", in_file=in_file) from error
    classes, other = _names(tree)
    if name in classes or not other.isdisjoint((name, "*", "__getattr__")):
        return
    hint = nearest(name, classes)
    found = f"\n    classes there: {', '.join(sorted(classes)[:20])}" if classes else ""
    message = f"no class {name} in {where}" + (f"\n    did you mean: {hint}" if hint else "") + found
    raise TargetProblem(message, in_file=in_file)


def _names(module: ast.Module) -> tuple[set[str], set[str]]:
    """Return the classes that a module defines, and other names in it that may be classes once it is imported."""
    classes: set[str] = set()
    other: set[str] = set()
    for node in _statements(module):
        if isinstance(node, ast.ClassDef):
            classes.add(node.name)
        elif isinstance(node, ast.FunctionDef) and node.name == "__getattr__":
            other.add(node.name)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            other |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            other |= {name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)}
    return classes, other


def _statements(node: ast.AST) -> Iterator[ast.stmt]:
    """Yield the statements that run when a module is imported: also those in `if` and `try`, not those in functions."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.stmt):
            yield child
        if not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.expr)):
            yield from _statements(child)
