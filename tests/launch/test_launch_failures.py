"""Which of several dead ranks is named, from what is known of each."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cluster_ddp.errors import Cause
from cluster_ddp.launch.node.heartbeat import HeartbeatFile
from cluster_ddp.launch.node.rank_failures import Failures
from cluster_ddp.launch.node.ranks import LocalRanks, Rank, RankError, read_error
from cluster_ddp.launch.processes import kill_all
from cluster_ddp.launch.torchrun.exits import RankExit, RankExits, StartedRank
from cluster_ddp.launch.variables import HEARTBEAT_VARIABLE
from cluster_ddp.run.causes import describe_failure, shortened
from cluster_ddp.run.directory import RunDirectory
from cluster_ddp.run.events import EventWriter, read_events
from cluster_ddp.run.phase import Phase

PEER_LOST = "Traceback (most recent call last):\n  File x\nRuntimeError: Connection closed by peer\n"
OWN_ERROR = "noise\nTraceback (most recent call last):\n  File x\nValueError: wrong\n"


class Scene:
    """Ranks 4 and 5 of a node; they die as a test says."""

    def __init__(self, folder: Path) -> None:
        self.run = RunDirectory(folder / "run")
        self.run.events.mkdir(parents=True)
        self.attempt = self.run.attempt(0)
        self.folder = folder / "node-1"
        self.folder.mkdir(parents=True)
        self.heartbeat = HeartbeatFile.create(folder / "heartbeat", slots=2)
        self.ranks = LocalRanks(self.heartbeat, 2)
        self.exits = RankExits(self.folder)
        self.now = time.time()
        events = EventWriter(self.run, "node-1")
        self.failures = Failures(self.ranks, self.exits, events, self.attempt, 1, clock=lambda: self.now)

    def rank(self, number: int, stderr: str = "", *, phase: Phase | None = Phase.TRAINING, step: int = 8) -> Rank:
        local = number - 4
        log = self.folder / f"{number}.log"
        log.write_text(stderr)
        rank = Rank(1000 + number, number, local, None, log, None)
        self.ranks.seen[rank.pid] = rank
        if phase is not None:
            self.heartbeat.slots[local].claim(rank=number, pid=rank.pid)
            self.heartbeat.slots[local].beat(step)
            self.heartbeat.slots[local].set_phase(phase)
        return rank

    def exit_code(self, rank: Rank, code: int) -> None:
        self.exits.failed[rank.pid] = RankExit(rank.pid, rank.rank, rank.local_rank, code)

    def event(self) -> dict[str, Any]:
        (event,) = read_events(self.run)
        return event


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    made = Scene(tmp_path)
    yield made
    made.heartbeat.close()


def test_who_was_killed_is_named_before_who_complains(scene: Scene) -> None:
    killed, complains = scene.rank(5), scene.rank(4, PEER_LOST)
    scene.exit_code(killed, -9)
    scene.exit_code(complains, 1)
    scene.failures.note([complains, killed], agent_ended=True)
    event = scene.event()
    assert (event["rank"], event["signal"], event["exit_code"]) == (5, "SIGKILL", -9)
    assert (event["step"], event["node"]) == (8, 1)
    assert event["others"] == [4]
    assert "SIGKILL" in event["error"]


def test_a_host_is_named_as_slurm_names_it(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its own name, which may be another one, Slurm could not be asked to leave it out."""
    monkeypatch.setenv("SLURMD_NODENAME", "queue1-st-7")
    killed = scene.rank(5)
    scene.failures.note([killed], agent_ended=False)
    scene.exit_code(killed, -9)
    scene.now += 20
    scene.failures.note([], agent_ended=True)
    assert scene.event()["host"] == "queue1-st-7"


def test_an_error_after_the_work_is_not_lost(scene: Scene) -> None:
    """The run is complete, but what the script does after its block, such as an export, has failed."""
    failed, aborted = scene.rank(4, OWN_ERROR, phase=Phase.DONE), scene.rank(5, phase=Phase.DONE)
    scene.exit_code(failed, 1)
    scene.exit_code(aborted, -signal.SIGABRT)
    scene.failures.note([failed, aborted], agent_ended=True)
    (told,) = scene.failures.after_work()
    assert told.startswith("rank 4 on ") and "ValueError: wrong" in told
    assert list(read_events(scene.run)) == []


