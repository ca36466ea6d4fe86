"""A rank that knows the heartbeat, without torch: heartbeat_rank.py STEPS [MODE [STOPS]]. It tells on standard output.

STOPS is the process that a rank stops before it hangs: `agent` or `rank0`.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import subprocess
import sys
import time

from cluster_ddp.launch.node.heartbeat import STACKS_SIGNALS, HeartbeatFile, stacks_beside
from cluster_ddp.run.phase import Phase

steps = int(sys.argv[1])
mode = sys.argv[2] if len(sys.argv) > 2 else ""
rank, local_rank = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
first_life = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
received: list[str] = []

for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
    signal.signal(number, lambda given, _: received.append(signal.Signals(given).name))

heartbeat = HeartbeatFile.open(os.environ["CLUSTER_DDP_HEARTBEAT"])
slot = heartbeat.slots[local_rank]
faulthandler.register(STACKS_SIGNALS[0], file=stacks_beside(heartbeat.path, rank).open("a"), all_threads=True)
slot.claim(rank=rank)
while mode.startswith("hang") and not all(other.pid for other in heartbeat.slots):
    time.sleep(0.05)  # as ranks of DDP, which meet before they train
if mode == "helper":  # such as a DataLoader worker that left the rank's session
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)

print(f"rank {rank} begins, restart {os.environ['TORCHELASTIC_RESTART_COUNT']}", flush=True)
slot.set_phase(Phase.TRAINING)
step = 0
while step < steps and (heartbeat.stop_level == 0 or mode == "deaf"):
    if received and mode.startswith("crash"):
        sys.exit(1)  # as when a collective fails because a peer is gone
    time.sleep(0.001 if mode.startswith("hang") else 0.05)
    if first_life and mode == f"crash{rank}" and step == 10:
        raise ValueError("the failure of the test")
    if mode == f"hang{rank}" and step == 10:
        if sys.argv[3:]:
            os.kill({"agent": os.getppid(), "rank0": heartbeat.slots[0].pid}[sys.argv[3]], signal.SIGSTOP)
        time.sleep(600)
    if mode == f"worker{rank}" and step == 10:
        with subprocess.Popen(["sleep", "600"]) as worker:
            worker.send_signal(signal.SIGSTOP)
    step += 1
    slot.beat(step)
print(
    f"rank {rank} ends: level {heartbeat.stop_level}, reason {heartbeat.stop_reason}, received {received}", flush=True
)
slot.set_phase(Phase.DONE)
if mode.startswith("hang"):
    os._exit(0)  # at once: of what it was asked for later, nothing would be seen
if mode == "abort":
    os.abort()
