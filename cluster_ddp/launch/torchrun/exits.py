"""Records, inside torchrun's agent, which ranks there are and how they ended.

The node program reads these records. The agent learns exit codes each time a rank fails, even when it restarts the
ranks. But the `ChildFailedError` that it raises at its end contains only those of the last time, and its log lines are
meant for people. So `record_exits` hooks into the two public methods of
`torch.distributed.elastic.multiprocessing.PContext` with which the agent waits for its ranks and ends them.
"""

from __future__ import annotations

import contextlib
import json
import signal
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from cluster_ddp.launch.logs import Tail
from cluster_ddp.launch.processes import is_alive

if TYPE_CHECKING:
    import subprocess

    from torch.distributed.elastic.multiprocessing import PContext, ProcessFailure, RunProcsResult

_FILE_NAME = "exits.jsonl"


@dataclass(frozen=True)
class StartedRank:
    """A process that the agent has started."""

    pid: int
    rank: int
    local_rank: int
    folder: str  # where torchrun keeps its output


@dataclass(frozen=True)
class RankExit:
    """How one rank failed."""

    pid: int
    rank: int
    local_rank: int
    exit_code: int  # negative for a signal


class RankExits:
    """What the agent of this node had recorded at the last `read`."""

    def __init__(self, log_dir: Path) -> None:
        self.log_dir = log_dir
        self._tail = Tail(log_dir / _FILE_NAME)
        self.failed: dict[int, RankExit] = {}  # ranks with an exit status other than 0, by process id
        self.started: dict[int, StartedRank] = {}  # by process id
        self.left: set[int] = set()  # process ids of ranks that ended with status 0, as far as the agent has checked
        self.ended_by_agent: set[int] = set()  # process ids; because other ranks failed, or nodes joined or left

    def unended(self) -> list[StartedRank]:
        """Return the ranks whose end the agent has not recorded by now."""
        self.read()
        ended = self.failed.keys() | self.left | self.ended_by_agent
        return [rank for rank in self.started.values() if rank.pid not in ended]

    def read(self) -> None:
        """Read what was recorded since the last call."""
        for line in self._tail.lines():
            with contextlib.suppress(ValueError, TypeError, KeyError):  # written to a full disk
                record = json.loads(line)
                self.ended_by_agent.update(record["ended_by_agent"])
                self.left.update(record["left"])
                self.failed |= {entry["pid"]: RankExit(**entry) for entry in record["failed"]}
                self.started |= {entry["pid"]: StartedRank(**entry) for entry in record["started"]}


def record_exits(log_dir: Path) -> None:
    """Make the agent that this process becomes record in its log folder how its ranks end."""
    from torch.distributed.elastic.multiprocessing import PContext

    wait, close = PContext.wait, PContext.close
    named: WeakSet[PContext] = WeakSet()

    def recording_wait(context: PContext, timeout: float = -1, period: float = 1) -> RunProcsResult | None:
        if context not in named:
            named.add(context)
            _write(log_dir, started=_started(context))
        result = wait(context, timeout, period)
        if result is not None:
            failed = [_rank_exit(context, failure) for failure in result.failures.values()]
            _write(log_dir, failed=failed, left=_left(context))
        return result

    def recording_close(context: PContext, death_sig: signal.Signals | None = None, timeout: int = 30) -> None:
        living = [pid for pid in context.pids().values() if is_alive(pid)]
        if living:
            # `wait` tells of those that have failed only after this, which takes half a minute if others do not exit.
            _write(log_dir, failed=_failed(context), ended_by_agent=living)
        close(context, death_sig, timeout)

    PContext.wait = recording_wait  # type: ignore[method-assign, assignment]
    PContext.close = recording_close  # type: ignore[method-assign, assignment]


def _started(context: PContext) -> list[StartedRank]:
    envs = {number: env for number, env in context.envs.items() if "TORCHELASTIC_ERROR_FILE" in env}
    return [
        StartedRank(pid, int(env["RANK"]), number, str(Path(env["TORCHELASTIC_ERROR_FILE"]).parent))
        for number, pid in context.pids().items()
        if (env := envs.get(number)) is not None
    ]


def _rank_exit(context: PContext, failure: ProcessFailure) -> RankExit:
    rank = int(context.envs[failure.local_rank]["RANK"])
    return RankExit(failure.pid, rank, failure.local_rank, failure.exitcode)


def _failed(context: PContext) -> list[RankExit]:
    return [
        RankExit(process.pid, int(context.envs[number]["RANK"]), number, process.returncode)
        for number, process in _processes(context).items()
        if process.returncode
    ]


def _left(context: PContext) -> list[int]:
    return [process.pid for process in _processes(context).values() if process.returncode == 0]


def _processes(context: PContext) -> dict[int, subprocess.Popen[Any]]:
    """Return the processes of the ranks by local rank, with the exit status of those that the agent has checked."""
    handlers = getattr(context, "subprocess_handlers", {})
    return {number: handler.proc for number, handler in handlers.items()}


def _write(
    log_dir: Path,
    *,
    started: list[StartedRank] | None = None,
    failed: list[RankExit] | None = None,
    left: list[int] | None = None,
    ended_by_agent: list[int] | None = None,
) -> None:
    record = {
        "started": [asdict(entry) for entry in started or []],
        "failed": [asdict(entry) for entry in failed or []],
        "left": left or [],
        "ended_by_agent": ended_by_agent or [],
    }
    with contextlib.suppress(OSError), (log_dir / _FILE_NAME).open("a") as file:
        file.write(f"{json.dumps(record)}\n")
