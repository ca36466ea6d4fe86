"""A rank that trains nothing, but takes part as one that does: beating_rank.py STEPS [BRAKE]. It needs no torch.

As long as the file BRAKE exists, training does not come to its end.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

from cluster_ddp.launch.node.heartbeat import HeartbeatFile
from cluster_ddp.run.directory import RunDirectory
from cluster_ddp.run.events import EventWriter
from cluster_ddp.run.phase import Phase

Wish = tuple[bool, bool]  # to stop, and to go on beyond the last step


def take_part(meet: Callable[[], None] = lambda: None, agree: Callable[[Wish], Wish] = lambda wish: wish) -> None:
    """Be a rank of an attempt; by `agree` all ranks come to one wish after each step."""
    signal.signal(signal.SIGTERM, lambda *_: None)
    heartbeat = HeartbeatFile.open(os.environ["CLUSTER_DDP_HEARTBEAT"])
    slot = heartbeat.slots[int(os.environ["LOCAL_RANK"])]
    rank, attempt, total = int(os.environ["RANK"]), int(os.environ["CLUSTER_DDP_ATTEMPT"]), int(sys.argv[1])
    slot.claim(rank=rank)
    meet()
    slot.set_phase(Phase.TRAINING)
    events = EventWriter(RunDirectory(Path(os.environ["CLUSTER_DDP_RUN"])), f"rank-{rank}")
    if rank == 0:
        events.write("started", attempt=attempt, step=0, world_size=int(os.environ["WORLD_SIZE"]), total_steps=total)
    brake = Path(sys.argv[2]) if len(sys.argv) > 2 else None
    step, stops, goes_on = 0, False, False
    while not stops and (step < total or goes_on):
        stops, goes_on = agree((bool(heartbeat.stop_level), brake is not None and brake.exists()))
        time.sleep(0.02)
        step += 1
        slot.beat(step)
        if rank == 0 and step % 10 == 0:
            print(f"step {step} of attempt {attempt} on devices {os.environ.get('CUDA_VISIBLE_DEVICES')}", flush=True)
    if rank == 0 and stops:
        events.write("stopped", attempt=attempt, step=step, reason=heartbeat.stop_reason)
    elif rank == 0:
        events.write("completed", attempt=attempt, step=step)
    slot.set_phase(Phase.DONE)


if __name__ == "__main__":
    take_part()
