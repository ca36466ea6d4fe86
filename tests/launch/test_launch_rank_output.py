"""What the processes of a node print, from their files on the node's own disk to the node's log."""

from __future__ import annotations

import errno
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from node_process import Node

from cluster_ddp.launch import logs
from cluster_ddp.launch.node import rank_output
from cluster_ddp.launch.node.rank_output import AGENT_LOG, RankOutput
from cluster_ddp.run.directory import AttemptDirectory
from cluster_ddp.run.node_log import LogLine, parse_line


class Printing:
    """Two ranks that print, as torchrun lets them."""

    def __init__(self, folder: Path, log: Path) -> None:
        self.folder = folder
        self.output = RankOutput(log, folder)
        started = [
            {"pid": local, "rank": local + 4, "local_rank": local, "folder": str(folder / str(local))}
            for local in (0, 1)
        ]
        for rank in started:
            Path(str(rank["folder"])).mkdir(parents=True)
        record = {"started": started, "failed": [], "left": [], "ended_by_agent": []}
        (folder / "exits.jsonl").write_text(json.dumps(record) + "\n")

    def say(self, local: int, text: str, stream: str = "stdout") -> None:
        with (self.folder / str(local) / f"{stream}.log").open("a") as file:
            file.write(text)


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "node-2.log"


@pytest.fixture
def printing(tmp_path: Path, log: Path) -> Printing:
    return Printing(tmp_path / "own", log)


def test_each_line_says_which_rank_has_printed_it(printing: Printing, log: Path) -> None:
    (printing.folder / AGENT_LOG).write_text("W1122 agent\n")
    printing.say(0, "step 1\n[rank 5] a rank's own words\n")
    printing.say(1, "Traceback\n  File x\nhalf", "stderr")
    lines = printing.output.gather()
    assert LogLine("step 1", 4) in lines and LogLine("  File x", 5, is_error=True) in lines
    printing.say(1, " of it", "stderr")
    list(printing.output.rest())
    written = log.read_text().splitlines()
    assert written == [
        "[torchrun] W1122 agent", "[rank 4] step 1", "[rank 4] [rank 5] a rank's own words", "[rank 5 err] Traceback",
        "[rank 5 err]   File x", "[rank 5 err] half of it",
    ]  # fmt: skip
    assert [line for text in written if (line := parse_line(text)).rank == 5][-1].text == "half of it"
    assert parse_line("cluster-ddp: the node program") == LogLine("cluster-ddp: the node program")


def test_a_node_that_may_not_write_to_the_run_begins_nothing(start_node: Callable[..., Node]) -> None:
    def forbid(attempt: AttemptDirectory) -> None:
        attempt.log_file(0).mkdir()

    node = start_node("plain_rank.py", prepare=forbid)
    status, _, err = node.finish()
    assert (status, node.events("node-started")) == (1, [])
    (failed,) = node.events("node-failed")
    assert "must be the same and writable on every node" in failed["error"]
    assert "cannot start" in err.splitlines()[-1]


@pytest.mark.parametrize(("number", "begins"), [(errno.ENOSPC, True), (errno.EDQUOT, True), (errno.EROFS, False)])
def test_a_full_storage_is_no_reason_not_to_begin(
    log: Path, monkeypatch: pytest.MonkeyPatch, number: int, begins: bool
) -> None:
    def refuse(path: Path) -> int:
        raise OSError(number, os.strerror(number), str(path))

    monkeypatch.setattr(rank_output, "open_append", refuse)
    if begins:
        RankOutput.prepare(log).remove()
    else:
        with pytest.raises(OSError, match="Read-only"):
            RankOutput.prepare(log)


def test_a_progress_bar_leaves_lines(printing: Printing, log: Path) -> None:
    printing.say(0, "\r 10%\r 20%\r\nnext\r")
    printing.output.gather()
    printing.say(0, "\nend\n")
    list(printing.output.rest())
    assert [parse_line(line).text for line in log.read_text().splitlines() if parse_line(line).text] == [
        " 10%", " 20%", "next", "end",
    ]  # fmt: skip


def test_storage_that_refuses_costs_no_line(
    printing: Printing, log: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with monkeypatch.context() as full:
        full.setattr(rank_output, "open_append", lambda path: (_ for _ in ()).throw(OSError(28, "No space left")))
        printing.say(0, "one\n")
        assert list(printing.output.rest()) == [LogLine("one", 4)]
        printing.say(0, "two\n")
        list(printing.output.rest())
    assert capsys.readouterr().err.count("No space left") == 1 and not log.exists()
    list(printing.output.rest())
    assert log.read_text() == "[rank 4] one\n[rank 4] two\n"


def test_much_that_is_left_is_written_in_pieces(printing: Printing, log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that prints faster than the storage takes it leaves gigabytes, which do not fit into memory."""
    written: list[int] = []
    append = rank_output.append
    monkeypatch.setattr(rank_output, "append", lambda path, data: (written.append(len(data)), append(path, data)))
    monkeypatch.setattr(rank_output, "MAX_WAITING", 4096)
    monkeypatch.setattr(logs, "MAX_READ", 4096)
    for _ in range(64):
        printing.say(0, "x" * 1023 + "\n")
    assert sum(1 for _ in printing.output.rest()) == 64
    assert len(log.read_text().splitlines()) == 64 and max(written) < 16384


def test_what_a_killed_node_program_has_left_is_gathered_by_another(printing: Printing, log: Path) -> None:
    printing.say(0, "one\n")
    list(printing.output.rest())
    printing.say(0, "saved at the end\n")
    rescuer = RankOutput(log, printing.folder)
    list(rescuer.rest())
    assert log.read_text() == "[rank 4] one\n[rank 4] saved at the end\n"
    rescuer.remove()
    assert not printing.folder.exists()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux gives back the beginning of a file")
def test_what_was_gathered_gives_its_room_back(printing: Printing) -> None:
    with (printing.folder / "0" / "stdout.log").open("a") as file:
        for _ in range(4):
            file.write(("x" * 1023 + "\n") * 1024)
            file.flush()
            list(printing.output.rest())
        assert Path(file.name).stat().st_size == 4 << 20
        room = Path(file.name).stat().st_blocks * 512
    assert room <= 2 << 20
