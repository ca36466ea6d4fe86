"""A rank that meets the others over gloo and then waits for its end."""

from __future__ import annotations

import time

import torch.distributed as dist

dist.init_process_group("gloo")
dist.barrier()
print(f"rank {dist.get_rank()} has met the others", flush=True)
time.sleep(600)
