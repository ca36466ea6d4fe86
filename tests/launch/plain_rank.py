"""A rank of a script that knows nothing of this package: plain_rank.py [helper] [handles] [usr1] [fails].

By itself it never ends. It `handles` SIGTERM or SIGUSR1 (`usr1`) by ending, with a status of its own if it `fails`. Of
a `helper`, a process that it has forked and terminates, it tells the exit status.
"""

from __future__ import annotations

import multiprocessing
import signal
import sys
import time

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
print("begins", flush=True)
while not stopped:
    time.sleep(0.05)
print("saved and ends by", signal.Signals(stopped[0]).name, flush=True)
sys.exit(3 if "fails" in sys.argv else 0)
