"""Proof 2: whatever is done to a file of a checkpoint, it is never loaded silently, and the one before it is used."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from checkpoint_cases import RUN_ID, Recorder, blank, checkpointer, same, save, state

from cluster_ddp.checkpoint.errors import CheckpointError, CheckpointMismatch, NoIntactCheckpoint
from cluster_ddp.checkpoint.format import digest, encode
from cluster_ddp.checkpoint.verify import list_checkpoints, newest_intact

OTHER_ID = "other-20260101-000000-0000"
OLD, NEW = state(1, size=200), state(2, size=200)
SHARD = "shard-0000.safetensors"


@pytest.fixture(scope="module")
def intact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two checkpoints of this run, and one of another run at the same step with the same tensors."""
    folder = tmp_path_factory.mktemp("intact")
    for directory, run_id in ((folder / "checkpoints", RUN_ID), (folder / "other", OTHER_ID)):
        target = checkpointer(directory, run_id=run_id, background=False)
        save(target, 10, OLD)
        save(target, 20, NEW)
    return folder


def _check(intact: Path, tmp_path: Path, damage: Callable[[Path], None], file: str) -> None:
    """After the damage the old checkpoint is loaded, the new one set aside whole, and the file named."""
    directory = tmp_path / "checkpoints"
    shutil.rmtree(directory, ignore_errors=True)
    shutil.copytree(intact / "checkpoints", directory)
    newest = directory / "step-00000020"
    damage(newest)
    left = sorted(path.name for path in newest.iterdir())
    listed = {info.step: info for info in list_checkpoints(directory, RUN_ID, read_all=True)}
    assert listed[20].state == "damaged" and any(text.startswith(f"{file}:") for text in listed[20].problems)
    events, live = Recorder(), blank(OLD)
    restored = checkpointer(directory, events).restore(live)
    assert restored is not None and restored.step == 10
    assert same(live, OLD)
    (told,) = events.of("checkpoint-damaged")
    assert told["step"] == 20 and any(text.startswith(f"{file}:") for text in told["problems"])
    assert told["set_aside"].startswith("damaged-")
    assert sorted(path.name for path in (directory / told["set_aside"]).iterdir()) == left, "something was deleted"


def _check_foreign(intact: Path, tmp_path: Path, replace: Callable[[Path], None]) -> None:
    """The old checkpoint is loaded; the new one is named as another run's, and stays under its name as it is."""
    directory = tmp_path / "checkpoints"
    shutil.copytree(intact / "checkpoints", directory)
    newest = directory / "step-00000020"
    replace(newest)
    before = {path.name: path.read_bytes() for path in newest.iterdir()}
    listed = {info.step: info for info in list_checkpoints(directory, RUN_ID, read_all=True)}
    assert listed[20].state == "other-run" and OTHER_ID in listed[20].problems[0]
    assert newest_intact(directory, RUN_ID)[0].name == "step-00000010"
    events, live = Recorder(), blank(OLD)
    restored = checkpointer(directory, events).restore(live)
    assert restored is not None and restored.step == 10 and same(live, OLD)
    (told,) = events.of("checkpoint-damaged")
    assert told["step"] == 20 and told["set_aside"] is None
    assert told["problems"] == [f"of another run, {OTHER_ID}; this run is {RUN_ID}"]
    assert {path.name: path.read_bytes() for path in newest.iterdir()} == before


