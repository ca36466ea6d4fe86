"""Which checkpoints stay."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from checkpoint_cases import Recorder, checkpointer, restore, same, save, state

from cluster_ddp.checkpoint.folders import surplus, temporary_name, this_process
from cluster_ddp.checkpoint.verify import list_checkpoints
from cluster_ddp.run.directory import steps_in
from cluster_ddp.run.storage import Storage

ACCURACY = {10: 0.5, 20: 0.9, 30: 0.7, 40: 0.9, 50: 0.1}
RATED = {step: {"val/accuracy": value} for step, value in ACCURACY.items()}


@pytest.mark.parametrize(
    ("keep_last", "keep_every", "best", "kept"),
    [
        (1, None, None, {50}),
        (3, None, None, {30, 40, 50}),
        (9, None, None, {10, 20, 30, 40, 50}),
        (1, 20, None, {20, 40, 50}),
        (1, None, ("val/accuracy", "max"), {40, 50}),
        (2, None, ("val/accuracy", "min"), {40, 50}),
        (1, None, ("val/unknown", "max"), {50}),
        (1, 30, ("val/accuracy", "max"), {30, 40, 50}),
    ],
)
def test_what_stays(keep_last: int, keep_every: int | None, best: tuple[str, str] | None, kept: set[int]) -> None:
    gone = surplus(list(ACCURACY), RATED, newest_proven=50, keep_last=keep_last, keep_every=keep_every, best=best)
    assert set(ACCURACY) - set(gone) == kept


def test_the_proven_one_stays_though_newer_ones_are_there() -> None:
    """After a fall-back to step 20 the one just written stays, whatever the folders of the later steps hold."""
    assert surplus([10, 20, 30], {}, newest_proven=20, keep_last=1, keep_every=None, best=None) == [10]


def test_by_saving(tmp_path: Path) -> None:
    settings = {"keep_last": 2, "keep_every": 30, "keep_best": {"metric": "val/accuracy", "mode": "max"}}
    target = checkpointer(tmp_path, **settings)
    for step in (10, 20):
        save(target, step, state(step), **RATED[step])
    target.finish()
    target = checkpointer(tmp_path, **settings)  # a new attempt reads the metrics of the ones before it
    target.restore(state(0))
    for step, value in ((30, 0.7), (40, 0.8), (50, 0.1), (60, 0.2), (70, 0.3)):
        save(target, step, state(step), **{"val/accuracy": value})
    target.finish()
    assert steps_in(tmp_path) == [20, 30, 60, 70]


def test_a_failed_save_removes_nothing(tmp_path: Path) -> None:
    class Failing(Storage):
        fail = False

        def rename(self, source: Path, target: Path) -> None:
            if self.fail and target.name.startswith("step-"):
                raise OSError(5, os.strerror(5))
            super().rename(source, target)

    events, storage = Recorder(), Failing()
    target = checkpointer(tmp_path, events, storage, keep_last=1)
    save(target, 10, state(10))
    target.finish()
    storage.fail = True
    save(target, 20, state(20))
    assert not target.finish()
    assert target.last_saved == 10
    assert events.of("checkpoint-failed") and [path.name for path in tmp_path.iterdir()] == ["step-00000010"]
    _, live = restore(tmp_path, state(0))
    assert same(live, state(10))


def test_links_and_files_in_the_way_do_not_end_the_removing(tmp_path: Path) -> None:
    """An archived checkpoint with a link left in its place, and a file under the name of an unfinished one."""
    directory, archive = tmp_path / "checkpoints", tmp_path / "archive"
    target, events = checkpointer(directory, keep_last=1, background=False), Recorder()
    save(target, 10, state(10))
    (directory / "step-00000010").rename(archive)
    (directory / "step-00000010").symlink_to(archive)
    (directory / temporary_name(5, this_process())).write_text("in the way")
    target = checkpointer(directory, events, keep_last=1, background=False)
    for step in (20, 30, 40):
        save(target, step, state(step))
    assert [path.name for path in directory.iterdir()] == ["step-00000040"]
    assert len(list(archive.iterdir())) == 2, "the archive was emptied through the link"
    assert events.of("removal-failed") == []


def test_what_cannot_be_removed_is_said_once_and_the_rest_goes_on(tmp_path: Path) -> None:
    class Refusing(Storage):
        def rmtree(self, path: Path) -> None:
            if "00000010" in path.name:
                raise PermissionError(13, "Permission denied", str(path))
            super().rmtree(path)

    events = Recorder()
    target = checkpointer(tmp_path, events, Refusing(), keep_last=1, background=False)
    for step in (10, 20, 30, 40):
        save(target, step, state(step))
    assert steps_in(tmp_path) == [40]
    (told,) = events.of("removal-failed")
    assert "00000010" in told["name"] and "Permission denied" in told["reason"]
    listed = {info.state: info for info in list_checkpoints(tmp_path, "any", read_all=False)}
    assert "00000010" in listed["stray"].path.name, "what takes up room is not shown"
