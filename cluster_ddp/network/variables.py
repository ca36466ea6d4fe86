"""Facts about individual variables: which exist, who reads them, and which values they accept.

NCCL silently ignores a variable it does not know and a level it cannot read, and training then runs slowly or over the
wrong interface with no hint why. So these are checked before the job is queued.

Taken from the sources of NCCL 2.29 and torch 2.13.
"""

from __future__ import annotations

from collections.abc import Mapping

LEVELS = ("LOC", "NVL", "NVB", "C2C", "PIX", "PXB", "P2C", "PXN", "PHB", "SYS")
"""Distances in the machine's topology, near to far; digits are taken as well."""

LEVEL_VARIABLES = frozenset({"NCCL_P2P_LEVEL", "NCCL_NET_GDR_LEVEL"})

RENAMED: Mapping[str, str] = {
    "NCCL_BLOCKING_WAIT": "TORCH_NCCL_BLOCKING_WAIT",
    "NCCL_ASYNC_ERROR_HANDLING": "TORCH_NCCL_ASYNC_ERROR_HANDLING",
}
"""Old names that torch still reads, with a warning on each rank, and that the new names beat."""

WITHOUT_EFFECT: Mapping[str, str] = {
    "NCCL_TREE_THRESHOLD": "NCCL chooses the algorithm itself since 2.5; NCCL_ALGO forces one",
    "NCCL_LL_THRESHOLD": "NCCL chooses the protocol itself since 2.5; NCCL_PROTO forces one",
    "NCCL_IB_CUDA_SUPPORT": "it became NCCL_NET_GDR_LEVEL in NCCL 2.4",
    "NCCL_IB_GDR_LEVEL": "it became NCCL_NET_GDR_LEVEL in NCCL 2.4",
}
"""Variables that guides repeat and that no NCCL of today reads."""

MAX_SOCKET_THREADS = 16
MAX_SOCKETS = 64
"""NCCL's limits: threads per connection, and threads times sockets per thread."""
