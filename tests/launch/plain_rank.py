"""A rank of a script that knows nothing of this package: plain_rank.py [handles]. It never ends by itself."""

from __future__ import annotations

import signal
import sys
import time

stopped: list[int] = []
if "handles" in sys.argv:
    signal.signal(signal.SIGTERM, lambda number, _: stopped.append(number))
print("begins", flush=True)
while not stopped:
    time.sleep(0.05)
print("saved and ends", flush=True)
