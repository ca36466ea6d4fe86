"""Imported by the server that forks workers, as it starts: signals that ask a run to stop do not end it.

What it forks ends on SIGTERM again, until it sees to that itself.
"""

from __future__ import annotations

from cluster_ddp.launch.processes import existing_signals, survive

survive(existing_signals("SIGTERM", "SIGUSR1", "SIGUSR2", "SIGHUP"))  # the server itself ignores SIGINT
