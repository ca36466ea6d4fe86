"""docs/exactness.md has the cases that the tests run, and messages of the program that a test provokes."""

from __future__ import annotations

import re

import pytest
from documented import is_message_of_the_program
from zoo_document import ELSEWHERE, MARK, PAGE, PROJECT, tables


def test_the_tables_are_those_of_the_tests() -> None:
    _, _, written = PAGE.read_text().partition(MARK)
    assert written == tables(), "python tests/zoo/zoo_document.py writes them"


@pytest.mark.parametrize(("what", "message", "test"), ELSEWHERE)
def test_a_refusal_has_its_test(what: str, message: str, test: str) -> None:
    assert is_message_of_the_program(message)
    file, _, name = test.partition("::")
    assert re.search(rf"^def {name}\(", (PROJECT / "tests" / file).read_text(), re.MULTILINE)
