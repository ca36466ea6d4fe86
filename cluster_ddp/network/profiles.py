"""Profiles: default variables for each kind of network. The job file's keys and `env` override them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class Default(NamedTuple):
    """A variable's value in a profile, and why it is set."""

    value: str
    why: str


PROFILES: Mapping[str, Mapping[str, Default]] = {
    # NCCL's own detection is right on most clusters, so nothing is set by default.
    "auto": {},
    "ethernet": {
        "NCCL_IB_DISABLE": Default("1", "no InfiniBand: NCCL uses plain sockets"),
        "NCCL_SOCKET_NTHREADS": Default("4", "one thread cannot fill a fast Ethernet link"),
        "NCCL_NSOCKS_PERTHREAD": Default("4", "nor can one connection"),
    },
    "infiniband": {
        "NCCL_IB_DISABLE": Default("0", "use the InfiniBand adapters"),
        "NCCL_IB_TIMEOUT": Default("22", "17 s before a retry, not 4: large fabrics reroute that long"),
    },
    "roce": {
        "NCCL_IB_DISABLE": Default("0", "RoCE is driven through the InfiniBand verbs"),
        "NCCL_IB_TIMEOUT": Default("22", "17 s before a retry, not 4: congested Ethernet drops and resends"),
    },
}
