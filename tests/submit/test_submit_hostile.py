"""A thousand hostile strings in all text fields of a job: the scripts run under bash, and nothing else does."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from test_submit_script_text import HOSTILE, LINE, TEXT, job

from cluster_ddp.submit.script import render_script

SCRIPTS = 20
LINES, TEXTS = 16, 36  # in each script
RUNTIMES = ("apptainer", "enroot", "pyxis", None)


def stage(folder: Path) -> tuple[Path, Path]:
    """A run directory, and a folder with the programs that the script may call."""
    run, programs = folder / "run", folder / "programs"
    for made in (run / "events", run / "attempts", programs):
        made.mkdir(parents=True)
    for name in ("job.yaml", "run.json"):
        (run / name).write_text("{}")
    for name in ("apptainer", "enroot", "python3"):
        (programs / name).symlink_to("/bin/true")
    for name in ("realpath", "head", "date", "touch"):
        (programs / name).symlink_to(f"/usr/bin/{name}")
    (programs / "scontrol").write_text("#!/bin/bash\necho node1\n")
    (programs / "scontrol").chmod(0o755)
    return run, programs


def files(folder: Path) -> set[Path]:
    return set(folder.rglob("*"))


def script(lines: Iterator[str], texts: list[str], runtime: str | None) -> str:
    image = {"image": next(lines), "runtime": runtime, "mounts": [next(lines), next(lines)]} if runtime else None
    fields = ("partition", "account", "qos", "constraint", "exclude", "nodelist", "reservation")
    spec = job(
        task=None,
        script=next(lines),
        args=texts[::2],
        slurm={**{field: next(lines) for field in fields}, "extra": {"comment": next(lines), "mail-user": next(lines)}},
        launch={"container": image, "python": "/bin/true"},
        network={
            "socket_ifname": next(lines),
            "env": {f"VALUE_{number}": text for number, text in enumerate(texts[1::2])},
        },
    )
    return render_script(spec, python="/bin/true", own_run_of=next(lines)).text


@settings(
    max_examples=SCRIPTS,
    deadline=None,
    phases=(Phase.explicit, Phase.reuse, Phase.generate),
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example],
)
@given(
    lines=st.lists(LINE, min_size=LINES, max_size=LINES),
    texts=st.lists(TEXT, min_size=TEXTS, max_size=TEXTS),
    runtime=st.sampled_from(RUNTIMES),
)
def test_no_script_makes_a_stray_file(lines: list[str], texts: list[str], runtime: str | None) -> None:
    assert SCRIPTS * (LINES + TEXTS) >= 1000 and any("touch pwned" in text for text in HOSTILE)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run, programs = stage(folder)
        here = folder / "here"
        here.mkdir()
        before = files(folder)
        done = subprocess.run(
            ["/bin/bash", "-s", "--", str(run)],
            input=script(iter(lines), texts, runtime).encode(),
            env={"PATH": str(programs), "SLURM_JOB_NODELIST": "node1", "SLURM_JOB_ID": "7", "HOME": str(here)},
            cwd=here,
            capture_output=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr  # it came to its last line, which starts the keeper
        assert files(folder) == before
