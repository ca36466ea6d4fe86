"""docs/troubleshooting.md tells the truth: the messages it quotes are those of the program, and so are its ports."""

from __future__ import annotations

import re

import pytest
from documented import PROJECT, Call, finish, is_message_of_the_program

from cluster_ddp.launch.node.watchdog import UNLEARNED
from cluster_ddp.launch.ports import FIRST_PORT, PORTS
from cluster_ddp.train import choose_backend

PAGE = (PROJECT / "docs" / "troubleshooting.md").read_text()
OURS = PAGE.split("## What cluster_ddp says\n")[1].split("\n## ")[0]
QUOTED = re.findall(r"^\| `(.*?)` \|", OURS, re.MULTILINE)


@pytest.mark.parametrize("message", QUOTED)
def test_a_quoted_message_is_one_of_the_programs(message: str) -> None:
    assert is_message_of_the_program(message)


def test_there_are_messages_to_compare() -> None:
    assert len(QUOTED) > 20


def test_ports_are_those_of_the_script(call: Call) -> None:
    script = finish(call("cluster_ddp", "submit", "multi-node", "--dry-run"))
    said = f"from {FIRST_PORT} to {FIRST_PORT + PORTS - 1}, by the job id"
    assert said in script
    assert said in PAGE


def test_until_a_hang_is_noticed_it_takes_as_long_as_said() -> None:
    minutes = f"{UNLEARNED / 60:.0f} minutes"
    assert f"{minutes} during the first 20 steps and 20 seconds of an attempt, and during evaluation and saving" in PAGE


def test_backends_are_those_that_auto_picks() -> None:
    table = re.findall(r"^\| (Linux|macOS|Windows) \| (\w+) \| (\w+) \|", PAGE, re.MULTILINE)
    assert len(table) == 3
    for platform, with_cuda, without in table:
        system = {"macOS": "Darwin"}.get(platform, platform)
        assert choose_backend(system, False) == without.lower()
        assert with_cuda == "none" or choose_backend(system, True) == with_cuda.lower()  # no CUDA on a Mac