def test_who_left_with_status_0_is_named_before_who_complains(scene: Scene) -> None:
    left, complains = scene.rank(5), scene.rank(4, PEER_LOST)
    scene.exits.left.add(left.pid)
    scene.exit_code(complains, 1)
    scene.failures.note([left], agent_ended=False)
    scene.now += 2.1  # Slurm ends this node 5 s after the other
    scene.failures.note([complains], agent_ended=False)
    event = scene.event()
    assert (event["rank"], event["signal"], event["exit_code"], event["others"]) == (5, None, 0, [4])
    assert "ended with exit status 0 before its training was over" in event["error"]


def test_who_left_with_a_status_and_no_word_is_named_before_who_complains(scene: Scene) -> None:
    """What torch's own log says last, of a socket, would have made it an error of the surroundings, too."""
    left = scene.rank(5, "[W1125 01:28:56.694728054 socket.cpp:207] [c10d] The hostname of the client socket ...\n")
    complains = scene.rank(4, PEER_LOST)
    scene.exit_code(left, 3)
    scene.exit_code(complains, 1)
    scene.failures.note([left, complains], agent_ended=True)
    assert (scene.event()["rank"], scene.event()["error"]) == (5, "ended with exit status 3; it left no message")


def test_a_silent_death_is_not_recorded_before_torchrun_has_told_of_it(scene: Scene) -> None:
    killed = scene.rank(5)
    scene.failures.note([killed], agent_ended=False)
    scene.now += 5
    scene.failures.note([], agent_ended=False)
    assert read_events(scene.run) == []
    scene.exit_code(killed, -9)
    scene.failures.note([], agent_ended=False)
    assert scene.event()["signal"] == "SIGKILL"


def test_a_rank_that_torchrun_had_to_kill_is_not_the_cause(scene: Scene) -> None:
    """Ended because another failed, it did not come to SIGTERM in time."""
    failed, stuck = scene.rank(5), scene.rank(4)
    scene.exit_code(failed, 3)
    scene.exit_code(stuck, -9)
    scene.exits.ended_by_agent.add(stuck.pid)
    scene.failures.note([stuck, failed], agent_ended=True)
    assert (scene.event()["rank"], scene.event()["exit_code"]) == (5, 3)


def test_a_rank_that_fails_and_that_torchrun_had_to_kill_was_not_killed_from_outside(scene: Scene) -> None:
    """Else it would be named as the cause before the one whose connection it has lost."""
    stuck = scene.rank(4, PEER_LOST)
    scene.exit_code(stuck, -9)
    scene.exits.ended_by_agent.add(stuck.pid)
    scene.failures.note([stuck], agent_ended=True)
    event = scene.event()
    assert (event["signal"], event["exit_code"]) == (None, -9) and "closed by peer" in event["error"]


def test_of_two_errors_the_first_is_named(scene: Scene) -> None:
    late = scene.rank(4, PEER_LOST)
    early = scene.rank(5, OWN_ERROR)
    assert early.stderr is not None
    moment = time.time() - 60
    os.utime(early.stderr, (moment, moment))
    scene.failures.note([late, early], agent_ended=True)
    event = scene.event()
    assert (event["rank"], event["failed_at"]) == (5, pytest.approx(moment, abs=1))
    assert event["error"].startswith("Traceback")
    assert event["error"].endswith("ValueError: wrong")


@pytest.mark.parametrize("case", ["says so", "ended by torchrun"])
def test_a_rank_that_only_follows_another_nodes_failure_is_not_recorded(scene: Scene, case: str) -> None:
    rank = scene.rank(4, PEER_LOST if case == "says so" else "")
    if case == "says so":
        scene.heartbeat.slots[0].set_cause(Cause.FOLLOWS)
    else:
        scene.exits.ended_by_agent.add(rank.pid)
        scene.exit_code(rank, -15)
    scene.failures.note([rank], agent_ended=True)
    assert read_events(scene.run) == []


def test_ranks_that_are_done_or_end_with_status_0_have_not_failed(scene: Scene) -> None:
    done, script = scene.rank(4, phase=Phase.DONE), scene.rank(5, phase=None)
    scene.exit_code(done, -6)
    scene.failures.note([done, script], agent_ended=True)
    assert read_events(scene.run) == []


def test_a_rank_that_was_done_before_it_was_ever_looked_at_has_not_failed(scene: Scene) -> None:
    done = scene.rank(4, phase=Phase.DONE)
    del scene.ranks.seen[done.pid]
    scene.exit_code(done, -6)
    scene.failures.note([], agent_ended=True)
    assert read_events(scene.run) == []


