"""A rank of one that trains nothing, without torch, whose import takes seconds: lone_rank.py STEPS BRAKE.

It stops when its node asks. As long as the file BRAKE exists, training does not come to its end.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

from cluster_ddp.launch.heartbeat import HeartbeatFile
from cluster_ddp.run.directory import RunDirectory
from cluster_ddp.run.events import EventWriter
from cluster_ddp.run.phase import Phase

signal.signal(signal.SIGTERM, lambda *_: None)
heartbeat = HeartbeatFile.open(os.environ["CLUSTER_DDP_HEARTBEAT"])
slot = heartbeat.slots[0]
slot.claim(rank=0)
slot.set_phase(Phase.TRAINING)
steps, brake = int(sys.argv[1]), Path(sys.argv[2])
events = EventWriter(RunDirectory(Path(os.environ["CLUSTER_DDP_RUN"])), "rank-0")
attempt = int(os.environ["CLUSTER_DDP_ATTEMPT"])
events.write("started", attempt=attempt, step=0, world_size=1, total_steps=steps)
step = 0
while not heartbeat.stop_level and (step < steps or brake.exists()):
    time.sleep(0.02)
    step += 1
    slot.beat(step)
    if step % 10 == 0:
        print(f"step {step} of attempt {attempt}", flush=True)
if heartbeat.stop_level:
    events.write("stopped", attempt=attempt, step=step, reason=heartbeat.stop_reason)
else:
    events.write("completed", attempt=attempt, step=step)
slot.set_phase(Phase.DONE)
