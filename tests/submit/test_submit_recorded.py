"""The scripts in ``sbatch/`` are what the templates render to."""

from __future__ import annotations

import difflib
import os
from pathlib import Path

import pytest

from cluster_ddp.job import load_job, template_names
from cluster_ddp.submit.script import render_script

FOLDER = Path(__file__).resolve().parents[2] / "sbatch"
RECORD = "RECORD_SBATCH"


@pytest.mark.parametrize("template", template_names())
def test_the_recorded_script_is_what_the_template_renders_to(template: str) -> None:
    file = FOLDER / f"{template}.sbatch"
    rendered = render_script(load_job(template).spec, python="python3", own_run_of=template).text
    if os.environ.get(RECORD):
        FOLDER.mkdir(exist_ok=True)
        file.write_text(rendered)
        file.chmod(0o755)
    recorded = file.read_text() if file.exists() else ""
    difference = difflib.unified_diff(
        recorded.splitlines(),
        rendered.splitlines(),
        f"sbatch/{file.name}",
        f"rendered from job_templates/{template}.yaml",
        lineterm="",
    )
    how = f"{RECORD}=1 python -m pytest tests/submit/test_submit_recorded.py"
    assert rendered == recorded, "\n".join(difference) + f"\n\nIf this is what you want, record it again: {how}"


def test_there_is_no_script_without_a_template() -> None:
    assert {file.stem for file in FOLDER.glob("*.sbatch")} == set(template_names())