def test_a_script_that_is_not_on_the_heartbeat_is_known_by_its_exit_code(scene: Scene) -> None:
    rank = scene.rank(5, OWN_ERROR, phase=None)
    scene.exit_code(rank, 1)
    scene.failures.note([rank], agent_ended=True)
    assert (scene.event()["rank"], scene.event()["step"]) == (5, None)


@pytest.mark.parametrize(
    ("stderr", "left"),
    [
        ("usage: t.py [--lr LR]\nt.py: error: unrecognized arguments: --x\n",
         "what it wrote last to stderr: t.py: error: unrecognized arguments: --x"),
        ("", "it left no message"),
    ],
)  # fmt: skip
def test_of_a_script_that_ends_without_an_error_the_last_line_is_given(scene: Scene, stderr: str, left: str) -> None:
    rank = scene.rank(5, stderr, phase=None)
    scene.exit_code(rank, 2)
    scene.failures.note([rank], agent_ended=True)
    assert scene.event()["error"] == f"ended with exit status 2; {left}"


def test_torchs_own_error_file_is_read_and_its_prefixes_are_taken_away(tmp_path: Path) -> None:
    error_file, log = tmp_path / "error.json", tmp_path / "stderr.log"
    log.write_text("[rank3]: Traceback (most recent call last):\n[rank3]:   File x\n[rank3]: KeyError: 'a'\n")
    rank = Rank(1, 3, 0, None, log, error_file)
    error = read_error(rank)
    assert error is not None and error.message == "Traceback (most recent call last):\n  File x\nKeyError: 'a'"
    error_file.write_text(
        '{"message": {"message": "m", "extraInfo": {"py_callstack": "Traceback: KeyError", "timestamp": "17"}}}'
    )
    assert read_error(rank) == RankError("Traceback: KeyError", 17.0)
    error_file.write_text("{")
    error = read_error(rank)
    assert error is not None and error.time == pytest.approx(log.stat().st_mtime)


def test_the_error_of_a_rank_that_ends_as_it_is_found_is_read(scene: Scene) -> None:
    """The kernel no longer tells what such a process writes to; a file of torchrun's lies beside its error file."""
    (scene.folder / "stderr.log").write_text(OWN_ERROR)
    rank = {"RANK": "4", "LOCAL_RANK": "0", "TORCHELASTIC_ERROR_FILE": str(scene.folder / "error.json")}
    program = "import os; os.write(1, b'.'); [os.close(number) for number in (2, 1)]; os.read(0, 1)"
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True,
        env={**os.environ, **rank, HEARTBEAT_VARIABLE: str(scene.heartbeat.path)},
    ) as process:  # fmt: skip
        assert process.stdout is not None and process.stdout.read() == b"."  # it has closed both
        scene.ranks.poll()
        process.kill()
    scene.exit_code(scene.ranks.seen[process.pid], 1)
    scene.failures.note([scene.ranks.seen[process.pid]], agent_ended=True)
    scene.failures.note([], agent_ended=True)
    assert "ValueError: wrong" in scene.event()["error"]


def test_a_rank_that_shows_no_environment_is_known_from_its_agent(scene: Scene) -> None:
    """A program may overwrite it as soon as it starts, as setproctitle does."""
    with subprocess.Popen(["sleep", "60"], start_new_session=True, env={"PATH": os.environ["PATH"]}) as process:
        assert scene.ranks.poll() == scene.ranks.living == []
        started = StartedRank(process.pid, 4, 0, str(scene.folder))
        assert scene.ranks.poll([started]) == []
        assert [(rank.pid, rank.rank) for rank in scene.ranks.living] == [(process.pid, 4)]
        assert kill_all(scene.heartbeat.path, ranks=[process.pid]) == []
    assert [rank.stderr for rank in scene.ranks.poll([started])] == [scene.folder / "stderr.log"]
    assert scene.ranks.living == []


DUMP = (
    '\n\nThread 0x0a (most recent call first):\n  File "threading.py", line 1 in run\n\n'
    'Current thread 0x0b (most recent call first):\n  File "a.py", line 5 in load\n'
    '  File "a.py", line 7 in <module>\n\nExtension modules: '
    + "numpy.linalg._umath_linalg, " * 2000
    + "yaml._yaml (total: 2001)\n"
)


