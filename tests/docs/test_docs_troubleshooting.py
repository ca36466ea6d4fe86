"""docs/troubleshooting.md tells the truth: the messages it quotes are those of the program, and so are its ports."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest
from documented import PROJECT, Call, finish

from cluster_ddp.launch.ports import FIRST_PORT, PORTS
from cluster_ddp.train import choose_backend

PAGE = (PROJECT / "docs" / "troubleshooting.md").read_text()
OURS = PAGE.split("## What cluster_ddp says\n")[1].split("\n## ")[0]
QUOTED = re.findall(r"^\| `(.*?)` \|", OURS, re.MULTILINE)
GAP = "\0"  # stands for what an f-string fills in


def strings() -> Iterator[str]:
    """Every string of the package, of an f-string the parts that are always the same."""
    for file in (PROJECT / "cluster_ddp").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.JoinedStr):
                yield GAP.join(part.value for part in node.values if isinstance(part, ast.Constant))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value


@pytest.mark.parametrize("message", QUOTED)
def test_a_quoted_message_is_one_of_the_programs(message: str) -> None:
    pattern = re.compile(".*".join(re.escape(part.strip()) for part in message.split("…")), re.DOTALL)
    assert any(pattern.search(string) for string in strings())


def test_there_are_messages_to_compare() -> None:
    assert len(QUOTED) > 20


def test_ports_are_those_of_the_script(call: Call) -> None:
    script = finish(call("cluster_ddp", "submit", "multi-node", "--dry-run"))
    said = f"from {FIRST_PORT} to {FIRST_PORT + PORTS - 1}, by the job id"
    assert said in script
    assert said in PAGE


def test_backends_are_those_that_auto_picks() -> None:
    table = re.findall(r"^\| (Linux|macOS|Windows) \| (\w+) \| (\w+) \|", PAGE, re.MULTILINE)
    assert len(table) == 3
    for platform, with_cuda, without in table:
        system = {"macOS": "Darwin"}.get(platform, platform)
        assert choose_backend(system, False) == without.lower()
        assert with_cuda == "none" or choose_backend(system, True) == with_cuda.lower()  # no CUDA on a Mac
