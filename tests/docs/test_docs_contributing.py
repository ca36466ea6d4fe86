"""docs/contributing.md names files and functions that exist, and the package is built as it says."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from documented import PROJECT

PACKAGE = PROJECT / "cluster_ddp"
PAGE = (PROJECT / "docs/contributing.md").read_text()
FOLDERS = sorted(str(path.parent.relative_to(PACKAGE)) for path in PACKAGE.glob("*/**/__init__.py"))
ROOMS = re.findall(r"^\| `(\w+)/` \|", PAGE, re.MULTILINE)


def test_every_folder_is_in_the_map() -> None:
    assert sorted(ROOMS) == sorted(path.parent.name for path in PACKAGE.glob("*/__init__.py"))


@pytest.mark.parametrize("folder", FOLDERS)
def test_the_map_of_a_folder_has_each_of_its_files(folder: str) -> None:
    mapped = ast.get_docstring(ast.parse((PACKAGE / folder / "__init__.py").read_text())) or ""
    files = {path.stem for path in (PACKAGE / folder).glob("[!_]*.py")}
    assert not files - set(re.findall(r"\w+", mapped)), f"missing in the map of {folder}/__init__.py"


def test_every_file_and_every_name_is_there() -> None:
    for line in PAGE.splitlines():
        words = re.findall(r"`([^`]+)`", line)
        files = [PACKAGE / word for word in words if re.search(r"/\w+\.(py|sbatch)$", word)]
        assert all(file.is_file() for file in files), line
        text = "".join(file.read_text() for file in files)
        for name in (word for word in words if files and re.fullmatch(r"[A-Za-z]\w*(\.\w+)?", word)):
            assert all(re.search(rf"\b{part}\b", text) for part in name.split(".")), (line, name)


def test_a_folder_imports_only_those_before_it() -> None:
    for room in ROOMS[:-1]:  # tasks are written as users write theirs
        for file in (PACKAGE / room).rglob("*.py"):
            later = {other for other in _imported(file) if other in ROOMS[ROOMS.index(room) + 1 :]}
            assert not later, f"{file.relative_to(PROJECT)} imports {', '.join(sorted(later))}"


def _imported(file: Path) -> set[str]:
    modules = [node.module or "" for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.ImportFrom)]
    return {module.split(".")[1] for module in modules if module.startswith("cluster_ddp.")}
