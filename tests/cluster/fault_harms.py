"""How the faults of the table are struck on the real cluster, and what each has at hand."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from chaos_faults import FAULTS, Strike
from chaos_faults import Scene as ChaosScene
from same_training import checkpoints
from slurm_cluster import CHECKOUT, SlurmCluster
from training_job import TrainingJob

from cluster_ddp.launch.ports import job_port

FIRST, BAD = "node1", "node2"
"""The batch host, and where harm is done before a run begins. Slurm gives a job of two nodes the first two."""
KEEPER = r"cluster_ddp\.launch\.keeper|submitit\.core\._submit"
EVERY_STEPS = 10
STRUCK_AT = 12
_CONTROLLER_AWAY_SECONDS = 120.0  # as in an ordinary failover (SlurmctldTimeout)
_SUSPENDED_SECONDS = 15.0
_MEMORY_BYTES = 1 << 30


@dataclass
class Scene:
    """What a fault finds.

    Attributes
    ----------
    folder
        Where the run and whatever belongs to it lies, seen by all nodes.
    disk
        The small disk that it lies on.
    training
        The run; before it is submitted there is none.
    said
        Every reason and warning that `status` has given so far.
    names
        What words of the job file, of its options and of commands in nodes stand for.
    """

    cluster: SlurmCluster
    via: str
    folder: Path
    disk: Path
    training: TrainingJob | None = None
    said: list[str] = field(default_factory=list)
    names: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.names |= {
            "FOLDER": str(self.folder),
            "PYTHON": str(Path(sys.executable).parent),
            "PACKAGE": str(CHECKOUT / "cluster_ddp"),
        }

    def named(self, words: str) -> str:
        for name, meant in self.names.items():
            words = words.replace(name, meant)
        return words

    @property
    def run(self) -> TrainingJob:
        assert self.training is not None
        return self.training

    def host(self, node: int) -> str:
        """The host of a node rank in the first attempt."""
        found = [e["host"] for e in self.run.events() if e["event"] == "node-started" and e["node"] == node]
        return str(found[0])

    def wait(self, ready: Callable[[], Any], what: str, seconds: float = 120) -> Any:
        return self.cluster.wait_for(ready, seconds, f"{what}\n{self.training.story() if self.training else ''}")


Harm = Callable[[Scene], object]


def warn(scene: Scene) -> None:
    name = "USR2" if scene.via == "submitit" else "USR1"
    scene.cluster.send_signal(scene.run.job, name, batch=True)


def shorten_time_limit(scene: Scene) -> None:
    """Leave it less time than the keeper lets pass until it asks Slurm again when the job ends."""
    scene.cluster.run("scontrol", "update", f"JobId={scene.run.job}", "TimeLimit=2")
    scene.run.wait_for_restart(1)
    scene.cluster.run("scontrol", "update", f"JobId={scene.run.job}", "TimeLimit=20")


def preempt(scene: Scene) -> None:
    scene.cluster.preempt(scene.run.job)


def as_in_chaos(kind: str, node: int = 1) -> Harm:
    """A fault of the chaos runs, on the host of a node rank."""

    def strike(scene: Scene) -> None:
        what = Strike(kind, scene.host(node), after=0, seconds=4.0, seed=1)
        FAULTS[kind].strike(ChaosScene(scene.cluster, scene.run, scene.disk), what)

    return strike


def suspend(scene: Scene) -> None:
    scene.cluster.run("scontrol", "suspend", str(scene.run.job))
    time.sleep(_SUSPENDED_SECONDS)
    scene.cluster.run("scontrol", "resume", str(scene.run.job))


def requeue_and_hold(scene: Scene) -> None:
    scene.cluster.run("scontrol", "requeuehold", str(scene.run.job))
    scene.wait(lambda: scene.run.status()["state"] == "HELD", "the run is told as held")
    time.sleep(3)
    scene.cluster.run("scontrol", "release", str(scene.run.job))


def processes(pattern: str, node: int) -> Harm:
    def strike(scene: Scene) -> None:
        found = scene.cluster.processes(scene.host(node), pattern)
        assert found, f"nothing to kill: {pattern}"
        for process in found:
            scene.cluster.kill(process)

    return strike


def stop_keeper(scene: Scene) -> None:
    """Stop it, kill a rank, ask when the nodes have ended what `status` would say minutes later, and continue it."""
    cluster, host = scene.cluster, scene.host(0)
    keepers = cluster.processes(host, KEEPER)
    assert keepers
    for keeper in keepers:
        cluster.kill(keeper, signal.SIGSTOP)
    for rank in cluster.ranks(scene.host(1)).values():
        cluster.kill(rank)
    scene.wait(lambda: not list((scene.run.run / "attempts/000").glob("node-*.alive")), "both nodes have ended")
    status = scene.run.status(later=150)
    assert status["state"] == "RUNNING", status
    scene.said.append(status["reason"] or "")
    for keeper in keepers:
        cluster.kill(keeper, signal.SIGCONT)


def kill_batch_slurmstepd(scene: Scene) -> None:
    """Let the run complete after it, and end the job as `status` says minutes later."""
    processes(rf"slurmstepd: \[{scene.run.job}\.batch\]", 0)(scene)
    scene.run.full_speed()
    scene.wait(lambda: scene.run.status()["state"] == "COMPLETED", "the run is complete")
    status = scene.run.status(later=400)
    assert status["state"] == "COMPLETED", status
    scene.said.append(status["reason"] or "")
    assert scene.cluster.state(scene.run.job) == "RUNNING"
    assert f"To end it: scancel {scene.run.job}" in scene.said[-1], scene.run.story()
    scene.cluster.cancel(scene.run.job)


def vanish(scene: Scene) -> None:
    """All of the run on its second node ends at once, also what Slurm has started there; its slurmd answers."""
    processes(r"slurmstepd: \[\d+\.0\]|cluster_ddp", 1)(scene)


def vanish_and_stop(scene: Scene) -> None:
    vanish(scene)
    scene.cluster.cli("stop", str(scene.run.run), timeout=180)


def restart_without_python(scene: Scene) -> None:
    """Preempt it, and take python away from the batch host before it starts again."""
    preempt(scene)
    scene.run.wait_for_restart(1)
    in_node(FIRST, "mount", "-t", "tmpfs", "none", "PYTHON")(scene)


def limit_memory(scene: Scene) -> None:
    """As ``ulimit -v`` would have: whatever the rank asks for from now on is refused."""
    for rank in scene.cluster.ranks(scene.host(1)).values():
        scene.cluster.run("prlimit", f"--pid={rank.pid}", "--as=4096")


def in_small_cgroup(scene: Scene) -> None:
    """Give the rank of the bad node as much memory as it needs to train, as Slurm does where it constrains it."""
    ranks = scene.wait(lambda: scene.cluster.ranks(BAD), f"a rank runs on {BAD}")
    group = _memory_group(scene)
    group.mkdir()
    limit = "memory.max" if (group / "memory.max").exists() else "memory.limit_in_bytes"
    (group / limit).write_text(str(_MEMORY_BYTES))
    for rank in ranks.values():
        (group / "cgroup.procs").write_text(str(rank.pid))


def remove_cgroup(scene: Scene) -> None:
    """Remove the group, which has no processes any more."""
    _memory_group(scene).rmdir()


def _memory_group(scene: Scene) -> Path:
    first = Path("/sys/fs/cgroup/memory")  # where the old hierarchies are in use
    return (first if first.exists() else first.parent) / f"{scene.cluster.folder.name}-{scene.via}"


def reboot(node: int) -> Harm:
    """Off and on again at once: sooner than Slurm would have missed it."""

    def strike(scene: Scene) -> None:
        host = scene.host(node)
        scene.cluster.crash_node(host)
        scene.cluster.boot_node(host)

    return strike


def crash(node: int) -> Harm:
    def strike(scene: Scene) -> None:
        host = scene.host(node)
        scene.cluster.crash_node(host)
        # Back sooner, it would be given the same job, and then Slurm's late word that the job is to be ended there.
        scene.wait(lambda: (scene.run.run / "attempts" / "001").exists(), "it has begun elsewhere", 240)
        scene.cluster.boot_node(host)

    return strike


def without_controller(scene: Scene) -> None:
    """A rank dies while Slurm's controller is away: the requeue that follows finds nobody to ask."""
    scene.cluster.kill_slurmctld()
    for rank in scene.cluster.ranks(scene.host(1)).values():
        scene.cluster.kill(rank)
    began = time.monotonic()

    def told() -> bool:
        reason = scene.run.status()["reason"] or ""
        scene.said.append(reason)
        return "trying to requeue the job" in reason

    scene.wait(told, "status tells what the run waits for", 300)
    time.sleep(max(0.0, began + _CONTROLLER_AWAY_SECONDS - time.monotonic()))
    scene.cluster.start_slurmctld()


