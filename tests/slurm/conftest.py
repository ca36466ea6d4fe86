from __future__ import annotations

from pathlib import Path

import pytest

from cluster_ddp.slurm import commands


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An otherwise empty PATH, to put stand-ins in."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for tool in ("bash", "basename", "dirname", "cat", "env"):
        (folder / tool).symlink_to(
            Path("/usr/bin") / tool if (Path("/usr/bin") / tool).exists() else Path("/bin") / tool
        )
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.setattr(commands, "PAUSES", (0.01, 0.01))
    return folder
