"""Job files to try things on."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from cluster_ddp.job import JobFileError, load_job

WriteJob = Callable[..., Path]


@pytest.fixture
def job(tmp_path: Path) -> WriteJob:
    """Write a job file; without a task or script of its own it trains the digits."""

    def write(text: str = "", name: str = "job.yaml") -> Path:
        text = textwrap.dedent(text)
        if "task:" not in text and "script:" not in text and "extends:" not in text:
            text += "\ntask: cluster_ddp.tasks.digits:Digits\n"
        file = tmp_path / name
        file.write_text(text)
        return file

    return write


@pytest.fixture
def errors_of(job: WriteJob) -> Callable[..., str]:
    """Load a wrong job and return the message."""

    def load(text: str, *overrides: str) -> str:
        with pytest.raises(JobFileError) as caught:
            load_job(str(job(text)), overrides)
        assert caught.value.exit_status == 2
        return str(caught.value)

    return load
