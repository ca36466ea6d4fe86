"""What a stranger, a broken disk or another version may have left in a run: no command hangs, fails or hides others."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hostile_runs import FILES, FOLDERS, OTHERS, Commands, check, make_bad_run, make_bad_sweep, use
from run_builders import begin_dead

import cluster_ddp.cli
from cluster_ddp.launch.logs import AttemptLogs
from cluster_ddp.launch.sign_of_life import SignOfLife, touched_at
from cluster_ddp.run.directory import RunDirectory
from cluster_ddp.run.errors import RunError


def a_pipe(path: Path) -> None:
    os.mkfifo(path)


def a_link_to_zeros(path: Path) -> None:
    path.symlink_to("/dev/zero")


def a_sparse_file(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(50 << 30)


def a_folder(path: Path) -> None:
    path.mkdir()


def a_file(path: Path) -> None:
    path.write_text("{}")


def a_link_to_itself(path: Path) -> None:
    path.symlink_to(path)


def brackets(path: Path) -> None:
    path.write_text("[" * 200_000)


def a_huge_integer(path: Path) -> None:
    number = "9" * 400
    names = ("time", "step", "samples", "attempt", "begun", "ended", "created", "pid", "format", "nodes", "level")
    path.write_text("{" + ", ".join(f'"{name}": {number}' for name in names) + ', "event": "checkpoint"}\n')


@pytest.mark.parametrize("kind", [a_pipe, a_link_to_zeros, a_sparse_file, a_folder, brackets, a_huge_integer])
def test_a_run_with_odd_files_harms_no_command_and_hides_no_other(
    folder: Path, commands: Commands, kind: Callable[[Path], None]
) -> None:
    for name in FILES:
        (folder / "bad" / name).unlink()
        kind(folder / "bad" / name)
    said = check(commands)
    assert "run.json cannot be read" in said


@pytest.mark.parametrize("kind", [a_pipe, a_sparse_file, brackets])
def test_files_that_few_commands_read_may_be_odd_too(
    folder: Path, commands: Commands, kind: Callable[[Path], None]
) -> None:
    for name in OTHERS:
        if kind is a_sparse_file and name.endswith(".log"):
            continue  # a log may be as long as it likes, and is shown
        (folder / "bad" / name).unlink(missing_ok=True)
        kind(folder / "bad" / name)
    check(commands)
    use(commands)


@pytest.mark.parametrize("kind", [a_pipe, a_link_to_itself, a_file])
def test_what_stands_in_place_of_a_folder_harms_no_command(
    folder: Path, commands: Commands, kind: Callable[[Path], None]
) -> None:
    for name in FOLDERS:
        path, aside = folder / "bad" / name, folder.parent / "aside"
        path.mkdir(exist_ok=True)
        path.rename(aside)
        kind(path)
        check(commands)
        use(commands)
        path.unlink()
        aside.rename(path)


def test_a_number_of_nodes_that_nobody_has_is_refused(folder: Path, commands: Commands) -> None:
    local = make_bad_run(folder, name="local", via="local")
    local.record_file.write_text(local.record_file.read_text().replace('"nodes": 1', f'"nodes": {1 << 60}'))
    assert "nodes has a value that cluster_ddp never writes" in commands.call("resume", "local")


def test_a_sweep_of_too_many_elements_is_refused(folder: Path, commands: Commands) -> None:
    record = make_bad_sweep(folder).path.parent / "sweep.json"
    elements = [{"name": f"{number:04d}-x", "settings": []} for number in range(20_000)]
    record.write_text(json.dumps({**json.loads(record.read_text()), "elements": elements}))
    assert "20,000 elements and 0 arrays are too many" in commands.call("status", "bad-sweep")
    assert "bad-sweep" in commands.call("list")


def test_a_sign_of_life_is_neither_left_nor_looked_for_behind_a_link_or_a_pipe(tmp_path: Path) -> None:
    link, pipe, other = tmp_path / "link", tmp_path / "pipe", tmp_path / "other"
    link.symlink_to(other)
    os.mkfifo(pipe)
    for file in (link, pipe):
        SignOfLife(file).give()
        assert touched_at(file) is None
    assert not other.exists()


def test_a_log_is_read_piece_by_piece_however_long_it_is(folder: Path, commands: Commands) -> None:
    attempt = RunDirectory(folder / "bad").attempt(0)
    attempt.log_file(0).write_bytes(b"x" * (20 << 20))
    read = [len(line.text) for _, line in AttemptLogs(attempt, node=0).lines(rest=True)]
    assert sum(read) == 20 << 20 and max(read) <= 5 << 20


@pytest.mark.parametrize("moment", ["1e300", "-1e18", "-1.7e308", "1e999", "NaN", '"now"', "9" * 400])
def test_times_out_of_range_are_no_times(folder: Path, commands: Commands, moment: str) -> None:
    bad = RunDirectory(folder / "bad")
    record = bad.record_file.read_text()
    bad.record_file.write_text(record.replace(f'"created": {json.loads(record)["created"]!r}', f'"created": {moment}'))
    attempt = bad.attempt(0).record_file
    text = attempt.read_text()
    attempt.write_text(text.replace(f'"begun": {json.loads(text)["begun"]!r}', f'"begun": {moment}'))
    line = f'{{"time": {moment}, "event": "checkpoint", "attempt": 0, "step": 3}}\n'
    (bad.events / "rank-0.jsonl").write_text(line)
    bad.metrics_file.write_text(line)
    assert "created has a value that cluster_ddp never writes" in check(commands) or moment == "9" * 400


def test_values_of_another_kind_are_as_good_as_not_there(folder: Path, commands: Commands) -> None:
    bad = RunDirectory(folder / "bad")
    names = ("step", "samples", "total_steps", "node", "rank", "host", "reason", "error", "by", "signal", "cancels")
    lines = []
    for event in ("started", "failed", "node-finished", "node-lost", "rank-failed", "stopped", "checkpoint", "hang"):
        for value in ([], {}, [[1]], -5, 1e300, True, "\x1b[2J", ["a"]):
            line = {"time": time.time(), "event": event, "attempt": 0, **dict.fromkeys(names, value)}
            lines.append(json.dumps(line) + "\n")
    (bad.events / "rank-0.jsonl").write_text("".join(lines))
    assert "\x1b" not in check(commands)


ESCAPES = "\x1b]52;c;cm0gLXJmIH4=\x07\x1b]0;title\x1b\\\\\x1b[2J\x9b31m\u202e\r"


def test_no_escape_sequence_of_a_run_reaches_the_terminal(folder: Path, commands: Commands) -> None:
    bad = RunDirectory((folder / "bad").rename(folder / f"bad{ESCAPES.replace('/', '')}"))
    record = json.loads(bad.record_file.read_text())
    strange = {"name": ESCAPES, "via": ESCAPES, "id": bad.id, "slurm_job_ids": []}
    bad.record_file.write_text(json.dumps({**record, **strange}))
    failed = {"event": "failed", "error": f"oops {ESCAPES}", "host": ESCAPES, "rank": 0, "attempt": 0}
    (bad.events / "rank-0.jsonl").write_text(json.dumps({**failed, "time": time.time()}) + "\n")
    bad.metrics_file.write_text(json.dumps({"step": 1, "attempt": 0, f"val/{ESCAPES}": 1.0}) + "\n")
    (bad.checkpoints / "step-00000001" / f"odd{ESCAPES}").mkdir()
    (bad.checkpoints / f"damaged-{ESCAPES}").mkdir()
    bad.attempt(0).stop_file.unlink()
    make_bad_sweep(folder).path.parent.rename(folder / f"sweep\nforged{ESCAPES.replace('/', '')}")
    name = bad.id
    calls = (("list",), ("status",), ("status", name), ("checkpoints", name), ("stop", name), ("status", f"x{ESCAPES}"))
    calls += ("cancel", name), ("submit", f"no{ESCAPES}.yaml")
    said = "".join(commands.call(*words) for words in calls)
    assert "oops" in said and "val/" in said and "neighbour" in said and "\nforged" not in said
    assert [character for character in said if not character.isprintable() and character != "\n"] == []


def test_what_the_commands_print_goes_through_one_function() -> None:
    """A print of its own in a command is how the next escape sequence would get through."""
    commands = Path(cluster_ddp.cli.__file__).parent
    printing = [file.name for file in commands.glob("*.py") if re.search(r"(?<![\w.])print\(", file.read_text())]
    assert printing == ["output.py"]


def test_a_link_to_another_file_is_not_written_through(folder: Path, commands: Commands, tmp_path: Path) -> None:
    from cluster_ddp.run.events import EventWriter
    from cluster_ddp.train.metrics.file import LineFile

    bad, other = RunDirectory(folder / "bad"), tmp_path / "other"
    other.write_text("mine\n")
    for path in (bad.events / "login-x.jsonl", bad.metrics_file):
        path.unlink(missing_ok=True)
        path.symlink_to(other)
    assert not EventWriter(bad, "login-x").write("cancelled", attempt=0, by="me")
    with pytest.raises(OSError, match="link"):
        LineFile(bad.metrics_file)
    assert other.read_text() == "mine\n"


@pytest.mark.parametrize("name", ["events", "attempts", "checkpoints", "attempts/000"])
def test_a_link_in_place_of_a_folder_is_not_written_through(
    folder: Path, commands: Commands, tmp_path: Path, name: str
) -> None:
    bad, other = RunDirectory(folder / "bad"), tmp_path / "other"
    (bad.path / name).rename(other)
    (bad.path / name).symlink_to(other)
    before = {path: path.is_file() and path.read_bytes() for path in other.rglob("*")}
    said = check(commands) + use(commands)
    assert f"bad/{name} is a link" in said
    with pytest.raises(RunError, match="is a link"):
        begin_dead(bad)
    assert {path: path.is_file() and path.read_bytes() for path in other.rglob("*")} == before
