from __future__ import annotations

import errno
import json
import multiprocessing
import os
import shutil
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from run_builders import begin_dead

from cluster_ddp.run.attempt_record import read_attempt
from cluster_ddp.run.directory import RunDirectory
from cluster_ddp.run.errors import RunError
from cluster_ddp.run.events import EventWriter, on_this_host, read_events
from cluster_ddp.run.history import read_history
from cluster_ddp.run.lineage import Lineage, Origin
from cluster_ddp.run.metrics import read_latest
from cluster_ddp.run.record import read_record
from cluster_ddp.run.status.report import describe
from cluster_ddp.run.stopfile import REASONS, read_stop


def test_events_of_several_writers_are_read_in_the_order_of_time(run: RunDirectory) -> None:
    first, second = EventWriter(run, "node-0"), EventWriter(run, "rank-0")
    assert first.write("node-started", attempt=0, node=0)
    assert second.write("started", attempt=0, step=0, total_steps=300)
    assert first.write("node-finished", attempt=0, node=0, outcome="done")
    events = read_events(run)
    assert [event["event"] for event in events] == ["node-started", "started", "node-finished"]
    assert events[1]["total_steps"] == 300 and events[1]["attempt"] == 0
    assert abs(events[0]["time"] - time.time()) < 60
    assert sorted(path.name for path in run.events.iterdir()) == ["node-0.jsonl", "rank-0.jsonl"]


