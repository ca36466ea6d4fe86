"""Proof 1: whatever file operation of a save is the last one, an intact checkpoint is found: the old one or the new."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from checkpoint_cases import RUN_ID, Recorder, checkpointer, restore, same, save, state
from crashing_storage import CrashingStorage, Killed

from cluster_ddp.checkpoint import writer
from cluster_ddp.checkpoint.checkpointer import Checkpointer
from cluster_ddp.checkpoint.verify import verify
from cluster_ddp.run.directory import steps_in

STATES = {step: state(step) for step in (10, 20, 30, 40)}
SETTINGS = {"keep_last": 2, "background": False}


def _first(target: Checkpointer, arm: Callable[[], None]) -> None:
    arm()
    save(target, 10, STATES[10])


def _second_with_retention(target: Checkpointer, arm: Callable[[], None]) -> None:
    for step in (10, 20):
        save(target, step, STATES[step])
    arm()
    save(target, 30, STATES[30])


def _final_keeping_one(target: Checkpointer, arm: Callable[[], None]) -> None:
    save(target, 30, STATES[30])
    arm()
    save(target, 40, STATES[40])


def _same_step_again(target: Checkpointer, arm: Callable[[], None]) -> None:
    """A run that went back to an older checkpoint comes to this step a second time; it is the only one there."""
    save(target, 20, STATES[20])
    arm()
    save(target, 20, STATES[20])


OLD_AND_NEW = {
    _first: (None, 10),
    _second_with_retention: (20, 30),
    _final_keeping_one: (30, 40),
    _same_step_again: (20, 20),
}
SCENARIOS = list(OLD_AND_NEW)


def _settings(scenario: Callable[..., object]) -> dict[str, Any]:
    return {**SETTINGS, "keep_last": 1} if scenario is _final_keeping_one else SETTINGS


# What of the names and of the bytes that were not flushed is there after the crash.
KEPT = [*itertools.product((0.0, 0.34, 0.67, 1.0), (0.0, 0.5), (False,)), (1.0, 0.0, True)]
names = [scenario.__name__.strip("_") for scenario in SCENARIOS]


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several writes for a small shard."""
    monkeypatch.setattr(writer, "PIECE", 500)


def _armed(folder: Path, at: int | None, fault: str) -> tuple[CrashingStorage, Callable[[], None]]:
    """A storage that goes wrong at operation `at` after it was armed."""
    folder.mkdir()
    storage = CrashingStorage(folder, None, fault)

    def arm() -> None:
        storage.at = None if at is None else len(storage.operations) + at

    return storage, arm


def _operations(folder: Path, scenario: Callable[..., object]) -> int:
    """How many operations the save takes that is to be interrupted."""
    storage, _ = _armed(folder, None, "kill")
    before = 0

    def mark() -> None:
        nonlocal before
        before = len(storage.operations)

    scenario(checkpointer(folder / "checkpoints", storage=storage, **_settings(scenario)), mark)
    return len(storage.operations) - before


@pytest.mark.parametrize("scenario", SCENARIOS, ids=names)
def test_killed_at_every_operation(scenario: Callable[..., None], tmp_path: Path) -> None:
    count = _operations(tmp_path / "counted", scenario)
    assert count >= 12
    outcomes = set()
    old, new = OLD_AND_NEW[scenario]
    for at in range(count + 1):
        folder = tmp_path / str(at)
        storage, arm = _armed(folder, at, "kill")
        events = Recorder()
        target = checkpointer(folder / "checkpoints", events, storage=storage, **_settings(scenario))
        with pytest.raises(Killed) if at < count else contextlib.nullcontext():
            scenario(target, arm)
        told = any(fields["step"] == new for fields in events.of("checkpoint")) and old != new
        for names_kept, bytes_kept, outer_lost in KEPT:
            found = folder / f"after-{names_kept}-{bytes_kept}-{outer_lost}"
            storage.after_crash(found, names_kept=names_kept, bytes_kept=bytes_kept, outer_lost=outer_lost)
            outcomes.add(outcome := _check_found(found / "checkpoints"))
            assert outcome == new or not told, "what was reported as durable is gone"
    assert outcomes == {old, new}, "interrupted early it is the old one, late the new one"


def _check_found(directory: Path) -> int | None:
    """Nothing under a final name is damaged, restore finds the newest, and the next save works and leaves no rest."""
    for step in steps_in(directory):
        verify(directory / f"step-{step:08d}", RUN_ID)
    events = Recorder()
    target = checkpointer(directory, events, **SETTINGS)
    live = {name: tensor * 0 for name, tensor in STATES[10].items()}
    restored = target.restore(live)
    assert not events, "a crash looks like damage"
    if restored is not None:
        assert same(live, STATES[restored.step])
        assert restored.scalars["schedule"] == {"at": restored.step}
    save(target, 50, STATES[10])
    assert events.of("checkpoint")
    assert all(path.name.startswith("step-") for path in directory.iterdir()), "left-overs stay"
    return restored.step if restored is not None else None


def test_a_failed_save_says_what_follows_and_whether_there_is_a_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    storage, arm = _armed(tmp_path / "run", 0, "always")
    target = checkpointer(tmp_path / "run/checkpoints", storage=storage, **SETTINGS)
    arm()
    save(target, 10, STATES[10])
    storage.at = None
    save(target, 20, STATES[20])
    arm()
    save(target, 30, STATES[30])
    save(target, 40, STATES[40], is_last=True)
    first, later, last = capsys.readouterr().err.splitlines()
    assert first.endswith("training continues; there is no checkpoint yet")
    assert later.endswith("training continues; earlier checkpoints are kept")
    assert "the save of step 40 failed" in last and "training continues" not in last
    assert last.endswith("no step follows: if trying again fails as well, remove the cause, for example by freeing "
                         "some space on the run's storage, and resume; earlier checkpoints are kept")  # fmt: skip


@pytest.mark.parametrize("fault", ["once", "always"])
@pytest.mark.parametrize("scenario", SCENARIOS, ids=names)
def test_error_at_every_operation(
    scenario: Callable[..., None], fault: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old, new = OLD_AND_NEW[scenario]
    for at in range(_operations(tmp_path / "counted", scenario)):
        folder = tmp_path / str(at)
        storage, arm = _armed(folder, at, fault)
        events = Recorder()
        target = checkpointer(folder / "checkpoints", events, storage=storage, **_settings(scenario))
        scenario(target, arm)  # raises nothing
        done = events.of("checkpoint")[-1]["step"] == new if events.of("checkpoint") else False
        failed = events.of("checkpoint-failed")
        if failed:
            assert failed[0]["error"] == "Input/output error" and failed[0]["rank"] == 0 and failed[0]["file"]
            assert "training continues" in capsys.readouterr().err
        assert done or failed
        storage.at = None
        restored, live = restore(folder / "checkpoints", STATES[10])
        assert (restored.step if restored else None) in (old, new)
        if restored is not None:
            assert same(live, STATES[restored.step])
        save(target, 50, STATES[20])
        assert events[-1][0] == "checkpoint" and events[-1][1]["step"] == 50
        assert all(path.name.startswith("step-") for path in (folder / "checkpoints").iterdir())
