"""What a calm training of a task warns of."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from zoo_training import Case, judge

SHORT = {"steps": 3, "ema_decay": None}


def told(make: Any, folder: Path, capfd: pytest.CaptureFixture[str], **train: Any) -> list[str]:
    """The names that a calm training warns of, besides what every task of the zoo forgets."""
    verdict = judge(Case(train={**SHORT, **train}), folder, make, crashes=())
    assert verdict.error is None and verdict.refused is None, verdict
    said = [line for line in capfd.readouterr().err.splitlines() if "which no checkpoint contains" in line]
    listed = [line.partition("training changes ")[2].partition(", which")[0].split(", ") for line in said]
    return sorted({name for names in listed for name in names} - {"task.losses"})