def test_no_two_hosts_write_to_one_file(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next attempt begins elsewhere while a node that was cut off still writes."""
    for host in ("here", "there"):
        monkeypatch.setattr("socket.gethostname", lambda host=host: host)
        assert EventWriter(run, on_this_host("node")).write("node-started", attempt=0, node=0)
    assert sorted(path.name for path in run.events.iterdir()) == ["node-here.jsonl", "node-there.jsonl"]
    assert len(read_events(run)) == 2


def test_a_torn_line_is_passed_over_and_does_not_take_the_next_with_it(run: RunDirectory) -> None:
    writer = EventWriter(run, "node-0")
    writer.write("node-started", attempt=0)
    with writer.path.open("ab") as file:
        file.write(b'{"time": 3.0, "event": "check')
    assert [event["event"] for event in read_events(run)] == ["node-started"]
    writer.write("hang", attempt=0)
    assert [event["event"] for event in read_events(run)] == ["node-started", "hang"]


@pytest.mark.parametrize(
    "line",
    ["[]", "3", "null", '{"event": "x"}', '{"time": "now", "event": "x"}', '{"time": NaN, "event": "x"}',
     '{"time": 1, "event": 4}', '{"time": 1, "event": "x", "attempt": "0"}', '{"a":' * 100_000,
     f'{{"time": {10**400}, "event": "x"}}'],
)  # fmt: skip
def test_what_is_no_event_is_passed_over(run: RunDirectory, line: str) -> None:
    (run.events / "strange.jsonl").write_text(line + '\n{"time": 1, "event": "submitted"}\n')
    assert [event["event"] for event in read_events(run)] == ["submitted"]


def test_a_whole_number_beyond_all_floats_is_no_metric(run: RunDirectory) -> None:
    huge = 10**400
    lines = [
        {"attempt": 0, "step": 3, "time": 5.0, "train/loss": 0.5, "train/tokens": 7},
        {"attempt": 0, "step": 4, "time": huge, "train/loss": huge, "train/tokens": -huge},
        {"attempt": 0, "step": huge, "time": 6.0},
    ]
    run.metrics_file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    latest = read_latest(run.metrics_file, Lineage())
    assert latest.values == {"train/loss": 0.5, "train/tokens": 7}
    assert latest.times == {0: 5.0}
    assert describe(run, {}).step == 4


ROWS = st.lists(
    st.tuples(
        st.integers(0, 3),
        st.integers(0, 12),
        st.dictionaries(
            st.sampled_from(["train/loss", "lr", "val/top1", "val/top5", 'odd"name', "é"]),
            st.floats() | st.none() | st.integers() | st.just("text") | st.booleans(),
            max_size=4,
        ),
    ),
    max_size=40,
)
PLACES = st.dictionaries(st.integers(0, 3), st.none() | st.integers(0, 12), max_size=4)


@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows=ROWS, in_order=st.booleans(), places=PLACES, damage=st.sampled_from([b"", b"{torn}\n", b'{"step": 1']))
def test_the_end_of_the_metrics_tells_the_same_as_all_of_them(
    run: RunDirectory,
    rows: list[tuple[int, int, dict[str, object]]],
    in_order: bool,
    places: dict[int, int | None],
    damage: bytes,
) -> None:
    if in_order:
        rows = sorted({row[:2]: row for row in rows}.values(), key=lambda row: row[:2])
    lineage = Lineage({number: Origin(step) for number, step in places.items()})
    as_written, otherwise = [], []  # only rows as the trainer writes them are read from the end
    for count, (attempt, step, values) in enumerate(rows):
        row = {"step": step, "samples": 8 * step, "epoch": 0, "attempt": attempt, "time": 100.0 + count, **values}
        as_written.append(json.dumps(row).encode() + b"\n")
        otherwise.append(json.dumps({"time": row["time"], **row}).encode() + b"\n")
    told = []
    for lines in (as_written, otherwise):
        middle = len(lines) // 2
        run.metrics_file.write_bytes(b"".join([*lines[:middle], damage, *lines[middle:]]))
        latest = read_latest(run.metrics_file, lineage)
        told.append((latest.step, latest.samples, latest.attempt, str(sorted(latest.values.items())), latest.steps))
        told[-1] += (latest.times,)
    assert told[0] == told[1]


def test_storage_that_refuses_is_reported_and_does_not_raise(
    run: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    run.events.rmdir()
    run.events.touch()
    assert not EventWriter(run, "node-0").write("checkpoint", attempt=0, step=5)
    assert "cannot record 'checkpoint'" in capsys.readouterr().err
    assert read_events(run) == []


def test_an_end_is_recorded_although_the_folder_of_events_was_removed(run: RunDirectory) -> None:
    writer = EventWriter(run, "rank-0")
    shutil.rmtree(run.events)
    assert writer.write("completed", attempt=0, step=9)
    assert [event["event"] for event in read_events(run)] == ["completed"]
    run.path.rename(run.path.with_name("moved"))
    assert not writer.write("completed", attempt=0, step=9)
    assert not run.path.exists()


def test_a_writers_name_stays_inside_the_folder(run: RunDirectory) -> None:
    assert EventWriter(run, "../../login-a/b").path.parent == run.events


def test_two_commands_on_one_login_node_do_not_lose_each_others_events(run: RunDirectory) -> None:
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=_write_many, args=(run, index)) for index in range(4)]
    for process in writers:
        process.start()
    for process in writers:
        process.join(60)
    assert sorted((event["index"], event["count"]) for event in read_events(run)) == [
        (index, count) for index in range(4) for count in range(25)
    ]


def _write_many(run: RunDirectory, index: int) -> None:
    for count in range(25):
        EventWriter(run, "login").write("stop-requested", index=index, count=count, filling="x" * 500)


SHARED_FILES = [
    "attempts/000/origin.json",
    "events/node-0.jsonl",
    "metrics.jsonl",
    "run.json",
    "attempts/000/attempt.json",
    "attempts/000/stop",
]
KEYS = st.sampled_from(
    [
        "time",
        "event",
        "attempt",
        "step",
        "samples",
        "reason",
        "level",
        "grace",
        "pid",
        "rank",
        "id",
        "begun",
        "ended",
        "error",
        "slurm_job_ids",
        "nodes",
        "host",
        "boot_id",
        "namespace",
        "started",
        "name",
        "created",
        "via",
        "wandb_id",
        "train/loss",
    ]
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.sampled_from(REASONS),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=10),
    max_leaves=10,
)
EVENTS = st.sampled_from(["started", "checkpoint", "failed", "rank-failed", "completed", "stopped", "resume-requested"])


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    name=st.sampled_from(SHARED_FILES),
    content=st.binary(max_size=200)
    | JSON.map(lambda value: json.dumps(value).encode())
    | st.tuples(EVENTS, st.dictionaries(KEYS, JSON, max_size=5)).map(
        lambda pair: json.dumps({**pair[1], "time": 5.0, "attempt": 0, "event": pair[0]}).encode()
    ),
    torn=st.integers(0, 40),
)
def test_no_reader_stumbles_over_garbage(run: RunDirectory, name: str, content: bytes, torn: int) -> None:
    if not run.attempt(0).path.exists():
        begin_dead(run)
    path = run.path / name
    before = path.read_bytes() if path.exists() else None
    try:
        path.write_bytes(content + b"\n" + content[: max(0, len(content) - torn)])
        read_events(run)
        read_latest(run.metrics_file, Lineage())
        read_attempt(run.attempt(0))
        read_stop(run.attempt(0))
        status = describe(run, {}).to_json()
        json.dumps(status)
        assert status["directory"] == str(run.path)
    finally:
        path.unlink()
        if before is not None:
            path.write_bytes(before)


def test_missing_files_are_as_good_as_empty(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "nothing")
    assert read_events(run) == []
    assert read_latest(run.metrics_file, Lineage()).step is None
    assert read_stop(run.attempt(0)) is None
    with pytest.raises(RunError, match="is not a run"):
        read_record(run)
    assert describe(run, None).attempts == 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("number", "fatal"), [(errno.ESTALE, True), (errno.EIO, True), (errno.EACCES, False)])
def test_who_decides_does_not_take_what_storage_withholds_for_what_never_was(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch, number: int, fatal: bool
) -> None:
    """A cancelled run would begin again."""
    EventWriter(run, "login").write("cancelled")

    def read_on(path: Path, *_: object) -> None:
        raise OSError(number, os.strerror(number), str(path))

    monkeypatch.setattr("cluster_ddp.run.events.read_on", read_on)
    assert read_events(run) == []
    if fatal:
        with pytest.raises(RunError, match=r"login\.jsonl cannot be read"):
            read_events(run, strict=True)
    else:
        assert read_events(run, strict=True) == []


def test_who_decides_does_not_take_attempts_that_storage_withholds_for_none(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    (attempt := run.attempt(0)).path.mkdir(parents=True)
    attempt.record_file.write_text("{}")

    def fail(path: Path, *_: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))

    with monkeypatch.context() as of_record:
        of_record.setattr("cluster_ddp.run.reading.read_file", fail)
        assert len(read_history(run).attempts) == 1
        with pytest.raises(RunError, match=r"attempt\.json cannot be read"):
            read_history(run, strict=True)
    monkeypatch.setattr("cluster_ddp.run.attempt_record.attempt_numbers", lambda run: fail(run.attempts))
    assert read_history(run).attempts == ()
    with pytest.raises(RunError, match="attempts cannot be read"):
        read_history(run, strict=True)
