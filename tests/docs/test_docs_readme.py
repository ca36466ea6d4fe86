"""README.md tells the truth: its job file is a job file, and every command in it does what stands there."""

from __future__ import annotations

import fnmatch
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from documented import FINDS_RANKS, PROJECT, Call, block, finish, hold_rank_0
from light_agent import LIGHT_AGENT
from slurm_cluster import SlurmCluster
from waiting import wait_for

README = (PROJECT / "README.md").read_text()
TABLE = re.findall(r"^\| (`.*?) \|", README, re.MULTILINE)

# What a test runs; a command that is added to the README has to be added to a test, too.
INSTALL = "python3 -m venv /shared/me/ddp", "/shared/me/ddp/bin/pip install .", "source /shared/me/ddp/bin/activate"
DRY_RUN = "cluster-ddp submit digits.yaml --dry-run"
SUBMIT = "cluster-ddp submit digits.yaml"
LOCAL = "cluster-ddp local digits.yaml --nodes 2 --procs 2 --set train.precision=fp32"
STOP, STATUS, RESUME = (f"cluster-ddp {name} digits" for name in ("stop", "status", "resume"))
STEPS_PER_EPOCH = 1442 // 64
TINY = ("--set", "train.epochs=2", "--set", "train.workers=0")


def words(command: str) -> list[str]:
    """A command's arguments."""
    return shlex.split(command)[1:]


@pytest.fixture
def here(tmp_path: Path) -> Path:
    """A folder with the README's job file."""
    (tmp_path / "digits.yaml").write_text(block("README.md", "yaml"))
    return tmp_path


def test_every_command_shown_is_one_that_is_tested() -> None:
    consoles = re.findall(r"```console\n(.*?)```", README, re.DOTALL)
    shown = [line.removeprefix("$ ").split("  #")[0].strip() for text in consoles for line in text.splitlines()]
    assert shown == [DRY_RUN, SUBMIT, LOCAL, STOP, STATUS, RESUME, *INSTALL]
    assert re.findall(r"^    (make \w+)", README, re.MULTILINE) == ["make demo", "make test"]


def test_nodes_run_the_python_that_submits(here: Path, call: Call) -> None:
    # That pip installs it and the installed command renders a script is tested in tests/packaging.
    assert sys.executable in finish(call("cluster_ddp", *words(DRY_RUN)))


def test_dry_run_prints_the_script_and_writes_nothing(here: Path, call: Call) -> None:
    script = finish(call("cluster_ddp", *words(DRY_RUN)))
    assert script.startswith("#!/bin/bash\n")
    assert "#SBATCH --job-name=digits" in script
    assert re.search(r"torchrun \\\n +--nnodes=", script)
    assert [path.name for path in here.iterdir()] == ["digits.yaml"]


@FINDS_RANKS
def test_local_stop_status_resume(here: Path, call: Call) -> None:
    dry = finish(call("cluster_ddp", *words(LOCAL), "--dry-run"))
    assert len(re.findall(r"torchrun .*--nnodes=2 --nproc-per-node=2", dry)) == 2
    # Two nodes are started by the demo, below.
    running = call("cluster_ddp", *words(LOCAL), "--nodes", "1", *TINY, PYTHONPATH=LIGHT_AGENT)
    run = wait_for(lambda: next(here.glob("runs/*"), None))
    held = hold_rank_0(run)
    finish(call("cluster_ddp", *words(STOP)))
    wait_for(lambda: any("stop-requested" in file.read_text() for file in run.glob("events/node-*.jsonl")))
    os.kill(held, signal.SIGCONT)
    finish(running, status=5)
    assert "STOPPED" in finish(call("cluster_ddp", *words(STATUS)))
    assert "COMPLETED" in finish(call("cluster_ddp", *words(RESUME), PYTHONPATH=LIGHT_AGENT))
    assert json.loads(finish(call("cluster_ddp", *words(STATUS), "--json")))["attempts"] == 2


