"""The node program, ``python -m cluster_ddp.launch.node --run DIR --attempt N -- torchrun ...``: one per node.

It applies the environment and reports it, starts torchrun, hands stop requests to its ranks, watches for hangs and for
lost agents, and records what happened. Slurm, submitit, local and manual starts all go through it.
"""

from __future__ import annotations

import argparse
import os
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from cluster_ddp.launch.program import TICK_SECONDS, NodeProgram, say
from cluster_ddp.run.directory import RunDirectory
from cluster_ddp.spec.errors import ClusterDDPError


def run_node(
    run_dir: Path | str,
    attempt: int,
    command: Sequence[str],
    *,
    node_rank: int | None = None,
    take_signals: bool = True,
) -> int:
    """Run one node's part of an attempt, to the end.

    Parameters
    ----------
    command
        The torchrun line with its placeholders.
    node_rank
        Default: SLURM_NODEID, else 0.
    take_signals
        Signals to this process are stop requests. When False the caller's handlers stay, and may wait for the ranks
        (`attempt.stop_file` is the way to stop them then): the watching goes on in a thread of its own.

    Returns
    -------
    int
        0 when the ranks trained to the end or stopped as asked, 1 when they failed.

    Raises
    ------
    ClusterDDPError
        The run cannot be read, or this node has no address for the others.
    """
    rank = int(os.environ.get("SLURM_NODEID", "0")) if node_rank is None else node_rank
    program = NodeProgram(RunDirectory(Path(run_dir)), attempt, command, node_rank=rank, take_signals=take_signals)
    program.start()
    if take_signals:
        return program.watch()
    status = 1
    _FINISHED.clear()

    def watch() -> None:
        nonlocal status
        try:
            status = program.watch()
        finally:
            _FINISHED.set()

    threading.Thread(target=watch, name="node-program", daemon=True).start()
    while not _FINISHED.wait(TICK_SECONDS):  # short waits, so that the handlers of the caller's signals run
        pass
    return status


_FINISHED = threading.Event()


def wait_for_ranks(timeout: float) -> bool:
    """For a signal handler of a caller of `run_node(take_signals=False)`: wait until all of this node has ended."""
    return _FINISHED.wait(timeout)


def _arguments(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m cluster_ddp.launch.node", description=__doc__.split("\n\n")[0])
    parser.add_argument("--run", required=True, type=Path, help="the run directory")
    parser.add_argument("--attempt", required=True, type=int, help="the attempt's number")
    parser.add_argument("--node-rank", type=int, default=None, help="default: SLURM_NODEID, else 0")
    parser.add_argument("torchrun", nargs=argparse.REMAINDER, help="-- torchrun ...")
    parsed = parser.parse_args(arguments)
    if parsed.torchrun[:1] == ["--"]:
        parsed.torchrun = parsed.torchrun[1:]
    if not parsed.torchrun:
        parser.error("the torchrun line is missing: -- torchrun --nnodes=...")
    return parsed


def main(arguments: Sequence[str]) -> int:
    """Entry point of ``python -m cluster_ddp.launch.node``."""
    parsed = _arguments(arguments)
    try:
        return run_node(parsed.run, parsed.attempt, parsed.torchrun, node_rank=parsed.node_rank)
    except ClusterDDPError as error:
        say(f"cluster-ddp: {error}", sys.stderr)
        return error.exit_status
    finally:
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except OSError:  # what could not be printed must not become the exit status
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
