from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from cluster_ddp.run.lineage import Lineage, Origin
from cluster_ddp.run.metrics import read_latest
from cluster_ddp.run.reading import parse_lines
from cluster_ddp.train.metrics.file import LineFile
from cluster_ddp.train.metrics.progress import Bar, Lines


class SmallDisk:
    """Takes so many bytes more, then is full."""

    def __init__(self, room: int) -> None:
        self.room = room
        self._write = os.write

    def write(self, fd: int, data: bytes) -> int:
        if not self.room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        taken = self._write(fd, data[: self.room])
        self.room -= taken
        return taken


def test_a_full_disk_costs_no_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "metrics.jsonl"
    file, disk = LineFile(path), SmallDisk(10)
    monkeypatch.setattr("cluster_ddp.train.metrics.file.os.write", disk.write)
    for line in ("first", "second", "third"):  # the second is taken in part
        file.write(line)
    assert path.read_text() == "first\nseco"
    assert capsys.readouterr().err.count("No space left on device") == 1
    disk.room = 1000
    file.write("fourth")
    file.close()
    assert path.read_text() == "first\nsecond\nthird\nfourth\n"
    assert capsys.readouterr().err == ""


def test_lines_that_were_never_taken_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = LineFile(tmp_path / "metrics.jsonl")
    monkeypatch.setattr("cluster_ddp.train.metrics.file.os.write", SmallDisk(0).write)
    file.write("first")
    file.write("second")
    file.close()
    assert "its last 2 lines are lost" in capsys.readouterr().err


def test_a_file_that_somebody_deletes_is_created_again(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    file = LineFile(path)
    file.write("first")
    path.unlink()
    file.write("second")
    file.close()
    assert path.read_text() == "second\n"


def test_a_torn_line_does_not_spoil_the_next(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"st')
    for line in ('{"step": 2}', '{"step": 3}'):
        file = LineFile(path)
        file.write(line)
        file.close()
    assert path.read_text() == '{"step": 1}\n{"st\n{"step": 2}\n{"step": 3}\n'


LOGS = """
import sys
from pathlib import Path
from cluster_ddp.train.metrics.file import MetricsFile
path, attempt = Path(sys.argv[1]), int(sys.argv[2])
file = MetricsFile(path, attempt)
path.with_name(f"there-{attempt}").touch()
while not path.with_name(f"there-{1 - attempt}").exists():
    pass
for step in range(1, 2001):
    file.write(step=step, samples=step, epoch=0, values={"x" * (step % 300): float(attempt)})
"""


def test_two_attempts_that_log_at_once_tear_no_line_and_the_newer_one_counts(tmp_path: Path) -> None:
    """One of them is cut from Slurm's controller, and has not noticed yet that it is."""
    path = tmp_path / "metrics.jsonl"
    loggers = [subprocess.Popen([sys.executable, "-c", LOGS, str(path), str(attempt)]) for attempt in (0, 1)]
    assert [logger.wait(60) for logger in loggers] == [0, 0]
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for attempt in (0, 1):
        assert [row["step"] for row in rows if row["attempt"] == attempt] == list(range(1, 2001))
    latest = read_latest(path, Lineage({1: Origin(1500)}))
    assert (latest.attempt, latest.step) == (1, 2000)


def test_lines_that_two_hosts_have_written_over_each_other_cost_only_themselves(tmp_path: Path) -> None:
    """Network storage has no common end of a file: each host appends where it believes it to be."""
    path, lines = tmp_path / "metrics.jsonl", [LineFile(tmp_path / name) for name in ("old", "new")]
    for step in range(1, 40):
        for attempt, file in enumerate(lines):
            file.write(json.dumps({"step": step, "attempt": attempt, "time": 1.0, "x" * (7 * attempt + 1): 0.5}))
    old, new = (bytearray((tmp_path / name).read_bytes()) for name in ("old", "new"))
    mixed = new[:]
    for start in range(0, len(old) - 100, 400):
        mixed[start : start + 100] = old[start : start + 100]
    path.write_bytes(mixed)
    assert len(parse_lines(path.read_bytes())) < mixed.count(b"\n")
    latest = read_latest(path, Lineage({1: Origin(3)}))
    assert (latest.attempt, latest.step) == (1, 39)


def test_no_escape_sequence_in_the_name_of_a_metric_reaches_the_terminal(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    values = {"val/\x1b]52;c;Zg==\x07[red]": 1.0}
    Lines(1).update(1, 0, values)
    assert "\x1b" not in (printed := capsys.readouterr().out) and "val/\\x1b" in printed
    drawn = tmp_path / "drawn"
    bar = Bar(drawn.open("w"), "title", 1, 0)
    bar.update(1, 0, values)
    bar.say("\x1b]0;title\x07")
    bar.close()
    assert "\x1b]" not in drawn.read_text() and "[red]" in drawn.read_text()


def test_a_full_disk_behind_the_output_does_not_end_the_training(monkeypatch: pytest.MonkeyPatch) -> None:
    with open("/dev/full", "w") as full:  # noqa: PTH123
        monkeypatch.setattr("sys.stdout", full)
        Lines(10).say("step 1")
        monkeypatch.undo()
        with pytest.raises(OSError, match="No space"):
            full.flush()
        os.dup2(os.open(os.devnull, os.O_WRONLY), full.fileno())


def test_a_terminal_that_goes_away_ends_nothing() -> None:
    """As when the connection to the machine is lost: the rank is to save then, and its program may print."""
    master, other = os.openpty()
    bar = Bar(os.fdopen(other, "w"), "training", 10, 0)
    os.close(master)
    bar.update(10, 0, {"train/loss": 1.0})
    bar.say("evaluated")
    print("from the program")
    bar.close()
