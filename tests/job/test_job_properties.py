"""Whatever is done to a valid job file: a job or a clear message, never another exception."""

from __future__ import annotations

import json
import re
import tempfile
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from test_job_loading import EVERYTHING

from cluster_ddp.job import (
    JobFileError,
    JobSpec,
    dump_resolved,
    load_job,
    load_resolved,
    template_file,
    template_names,
)
from cluster_ddp.job.document import Place, dump, parse, plain

BASES = [EVERYTHING, *(template_file(name).read_text() for name in template_names())]
TREES = [plain(parse(text, Place(Path("base.yaml")))) for text in BASES]

ODD = [
    "banana",
    "-1",
    "1e-3",
    "12:00:00",
    "auto",
    "a: b",
    "[",
    "}",
    "*a",
    "&a",
    "!!x",
    "<<",
    "|",
    "\t",
    "~",
    "x" * 5000,
    "$HOME",
    "$X/",
    "/",
]
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-(10**400), 10**400)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
    | st.sampled_from(ODD)
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


def check(text: str, *overrides: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "job.yaml"
        file.write_text(text, encoding="utf-8", newline="")
        try:
            spec = load_job(str(file), overrides, check_target=False).spec
        except JobFileError as error:
            message = str(error)
            assert re.search(r"\.yaml:[1-9][0-9]*: |--set ", message), message
            assert "pydantic" not in message
            assert "\n    allowed: \n" not in message
            assert len(message) < 20_000
            return
        resolved = Path(folder) / "resolved.yaml"
        resolved.write_text(dump_resolved(spec), encoding="utf-8", newline="")
        assert load_resolved(resolved) == spec


@st.composite
def mutated_texts(draw: st.DrawFn) -> str:
    """A job file with lines deleted, doubled, exchanged or cut, or odd characters put in."""
    lines = draw(st.sampled_from(BASES)).splitlines(keepends=True)
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, len(lines) - 1))
        action = draw(st.sampled_from(["delete", "double", "swap", "cut", "insert", "indent"]))
        if action == "delete" and len(lines) > 1:
            del lines[at]
        elif action == "double":
            lines.insert(at, lines[at])
        elif action == "swap":
            lines[at], lines[0] = lines[0], lines[at]
        elif action == "cut":
            lines[at] = lines[at][: draw(st.integers(0, len(lines[at])))]
        elif action == "insert":
            column = draw(st.integers(0, len(lines[at])))
            odd = draw(st.sampled_from(ODD) | st.text(st.characters(exclude_categories=["Cs"]), max_size=4))
            lines[at] = lines[at][:column] + odd + lines[at][column:]
        else:
            lines[at] = "  " + lines[at]
    return "".join(lines)


def paths(tree: Any, path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    if not isinstance(tree, dict):
        return []
    return [below for key, value in tree.items() for below in ((*path, key), *paths(value, (*path, key)))]


@st.composite
def mutated_trees(draw: st.DrawFn) -> str:
    """A job whose keys are deleted, misspelt or given any value."""
    tree = json.loads(json.dumps(draw(st.sampled_from(TREES))))
    for _ in range(draw(st.integers(1, 3))):
        *parents, key = draw(st.sampled_from(paths(tree)))
        section = tree
        for parent in parents:
            section = section[parent]
        value = section.pop(key)
        action = draw(st.sampled_from(["delete", "misspell", "replace"]))
        if action == "misspell":
            section[key[:-1] + draw(st.text(st.characters(exclude_categories=["Cs"]), max_size=2))] = value
        elif action == "replace":
            section[key] = draw(VALUES)
        if not paths(tree):
            break
    return dump(tree)


@settings(max_examples=200)
@given(mutated_texts())
def test_a_job_file_with_a_damaged_text(text: str) -> None:
    check(text)


@settings(max_examples=200)
@given(mutated_trees())
def test_a_job_file_with_damaged_settings(text: str) -> None:
    check(text)


@settings(max_examples=100)
@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=60))
def test_any_text(text: str) -> None:
    check(text)


@settings(max_examples=150)
@given(
    st.lists(
        st.tuples(st.sampled_from([".".join(path) for tree in TREES for path in paths(tree)]), SCALARS.map(str)),
        max_size=3,
    )
)
def test_any_overrides(overrides: list[tuple[str, str]]) -> None:
    check("extends: multi-node\n", *(f"{key}={value}" for key, value in overrides))


LINES = st.text(st.characters(exclude_categories=["Cs", "Cc", "Zl", "Zp"]), min_size=1, max_size=15).filter(str.strip)
WORDS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=15)


@settings(max_examples=150)
@given(
    params=st.dictionaries(WORDS, VALUES, max_size=3),
    line=LINES,
    words=st.lists(WORDS, max_size=3),
    seconds=st.integers(1, 10**8),
    lr=st.floats(1e-300, 1e300),
)
def test_any_job_reads_back_as_itself(
    params: dict[str, Any], line: str, words: list[str], seconds: int, lr: float
) -> None:
    spec = JobSpec.model_validate(
        {
            "name": "x",
            "task": "a:B",
            "params": params,
            "slurm": {"partition": line, "time": f"{seconds}s", "extra": {"comment": line}},
            "launch": {"setup": words, "hang_timeout": seconds},
            "network": {"env": {f"V{number}": word for number, word in enumerate(words)}, "timeout": seconds},
            "requeue": {"warning": 1},
            "train": {"lr": lr, "seed": seconds},
        }
        if seconds > 1
        else {"name": "x", "task": "a:B", "params": params}
    )
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "job.yaml"
        file.write_text(dump_resolved(spec), encoding="utf-8", newline="")
        assert load_resolved(file) == spec
