"""A rank of a script that knows nothing of this package: plain_rank.py [helper] [handles] [usr1] [fails] [titled].

By itself it never ends. It `handles` SIGTERM or SIGUSR1 (`usr1`) by ending, with a status of its own if it `fails`. Of
a `helper`, a process that it has forked and terminates, it tells the exit status. One that is `titled` overwrites the
environment that the system shows of it, as setproctitle does.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
import time
from pathlib import Path

if "titled" in sys.argv:
    begin, end = map(int, Path("/proc/self/stat").read_text().rpartition(")")[2].split()[47:49])  # env_start, env_end
    ctypes.memset(begin, 0, end - begin)
stopped: list[int] = []
if "helper" in sys.argv:
    helper = multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,))
    helper.start()
    helper.terminate()
    helper.join()
    print("its helper ended with", helper.exitcode, flush=True)
for word, number in (("handles", signal.SIGTERM), ("usr1", signal.SIGUSR1)):
    if word in sys.argv:
        signal.signal(number, lambda number, _: stopped.append(number))
print("begins as", os.getpid(), flush=True)
while not stopped:
    time.sleep(0.05)
print("saved and ends by", signal.Signals(stopped[0]).name, flush=True)
sys.exit(3 if "fails" in sys.argv else 0)
