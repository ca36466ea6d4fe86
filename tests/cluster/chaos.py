"""A run under a schedule of faults, and what each of them cost."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chaos_faults import FAULTS, TIME_LIMIT, NoVictim, Scene, Strike
from login_node import OVER
from same_training import trained_steps
from slurm_cluster import SlurmCluster
from training_job import EPOCHS, STEPS_PER_EPOCH, TrainingJob, submit

EVERY_STEPS = 5
RECOVERY_SECONDS = 240
_TRIES = 3
_STEPS_PER_FAULT = 32  # the most that a schedule waits for, the steps of a grace, a full disk or a slow stop, and more


@dataclass(frozen=True)
class Cost:
    """What a fault cost.

    Attributes
    ----------
    step:
        The last step that was logged when it struck.
    attempts:
        How many attempts it took to go on.
    repeated:
        Steps that had to be trained again.
    seconds:
        The longest time without a step that had not been made before.
    """

    strike: Strike
    step: int
    attempts: int
    repeated: int
    seconds: float


def submit_chaos(cluster: SlurmCluster, folder: Path, *, faults: int, nodes: int, braked: bool) -> TrainingJob:
    """Submit digits on so many nodes, one rank each, long enough for so many faults; none are for a calm run."""
    folder.mkdir()
    epochs = max(EPOCHS, -(-faults * _STEPS_PER_FAULT // STEPS_PER_EPOCH))
    return submit(
        cluster,
        folder,
        braked=braked,
        params={"brake": str(folder / "brake"), "width": 8, "seconds": 0.25},
        slurm={"nodes": nodes, "time": TIME_LIMIT},
        launch={"procs_per_node": 1},
        train={"epochs": epochs},
        checkpoint={"every_steps": EVERY_STEPS},
        network={"timeout": "2m"},
    )


def endure(scene: Scene, strikes: Sequence[Strike]) -> list[Cost]:
    """Strike the run with one fault after the other, each when training is under way again."""
    return [_strike(scene, strike) for strike in strikes]


def _strike(scene: Scene, strike: Strike) -> Cost:
    for _ in range(_TRIES):
        goal = _newest(scene) + strike.after
        _wait(scene, lambda goal=goal: _newest(scene) >= goal, f"{strike.after} steps more")
        try:
            return _suffer(scene, strike)
        except NoVictim as none:
            story = str(none)
    raise AssertionError(f"nothing to strike, {_TRIES} times: {strike}\n{story}")


def _suffer(scene: Scene, strike: Strike) -> Cost:
    rows = _rows(scene)
    step, attempt, began = _newest(scene), max(row["attempt"] for row in rows), time.time()
    fault = FAULTS[strike.kind]
    fault.strike(scene, strike)
    undone = time.time()

    def new_step() -> dict[str, Any] | None:
        rows = _rows(scene)
        if not fault.restarts:
            return next((row for row in rows if row["step"] > step and row["time"] > undone), None)
        known = max(row["step"] for row in rows if row["attempt"] <= attempt)
        return next((row for row in rows if row["attempt"] > attempt and row["step"] > known), None)

    row = _wait(scene, new_step, f"training goes on after: {strike}")
    trained = trained_steps(scene.training.run)
    known = max(max(steps) for number, steps in trained.items() if number <= attempt and steps)
    repeated = sum(
        len([step for step in steps if step <= known]) for number, steps in trained.items() if number > attempt
    )
    pause = _longest_pause(_rows(scene), since=began, until=row["time"])
    return Cost(strike, step, row["attempt"] - attempt, repeated, pause)


def _longest_pause(rows: Sequence[dict[str, Any]], *, since: float, until: float) -> float:
    """Seconds without a new step, at most, between two times; the step before counts as made at the first of them."""
    made, reached = [since], max((row["step"] for row in rows if row["time"] <= since), default=0)
    for row in sorted(rows, key=lambda row: float(row["time"])):
        if since < row["time"] <= until and row["step"] > reached:
            made.append(row["time"])
            reached = row["step"]
    return max((after - before for before, after in itertools.pairwise(made)), default=0.0)


def _rows(scene: Scene) -> list[dict[str, Any]]:
    """The logged steps; an evaluation is not one."""
    return [row for row in scene.training.rows() if "train/loss" in row]


def _newest(scene: Scene) -> int:
    return max((int(row["step"]) for row in _rows(scene)), default=0)


def _wait(scene: Scene, ready: Any, what: str) -> Any:
    """Wait for something the run has to do by itself; at its early end, or too late, fail with all that is known."""
    training = scene.training

    def over() -> bool:
        return scene.cluster.state(training.job) in OVER

    try:
        found = scene.cluster.wait_for(lambda: ready() or (over() and "over"), RECOVERY_SECONDS, what, every=0.3)
    except TimeoutError as error:
        raise AssertionError(f"{error}\n{training.story()}") from None
    found = ready() if found == "over" else found
    assert found, f"the job ended before: {what}\n{training.story()}"
    return found


def table(costs: Sequence[Cost], title: str) -> str:
    """What each fault cost, for people."""
    lines = [
        title,
        "",
        f"{'':>3} {'fault':<26} {'where':<7} {'at step':>7} {'attempts':>8} {'steps repeated':>14} {'seconds':>8}",
    ]
    for number, cost in enumerate(costs, start=1):
        where = cost.strike.node if FAULTS[cost.strike.kind].local else "job"
        lines.append(
            f"{number:>3} {cost.strike.kind:<26} {where:<7} {cost.step:>7} {cost.attempts:>8} {cost.repeated:>14} "
            f"{cost.seconds:>8.1f}"
        )
    total = f"{sum(cost.attempts for cost in costs):>8} {sum(cost.repeated for cost in costs):>14}"
    seconds = sum(cost.seconds for cost in costs)
    lines += [f"{'':>3} {'all':<26} {'':<7} {'':>7} {total} {seconds:>8.1f}", ""]
    lines += [
        f"Seconds: the longest time without a new step. The mean over the faults: {seconds / max(1, len(costs)):.1f} s."
    ]
    return "\n".join(lines) + "\n"


def most_repeated(strike: Strike) -> int:
    """The most steps that a fault may cost: none when there was time to save, else those since the last checkpoint.

    The last checkpoint may still have been on its way to the disk; a damaged one takes the run back to the one before.
    """
    if FAULTS[strike.kind].graceful:
        return 0
    return (3 if strike.kind == "damaged checkpoint" else 2) * EVERY_STEPS
