"""What is known of an allocation, with a stand-in for Slurm's commands."""

from __future__ import annotations

from pathlib import Path

import pytest

from cluster_ddp.launch.allocation import SlurmAllocation
from cluster_ddp.slurm.start import this_start


def test_a_question_that_gets_no_answer_takes_no_earlier_answer_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slurm's SIGTERM may end a call of scontrol while another one has told how long SIGKILL waits."""
    start = this_start({"SLURM_JOB_ID": "77"})
    assert start is not None
    allocation = SlurmAllocation(start)
    scontrol = tmp_path / "scontrol"
    scontrol.write_text("#!/bin/bash\necho 'KillWait                = 5 sec'\n")
    scontrol.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    allocation.ask_ahead()
    scontrol.write_text("#!/bin/bash\nkill -TERM $$\n")
    allocation.ask_ahead()
    assert allocation.kill_wait == 5
