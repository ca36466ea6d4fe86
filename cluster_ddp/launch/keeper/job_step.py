"""The job step that trains: srun starts one node program on every node, which starts torchrun."""

from __future__ import annotations

from collections.abc import Sequence

# --label: how the keeper tells the nodes' output apart.
SRUN = ("srun", "--export=ALL", "--ntasks-per-node=1", "--kill-on-bad-exit=1", "--wait=0", "--label")

ATTEMPT = "{attempt}"
"""Stands in the command for the attempt's number, which is known only when the attempt has begun."""

PORT = "{port}"
"""Stands in the rendezvous endpoint for a port that is free on the first node, another for each attempt."""


def node_program(
    python: str, run_directory: str, torchrun: Sequence[str], *, attempt: str = ATTEMPT, node: int | None = None
) -> list[str]:
    """Return the command that runs on every node.

    Parameters
    ----------
    torchrun
        The torchrun command line with its placeholders.
    node
        The node's rank, if not the one that Slurm tells.
    """
    rank = [] if node is None else ["--node-rank", str(node)]
    words = [python, "-m", "cluster_ddp.launch.node", "--run", run_directory, "--attempt", attempt, *rank]
    return [*words, "--", *torchrun]


def leaves_port_open(command: Sequence[str]) -> bool:
    """Whether the keeper has to choose the port."""
    return command[_first(command, "--rdzv-endpoint=")].endswith(PORT)


def with_attempt(command: Sequence[str], number: int, port: int | None = None) -> list[str]:
    """Fill in the attempt's number in the job step's command and, if it is open, the rendezvous port.

    Only the node program's ``--attempt`` and torchrun's ``--rdzv-id`` and ``--rdzv-endpoint`` are changed, the first of
    each: what follows belongs to the user and may contain braces.
    """
    filled = list(command)
    filled[filled.index("--attempt") + 1] = str(number)
    index = _first(filled, "--rdzv-id=")
    filled[index] = filled[index].replace(ATTEMPT, str(number))
    if port is not None:
        index = _first(filled, "--rdzv-endpoint=")
        filled[index] = filled[index].replace(PORT, str(port))
    return filled


def _first(command: Sequence[str], option: str) -> int:
    return next(index for index, argument in enumerate(command) if argument.startswith(option))
