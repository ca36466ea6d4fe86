"""The table of faults: how each is struck on a real cluster, how the run is to end, and what `status` is to say.

docs/faults.md is this table with what was measured; `fault_record` makes it.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from chaos_faults import FAULTS, Strike
from chaos_faults import Scene as ChaosScene
from same_training import checkpoints
from slurm_cluster import SlurmCluster
from training_job import TrainingJob

from cluster_ddp.launch.ports import job_port

BAD = "node2"
"""Where harm is done before a run begins. Slurm gives a job of two nodes the first two."""
EVERY_STEPS = 10
STRUCK_AT = 12
_CONTROLLER_AWAY_SECONDS = 30.0
_SUSPENDED_SECONDS = 15.0


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
    """

    cluster: SlurmCluster
    via: str
    folder: Path
    disk: Path
    training: TrainingJob | None = None
    said: list[str] = field(default_factory=list)

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


@dataclass(frozen=True)
class Row:
    """A fault.

    Attributes
    ----------
    follows
        What happens then, for docs/faults.md.
    strike, at
        Does the harm to a run that has come to a step, a little after a checkpoint; 0: at once.
    before, undo
        Does harm before the run is submitted, and takes it away.
    state, attempts
        How the run ends.
    lost
        The most steps that may be trained again.
    words
        What `status` says at some moment, each of them.
    job
        Sections of the job file; ``FOLDER`` in text stands for the run's folder.
    task
        A file and class besides the paced digits, with parameters of its own.
    short
        The ways that are part of the default run.
    """

    follows: str
    strike: Harm | None = None
    at: int = STRUCK_AT
    before: Harm | None = None
    undo: Harm | None = None
    state: str = "COMPLETED"
    attempts: int = 2
    lost: int = 0
    words: tuple[str, ...] = ()
    job: Mapping[str, Any] = field(default_factory=dict)
    task: tuple[str, Mapping[str, Any]] | None = None
    short: tuple[str, ...] = ()


# -- strikes -----------------------------------------------------------------------------------------------------------


def _warn(scene: Scene) -> None:
    name = "USR2" if scene.via == "submitit" else "USR1"
    scene.cluster.send_signal(scene.run.job, name, batch=True)


def _preempt(scene: Scene) -> None:
    scene.cluster.preempt(scene.run.job)


def _as_in_chaos(kind: str, node: int = 1) -> Harm:
    """A fault of the chaos runs, on the host of a node rank."""

    def strike(scene: Scene) -> None:
        what = Strike(kind, scene.host(node), after=0, seconds=4.0, seed=1)
        FAULTS[kind].strike(ChaosScene(scene.cluster, scene.run, scene.disk), what)

    return strike


def _stop(scene: Scene) -> None:
    scene.cluster.cli("stop", str(scene.run.run), timeout=180)


def _suspend(scene: Scene) -> None:
    scene.cluster.run("scontrol", "suspend", str(scene.run.job))
    time.sleep(_SUSPENDED_SECONDS)
    scene.cluster.run("scontrol", "resume", str(scene.run.job))


def _requeue_and_hold(scene: Scene) -> None:
    scene.cluster.run("scontrol", "requeuehold", str(scene.run.job))
    scene.wait(lambda: scene.run.status()["state"] == "HELD", "the run is told as held")
    time.sleep(3)
    scene.cluster.run("scontrol", "release", str(scene.run.job))


def _processes(pattern: str, node: int) -> Harm:
    def strike(scene: Scene) -> None:
        found = scene.cluster.processes(scene.host(node), pattern)
        assert found, f"nothing to kill: {pattern}"
        for process in found:
            scene.cluster.kill(process)

    return strike


def _limit_memory(scene: Scene) -> None:
    """As ``ulimit -v`` would have: whatever the rank asks for from now on is refused."""
    for rank in scene.cluster.ranks(scene.host(1)).values():
        scene.cluster.run("prlimit", f"--pid={rank.pid}", "--as=4096")


def _reboot(node: int) -> Harm:
    """Off and on again at once: sooner than Slurm would have missed it."""

    def strike(scene: Scene) -> None:
        host = scene.host(node)
        scene.cluster.crash_node(host)
        scene.cluster.boot_node(host)

    return strike


def _crash(node: int) -> Harm:
    def strike(scene: Scene) -> None:
        host = scene.host(node)
        scene.cluster.crash_node(host)
        # Back sooner, it would be given the same job, and then Slurm's late word that the job is to be ended there.
        scene.wait(lambda: (scene.run.run / "attempts" / "001").exists(), "it has begun elsewhere", 240)
        scene.cluster.boot_node(host)

    return strike