@pytest.mark.parametrize(
    ("stderr", "words"),
    [
        ("libfoo: assertion `x > 0' failed at foo.c:12\n\n", "ended by SIGABRT; what it wrote last to stderr: lib"),
        ("  warming up\n[W1123 10:00:00.0 a.cpp:1] Warning: noise\n", "what it wrote last to stderr:   warming up"),
        ("noise\nterminate called after 'c10::Error'\n  what():  a bad shape\nframe #0: f\n", "what():  a bad shape"),
        ("noise\nfoo.c:12: Error: no device\nbye\n", "failed: foo.c:12: Error: no device"),
        ("[W1123 10:00:00.0 a.cpp:1] Warning: noise\n", "ended by SIGABRT; it left no message"),
        ("libfoo: no device\nFatal Python error: Aborted" + DUMP, 'libfoo: no device (File "a.py", line 5 in load)'),
        ("Fatal Python error: Aborted" + DUMP, 'Fatal Python error: Aborted (File "a.py", line 5 in load)'),
        ("noise\nFatal Python error: Bus error" + DUMP, 'stderr: Fatal Python error: Bus error (File "a.py", line 5'),
        (
            "  + Exception Group Traceback (most recent call last):\n  |   File \"a.py\", line 1, in <module>\n"
            "  |     raise errors\n  | ExceptionGroup: several (2 sub-exceptions)\n  +-+-- 1 --\n    | ValueError: 1\n",
            "failed: ExceptionGroup: several (2 sub-exceptions)",
        ),
    ],
)  # fmt: skip
def test_what_a_library_says_before_it_aborts_is_told(scene: Scene, stderr: str, words: str) -> None:
    rank = scene.rank(4, stderr)
    scene.exit_code(rank, -signal.SIGABRT)
    scene.failures.note([rank], agent_ended=True)
    assert words in describe_failure(scene.event())


def test_a_rank_that_could_not_say_why_it_failed_is_told_with_the_full_disk(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda folder: SimpleNamespace(free=0))
    rank = scene.rank(4, "")
    scene.exit_code(rank, 1)
    scene.failures.note([rank], agent_ended=True)
    assert "it left no message; the node has no space left in" in describe_failure(scene.event())
    assert scene.event()["cause"] == "host"  # so it is tried again, and elsewhere


@pytest.mark.parametrize(("said", "cause"), [(None, "program"), (Cause.OUTSIDE, "outside"), (Cause.HOST, "host")])
def test_a_rank_knows_best_why_it_failed(scene: Scene, said: Cause | None, cause: str) -> None:
    rank = scene.rank(4, OWN_ERROR)
    if said is not None:
        scene.heartbeat.slots[0].set_cause(said)
    scene.failures.note([rank], agent_ended=True)
    assert scene.event()["cause"] == cause


def test_nccls_own_words_are_told_with_the_kind_of_error() -> None:
    error = (
        'Traceback (most recent call last):\n  File "a.py", line 1, in f\n    f()\ntorch.distributed.DistBackendError: '
        "NCCL error in: x.cpp:1970, unhandled system error, NCCL version 2.20.5\nncclSystemError: System call (e.g. "
        "socket, malloc) or external library call failed or device error. \nLast error:\nsocketStartConnect: Connect "
        "to 10.0.0.2<4567> failed : Software caused connection abort\n"
    )
    said = describe_failure({"event": "rank-failed", "rank": 1, "error": error})
    assert said.endswith("NCCL version 2.20.5: socketStartConnect: Connect to 10.0.0.2<4567> failed : Software caused "
                         "connection abort")  # fmt: skip


@pytest.mark.parametrize(
    ("message", "why"),
    [
        ("cannot load shard 7", " (because of FileNotFoundError: no /data/7)"),
        ("cannot load shard 7: no /data/7", ""),
    ],
)
def test_what_an_error_was_raised_from_is_told(message: str, why: str) -> None:
    def load() -> None:
        try:
            raise FileNotFoundError("no /data/7")
        except FileNotFoundError as error:
            raise KeyError(7) from error

    try:
        try:
            load()
        except KeyError as error:
            raise RuntimeError(message) from error
    except RuntimeError:
        said = describe_failure({"event": "rank-failed", "rank": 1, "error": traceback.format_exc()})
    assert said == f"rank 1 failed: RuntimeError: {message}{why}"


def test_of_a_long_error_the_beginning_of_its_message_is_kept() -> None:
    frames = "".join(f'  File "{number}.py", line 1, in f\n    f()\n' for number in range(1000))
    for details in ("  a detail\n" * 100, "  a detail\n" * 100_000, "x" * 1_000_000):
        error = shortened(f"Traceback (most recent call last):\n{frames}RuntimeError: the cause\n{details}")
        assert len(error) < 4100
        failed = {"event": "rank-failed", "rank": 1, "error": error}
        assert describe_failure(failed) == "rank 1 failed: RuntimeError: the cause"
