"""Hundreds of hostile strings in each text field of a job: the scripts run under bash, and nothing else does."""

from __future__ import annotations

import subprocess
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from test_submit_script_text import HOSTILE, LINE, TEXT, job

from cluster_ddp.submit.script import render_script

STRINGS = 50  # of one draw, each of which stands in each field once
RUNTIMES = ("apptainer", "enroot", "pyxis")
# Performs the scripts $2 one after the other, each as a shell of its own would. What they call of the system is played
# by functions, which take no new process; $1 is the run directory.
PERFORM = r"""
realpath() { printf '%s\n' "${@: -1}"; }
tail() { local line last= && while read -r line; do last=$line; done; [[ -z $last ]] || printf '%s\n' "$last"; }
timeout() { "${@:2}"; }
scontrol() { echo node1; }
for script in "$2"/*; do
    (. "$script" "$1") || { echo "$script: status $?" && exit 1; }
done
"""


class Written:
    """A folder with scripts to perform, a run directory, and programs for the scripts to call."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.run, self.here, self.programs, self.scripts = (
            folder / name for name in ("run", "here", "programs", "scripts")
        )
        for made in (self.run / "events", self.run / "attempts", self.here, self.programs, self.scripts):
            made.mkdir(parents=True)
        for name in ("job.yaml", "run.json", "slurm-7.out"):
            (self.run / name).write_text("{}")
        (self.programs / "touch").symlink_to("/usr/bin/touch")

    def python(self, text: str) -> str:
        """An interpreter with that name; it only prints its arguments."""
        program = self.programs / (text.replace("/", "_")[:20] + "-python")
        if not program.is_symlink():
            program.symlink_to("/bin/echo")
        return str(program)

    def write(self, lines: list[str], texts: list[str], *, task: bool, runtime: str | None) -> None:
        """Write the script of a job whose text fields are these strings."""
        line, text = iter(lines), iter(texts)
        fields = ("partition", "account", "qos", "constraint", "exclude", "nodelist", "reservation")
        image, metric, project, notified, path, own_run, python, host_python = (next(line) for _ in range(8))
        program = {
            "task": f"/{path}.py:Task",
            "params": {"text": next(text), next(text): 1},
        } if task else {
            "script": path,
            "args": [next(text), next(text)],
            "args_on_resume": [next(text)],
        }  # fmt: skip
        spec = job(
            **{"task": None, **program},
            runs_dir=next(line),
            slurm={**{field: next(line) for field in fields}, "extra": {"comment": next(line), "wckey": next(line)}},
            launch={
                "container": {"image": image, "runtime": runtime, "mounts": [next(text)]} if runtime else None,
                "python": self.python(python),
            },
            network={"socket_ifname": next(line), "env": {"VALUE": next(text)}},
            checkpoint={"keep_best": {"metric": metric, "mode": "max"}},
            log={"wandb": {"project": project}},
            notify={"command": notified},
            not_secret=[next(text)],
        )
        script = render_script(spec, python=self.python(host_python), own_run_of=own_run)
        (self.scripts / f"{len(list(self.scripts.iterdir())):03d}").write_text(script.text)

    def perform(self) -> subprocess.CompletedProcess[bytes]:
        """Run all the scripts under bash."""
        return subprocess.run(
            ["/bin/bash", "-c", PERFORM, "bash", str(self.run), str(self.scripts)],
            env={
                "PATH": str(self.programs),
                "SLURM_JOB_NODELIST": "node1",
                "SLURM_JOB_ID": "7",
                "HOME": str(self.here),
            },
            cwd=self.here,
            capture_output=True,
            timeout=300,
        )


def files(folder: Path) -> set[Path]:
    return set(folder.rglob("*"))


@pytest.mark.parametrize("draws", [5, pytest.param(20, marks=pytest.mark.chaos)])
def test_no_script_makes_a_stray_file(draws: int) -> None:
    assert any("touch pwned" in text for text in HOSTILE)
    strings = [st.lists(of, min_size=STRINGS, max_size=STRINGS) for of in (LINE, TEXT)]

    @settings(
        max_examples=draws,
        phases=(Phase.explicit, Phase.reuse, Phase.generate),
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example],
    )
    @given(*strings)
    def perform(lines: list[str], texts: list[str]) -> None:
        with tempfile.TemporaryDirectory() as name:
            written = Written(Path(name))
            for first in range(STRINGS):  # each field has each string once
                turned = lines[first:] + lines[:first], texts[first:] + texts[:first]
                written.write(*turned, task=False, runtime=RUNTIMES[first % 3])
                written.write(*turned, task=True, runtime=None)
            before = files(written.folder)
            done = written.perform()
            assert done.returncode == 0, done.stdout + done.stderr  # each came to its last line: it starts the keeper
            assert files(written.folder) == before

    perform()
