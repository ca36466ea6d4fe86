"""What the pages name exists, on whatever page it stands: links, settings, benchmarks."""

from __future__ import annotations

import re
from typing import Any

import pytest
from documented import PROJECT

from cluster_ddp.job import JobSpec

PAGES = ["README.md", *(f"docs/{path.name}" for path in sorted((PROJECT / "docs").glob("*.md")))]
SECTIONS = "slurm|launch|network|requeue|train|checkpoint|log"
KEYS: dict[str, dict[str, Any]] = JobSpec(name="a", script="a.py").model_dump()


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    links = re.findall(r"\]\((?!https?:)([^)#]+)", (PROJECT / page).read_text())
    missing = [link for link in links if not ((PROJECT / page).parent / link).exists()]
    assert not missing


@pytest.mark.parametrize("page", PAGES)
def test_settings_exist(page: str) -> None:
    code = " ".join(re.findall(r"`([^`\n]+)`", (PROJECT / page).read_text()))
    named = re.findall(rf"(?<![\w./])({SECTIONS})\.([a-z]\w+)\b(?!\()", code)
    files = {("train", "py"), ("train", "slurm")}
    unknown = [f"{part}.{key}" for part, key in named if key not in KEYS[part] and (part, key) not in files]
    assert unknown == []


def test_every_page_of_the_docs_is_linked_from_the_readme() -> None:
    readme = (PROJECT / "README.md").read_text()
    assert [page for page in PAGES[1:] if f"({page})" not in readme] == []


def test_benchmarks_exist() -> None:
    pages = [(PROJECT / "docs" / page).read_text() for page in ("performance.md", "scale.md")]
    named = re.findall(r"`python (benchmarks/\w+\.py)", "".join(pages))
    assert len(set(named)) == 8
    assert [name for name in named if not (PROJECT / name).is_file()] == []