def forbid_requeue(scene: Scene) -> None:
    """Slurm is told to queue the job no more, and then the end of its time is near."""
    scene.cluster.run("scontrol", "update", f"JobId={scene.run.job}", "Requeue=0")
    warn(scene)


def cut_from_controller(scene: Scene) -> None:
    """Slurm gives the node up and starts the job elsewhere, while the old attempt trains on."""
    scene.cluster.cut_from_controller(scene.host(0))

    def trains_elsewhere() -> bool:
        return any(event["event"] == "resumed" and event["attempt"] == 1 for event in scene.run.events())

    scene.wait(trains_elsewhere, "it trains elsewhere", 240)


def stand_still(pattern: str, seconds: float | None) -> Harm:
    """Stop a process of the bad node as soon as it is there, and let it go on after a while, or never."""

    def strike(scene: Scene) -> None:
        found = scene.wait(lambda: scene.cluster.processes(BAD, pattern), f"{pattern} on {BAD}")
        for process in found:
            scene.cluster.run("kill", "-STOP", str(process.pid))
        if seconds is not None:
            time.sleep(seconds)
            for process in found:
                scene.cluster.run("kill", "-CONT", str(process.pid), check=False)

    return strike


def in_node(node: str, *command: str) -> Harm:
    """A command inside a node, in which FOLDER and PYTHON stand for the run's folder and the environment's."""

    def act(scene: Scene) -> object:
        return scene.cluster.node_exec(node, *map(scene.named, command))

    return act


