"""A rank that warns of something twice, as two ranks would, and works to its end."""

from __future__ import annotations

import sys
import time

for _ in range(2):
    print("cluster-ddp: the save of step 7 failed; training continues", file=sys.stderr)
    print("cluster-ddp: rank 0 ends because another one did", file=sys.stderr)
    print("some library's own line", file=sys.stderr)
    print("/x/cluster_ddp/train/model.py:118: UserWarning: BatchNorm stays", file=sys.stderr, flush=True)
time.sleep(1.5)  # a rank that ends at once is seen by its exit only
