"""A rank that trains nothing over gloo: gloo_rank.py STEPS [BRAKE]. All ranks stop at one step when a node asks.

As long as the file BRAKE exists, training does not come to its end.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from cluster_ddp.launch.heartbeat import HeartbeatFile
from cluster_ddp.run.directory import RunDirectory
from cluster_ddp.run.events import EventWriter
from cluster_ddp.run.phase import Phase

signal.signal(signal.SIGTERM, lambda *_: None)
heartbeat = HeartbeatFile.open(os.environ["CLUSTER_DDP_HEARTBEAT"])
slot = heartbeat.slots[int(os.environ["LOCAL_RANK"])]
rank = int(os.environ["RANK"])
slot.claim(rank=rank)
dist.init_process_group("gloo")
slot.set_phase(Phase.TRAINING)
events = EventWriter(RunDirectory(Path(os.environ["CLUSTER_DDP_RUN"])), f"rank-{rank}")
attempt = int(os.environ["CLUSTER_DDP_ATTEMPT"])
if rank == 0:
    events.write("started", attempt=attempt, step=0, world_size=dist.get_world_size(), total_steps=int(sys.argv[1]))
brake = Path(sys.argv[2]) if len(sys.argv) > 2 else None
step, stop, wish = 0, False, torch.zeros(2)
while not stop and (step < int(sys.argv[1]) or wish[1]):
    wish[0], wish[1] = heartbeat.stop_level, brake is not None and brake.exists()
    dist.all_reduce(wish, dist.ReduceOp.MAX)
    stop = bool(wish[0])
    time.sleep(0.02)
    step += 1
    slot.beat(step)
    if rank == 0 and step % 10 == 0:
        print(f"step {step} of attempt {attempt} on devices {os.environ.get('CUDA_VISIBLE_DEVICES')}", flush=True)
if rank == 0 and stop:
    events.write("stopped", attempt=attempt, step=step, reason=heartbeat.stop_reason)
elif rank == 0:
    events.write("completed", attempt=attempt, step=step)
slot.set_phase(Phase.DONE)
dist.destroy_process_group()
