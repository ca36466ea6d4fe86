"""docs/examples.md: each job file in docs/examples trains, and what the page does with the weights works."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from documented import PROJECT, Call, block, finish
from light_agent import LIGHT_AGENT
from safetensors.torch import load_file

PAGE = "docs/examples.md"
EXAMPLES = sorted((PROJECT / "docs/examples").glob("*.yaml"))
SHORT = ("--set", "train.steps=5", "--set", "train.warmup_steps=1")


def test_the_page_shows_every_job_file() -> None:
    assert set(re.findall(r"\]\((examples/[\w-]+\.yaml)\)", (PROJECT / PAGE).read_text())) == {
        f"examples/{path.name}" for path in EXAMPLES
    }


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_a_job_file_trains_by_its_commands_and_its_weights_are_of_use(
    example: Path, tmp_path: Path, call: Call
) -> None:
    shown = re.findall(r"^#   cluster-ddp (.*)$", example.read_text(), re.MULTILINE)
    file = str(example.relative_to(PROJECT))
    assert shown == [f"local {file}", f"submit {file}"]
    finish(call("cluster_ddp", "submit", str(example), "--dry-run"))
    finish(call("cluster_ddp", "local", str(example), *SHORT, PYTHONPATH=LIGHT_AGENT))
    (export,) = re.findall(rf"^\$ cluster-ddp (export {example.stem} .*)$", (PROJECT / PAGE).read_text(), re.MULTILINE)
    assert "tensors of step 5" in finish(call("cluster_ddp", *export.split()))
    program = block(PAGE, "python")
    if f'load_file("{example.stem}.safetensors")' in program:
        done = subprocess.run(
            [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=True
        )
        assert re.fullmatch(r"rank correlation -?\d\.\d\d\n", done.stdout)
    else:
        assert len(load_file(tmp_path / f"{example.stem}.safetensors")) > 0
