"""docs/sweeps.md: its job file, its list and its commands do what stands there."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

from documented import PROJECT, Call, block, finish

PAGE = "docs/sweeps.md"
COMMANDS = [
    line.removeprefix("$ cluster-ddp ")
    for text in re.findall(r"```console\n(.*?)```", (PROJECT / PAGE).read_text(), re.DOTALL)
    for line in text.splitlines()
]


def test_the_commands_of_the_page(tmp_path: Path, call: Call) -> None:
    (tmp_path / "digits.yaml").write_text(block(PAGE, "yaml"))
    (tmp_path / "elements.yaml").write_text(block(PAGE, "yaml", after="## What may differ"))
    for name, answer in {"sbatch": "echo 7", "scontrol": "", "squeue": "", "scancel": ""}.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{answer}\n")
        (tmp_path / name).chmod(0o755)
    path = f"{tmp_path}:/usr/bin:/bin"
    dry, submit, status, stop = COMMANDS
    said = finish(call("cluster_ddp", *shlex.split(dry)))
    assert "0003-lr=1e-3-width=16" in said
    assert not (tmp_path / "runs").exists()
    assert "4 of 4 elements submitted, Slurm job 7" in finish(call("cluster_ddp", *shlex.split(submit), PATH=path))
    rows = json.loads(finish(call("cluster_ddp", *shlex.split(status), "--json", PATH=path)))
    assert [row["run_id"] for row in rows][3] == "0003-lr=1e-3-width=16"
    assert "none of its elements is running" in finish(call("cluster_ddp", *shlex.split(stop), PATH=path), status=2)
    listed = ("sweep", "digits.yaml", "--list", "elements.yaml", "--grid", "params.sizes=[8,8],[16,4]", "--dry-run")
    assert "    0003-" in finish(call("cluster_ddp", *listed))
