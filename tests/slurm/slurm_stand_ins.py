"""Stand-ins for Slurm's commands, which record how they are called."""

from __future__ import annotations

from pathlib import Path

CALLS = 'printf "%s\\n" "$(basename "$0") $*" >>"$(dirname "$0")/calls"\n'


def stand_in(folder: Path, name: str, body: str) -> None:
    program = folder / name
    program.write_text(f"#!/bin/bash\n{CALLS}{body}\n")
    program.chmod(0o755)


def calls(folder: Path) -> list[str]:
    return (folder / "calls").read_text().splitlines()
