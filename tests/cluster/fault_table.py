"""Driving a row of the table of faults: strike, wait for the end, and measure what it cost."""

from __future__ import annotations

import contextlib
import itertools
import json
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml
from fault_harms import Scene
from fault_row import Row
from fault_rows import ROWS
from login_node import OVER
from same_training import repeated_steps
from training_job import TrainingJob, write_job

PATIENCE = 300.0
_LOOK_SECONDS = 2.0


@dataclass(frozen=True)
class Result:
    """What became of a run.

    Attributes
    ----------
    lost
        Steps that were trained more than once.
    seconds
        The longest time without a new step; None where none followed.
    said
        Every reason, failure and warning that `status` gave, in order.
    """

    fault: str
    via: str
    slurm: str
    state: str
    attempts: int
    lost: int
    seconds: float | None
    said: tuple[str, ...]


def submit(scene: Scene, row: Row) -> TrainingJob:
    """Submit the digits on two nodes of one rank, with what the row changes."""
    sections: dict[str, Any] = {
        "train": {"epochs": 2},
        "slurm": {"nodes": 2},
        "launch": {"procs_per_node": 1},
        "log": {"every_steps": 1},
    }
    changes = _meant(dict(row.job), scene)
    merged = {name: {**sections.get(name, {}), **changes.get(name, {})} for name in {*sections, *changes}}
    path = write_job(scene.folder, braked=row.strike is not None, **merged)
    if row.task is not None:
        job = yaml.safe_load(path.read_text())
        file, params = row.task
        job["task"] = str(Path(__file__).with_name(file))
        job["params"] = {"width": 8, **_meant(dict(params), scene)}
        path.write_text(yaml.safe_dump(job))
    options = ("--via", scene.via, *map(scene.named, row.options))
    done = scene.cluster.cli("submit", str(path), "--json", "--no-check", *options, cwd=scene.folder)
    answer = json.loads(done.stdout.splitlines()[-1])
    return TrainingJob(scene.cluster, int(answer["slurm_job_id"]), Path(answer["directory"]), scene.folder / "brake")


def endure(scene: Scene, name: str) -> Result:
    """Do a row's harm to a run of its own, see it to its end, and say what became of it."""
    row = ROWS[name]
    (scene.folder / "runs").mkdir(parents=True)
    if row.before:
        row.before(scene)
    try:
        began = time.time()
        training = scene.training = submit(scene, row)
        with _listening(training, scene.said):
            if row.strike is not None:
                if row.at:
                    training.wait_for_step(row.at, timeout=PATIENCE)
                began = time.time()
                row.strike(scene)
                scene.wait(lambda: _attempts(training) >= row.attempts or _is_over(training), "it goes on", PATIENCE)
                if training.brake.exists():
                    training.full_speed()
            scene.wait(lambda: _is_over(training), "the job is over", PATIENCE)
        status = training.status()
    finally:
        if row.undo:
            row.undo(scene)
    scene.said.extend(_words(status))
    harmless_before = row.strike is None and row.before is None  # the fault comes from the task, at a step of its own
    return Result(
        fault=name,
        via=scene.via,
        slurm="{}.{:02}".format(*scene.cluster.version),
        state=status["state"],
        attempts=status["attempts"],
        lost=len(repeated_steps(training.run)) if _attempts(training) else 0,
        seconds=_longest_pause(training.rows(), since=None if harmless_before else began),
        said=tuple(dict.fromkeys(scene.said)),
    )


def check(result: Result, training: TrainingJob) -> None:
    """Fail, with the run's story, unless the run ended as its row says."""
    row = ROWS[result.fault]
    story = f"{result}\n{training.story()}"
    assert (result.state, result.attempts) == (row.state, row.attempts), story
    assert result.lost <= row.lost, story
    requeued = [event for event in training.events() if event["event"] == "requeued"]
    assert len(requeued) <= int(training.cluster.job_info(training.job)["Restarts"]), story  # only what was accepted
    said = "\n".join(result.said)
    assert [words for words in row.words if words not in said] == [], story
    if row.excluded is not None:
        assert training.cluster.job_info(training.job)["ExcNodeList"] == row.excluded, story


def write_result(result: Result, folder: Path) -> None:
    """Leave what was measured for whoever makes the page."""
    folder.mkdir(parents=True, exist_ok=True)
    number = list(ROWS).index(result.fault)
    (folder / f"{result.slurm}-{number:02}-{result.via}.json").write_text(json.dumps(asdict(result), indent=1) + "\n")


def _meant(value: Any, scene: Scene) -> Any:
    if isinstance(value, dict):
        return {name: _meant(inner, scene) for name, inner in value.items()}
    if isinstance(value, list):
        return [_meant(inner, scene) for inner in value]
    return scene.named(value) if isinstance(value, str) else value


@contextlib.contextmanager
def _listening(training: TrainingJob, said: list[str]) -> Iterator[None]:
    """Ask `status` again and again, as a person would, and note all that it says."""
    ended = threading.Event()

    def listen() -> None:
        while not ended.wait(_LOOK_SECONDS):
            done = training.cluster.cli("status", str(training.run), "--json", check=False, timeout=120)
            if done.returncode in (0, 4, 5) and done.stdout.strip():
                said.extend(_words(json.loads(done.stdout)))

    thread = threading.Thread(target=listen)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _words(status: dict[str, Any]) -> list[str]:
    return [words for words in (status["reason"], status["last_failure"], *status["warnings"]) if words]


def _attempts(training: TrainingJob) -> int:
    return len(list((training.run / "attempts").glob("[0-9]*")))


def _is_over(training: TrainingJob) -> bool:
    return training.job not in training.cluster.queue() and training.cluster.state(training.job) in OVER


def _longest_pause(rows: list[dict[str, Any]], *, since: float | None) -> float | None:
    """Seconds without a new step, at most; the step before counts as made at the beginning."""
    trained = sorted((row for row in rows if "train/loss" in row), key=lambda row: float(row["time"]))
    made, reached = [] if since is None else [since], 0
    for row in trained:
        if row["step"] > reached:
            reached = row["step"]
            if since is None or row["time"] > since:
                made.append(row["time"])
    if len(made) < 2:
        return None
    return round(max(after - before for before, after in itertools.pairwise(made)), 1)
