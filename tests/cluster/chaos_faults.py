"""The faults of the chaos runs: each does one kind of harm to a running job, and undoes what an operator would."""

from __future__ import annotations

import contextlib
import os
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from same_training import checkpoints
from slurm_cluster import SlurmCluster
from training_job import TrainingJob
from virtual_hosts import Process, sh

TIME_LIMIT = "02:00:00"
NODE_PROGRAM = r"^\S*python\S* -m cluster_ddp\.launch\.node "
"""The command lines of node programs, and not of the keeper, which holds the one that srun is to start."""


@dataclass(frozen=True)
class Strike:
    """One fault of a schedule.

    Attributes
    ----------
    kind:
        A key of `FAULTS`.
    node:
        Where it strikes, for the kinds that strike one node.
    after:
        New steps that training makes first.
    seconds:
        How long the harm lasts, for the kinds that last.
    seed:
        For whatever else the fault leaves to chance.
    """

    kind: str
    node: str
    after: int
    seconds: float
    seed: int


class NoVictim(Exception):
    """At this moment there is nothing to strike: Slurm itself has just ended something on that node.

    A message to a node that was away (end that job) can reach it later, when the same job is back there.
    """


@dataclass(frozen=True)
class Scene:
    """What a fault finds: the cluster, the run, and the folder of the small disk that the run is on."""

    cluster: SlurmCluster
    training: TrainingJob
    disk: Path


@dataclass(frozen=True)
class Fault:
    """A kind of harm.

    Attributes
    ----------
    strike:
        Does it, and returns when what an operator would undo is undone.
    restarts:
        Whether it ends the attempt.
    graceful:
        Whether there is time to save, so that no step may be trained twice.
    local:
        Whether it strikes one node.
    """

    strike: Callable[[Scene, Strike], None]
    restarts: bool
    graceful: bool = False
    local: bool = True


def schedule(seed: int, count: int, kinds: list[str], nodes: tuple[str, ...]) -> list[Strike]:
    """A random order of so many faults in which each kind comes at least once; the same for the same seed."""
    chance = random.Random(seed)
    drawn = [*kinds, *chance.choices(kinds, k=max(0, count - len(kinds)))][:count]
    chance.shuffle(drawn)
    return [
        Strike(kind, chance.choice(nodes), chance.randint(3, 12), chance.uniform(2, 6), chance.getrandbits(32))
        for kind in drawn
    ]


