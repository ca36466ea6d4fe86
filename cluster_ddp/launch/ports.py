"""The TCP ports that ranks meet at: by Slurm job and attempt, or any free one; never an ephemeral port."""

from __future__ import annotations

import random
import socket

from cluster_ddp.job.errors import ClusterDDPError
from cluster_ddp.launch.address import LOOPBACK

FIRST_PORT = 20000
PORTS = 12768  # up to 32767: the ephemeral ports, which anybody may hold, begin at 32768
TRIES = 256
_CHANCE = random.SystemRandom()  # programs that are seeded alike must not get one port, nor find their numbers moved on
_STRIDE = 1009  # between attempts, and between tries: far from the ports of the jobs with the next ids


class NoFreePort(ClusterDDPError):
    """Every port that was tried on this host is taken."""

    exit_status = 4


def job_port(slurm_job_id: int) -> int:
    """The port of a Slurm job: every node derives the same one, and jobs that share a node rarely collide."""
    return FIRST_PORT + slurm_job_id % PORTS


def attempt_port(slurm_job_id: int, attempt: int) -> int:
    """The port of one attempt of a Slurm job: a different one for each attempt, and one that nobody listens on here.

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
    """A port that nobody listens on at an address (empty: at any of this host's), or `NoFreePort`."""
    for port in _CHANCE.sample(range(FIRST_PORT, FIRST_PORT + PORTS), TRIES):
        if is_free(port, host):
            return port
    raise NoFreePort(f"no free port from {FIRST_PORT} to {FIRST_PORT + PORTS - 1} on {host or socket.gethostname()}")
