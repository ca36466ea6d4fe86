"""Imported by the server that forks workers, as it starts: signals that ask a run to stop do not end it.

What it forks ends on SIGTERM again, until it sees to that itself.
"""

from __future__ import annotations

import signal

from cluster_ddp.launch.processes import ASK_TO_STOP, survive

survive(number for number in ASK_TO_STOP if number is not signal.SIGINT)  # which the server itself ignores
