"""A script that knows nothing of cluster-ddp: counting_script.py END [--resume].

It counts until the file END exists, and saves its count when it gets SIGTERM, as frameworks do. An END that is not
empty holds the error that it ends with.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

end = Path(sys.argv[1])
saved = end.with_name("saved")
stopped: list[int] = []
signal.signal(signal.SIGTERM, lambda number, _: stopped.append(number))
count = int(saved.read_text()) if "--resume" in sys.argv else 0
print("attempt", os.environ["CLUSTER_DDP_ATTEMPT"], "goes on from", count, flush=True)
while not stopped and not end.exists():
    count += 1
    time.sleep(0.05)
saved.write_text(str(count))
if not stopped and (error := end.read_text()):
    sys.exit(error)
