"""What a stranger, a broken disk or another version may have left in a run: no command hangs, fails or hides others."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from run_builders import begin_dead, job

import cluster_ddp.cli
from cluster_ddp.launch.attempt_logs import AttemptLogs
from cluster_ddp.run.directory import RunDirectory
from cluster_ddp.run.errors import RunError
from cluster_ddp.run.runs import create_run

SECONDS = 2.0  # of work
PATIENCE = 20.0  # in addition, where the machine is busy: what hangs does so for longer
LIMIT = 2 << 30  # bytes of address space: a reader that takes in a whole sparse file does not get that far

# Calls the commands in one process, each under the limits, and prints what they printed.
COMMANDS = """
import contextlib, io, resource, sys, time
import cluster_ddp.cli.list, cluster_ddp.cli.status, cluster_ddp.cli.stop, cluster_ddp.cli.checkpoints, rich.console
import rich.table, cluster_ddp.checkpoint.verify, cluster_ddp.cli.logs, cluster_ddp.cli.clean, cluster_ddp.cli.export
import cluster_ddp.cli.cancel, cluster_ddp.cli.resume, cluster_ddp.job
from cluster_ddp.cli.app import main
resource.setrlimit(resource.RLIMIT_AS, ({limit}, {limit}))
for words in {calls!r}:
    sys.argv = ["cluster-ddp", *words]
    began, worked = time.monotonic(), time.process_time()
    status = main()
    took, worked = time.monotonic() - began, time.process_time() - worked
    print(f"status {{status}} of {{' '.join(words)}}: {{took:.1f}} s", flush=True)
    assert worked < {seconds} and took < {seconds} + {patience}, (worked, took)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a run that has done something, and a healthy neighbour."""
    runs = tmp_path / "runs"
    neighbour = create_run(job(name="neighbour"), runs_dir=runs, via="local", script=None)
    neighbour.path.rename(runs / "neighbour")
    make_bad_run(runs)
    return runs


def make_bad_run(runs: Path) -> RunDirectory:
    made = create_run(job(name="bad"), runs_dir=runs, via="local", script=None)
    bad = RunDirectory(made.path.rename(runs / "bad"))
    begin_dead(bad)
    now = time.time()
    (bad.events / "rank-0.jsonl").write_text(
        json.dumps({"time": now, "event": "started", "attempt": 0, "step": 0, "total_steps": 300}) + "\n"
    )
    bad.metrics_file.write_text(json.dumps({"step": 1, "attempt": 0, "time": now, "train/loss": 1.0}) + "\n")
    bad.attempt(0).stop_file.write_text('{"reason": "person"}')
    checkpoint = bad.checkpoints / "step-00000001"
    checkpoint.mkdir()
    (checkpoint / "manifest.json").write_text("{}")
    return bad


FILES = (
    "run.json",
    "metrics.jsonl",
    "events/rank-0.jsonl",
    "attempts/000/attempt.json",
    "attempts/000/stop",
    "checkpoints/step-00000001/manifest.json",
)
# Files that some commands read, with what they may hold.
OTHERS: dict[str, Any] = {
    "job.yaml": {"name": "bad", "task": "cluster_ddp.tasks.digits:Digits", "train": {"steps": 300}},
    "resume.json": {"time": 1.0, "host": "here", "pid": 1, "by": "me"},
    "attempts/000/origin.json": {"step": 1, "digest": "00"},
    "attempts/000/environment-0.json": {"host": "here", "node_rank": 0, "ranks": [{"rank": 0}], "variables": {}},
    "attempts/000/node-0.alive": {"time": 1.0},
    "attempts/000/node-0.log": {"time": 1.0},
    "events/digest.json": {"format": 1, "attempts": [], "events": []},
}


def ask(runs: Path, *calls: tuple[str, ...]) -> str:
    """What the commands say, all of them in time and in little memory; the neighbour is in every listing."""
    program = COMMANDS.format(calls=list(calls), limit=LIMIT, seconds=SECONDS, patience=PATIENCE)
    environment = {**os.environ, "CLUSTER_DDP_RUNS": str(runs), "COLUMNS": "400"}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=200, errors="replace"
    )
    assert done.returncode == 0, done.stdout + done.stderr
    said = done.stdout + done.stderr
    assert "unexpected" not in said and "Traceback" not in said, said
    return said


ALL = (("list",), ("status",), ("status", "bad"), ("status", "--json"), ("stop", "bad"), ("checkpoints", "bad"))


def check(runs: Path, *, listed: bool = True) -> str:
    said = ask(runs, *ALL)
    lists = said.partition("status 0 of list")[0], said.partition("of list")[2].partition("of status:")[0]
    for listing in lists:
        assert "neighbour" in listing
        assert "bad" in listing or not listed
    return said


MORE = (
    ("logs", "bad"),
    ("logs", "bad", "--errors"),
    ("clean", "bad", "--older", "1s", "--resumable"),
    ("export", "bad", "-o", "/dev/null"),
    ("cancel", "bad"),
)


def a_pipe(path: Path) -> None:
    os.mkfifo(path)


def a_link_to_zeros(path: Path) -> None:
    path.symlink_to("/dev/zero")


def a_sparse_file(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(50 << 30)


def a_folder(path: Path) -> None:
    path.mkdir()


def brackets(path: Path) -> None:
    path.write_text("[" * 200_000)


def a_huge_integer(path: Path) -> None:
    number = "9" * 400
    names = ("time", "step", "samples", "attempt", "begun", "ended", "created", "pid", "format", "nodes", "level")
    path.write_text("{" + ", ".join(f'"{name}": {number}' for name in names) + ', "event": "checkpoint"}\n')


@pytest.mark.parametrize("kind", [a_pipe, a_link_to_zeros, a_sparse_file, a_folder, brackets, a_huge_integer])
def test_a_run_with_odd_files_harms_no_command_and_hides_no_other(folder: Path, kind: Callable[[Path], None]) -> None:
    for name in FILES:
        (folder / "bad" / name).unlink()
        kind(folder / "bad" / name)
    said = check(folder)
    assert "run.json cannot be read" in said


@pytest.mark.parametrize("kind", [a_pipe, a_sparse_file, brackets])
def test_files_that_few_commands_read_may_be_odd_too(folder: Path, kind: Callable[[Path], None]) -> None:
    for name in OTHERS:
        if kind is a_sparse_file and name.endswith(".log"):
            continue  # a log may be as long as it likes, and is shown
        (folder / "bad" / name).unlink(missing_ok=True)
        kind(folder / "bad" / name)
    check(folder)
    ask(folder, *MORE, ("resume", "bad"))


def test_a_log_is_read_piece_by_piece_however_long_it_is(folder: Path) -> None:
    attempt = RunDirectory(folder / "bad").attempt(0)
    attempt.log_file(0).write_bytes(b"x" * (20 << 20))
    read = [len(line.text) for _, line in AttemptLogs(attempt).lines(rest=True)]
    assert sum(read) == 20 << 20 and max(read) <= 5 << 20


@pytest.mark.parametrize("moment", ["1e300", "-1e18", "-1.7e308", "1e999", "NaN", '"now"', "9" * 400])
def test_times_out_of_range_are_no_times(folder: Path, moment: str) -> None:
    bad = RunDirectory(folder / "bad")
    record = bad.record_file.read_text()
    bad.record_file.write_text(record.replace(f'"created": {json.loads(record)["created"]!r}', f'"created": {moment}'))
    attempt = bad.attempt(0).record_file
    text = attempt.read_text()
    attempt.write_text(text.replace(f'"begun": {json.loads(text)["begun"]!r}', f'"begun": {moment}'))
    line = f'{{"time": {moment}, "event": "checkpoint", "attempt": 0, "step": 3}}\n'
    (bad.events / "rank-0.jsonl").write_text(line)
    bad.metrics_file.write_text(line)
    assert "the value of created is not one" in check(folder) or moment == "9" * 400


def test_values_of_another_kind_are_as_good_as_not_there(folder: Path) -> None:
    bad = RunDirectory(folder / "bad")
    names = ("step", "samples", "total_steps", "node", "rank", "host", "reason", "error", "by", "signal", "cancels")
    lines = []
    for event in ("started", "failed", "node-finished", "node-lost", "rank-failed", "stopped", "checkpoint", "hang"):
        for value in ([], {}, [[1]], -5, 1e300, True, "\x1b[2J", ["a"]):
            line = {"time": time.time(), "event": event, "attempt": 0, **dict.fromkeys(names, value)}
            lines.append(json.dumps(line) + "\n")
    (bad.events / "rank-0.jsonl").write_text("".join(lines))
    assert "\x1b" not in check(folder)


ESCAPES = "\x1b]52;c;cm0gLXJmIH4=\x07\x1b]0;title\x1b\\\\\x1b[2J\x9b31m\u202e\r"


def test_no_escape_sequence_of_a_run_reaches_the_terminal(folder: Path) -> None:
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
    name = bad.id
    calls = (("list",), ("status",), ("status", name), ("checkpoints", name), ("stop", name), ("status", f"x{ESCAPES}"))
    said = ask(folder, *calls, ("cancel", name), ("submit", f"no{ESCAPES}.yaml"))
    assert "oops" in said and "val/" in said and "neighbour" in said
    printed = "".join(line for line in said.splitlines(keepends=True) if not line.startswith("status "))
    assert [character for character in printed if not character.isprintable() and character != "\n"] == []


def test_what_the_commands_print_goes_through_one_function() -> None:
    """A print of its own in a command is how the next escape sequence would get through."""
    commands = Path(cluster_ddp.cli.__file__).parent
    printing = [file.name for file in commands.glob("*.py") if re.search(r"(?<![\w.])print\(", file.read_text())]
    assert printing == ["answer.py"]


def test_a_link_to_another_file_is_not_written_through(folder: Path, tmp_path: Path) -> None:
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
def test_a_link_in_place_of_a_folder_is_not_written_through(folder: Path, tmp_path: Path, name: str) -> None:
    bad, other = RunDirectory(folder / "bad"), tmp_path / "other"
    (bad.path / name).rename(other)
    (bad.path / name).symlink_to(other)
    before = {path: path.is_file() and path.read_bytes() for path in other.rglob("*")}
    said = check(folder) + ask(folder, ("cancel", "bad"), ("resume", "bad"))
    assert f"bad/{name} is a link" in said
    with pytest.raises(RunError, match="is a link"):
        begin_dead(bad)
    assert {path: path.is_file() and path.read_bytes() for path in other.rglob("*")} == before


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda below: st.lists(below, max_size=4) | st.dictionaries(st.text(max_size=9), below, max_size=4),
    max_leaves=10,
)


def spoil(path: Path, data: st.DataObject) -> None:
    """Leave a file as it is, or write anything into it, or remove it."""
    content = path.read_bytes()
    places = st.integers(0, 5000)
    kind = data.draw(st.sampled_from(["as it is", "bytes", "cut", "flipped", "value", "gone"]), label=path.name)
    if kind == "bytes":
        content = data.draw(st.binary(max_size=2000))
    elif kind == "cut":
        content = content[: data.draw(places) % (len(content) + 1)]
    elif kind == "flipped" and content:
        at = data.draw(places) % len(content)
        content = content[:at] + data.draw(st.binary(min_size=1, max_size=3)) + content[at + 1 :]
    elif kind == "value":
        fields = json.loads(content)
        for field in fields or ["x"]:
            fields[field] = data.draw(JSON, label=field)
        content = json.dumps(fields).encode() + b"\n"
    if kind == "gone":
        path.unlink()
    else:
        path.write_bytes(content)


@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(data=st.data())
def test_any_bytes_in_any_file_leave_every_command_with_an_answer(folder: Path, data: st.DataObject) -> None:
    shutil.rmtree(folder / "bad")
    bad = make_bad_run(folder).path
    for name in FILES:
        spoil(bad / name, data)
    check(folder, listed=(bad / "run.json").exists())


def with_all_files(folder: Path) -> Path:
    """A new run to be spoiled, with the files that few commands read as well."""
    shutil.rmtree(folder / "bad")
    bad = make_bad_run(folder).path
    for name, content in OTHERS.items():
        (bad / name).write_text(json.dumps(content) + "\n")
    return bad


@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(data=st.data())
def test_any_bytes_in_files_that_few_commands_read_leave_them_with_an_answer(folder: Path, data: st.DataObject) -> None:
    bad = with_all_files(folder)
    for name in OTHERS:
        spoil(bad / name, data)
    check(folder)
    ask(folder, *MORE)


@pytest.mark.chaos
@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_any_bytes_in_all_files_at_once_leave_every_command_with_an_answer(folder: Path, data: st.DataObject) -> None:
    bad = with_all_files(folder)
    for name in (*FILES, *OTHERS):
        spoil(bad / name, data)
    check(folder, listed=(bad / "run.json").exists())
    ask(folder, *MORE)