def _without_controller(scene: Scene) -> None:
    """A rank dies while Slurm's controller is away: the requeue that follows finds nobody to ask."""
    scene.cluster.kill_slurmctld()
    for rank in scene.cluster.ranks(scene.host(1)).values():
        scene.cluster.kill(rank)
    began = time.monotonic()

    def told() -> bool:
        reason = scene.run.status()["reason"] or ""
        scene.said.append(reason)
        return "waiting to be queued again" in reason

    scene.wait(told, "status tells what the run waits for", 300)
    time.sleep(max(0.0, began + _CONTROLLER_AWAY_SECONDS - time.monotonic()))
    scene.cluster.start_slurmctld()


def _stand_still(pattern: str, seconds: float | None) -> Harm:
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


def _in_bad_node(*command: str) -> Harm:
    """A command inside the bad node, in which FOLDER and PYTHON stand for the run's folder and the environment's."""

    def act(scene: Scene) -> object:
        names = {"FOLDER": str(scene.folder), "PYTHON": str(Path(sys.executable).parent)}
        return scene.cluster.node_exec(BAD, *(_named(word, names) for word in command))

    return act


def _named(word: str, names: Mapping[str, str]) -> str:
    for name, value in names.items():
        word = word.replace(name, value)
    return word


def _full(place: str) -> Harm:
    fill = f"mount -t tmpfs -o size=4k none {place}; dd if=/dev/zero of={place}/x bs=4k count=1 2>/dev/null"
    return _in_bad_node("sh", "-c", f"mkdir -p {place}; {fill}")


def _take_port(scene: Scene) -> None:
    """Listen on all nodes where the next job's id would have its ranks meet."""
    cluster = scene.cluster
    next_job = int(cluster.run("sbatch", "--parsable", "--wrap=true", "--output=/dev/null")) + 1
    listen = f"import socket, time; s = socket.create_server(('', {job_port(next_job)})); time.sleep(600)"
    for node in cluster.nodes:
        cluster.node_spawn(node, sys.executable, "-c", listen)


def _damage_between(scene: Scene) -> None:
    """Kill a rank, and damage the newest checkpoint before the next attempt reads it."""
    _as_in_chaos("damaged checkpoint")(scene)


def _preempt_twice(scene: Scene) -> None:
    """Take the nodes away, and once more when the second attempt has made what it could not save."""
    scene.cluster.preempt(scene.run.job)
    scene.run.wait_for_step(STRUCK_AT + 12, attempt=1, timeout=180)
    scene.wait(lambda: checkpoints(scene.run.run), "the second attempt saves by itself")
    scene.cluster.preempt(scene.run.job)


_FAULTY = "faulty_digits.py:FaultyDigits"
_MARKER = {"marker": "FOLDER/struck"}
_CANCEL = {"slurm": {"partition": "cancel"}}
_NODE_PROGRAM = r"^\S*python\S* -m cluster_ddp\.launch\.node "


def bad(before: Harm, undo: Harm, words: str, **more: Any) -> Row:
    """A node that cannot take part: the run goes on without it."""
    return Row(
        "the node is named with its last words; requeued, and after the second time without it, while the partition "
        "has enough others",
        before=before,
        undo=undo,
        attempts=3,
        words=(f"node {BAD} failed", words),
        **more,
    )


