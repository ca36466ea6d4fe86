"""The node program, one per node: ``python -m cluster_ddp.launch.node --run DIR --attempt N -- torchrun ...``.

It sets and reports the environment, starts torchrun, passes stop requests on to its ranks, watches for hangs and lost
agents, and records what happened. Slurm, submitit, local and manual starts all use it.
"""

from __future__ import annotations

import argparse
import errno
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from cluster_ddp.errors import ClusterDDPError
from cluster_ddp.launch.node.program import NodeProgram
from cluster_ddp.launch.torchrun.agent_failure import explain, node_allows_fewer_files
from cluster_ddp.printing import say
from cluster_ddp.process import host_name, limit_umask
from cluster_ddp.run.directory import RunDirectory
from cluster_ddp.run.events import NODE_FAILED, EventWriter, on_this_host


def _arguments(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m cluster_ddp.launch.node", description=(__doc__ or "").split("\n\n")[0]
    )
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
    parsed = _arguments(arguments)
    limit_umask(parsed.run)
    run = RunDirectory(parsed.run)
    node_rank = int(os.environ.get("SLURM_NODEID", "0")) if parsed.node_rank is None else parsed.node_rank
    try:
        try:
            program = NodeProgram(run, parsed.attempt, parsed.torchrun, node_rank=node_rank)
            program.start()
        except (ClusterDDPError, OSError) as error:
            return did_not_start(run, parsed.attempt, node_rank, error)
        return program.watch()
    finally:
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except OSError:  # output that could not be printed must not become the exit status
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def did_not_start(run: RunDirectory, attempt: int, node_rank: int, error: ClusterDDPError | OSError) -> int:
    """Record and print why this node cannot take part; if it cannot write, the keeper records it."""
    host, words = host_name(), explain(error, run)
    of_the_job = isinstance(error, OSError) and error.errno == errno.EMFILE and not node_allows_fewer_files()
    EventWriter(run, on_this_host("node")).write(
        NODE_FAILED,
        attempt=attempt,
        node=node_rank,
        host=host,
        error=f"it cannot start: {words}",
        suspect=not of_the_job,
    )
    say(f"cluster-ddp: node {host} cannot start: {words}")  # the keeper reports the last line
    return 1 if isinstance(error, OSError) else error.exit_status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