def in_bad_node(*command: str) -> Harm:
    """A command inside the bad node."""
    return in_node(BAD, *command)


def full(place: str) -> Harm:
    fill = f"mount -t tmpfs -o size=4k none {place}; dd if=/dev/zero of={place}/x bs=4k count=1 2>/dev/null"
    return in_bad_node("sh", "-c", f"mkdir -p {place}; {fill}")


def full_runs_folder(scene: Scene) -> None:
    """Let the bad node see all that others write there, and have no room for what it writes itself."""
    upper = "mkdir -p FOLDER/own; mount -t tmpfs -o size=16k none FOLDER/own; mkdir FOLDER/own/upper FOLDER/own/work"
    layers = "lowerdir=FOLDER/runs,upperdir=FOLDER/own/upper,workdir=FOLDER/own/work"
    fill = "dd if=/dev/zero of=FOLDER/own/x bs=4k 2>/dev/null || true"
    in_bad_node("sh", "-c", f"{upper}; mount -t overlay -o {layers} none FOLDER/runs; {fill}")(scene)


def listen_everywhere(port: int) -> Harm:
    """Listen on all nodes at a port."""
    listen = f"import socket, time; s = socket.create_server(('', {port})); time.sleep(600)"

    def act(scene: Scene) -> None:
        for node in scene.cluster.nodes:
            scene.cluster.node_spawn(node, sys.executable, "-c", listen)

    return act


def take_port(scene: Scene) -> None:
    """Listen on all nodes where the next job's id would have its ranks meet."""
    next_job = int(scene.cluster.run("sbatch", "--parsable", "--wrap=true", "--output=/dev/null")) + 1
    listen_everywhere(job_port(next_job))(scene)


def damage_between(scene: Scene) -> None:
    """Kill a rank, and damage the newest checkpoint before the next attempt reads it."""
    as_in_chaos("damaged checkpoint")(scene)


def preempt_twice(scene: Scene) -> None:
    """Take the nodes away, and once more when the second attempt has made what it could not save."""
    scene.cluster.preempt(scene.run.job)
    scene.run.wait_for_step(STRUCK_AT + 12, attempt=1, timeout=180)
    scene.wait(lambda: checkpoints(scene.run.run), "the second attempt saves by itself")
    scene.cluster.preempt(scene.run.job)
