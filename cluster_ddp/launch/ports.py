"""Chooses the TCP port that nodes meet at: by Slurm job and attempt, or any free one; never an ephemeral port."""

from __future__ import annotations

import random
import socket

from cluster_ddp import exit_statuses
from cluster_ddp.errors import ClusterDDPError
from cluster_ddp.launch.address import LOOPBACK

FIRST_PORT = 20000
PORTS = 12768  # up to 32767: the ephemeral ports, which anybody may use, begin at 32768
TRIES = 256
_CHANCE = random.SystemRandom()  # unseeded: equally seeded programs need different ports and unchanged random numbers
_STRIDE = 1009  # between attempts, and between tries: far from the ports of jobs with the next ids


class NoFreePort(ClusterDDPError):
    """Every port that was tried on this host is taken."""

    exit_status = exit_statuses.RUN_FAILED


def job_port(slurm_job_id: int) -> int:
    """Return the port of a Slurm job: the same on every node, and rarely that of a job on the same node."""
    return FIRST_PORT + slurm_job_id % PORTS


def attempt_port(slurm_job_id: int, attempt: int) -> int:
    """Return the port of one attempt of a Slurm job: a different one for each attempt, and one that is free here.

    Call it on the host that will listen, which is the first of the job's nodes.
    """
    for number in range(attempt, attempt + TRIES):
        port = job_port(slurm_job_id + number * _STRIDE)
        if is_free(port):
            return port
    raise NoFreePort(f"no free port from {FIRST_PORT} to {FIRST_PORT + PORTS - 1} on {socket.gethostname()}")


def is_free(port: int, host: str = "") -> bool:
    """Whether a server could listen there now, by default on all addresses.

    A connection of an earlier server that is still closing does not matter.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
            probe.listen(1)
        except OSError:
            return False
    return True


def free_port(host: str = LOOPBACK) -> int:
    """Return a port that is free at an address (empty: at any of this host's); raises `NoFreePort`."""
    for port in _CHANCE.sample(range(FIRST_PORT, FIRST_PORT + PORTS), TRIES):
        if is_free(port, host):
            return port
    raise NoFreePort(f"no free port from {FIRST_PORT} to {FIRST_PORT + PORTS - 1} on {host or socket.gethostname()}")
