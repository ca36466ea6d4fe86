"""Faults between commands of a person, the jobs that they submit, and what those find on the nodes."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import small_job
from fault_harms import BAD, Harm, Scene, warn

ODD_SETUP = (
    "set -e",
    "said=$(cat <<'END'",
    "one \\",
    "END",
    ")",
    'echo "$said" \\',
    "  two > FOLDER/said",
    "[[ $(< FOLDER/said) == 'one \\ two' ]]",
    "run=7 python=8 args=9 status=1",
)
_AT_ONCE = 4
_SLOW_SECONDS = 40


def stop(scene: Scene) -> None:
    """Stop it and the jobs that wait behind it, and wait until they are gone."""
    scene.cluster.cli("stop", str(scene.run.run), timeout=180)
    scene.wait(lambda: scene.cluster.queue() == [], "nothing is queued")
    scene.said.append(scene.run.status()["reason"])


def stop_and_resume(*options: str) -> Harm:
    """Stop it, and resume it with some options."""

    def strike(scene: Scene) -> None:
        stop(scene)
        done = scene.cluster.cli("resume", str(scene.run.run), "--json", *options, timeout=180)
        scene.run.job = int(json.loads(done.stdout.splitlines()[-1])["slurm_job_id"])

    return strike


def resume_at_once(scene: Scene) -> None:
    """Stop it, and resume it several times at once: one of them submits a job, and the others say why they do not."""
    stop(scene)
    resume = ("resume", str(scene.run.run), "--json")
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        done = list(pool.map(lambda _: scene.cluster.cli(*resume, check=False, timeout=200), range(_AT_ONCE)))
    assert sorted(resumed.returncode for resumed in done) == [0, *[2] * (_AT_ONCE - 1)], done
    assert all(scene.run.run.name in resumed.stderr for resumed in done if resumed.returncode), done
    (answer,) = (json.loads(resumed.stdout.splitlines()[-1]) for resumed in done if resumed.returncode == 0)
    scene.run.job = int(answer["slurm_job_id"])


def next_of_chain(strike: Harm) -> Harm:
    """Strike the first job of a chain; it is the next one that sees the run to its end."""

    def in_chain(scene: Scene) -> None:
        first = scene.run.job
        strike(scene)
        scene.wait(lambda: first not in scene.cluster.queue(), "the first job of the chain is over")
        scene.run.job = first + 1

    return in_chain


def start_too_early(scene: Scene, job: int) -> None:
    """Take a job's dependency away: it starts at once."""
    scene.cluster.run("scontrol", "update", f"JobId={job}", "Dependency=")


def cancel(scene: Scene, job: int) -> None:
    scene.cluster.cancel(job)


def without_second_of_chain(lose: Callable[[Scene, int], None]) -> Harm:
    """Lose the second job of a chain while the first trains, which then ends; the third sees the run to its end."""

    def strike(scene: Scene) -> None:
        first = scene.run.job
        lose(scene, first + 1)
        scene.wait(lambda: first + 1 not in scene.cluster.queue(), "the second job of the chain is over")
        time.sleep(3)
        assert sorted(scene.cluster.queue()) == [first, first + 2], scene.run.story()
        next_of_chain(warn)(scene)
        scene.run.job = first + 2

    return strike


def submit_one_that_fails(scene: Scene) -> None:
    """Submit a run that fails, for another to come after."""
    (folder := scene.folder / "first").mkdir()
    first = small_job.submit(scene.cluster, folder, "--via", scene.via, fault={"fault": "import"})
    scene.names["FIRST"] = str(first.run)


def slow_down_scontrol(scene: Scene) -> None:
    """Leave a scontrol in the folder's bin that takes as long as on a busy site."""
    real = shutil.which("scontrol", path=scene.cluster.env["PATH"])
    _program(scene, "scontrol", f'sleep {_SLOW_SECONDS}\nexec {real} "$@"')


def stop_first_srun(scene: Scene) -> None:
    """Leave an srun in the folder's bin that stops itself the first time that it is to start the nodes."""
    real = shutil.which("srun", path=scene.cluster.env["PATH"])
    first = "[[ $* != *launch.node* || -e FOLDER/struck ]] || { touch FOLDER/struck; kill -STOP $$; }"
    _program(scene, "srun", f'{first}\nexec {real} "$@"')


def lose_image(scene: Scene) -> None:
    """Leave an apptainer in the folder's bin that says what the real one does without the image."""
    _program(scene, "apptainer", 'echo "FATAL:   could not open image FOLDER/my.sif: no such file" >&2\nexit 255')


def _program(scene: Scene, name: str, script: str) -> None:
    program = scene.folder / "bin" / name
    program.parent.mkdir()
    program.write_text(f"#!/bin/bash\n{script}\n".replace("FOLDER", str(scene.folder)))
    program.chmod(0o755)


def first_node_is(line: str) -> Harm:
    """Have the bad node read a line in place of the first node's in its /etc/hosts."""

    def before(scene: Scene) -> None:
        known = scene.cluster.node_exec(BAD, "cat", "/etc/hosts").splitlines()
        hosts = scene.folder / "hosts"
        hosts.write_text("".join(f"{line if 'node1' in entry.split() else entry}\n" for entry in known))
        scene.cluster.node_exec(BAD, "mount", "--bind", str(hosts), "/etc/hosts")

    return before
