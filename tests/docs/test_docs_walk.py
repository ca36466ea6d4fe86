"""docs/walk.md: what it types, typed on a real cluster, in its order, and answered as it shows."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
from documented import PROJECT
from light_agent import LIGHT_AGENT
from slurm_cluster import SlurmCluster

PAGE = (PROJECT / "docs/walk.md").read_text()
PATIENCE = 240.0


class Typed(NamedTuple):
    """A line that somebody types, and what is shown below it."""

    host: str  # "" on the login node
    words: list[str]
    shown: list[str]


def typed() -> list[Typed]:
    found: list[Typed] = []
    for text in re.findall(r"```console\n(.*?)```", PAGE, re.DOTALL):
        for line in text.splitlines():
            if command := re.fullmatch(r"(\w*)\$ cluster-ddp (.*)", line):
                found.append(Typed(command[1], shlex.split(command[2]), []))
            else:
                found[-1].shown.append(line)
    return found


def shape(line: str) -> str:
    """A line without what is different each time: words with digits, folders, and after them the last columns."""
    line = re.sub(r"\b[KMG]iB", "B", re.sub(r"\S*/\S*", "*", line))
    return " ".join("#" if any(c.isdigit() for c in word) else word for word in line.split())


def assert_shown(command: Typed, said: str) -> None:
    shapes = [shape(line) for line in said.splitlines()]
    for line in command.shown:
        wanted = shape(line)
        assert any(found.startswith(wanted) for found in shapes), f"{command.words}: {line!r} is not in\n{said}"


@pytest.mark.timeout(900)
def test_the_walk(cluster: SlurmCluster, tmp_path: Path) -> None:
    environment = {
        "HOME": str(tmp_path),
        "CLUSTER_DDP_CONFIG": str(tmp_path / "cluster-ddp/site.yaml"),
        "COLUMNS": "200",
        "PYTHONPATH": LIGHT_AGENT,
    }

    def say(*words: str) -> str:
        done = cluster.cli(*words, cwd=tmp_path, env=environment, timeout=PATIENCE)
        return done.stdout + done.stderr

    def states(name: str) -> list[str]:
        found = json.loads(say("status", name, "--json"))
        return [row["state"] for row in (found if isinstance(found, list) else [found])]

    def evaluated() -> bool:
        logs = tmp_path.glob("cluster_ddp_runs/job-*/attempts/*/node-0.log")  # a moment after metrics.jsonl
        return any("val/accuracy" in log.read_text() for log in logs)

    by_hand: list[tuple[Typed, subprocess.Popen[str]]] = []
    for command in typed():
        if command.host:
            words = [
                *cluster.enter(command.host),
                "env",
                f"--chdir={tmp_path}",
                sys.executable,
                "-m",
                "cluster_ddp",
                *command.words,
            ]
            pipe = subprocess.PIPE
            started = subprocess.Popen(
                words, cwd=tmp_path, env=cluster.env | environment, text=True, stdout=pipe, stderr=subprocess.STDOUT
            )
            by_hand.append((command, started))
            continue
        if command.words == ["status", "job-sweep"]:
            cluster.wait_for(
                lambda: states("job-sweep") == ["COMPLETED"] * 2, PATIENCE, "the sweep is complete", every=2
            )
        elif command.words[0] == "resume":
            cluster.wait_for(lambda: states("job") == ["STOPPED"], PATIENCE, "the run has stopped", every=2)
        elif command.words[0] == "clean":
            for launched, process in by_hand:
                out, _ = process.communicate(timeout=PATIENCE)
                assert process.returncode == 0, out
                assert_shown(launched, out)
        assert_shown(command, say(*command.words))
        if command.words[0] == "init":  # the page trains each element of the sweep, and by hand, for five
            job = tmp_path / "job.yaml"
            shorter = job.read_text().replace("epochs: 5", "epochs: 1")
            assert shorter != job.read_text()
            job.write_text(shorter)
        elif command.words[0] == "submit":
            cluster.wait_for(evaluated, PATIENCE, "it trains", every=0.5)
    assert (tmp_path / "digits.safetensors").stat().st_size
