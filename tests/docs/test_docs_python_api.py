"""docs/python-api.md tells the truth: its code runs as it stands, and its handle has what the table says."""

from __future__ import annotations

import re
from pathlib import Path

from documented import PROJECT, Call, block, finish
from light_agent import LIGHT_AGENT

from cluster_ddp.run.runs import list_runs
from cluster_ddp.submit import RunHandle

PAGE = (PROJECT / "docs" / "python-api.md").read_text()


def test_code_runs_as_it_stands(tmp_path: Path, call: Call) -> None:
    (tmp_path / "digits.yaml").write_text(
        "task: cluster_ddp.tasks.digits:Digits\ntrain: {global_batch: 64, workers: 0}\n"
    )
    (tmp_path / "program.py").write_text(block("docs/python-api.md", "python"))
    said = finish(call("program", PYTHONPATH=LIGHT_AGENT))
    (run,) = list_runs(tmp_path / "runs")
    assert said.startswith(run.id) and re.search(r"^44 0\.\d+$", said, re.MULTILINE), said
    assert (run.path / "local.out").read_text().count("COMPLETED") == 0  # it is not a command that reports its end


def test_handle_has_what_the_table_says() -> None:
    rows = re.findall(r"^\| (`.*?) \|", PAGE, re.MULTILINE)
    names = re.findall(r"`(\w+)", " ".join(rows))
    assert len(names) == 9
    assert [name for name in names if name not in ("id", "directory") and not hasattr(RunHandle, name)] == []
