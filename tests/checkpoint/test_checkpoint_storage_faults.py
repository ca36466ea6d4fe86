"""Proof 3: full, read-only, failing and slow storage. Training goes on, and so do saves once there is room."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from checkpoint_cases import Recorder, checkpointer, restore, same, save, state

from cluster_ddp.run.storage import Storage

MEBIBYTE = 1 << 20


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 16 MiB."""
    mount = shutil.which("mount")
    if mount is None or os.geteuid() != 0:
        pytest.skip("mounting a small file system needs root")
    folder = tmp_path / "disk"
    folder.mkdir()
    done = subprocess.run([mount, "-t", "tmpfs", "-o", "size=16m", "tmpfs", folder], capture_output=True, text=True)
    if done.returncode != 0:
        pytest.skip(f"this place does not allow mounting a tmpfs: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", folder], check=True, timeout=30)


def big(seed: int, mebibytes: int) -> dict[str, torch.Tensor]:
    return {**state(seed), "model.big": torch.full((mebibytes * MEBIBYTE // 4,), float(seed))}


def test_full_disk(small_disk: Path, capfd: pytest.CaptureFixture[str]) -> None:
    events = Recorder()
    target = checkpointer(small_disk / "checkpoints", events, keep_last=1)
    save(target, 1, big(1, 4))
    assert target.finish()
    filler = small_disk / "filler"
    filler.write_bytes(bytes(10 * MEBIBYTE))
    for step in (2, 3):
        save(target, step, big(step, 4))
        assert not target.finish()
    assert target.last_saved == 1
    assert [(f["step"], f["rank"], f["file"], f["error"]) for f in events.of("checkpoint-failed")] == [
        (step, 0, "shard-0000.safetensors", "No space left on device") for step in (2, 3)
    ]
    assert "the save of step 2 failed" in capfd.readouterr().err
    assert [path.name for path in (small_disk / "checkpoints").iterdir()] == ["step-00000001"], "half a save stays"
    restored, live = restore(small_disk / "checkpoints", big(0, 4))
    assert restored is not None and restored.step == 1 and same(live, big(1, 4))
    filler.unlink()
    save(target, 4, big(4, 4))
    assert target.finish() and target.last_saved == 4
    restored, live = restore(small_disk / "checkpoints", big(0, 4))
    assert restored is not None and restored.step == 4 and same(live, big(4, 4))


def test_a_limit_on_the_size_of_files_is_named(tmp_path: Path) -> None:
    events, before = Recorder(), resource.getrlimit(resource.RLIMIT_FSIZE)
    target = checkpointer(tmp_path / "checkpoints", events)
    resource.setrlimit(resource.RLIMIT_FSIZE, (MEBIBYTE, before[1]))
    try:
        save(target, 1, big(1, 4))
        assert not target.finish()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert [fields["error"] for fields in events.of("checkpoint-failed")] == [
        "the limit on the size of a file was reached (ulimit -f, or that of the file system)"
    ]


def test_a_checkpoints_folder_that_is_removed_is_made_again_but_no_run_directory(tmp_path: Path) -> None:
    """A person clears the run's checkpoints while it trains; a run directory that is gone may be a lost mount."""
    run = tmp_path / "run"
    run.mkdir()
    target = checkpointer(run / "checkpoints", Recorder())
    save(target, 1, state(1))
    assert target.finish()
    shutil.rmtree(run / "checkpoints")
    save(target, 2, state(2))
    assert target.finish() and target.last_saved == 2
    restored, live = restore(run / "checkpoints", state(0))
    assert restored is not None and restored.step == 2 and same(live, state(2))
    shutil.rmtree(run)
    save(target, 3, state(3))
    assert not target.finish() and not run.exists()


def test_no_room_for_the_manifest(small_disk: Path) -> None:
    """The disk fills up after the shard: the folder must not get its final name."""

    class Filling(Storage):
        def open_write(self, path: Path, mode: int = 0o644) -> int:
            if path.name == "manifest.json" and not filler.exists():
                with filler.open("wb", buffering=0) as file:
                    while True:
                        try:
                            file.write(bytes(4096))
                        except OSError:
                            break
            return super().open_write(path, mode)

    filler = small_disk / "filler"
    events = Recorder()
    target = checkpointer(small_disk / "checkpoints", events, Filling())
    save(target, 1, big(1, 4))
    assert not target.finish()
    (failed,) = events.of("checkpoint-failed")
    assert failed["error"] == "No space left on device" and failed["file"] == "manifest.json"
    assert list((small_disk / "checkpoints").iterdir()) == []
    with filler.open("rb+") as file:
        file.truncate(0)
    save(target, 2, big(2, 4))
    assert target.finish()


def test_read_only_storage(small_disk: Path) -> None:
    events = Recorder()
    target = checkpointer(small_disk / "checkpoints", events)
    save(target, 1, state(1))
    target.finish()
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True, timeout=30)
    save(target, 2, state(2))
    assert not target.finish()
    (failed,) = events.of("checkpoint-failed")
    assert failed["error"] == "Read-only file system"
    restored, live = restore(small_disk / "checkpoints", state(0))  # a new attempt can still read
    assert restored is not None and restored.step == 1 and same(live, state(1))
    subprocess.run(["mount", "-o", "remount,rw", small_disk], check=True, timeout=30)
    save(target, 3, state(3))
    assert target.finish()


def test_damaged_on_read_only_storage(small_disk: Path) -> None:
    """It cannot be set aside, and is skipped all the same."""
    target = checkpointer(small_disk / "checkpoints")
    for step in (1, 2):
        save(target, step, state(step))
    target.finish()
    os.truncate(small_disk / "checkpoints/step-00000002/shard-0000.safetensors", 50)
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True, timeout=30)
    restored, live = restore(small_disk / "checkpoints", state(0))
    assert restored is not None and restored.step == 1 and same(live, state(1))


def test_slow_storage_does_not_slow_the_loop(tmp_path: Path) -> None:
    class Slow(Storage):
        def write(self, fd: int, data: bytes | bytearray | memoryview) -> None:
            time.sleep(0.4)
            super().write(fd, data)

    target = checkpointer(tmp_path, storage=Slow(), when_busy="skip")
    began = time.monotonic()
    for step in range(1, 50):
        save(target, step, state(step))
    assert time.monotonic() - began < 0.4
    assert target.finish() and target.last_saved == 1


def test_an_event_that_cannot_be_recorded_is_told_later(tmp_path: Path) -> None:
    """The disk that is too full for the checkpoint is too full for the event."""

    class Failing(Storage):
        fail = True

        def fsync(self, fd: int) -> None:
            if self.fail:
                raise OSError(28, os.strerror(28))
            super().fsync(fd)

    class Full(Recorder):
        def __call__(self, event: str, fields: dict[str, object]) -> bool:  # type: ignore[override]
            if storage.fail:
                return False
            super().__call__(event, fields)
            return True

    storage, events = Failing(), Full()
    target = checkpointer(tmp_path, events, storage)
    save(target, 1, state(1))
    target.finish()
    assert not events
    storage.fail = False
    save(target, 2, state(2))
    target.finish()
    assert [(event, fields["step"]) for event, fields in events] == [("checkpoint-failed", 1), ("checkpoint", 2)]


def test_a_report_that_raises_does_not_stop_saving(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    class Broken(Recorder):
        def __call__(self, event: str, fields: dict[str, object]) -> None:
            raise ValueError("no such event")

    target = checkpointer(tmp_path, Broken())
    for step in (1, 2):
        save(target, step, state(step))
        assert target.finish() and target.last_saved == step
    assert "cannot report checkpoint" in capfd.readouterr().err


def test_what_was_logged_is_durable_before_the_checkpoint_that_it_led_to(tmp_path: Path) -> None:
    """After a power cut the attempt that goes on from a checkpoint does not log again what came before it."""

    class Watched(Storage):
        def flush_lines(self, path: Path) -> None:
            done.append(path.name)
            super().flush_lines(path)

        def rename(self, source: Path, target: Path) -> None:
            done.append(target.name)
            super().rename(source, target)

    done: list[str] = []
    target = checkpointer(tmp_path / "checkpoints", storage=Watched(), background=False)
    save(target, 1, state(1))  # with nothing logged
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    save(target, 2, state(2))
    assert done == ["metrics.jsonl", "step-00000001", "metrics.jsonl", "step-00000002"]
    assert target.last_saved == 2