@pytest.mark.timeout(400)
def test_submit_stop_status_resume(here: Path, cluster: SlurmCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(cluster.env, "PYTHONPATH", LIGHT_AGENT)

    def status() -> Any:
        return json.loads(cluster.cli(*words(STATUS), "--json", cwd=here).stdout)

    # The test's nodes have no GPU and few cores.
    small = "slurm.nodes=1 slurm.gpus_per_node=0 slurm.cpus_per_task=1 launch.procs_per_node=1 train.precision=fp32"
    changes = [word for change in small.split() for word in ("--set", change)]
    cluster.cli(*words(SUBMIT), *changes, "--set=train.epochs=200", "--set=train.workers=0", cwd=here)
    cluster.wait_for(lambda: any(file.stat().st_size for file in here.glob("runs/*/metrics.jsonl")), 120, "it trains")
    cluster.cli(*words(STOP), cwd=here)
    cluster.wait_for(lambda: not cluster.queue(), 60, "it has stopped")
    assert "STOPPED" in cluster.cli(*words(STATUS), cwd=here).stdout
    epochs = status()["step"] // STEPS_PER_EPOCH + 2
    cluster.cli(*words(RESUME), f"--set=train.epochs={epochs}", cwd=here)
    cluster.wait_for(lambda: not cluster.queue(), 120, "it is complete")
    found = status()
    assert (found["state"], found["attempts"], found["step"]) == ("COMPLETED", 2, epochs * STEPS_PER_EPOCH)


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_make_does_what_the_readme_says(call: Call, tmp_path: Path) -> None:
    done = subprocess.run(["make", "-n", "demo", "test"], cwd=PROJECT, capture_output=True, text=True, check=True)
    assert "-m pytest" in done.stdout
    (demo,) = re.findall(r"^\S*cluster-ddp (local .*)$", done.stdout, re.MULTILINE)
    said = finish(call("cluster_ddp", *shlex.split(demo), "--set", "train.epochs=1"))
    shown = README.split("The demo ends like this")[1].split("## ")[0]
    labels = re.findall(r"^  (\w[\w ]*?)  ", shown, re.MULTILINE)
    assert len(labels) == 3
    for label in labels:
        assert re.search(rf"^  {label} ", said, re.MULTILINE), f"{label} is shown, and the demo does not say it"
    assert re.search(r"^COMPLETED  quickstart-", said, re.MULTILINE)
    assert re.search(r"val/accuracy \d", said)
    (run,) = (tmp_path / "runs").iterdir()
    check_map(run)


def check_map(run: Path) -> None:
    """The README's map of a run directory has all that is in a local run, and nothing that is not there."""
    always: list[str] = []
    sometimes = ["run.json.holder"]
    for line in block("README.md", "text", after="## Where things are").splitlines():
        *names, said = re.split(r" {2,}", line.strip())
        folder = "attempts/000/" if line.startswith(" ") else ""
        special = re.search(
            "not in a local run|no terminal shows|if log\\.|after a (hang|save|resume)|with `?launch", said
        )
        group = sometimes if special else always
        group += [f"{folder}{name}*" if name.endswith("/") else folder + name for name in names]
    assert [pattern for pattern in always if not list(run.glob(pattern))] == []
    always.remove("attempts/000/*")  # what is in there stands below it
    files = [str(path.relative_to(run)) for path in run.rglob("*") if path.is_file()]
    assert len(files) > 10
    known = [*always, *sometimes]
    assert [file for file in files if not any(fnmatch.fnmatch(file, pattern) for pattern in known)] == []


def test_table_has_all_commands_and_options_that_exist(ask: Callable[..., str]) -> None:
    known = re.findall(r"^│ (\w+) ", ask("--help"), re.MULTILINE)
    listed = [shlex.split(part) for row in TABLE for part in re.findall(r"`(.*?)`", row)]
    assert sorted(name for name, *_ in listed) == sorted(known)
    for name, *rest in listed:
        options = [option for word in rest for option in re.findall(r"--[\w-]+", word)]
        said = ask(name, "--help") if options else ""
        assert all(option in said for option in options), (name, options)


def test_readme_is_short() -> None:
    lines = README.splitlines()
    last = max(number for number, line in enumerate(lines, 1) if line.startswith("| `"))
    assert last <= 130
    assert len(lines) <= 180