ROWS: dict[str, Row] = {
    # -- Slurm ends the job, or a person does
    "time limit near": Row(
        "warning signal, `requeue.warning` ahead: saved, requeued", _warn, words=("stopped: time-limit",)
    ),
    "time limit without a warning in time": Row(
        "SIGTERM: saved within Slurm's KillWait, requeued at least 3 s before it is over; nothing is lost if the save "
        "fits",
        _as_in_chaos("time limit"),
        lost=2 * EVERY_STEPS,  # KillWait is 5 s here
        words=("time-limit",),
        job={"requeue": {"warning": "1s"}},
    ),
    "preemption with grace": Row(
        "saved within the grace of the partition or the QOS, requeued", _preempt, words=("stopped: preemption",)
    ),
    "preemption without grace, on a CANCEL partition": Row(
        "saved within KillWait, requeued by the keeper; with 15 s or less no logger (wandb) is waited for",
        _preempt,
        words=("stopped: preemption",),
        job=_CANCEL,
        lost=EVERY_STEPS + 5,  # KillWait is 5 s here
        short=("sbatch", "submitit"),
    ),
    "a save that does not fit into the grace": Row(
        "the step, the grace and the time that a save takes are told, and what to set; the next attempts save often "
        "enough that something remains",
        _preempt_twice,
        attempts=3,
        lost=60,
        words=("save of step", "not finished within", "checkpoint.every_steps"),
        job={**_CANCEL, "checkpoint": {"every_steps": 1000}},
        task=("slow_disk_digits.py:SlowDiskDigits", {"writing": 3.0, "brake": "FOLDER/brake"}),
    ),
    "`cluster-ddp stop`": Row(
        "saved, STOPPED until `resume`", _stop, state="STOPPED", attempts=1, words=("stopped by",)
    ),
    "`scancel`, `cluster-ddp cancel`": Row(
        "saved if time allows, CANCELLED, never requeued; only `resume` starts it again",
        lambda scene: scene.cluster.cancel(scene.run.job),
        state="CANCELLED",
        attempts=1,
        words=("cancel",),
    ),
    "SIGTERM from an unknown sender": Row(
        "saved; requeued if Slurm lets the job run on, else STOPPED",
        lambda scene: scene.cluster.send_signal(scene.run.job, "TERM"),
        words=("stopped: terminated",),
    ),
    "suspended (`scontrol suspend`, gang scheduling)": Row(
        "SUSPENDED; its time does not count as a hang, and it goes on where it was",
        _suspend,
        attempts=1,
        words=("suspended by Slurm",),
        job={"launch": {"hang_timeout": 10}},
    ),
    "requeued and held (`scontrol requeuehold`, a failed prolog, MaxBatchRequeue)": Row(
        "saved, HELD with Slurm's reason and the command that releases it; nothing starts it before",
        _requeue_and_hold,
        lost=EVERY_STEPS + 5,
        words=("scontrol release",),
    ),
    # -- processes
    "rank killed (as for memory)": Row(
        "the rank, its host and its signal are recorded; requeued",
        _as_in_chaos("kill -9 of a rank"),
        lost=2 * EVERY_STEPS,
        words=("ended by SIGKILL, perhaps because the node ran out of memory",),
    ),
    "rank at a memory limit (`ulimit -v`)": Row(
        "its error, or that it hangs, is recorded with the rank and its host; requeued",
        _limit_memory,
        lost=2 * EVERY_STEPS,
        job={"launch": {"hang_timeout": 20}},
    ),
    "error after the first step": Row(
        "the rank, its host and its error are recorded; requeued (with `launch.max_restarts`, restarted inside the "
        "allocation)",
        lost=2 * EVERY_STEPS,
        words=("RuntimeError: the fault of the test",),
        task=(_FAULTY, {"fault": "crash", "at": 30, **_MARKER}),
    ),
    "error before the first finished step": Row(
        "FAILED and not retried: import error, wrong settings, out of memory",
        state="FAILED",
        attempts=1,
        words=("a_package_that_nobody_has",),
        task=(_FAULTY, {"fault": "import"}),
    ),
    "hang": Row(
        "after `launch.hang_timeout` (learned, at least a minute) stacks of all ranks and NCCL's flight recorder go to "
        "`attempts/NNN/`; requeued",
        lost=2 * EVERY_STEPS,
        words=("hangs",),
        job={"launch": {"hang_timeout": 10}},
        task=(_FAULTY, {"fault": "hang", "at": 30, **_MARKER}),
    ),
    "torchrun agent killed": Row(
        "its ranks and all other nodes save; requeued", _as_in_chaos("kill -9 of an agent"), words=("agent-lost",)
    ),
    "node program killed (as for memory)": Row(
        "its ranks have 3 s to save, then they are ended; requeued",
        _as_in_chaos("kill -9 of a node program"),
        lost=2 * EVERY_STEPS,
        short=("submitit",),
    ),
    "the keeper killed (as for memory)": Row(
        "nobody is left to queue the job again: the run is LOST until `resume`",
        _processes(r"cluster_ddp\.launch\.keeper|submitit\.core\._submit", 0),
        state="LOST",
        attempts=1,
    ),
    "attempts without a new checkpoint (`requeue.max_without_progress`)": Row(
        "STALLED, with the last error and its host; `resume` resets the count",
        state="STALLED",
        words=("2 attempts in a row ended without a new checkpoint", "the fault of the test"),
        lost=2 * EVERY_STEPS,
        job={"requeue": {"max_without_progress": 2}, "checkpoint": {"every_steps": 1000}},
        task=(_FAULTY, {"fault": "crash", "at": 8}),
    ),
    # -- nodes and the network
    "slurmd killed and back": Row("the job continues", _as_in_chaos("kill -9 of slurmd"), attempts=1),
    "network away for seconds": Row("the job continues", _as_in_chaos("link down for seconds"), attempts=1),
    "network of a node away, node lost": Row(
        "Slurm, errors of the other ranks or the watchdog end the attempt; requeued; a host that fails twice is "
        "excluded while the partition has enough others",
        _as_in_chaos("link down, node lost"),
        lost=2 * EVERY_STEPS,
        job={"network": {"timeout": "1m"}},
    ),
    "power cut of a node": Row("the same", _crash(1), lost=2 * EVERY_STEPS),
    "power cut of the batch host": Row("Slurm requeues it", _crash(0), lost=2 * EVERY_STEPS),
    "a node rebooted before Slurm misses it": Row("requeued", _reboot(1), lost=2 * EVERY_STEPS),
    "a node's processes vanish while its slurmd answers": Row(
        "once another node has signed off, a minute without a sign of life: the step is ended, the node recorded as "
        "lost; requeued",
        _processes(r"slurmstepd: \[\d+\.0\]|cluster_ddp", 1),
        lost=2 * EVERY_STEPS,
        words=("was lost: no sign of life",),
    ),
    "Slurm's controller away when the job is to be requeued": Row(
        "tried until the allocation is nearly over, which `status` says while it lasts",
        _without_controller,
        lost=2 * EVERY_STEPS,
        words=("waiting to be queued again, which is tried until the allocation is nearly over",),
    ),
    # -- a node that cannot take part
    "runs folder missing on a node": bad(
        _in_bad_node("mount", "-t", "tmpfs", "none", "FOLDER/runs"),
        _in_bad_node("umount", "FOLDER/runs"),
        "has to be the same and writable",
        short=("sbatch", "submitit"),
    ),
    "runs folder read-only on a node": bad(
        _in_bad_node("sh", "-c", 'mount --bind "$0" "$0" && mount -o remount,ro,bind "$0"', "FOLDER/runs"),
        _in_bad_node("umount", "FOLDER/runs"),
        "has to be the same and writable",
    ),
    "python missing on a node": bad(
        _in_bad_node("mount", "-t", "tmpfs", "none", "PYTHON"),
        _in_bad_node("umount", "PYTHON"),
        "Exited with exit code 2",
    ),
    "memory disk (`/dev/shm`) full on a node": bad(
        _full("/dev/shm"), _in_bad_node("umount", "/dev/shm"), "make room there"
    ),
    "temporary folder full on a node": Row(
        "not needed",
        before=_full("FOLDER/tmp"),
        undo=_in_bad_node("umount", "FOLDER/tmp"),
        attempts=1,
        job={"launch": {"setup": ["mkdir -p FOLDER/tmp; export TMPDIR=FOLDER/tmp"]}},
    ),
    "home missing on a node": Row(
        "not needed",
        before=_in_bad_node("sh", "-c", "mkdir -p FOLDER/home; mount -t tmpfs -o ro none FOLDER/home"),
        undo=_in_bad_node("umount", "FOLDER/home"),
        attempts=1,
        job={"launch": {"setup": ["mkdir -p FOLDER/home/me; export HOME=FOLDER/home/me"]}},
    ),
    "a node that joins late": Row(
        "the others wait, up to `launch.join_timeout`", _stand_still(_NODE_PROGRAM, 15), at=0, attempts=1
    ),
    "a node that never joins": Row(
        "torchrun gives up after `launch.join_timeout`; torchrun's words and what to do are told; requeued",
        _stand_still(r"-m cluster_ddp\.launch\.start_torchrun", None),
        at=0,
        job={"launch": {"join_timeout": 20}},
        words=("20 s",),
    ),
    "rendezvous port taken": Row(
        "another is taken before torchrun starts, and another for each attempt; with `launch.port` the failure names "
        "the port",
        before=_take_port,
        attempts=1,
    ),
    # -- before an attempt begins
    "a setup line that fails": Row(
        "FAILED with the line, its status and the Slurm output's name",
        state="FAILED",
        attempts=0,
        words=("launch.setup: status 127 from: no_such_module load cuda",),
        job={"launch": {"setup": ["no_such_module load cuda"]}},
    ),
    "a setup line that fails at a restart, once": Row(
        "tried again, three times at the most",
        _preempt,
        job={"launch": {"setup": ["((${SLURM_RESTART_COUNT:-0} != 1))"]}},
    ),
    "a setup line that fails at each restart": Row(
        "tried three times, then FAILED with the line",
        _preempt,
        state="FAILED",
        attempts=1,
        words=("restart failed on", "launch.setup: status 1 from:"),
        job={"launch": {"setup": ["((${SLURM_RESTART_COUNT:-0} == 0))"]}},
    ),
    # -- storage
    "disk full for a while": Row(
        "a warning and `checkpoint-failed`; training continues, earlier checkpoints stay, the next save is tried, "
        "lines for `metrics.jsonl` wait in memory",
        _as_in_chaos("full disk"),
        attempts=1,
    ),
    "newest checkpoint damaged": Row(
        "reported, set aside as `damaged-step-...`; the one before it is used",
        _damage_between,
        lost=3 * EVERY_STEPS,
        words=("is passed over",),
    ),
}