@contextlib.contextmanager
def small_disk(folder: Path, megabytes: int = 64) -> Iterator[Path]:
    """A disk of its own, which can be filled. Mount it before the hosts that are to see it start."""
    folder.mkdir()
    sh("mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "chaos", str(folder))
    try:
        yield folder
    finally:
        sh("umount", "--lazy", str(folder))


def _preempt(scene: Scene, strike: Strike) -> None:
    scene.cluster.preempt(scene.training.job)


def _warn(scene: Scene, strike: Strike) -> None:
    scene.cluster.send_signal(scene.training.job, "USR1")


def _terminate(scene: Scene, strike: Strike) -> None:
    scene.cluster.send_signal(scene.training.job, "TERM")


def _run_out_of_time(scene: Scene, strike: Strike) -> None:
    """Shorten the time limit to less than the job has had; Slurm notices within half a minute."""
    cluster, job = scene.cluster, str(scene.training.job)
    restarts = cluster.job_info(scene.training.job)["Restarts"]
    cluster.run("scontrol", "update", f"JobId={job}", "TimeLimit=1")
    cluster.wait_for(lambda: cluster.job_info(int(job))["Restarts"] != restarts, 180, "the time limit has struck")
    cluster.run("scontrol", "update", f"JobId={job}", f"TimeLimit={TIME_LIMIT}")


def _kill_rank(scene: Scene, strike: Strike) -> None:
    _kill(scene, list(scene.cluster.ranks(strike.node).values()))


def _kill_agent(scene: Scene, strike: Strike) -> None:
    _kill(scene, scene.cluster.agents(strike.node))


def _kill_node_program(scene: Scene, strike: Strike) -> None:
    _kill(scene, scene.cluster.processes(strike.node, NODE_PROGRAM))


def _kill(scene: Scene, found: list[Process]) -> None:
    if not found:
        raise NoVictim(scene.training.story())
    scene.cluster.kill(found[0])


def _restart_slurmd(scene: Scene, strike: Strike) -> None:
    scene.cluster.kill_slurmd(strike.node)
    time.sleep(strike.seconds)
    scene.cluster.start_slurmd(strike.node)


def _unplug(scene: Scene, strike: Strike) -> None:
    scene.cluster.link_down(strike.node)
    time.sleep(strike.seconds)
    scene.cluster.link_up(strike.node)


def _unplug_long(scene: Scene, strike: Strike) -> None:
    """Longer than Slurm waits for a node: it takes the node for dead and queues the job again."""
    restarts = scene.cluster.job_info(scene.training.job)["Restarts"]
    scene.cluster.link_down(strike.node)
    _wait_for_another_restart(scene, restarts)
    scene.cluster.link_up(strike.node)


def _cut_power(scene: Scene, strike: Strike) -> None:
    restarts = scene.cluster.job_info(scene.training.job)["Restarts"]
    scene.cluster.crash_node(strike.node)
    _wait_for_another_restart(scene, restarts)
    scene.cluster.boot_node(strike.node)


def _wait_for_another_restart(scene: Scene, restarts: str) -> None:
    job = scene.training.job
    scene.cluster.wait_for(
        lambda: scene.cluster.job_info(job)["Restarts"] != restarts, 120, f"job {job} is queued again"
    )


def _fill_disk(scene: Scene, strike: Strike) -> None:
    ballast = scene.disk / "ballast"
    with ballast.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))
    time.sleep(strike.seconds)
    ballast.unlink()


def _damage(scene: Scene, strike: Strike) -> None:
    """Kill a rank, and flip some bytes of the newest checkpoint before the next attempt reads it.

    There is one before it: without any intact one the run would end.
    """
    scene.cluster.wait_for(lambda: len(checkpoints(scene.training.run)) > 1, 90, "two checkpoints")
    _kill_rank(scene, strike)
    scene.cluster.wait_for(lambda: scene.cluster.state(scene.training.job) == "PENDING", 90, "between two attempts")
    chance = random.Random(strike.seed)
    victim = chance.choice(sorted(checkpoints(scene.training.run)[-1].iterdir()))
    with victim.open("r+b") as file:
        content = file.read()
        for _ in range(3):
            position = chance.randrange(len(content))
            file.seek(position)
            file.write(bytes([content[position] ^ 1 << chance.randrange(8)]))
        os.fsync(file.fileno())


FAULTS: dict[str, Fault] = {
    "preemption": Fault(_preempt, restarts=True, graceful=True, local=False),
    "scancel --signal=USR1": Fault(_warn, restarts=True, graceful=True, local=False),
    "scancel --signal=TERM": Fault(_terminate, restarts=True, graceful=True, local=False),
    "time limit": Fault(_run_out_of_time, restarts=True, local=False),
    "kill -9 of a rank": Fault(_kill_rank, restarts=True),
    "kill -9 of an agent": Fault(_kill_agent, restarts=True),
    "kill -9 of a node program": Fault(_kill_node_program, restarts=True),
    "kill -9 of slurmd": Fault(_restart_slurmd, restarts=False),
    "link down for seconds": Fault(_unplug, restarts=False),
    "link down, node lost": Fault(_unplug_long, restarts=True),
    "power cut": Fault(_cut_power, restarts=True),
    "full disk": Fault(_fill_disk, restarts=False),
    "damaged checkpoint": Fault(_damage, restarts=True),
}
