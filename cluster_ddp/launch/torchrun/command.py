"""The only builder of torchrun's command line, whatever starts the run (sbatch, submitit, local, by hand).

What differs from node to node is a placeholder in the command line, ``{is_host}``, ``{local_addr}`` and ``{log_dir}``,
which the node program fills in. Options newer than torch 2.4 (which signals the agent handles, how long it waits for
ranks that it ends) are not in the command line: the node program sets them as ``PET_...`` variables, which a torchrun
that does not know them ignores.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cluster_ddp.job import JobSpec

TORCHRUN = "torchrun"
START_MODULE = "cluster_ddp.launch.torchrun"
TRAIN_MODULE = "cluster_ddp.train"
LAST_CALL_SECONDS = 30

_PER_NODE = ("--rdzv-conf=", "--local-addr=", "--log-dir=")


def torchrun_command(
    spec: JobSpec, *, run_directory: str, nodes: int | str, procs: int | str, rdzv_id: str, endpoint: str
) -> list[str]:
    """Build the torchrun command line of a run, with placeholders for what only a node knows.

    Parameters
    ----------
    run_directory, rdzv_id, endpoint
        Strings that go into the command line unchanged; for a batch script they may contain shell variables.

    Returns
    -------
    list of str
        One argument each, unquoted. The first is ``torchrun``, which the node program runs with its own interpreter.
    """
    conf = f"is_host={{is_host}},join_timeout={spec.launch.join_timeout},last_call_timeout={LAST_CALL_SECONDS}"
    return [
        TORCHRUN,
        f"--nnodes={nodes}",
        f"--nproc-per-node={procs}",
        f"--rdzv-id={rdzv_id}",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint={endpoint}",
        f"--rdzv-conf={conf}",
        "--local-addr={local_addr}",
        f"--max-restarts={spec.launch.max_restarts}",
        "--log-dir={log_dir}",
        "--redirects=3",
        *_target(spec, run_directory),
    ]


def _target(spec: JobSpec, run_directory: str) -> list[str]:
    if spec.script is not None:
        return [spec.script, *spec.args]
    return ["-m", TRAIN_MODULE, run_directory]


def fill_in(command: Sequence[str], *, is_host: bool, local_addr: str, log_dir: str) -> list[str]:
    """Return the command that this node runs: placeholders replaced, and torchrun run by this interpreter.

    Only torchrun's own options are changed: an argument of the user's script may contain braces.
    """
    values = {"{is_host}": str(int(is_host)), "{local_addr}": local_addr, "{log_dir}": log_dir}
    filled = list(command)
    for index in range(_options_end(command)):
        if filled[index].startswith(_PER_NODE):
            for placeholder, value in values.items():
                filled[index] = filled[index].replace(placeholder, value)
    if filled[0] == TORCHRUN:
        # The `torchrun` on PATH may belong to a different environment than this program's.
        filled[:1] = [sys.executable, "-m", START_MODULE]
    return filled


def option(command: Sequence[str], name: str) -> str:
    """Return the value of one of torchrun's options, such as ``--nproc-per-node``; raises `ValueError` if missing."""
    for argument in command[: _options_end(command)]:
        if argument.startswith(f"{name}="):
            return argument[len(name) + 1 :]
    raise ValueError(f"the torchrun line has no {name}=...: {' '.join(command)}")


def trains_a_task(command: Sequence[str]) -> bool:
    """Whether the ranks are this package's trainer, which uses the heartbeat, or else the user's own script."""
    end = _options_end(command)
    return list(command[end : end + 2]) == ["-m", TRAIN_MODULE]


def script_set_apart(command: Sequence[str]) -> list[str]:
    """Return the command with ``--`` before the user's script.

    Otherwise torchrun refuses an argument of the script that abbreviates several of torchrun's options, such as
    ``--log``.
    """
    end = _options_end(command)
    return [*command[:end], "--", *command[end:]]


def _options_end(command: Sequence[str]) -> int:
    """Return the index of the first argument that is not one of torchrun's own ``--name=value`` options."""
    index = 1
    while index < len(command) and command[index].startswith("--"):
        index += 1
    return index