def _lengths(size: int) -> Iterator[int]:
    yield from (0, 1, 7, 8, 9, size // 2, size - 1)
    yield from random.Random(0).sample(range(size), 15)


@pytest.mark.parametrize("file", [SHARD, "manifest.json"])
def test_truncated(intact: Path, tmp_path: Path, file: str) -> None:
    for length in _lengths((intact / "checkpoints/step-00000020" / file).stat().st_size):
        _check(intact, tmp_path, lambda folder, length=length: os.truncate(folder / file, length), file)


@pytest.mark.parametrize("file", [SHARD, "manifest.json"])
def test_longer(intact: Path, tmp_path: Path, file: str) -> None:
    def append(folder: Path) -> None:
        with (folder / file).open("ab") as opened:
            opened.write(b"x")

    _check(intact, tmp_path, append, file)


def _flip(path: Path, at: int, bit: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1 << bit
    path.write_bytes(data)


def test_flipped_in_the_shard(intact: Path, tmp_path: Path) -> None:
    path = intact / "checkpoints/step-00000020" / SHARD
    head = 8 + int.from_bytes(path.read_bytes()[:8], "little")
    places = [*range(0, 8), *range(8, head, 37), head, path.stat().st_size - 1]
    places += random.Random(1).sample(range(head, path.stat().st_size), 40)
    for at in places:
        _check(intact, tmp_path, lambda folder, at=at: _flip(folder / SHARD, at, at % 8), SHARD)


def test_flipped_in_the_manifest(intact: Path, tmp_path: Path) -> None:
    size = (intact / "checkpoints/step-00000020/manifest.json").stat().st_size
    for at in [0, size - 1, *random.Random(2).sample(range(size), 60)]:
        _check(intact, tmp_path, lambda folder, at=at: _flip(folder / "manifest.json", at, at % 8), "manifest.json")


@pytest.mark.parametrize("file", [SHARD, "manifest.json"])
def test_deleted(intact: Path, tmp_path: Path, file: str) -> None:
    _check(intact, tmp_path, lambda folder: (folder / file).unlink(), file)


@pytest.mark.parametrize("source", ["checkpoints/step-00000010", "other/step-00000020", "other/step-00000010"])
@pytest.mark.parametrize("file", [SHARD, "manifest.json"])
def test_replaced_by_another(intact: Path, tmp_path: Path, file: str, source: str) -> None:
    if (
        file == SHARD
        and (intact / source / file).read_bytes() == (intact / "checkpoints/step-00000020" / file).read_bytes()
    ):
        return  # the same state at the same step has the same bytes: nothing to notice

    def replace(folder: Path) -> None:
        shutil.copy(intact / source / file, folder / file)

    if file != SHARD and source.startswith("other"):
        _check_foreign(intact, tmp_path, replace)
    else:
        _check(intact, tmp_path, replace, file)


@pytest.mark.parametrize("source", ["checkpoints/step-00000010", "other/step-00000020", "other/step-00000010"])
def test_replaced_whole(intact: Path, tmp_path: Path, source: str) -> None:
    def replace(folder: Path) -> None:
        shutil.rmtree(folder)
        shutil.copytree(intact / source, folder)

    if source.startswith("other"):
        _check_foreign(intact, tmp_path, replace)
    else:
        _check(intact, tmp_path, replace, "manifest.json")


def test_only_those_of_another_run_is_a_clear_failure_that_touches_nothing(intact: Path, tmp_path: Path) -> None:
    directory = tmp_path / "checkpoints"
    shutil.copytree(intact / "other", directory)
    before = sorted(directory.rglob("*"))
    with pytest.raises(
        CheckpointError, match=rf"step-00000020: of another run, {OTHER_ID}; this run is {RUN_ID}"
    ) as refused:
        checkpointer(directory).restore(blank(OLD))
    assert not refused.value.comes_back  # unlike damage, what keeps one from being read may pass
    assert sorted(directory.rglob("*")) == before


def test_saving_leaves_those_of_another_run_alone(
    intact: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """They are neither replaced by a save of their step, nor removed, nor counted among those that are kept."""
    directory = tmp_path / "checkpoints"
    shutil.copytree(intact / "other", directory)
    theirs = {path: path.read_bytes() for path in directory.rglob("*.*")}
    events = Recorder()
    target = checkpointer(directory, events, background=False, keep_last=2)
    durable = []
    for step in (5, 10, 15, 20, 25):
        save(target, step, OLD)
        durable.append(target.finish())
    assert durable == [True, False, True, False, True]
    assert [(told["step"], OTHER_ID in told["error"]) for told in events.of("checkpoint-failed")] == [
        (10, True),
        (20, True),
    ]
    assert "move it out of this run's folder" in capfd.readouterr().err
    assert {path: path.read_bytes() for path in theirs} == theirs
    assert sorted(path.name for path in directory.iterdir()) == [f"step-{step:08d}" for step in (10, 15, 20, 25)]


def test_file_too_much(intact: Path, tmp_path: Path) -> None:
    _check(
        intact, tmp_path, lambda folder: (folder / "shard-0001.safetensors").write_bytes(b""), "shard-0001.safetensors"
    )


@pytest.mark.parametrize("file", [SHARD, "manifest.json"])
def test_link_or_pipe_instead_of_a_file(intact: Path, tmp_path: Path, file: str) -> None:
    def link(folder: Path) -> None:
        (folder / file).rename(tmp_path / "elsewhere")
        (folder / file).symlink_to(tmp_path / "elsewhere")

    def pipe(folder: Path) -> None:
        (folder / file).unlink()
        os.mkfifo(folder / file)

    for damage in (link, pipe):
        _check(intact, tmp_path, damage, file)


def test_a_manifest_of_200_gb(intact: Path, tmp_path: Path) -> None:
    def sparse(folder: Path) -> None:
        with (folder / "manifest.json").open("r+b") as file:
            file.truncate(200 << 30)

    _check(intact, tmp_path, sparse, "manifest.json")


def test_empty_folder(intact: Path, tmp_path: Path) -> None:
    def empty(folder: Path) -> None:
        shutil.rmtree(folder)
        folder.mkdir()

    _check(intact, tmp_path, empty, "manifest.json")


@pytest.mark.parametrize(
    "change",
    [
        lambda body: body["shards"].update({"../../job.yaml": {"bytes": 1, "xxh3": "0"}}),
        lambda body: body["tensors"]["model.layer.weight"].update(shape=[3, 200]),
        lambda body: body["tensors"]["model.layer.weight"].update(shape=[-1, 3]),
        lambda body: body["tensors"]["model.layer.weight"].update(shard="shard-0009.safetensors"),
        lambda body: body["tensors"].pop("model.layer.weight"),
        lambda body: body["tensors"].pop("optimizer.layer.weight.exp_avg"),
        lambda body: body["tensors"]["optimizer.layer.weight.exp_avg"].update(dtype="I32"),
        lambda body: body.pop("scalars"),
        lambda body: body.update(step="20"),
        lambda body: body.update(format=2),
        lambda body: body.update(aliases={"model.x": "model.y"}),
        lambda body: body.update(created=10**400),
        lambda body: body.update(created=-1e300),
        lambda body: body.update(metrics={"val/accuracy": 10**400}),
        lambda body: body.update(samples=10**400),
        lambda body: body["shards"][SHARD].update(bytes=10**400),
        lambda body: body["tensors"]["model.layer.weight"].update(shape=[10**400, 3]),
        lambda body: body["tensors"]["optimizer.layer.weight.exp_avg"].update(shape=[10**6, 10**6, 10**6]),
        lambda body: body["tensors"]["optimizer.layer.weight.exp_avg"].update(shape=[0, 10**30]),
        lambda body: body["scalars"].update(counts={"skipped": [-(10**400)]}),
        lambda body: body.update(metrics=[]),
        lambda body: body.update(versions=7),
    ],
)
def test_false_manifest_with_a_true_digest(
    intact: Path, tmp_path: Path, change: Callable[[dict[str, object]], object]
) -> None:
    """What a stranger could write: the digest holds, the content does not."""

    def forge(folder: Path) -> None:
        body = json.loads((folder / "manifest.json").read_bytes())
        change(body)
        body["digest"] = digest(body)
        (folder / "manifest.json").write_bytes(encode(body))

    directory = tmp_path / "checkpoints"
    shutil.copytree(intact / "checkpoints", directory)
    forge(directory / "step-00000020")
    old = {name: tensor for name, tensor in OLD.items() if not name.startswith("optimizer.")}
    events, live = Recorder(), blank(old)
    try:
        restored = checkpointer(directory, events).restore(live)
    except CheckpointMismatch:
        assert same(live, blank(old))  # refused before anything was touched
    else:
        assert restored is not None and restored.step == 10 and same({**live, **restored.extra}, OLD)
        assert len(events.of("checkpoint-damaged")) == 1


def test_none_left_is_a_clear_failure_that_deletes_nothing(intact: Path, tmp_path: Path) -> None:
    directory = tmp_path / "checkpoints"
    shutil.copytree(intact / "checkpoints", directory)
    for step in ("step-00000010", "step-00000020"):
        _flip(directory / step / SHARD, 900, 3)
    before = sorted(path.stat().st_ino for path in directory.rglob("*"))
    with pytest.raises(NoIntactCheckpoint) as refused:
        checkpointer(directory).restore(blank(OLD))
    what, *which = str(refused.value).splitlines()
    assert "no intact checkpoint is left" in what and "then: cluster-ddp resume" in what
    assert "shard-0000.safetensors: its checksum" in which[0]
    with pytest.raises(NoIntactCheckpoint, match="no intact checkpoint is left"):
        checkpointer(directory).restore(blank(OLD))  # the next attempt does not start from the beginning either
    assert sorted(path.stat().st_ino for path in directory.rglob("*")) == before


def test_damage_in_what_has_no_live_tensor_counts_too(intact: Path, tmp_path: Path) -> None:
    """The optimizer's state, which a new optimizer does not hold yet, is verified like the rest."""
    directory = tmp_path / "checkpoints"
    shutil.copytree(intact / "checkpoints", directory)
    _flip(directory / "step-00000020" / SHARD, (directory / "step-00000020" / SHARD).stat().st_size - 1, 0)
    old = {name: tensor for name, tensor in OLD.items() if not name.startswith("optimizer.")}
    live = blank(old)
    restored = checkpointer(directory).restore(live)
    assert restored is not None and restored.step == 10 and same(live, old)
