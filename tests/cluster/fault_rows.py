"""The table of faults: how each is struck on a real cluster, how the run is to end, and what `status` is to say.

docs/faults.md is this table with what was measured; `fault_page` makes it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from chaos_faults import NODE_PROGRAM
from fault_harms import (
    BAD,
    EVERY_STEPS,
    STRUCK_AT,
    Harm,
    as_in_chaos,
    crash,
    cut_from_controller,
    damage_between,
    forbid_requeue,
    full,
    in_bad_node,
    in_small_cgroup,
    limit_memory,
    preempt,
    preempt_twice,
    processes,
    reboot,
    remove_cgroup,
    requeue_and_hold,
    shorten_time_limit,
    stand_still,
    stop,
    suspend,
    take_port,
    warn,
    without_controller,
)


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


def _paced(seconds: float) -> tuple[str, Mapping[str, Any]]:
    """The paced digits with so many seconds for each step."""
    return "paced_digits.py:PacedDigits", {"seconds": seconds, "brake": "FOLDER/brake"}


_FAULTY = "faulty_digits.py:FaultyDigits"
_MARKER = {"marker": "FOLDER/struck"}
_CANCEL = {"slurm": {"partition": "cancel"}}


def bad(before: Harm, undo: Harm, words: str, **more: Any) -> Row:
    """A node that cannot take part: the run goes on without it."""
    return Row(
        "the node is named, with its last output; requeued, after the second time without it if the partition has "
        "enough others",
        before=before,
        undo=undo,
        attempts=3,
        words=(f"node {BAD} failed", words),
        **more,
    )


ROWS: dict[str, Row] = {
    # -- Slurm ends the job, or a person does
    "time limit near": Row(
        "warning signal, `requeue.warning` ahead: saved, requeued", warn, words=("stopped: time-limit",)
    ),
    "time limit without a warning in time": Row(
        "SIGTERM: saved within Slurm's KillWait, requeued at least 3 s before it is over; nothing is lost if the save "
        "fits",
        as_in_chaos("time limit"),
        lost=2 * EVERY_STEPS,  # KillWait is 5 s here
        words=("time-limit",),
        job={"requeue": {"warning": "1s"}},
        task=_paced(seconds=2.5),  # Slurm looks at time limits every half a minute
    ),
    "time limit made shorter (`scontrol update TimeLimit=`)": Row(
        "Slurm's warning goes by the new one: saved, requeued",
        shorten_time_limit,
        words=("stopped: time-limit",),
        job={"requeue": {"warning": "20s"}},
        task=_paced(seconds=2.5),  # Slurm looks at time limits every half a minute
    ),
    "preemption with grace": Row(
        "saved within the grace of the partition or the QOS, requeued", preempt, words=("stopped: preemption",)
    ),
    "preemption without grace, on a CANCEL partition": Row(
        "saved within KillWait, requeued by the keeper; with 15 s or less, loggers (wandb) are not waited for",
        preempt,
        words=("stopped: preemption",),
        job=_CANCEL,
        lost=EVERY_STEPS + 5,  # KillWait is 5 s here
    ),
    "a save that does not fit into the grace": Row(
        "the step, the grace and the time that a save takes are reported, with what to set; the next attempts save "
        "often enough that something remains",
        preempt_twice,
        attempts=3,
        lost=60,
        words=("save of step", "not finished within", "checkpoint.every_steps"),
        job={**_CANCEL, "checkpoint": {"every_steps": 1000}},
        task=("slow_disk_digits.py:SlowDiskDigits", {"writing": 3.0, "brake": "FOLDER/brake"}),
    ),
    "`cluster-ddp stop`": Row(
        "saved, STOPPED until `resume`", stop, state="STOPPED", attempts=1, words=("stopped by",)
    ),
    "`scancel`, `cluster-ddp cancel`": Row(
        "saved if time allows, CANCELLED, never requeued; only `resume` restarts it",
        lambda scene: scene.cluster.cancel(scene.run.job),
        state="CANCELLED",
        attempts=1,
        words=("cancel",),
    ),
    "SIGTERM from an unknown sender": Row(
        "saved; requeued if Slurm lets the job keep running, otherwise STOPPED",
        lambda scene: scene.cluster.send_signal(scene.run.job, "TERM"),
        words=("stopped: terminated",),
    ),
    "suspended (`scontrol suspend`, gang scheduling)": Row(
        "SUSPENDED; this time does not count as a hang, and it continues where it was",
        suspend,
        attempts=1,
        words=("suspended by Slurm",),
        job={"launch": {"hang_timeout": 10}},
    ),
    "requeued and held (`scontrol requeuehold`, a failed prolog, MaxBatchRequeue)": Row(
        "saved, HELD with Slurm's reason and the command that releases it; nothing starts it before that",
        requeue_and_hold,
        lost=EVERY_STEPS + 5,
        words=("scontrol release",),
    ),
    # -- processes
    "rank killed (as for memory)": Row(
        "the rank, its host and its signal are recorded; requeued",
        as_in_chaos("kill -9 of a rank"),
        lost=2 * EVERY_STEPS,
        words=("ended by SIGKILL, perhaps because the node ran out of memory",),
    ),
    "rank at a memory limit (`ulimit -v`)": Row(
        "its error, or the hang, is recorded with the rank and its host; requeued",
        limit_memory,
        lost=2 * EVERY_STEPS,
        job={"launch": {"hang_timeout": 20}},
    ),
    "rank over the memory limit of its cgroup": Row(
        "the kernel kills it: the rank, its host and its signal are recorded; requeued",
        in_small_cgroup,
        at=0,
        undo=remove_cgroup,
        lost=2 * EVERY_STEPS,
        words=("ended by SIGKILL, perhaps because the node ran out of memory",),
        task=(_FAULTY, {"fault": "memory", "at": 30, **_MARKER}),
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
        "its ranks and all other nodes save; requeued", as_in_chaos("kill -9 of an agent"), words=("agent-lost",)
    ),
    "node program killed (as for memory)": Row(
        "its ranks have 3 s to save, then they are killed; the node is named; requeued, after the second time without "
        "it",
        as_in_chaos("kill -9 of a node program"),
        words=("its node program was killed from outside",),
        lost=2 * EVERY_STEPS,
        short=("submitit",),
    ),
    "the keeper killed (as for memory)": Row(
        "Slurm ends the job, and training saves if it still can; nothing is left to requeue it: LOST until `resume`",
        processes(r"cluster_ddp\.launch\.keeper|submitit\.core\._submit", 0),
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
    "slurmd killed and back": Row("the job continues", as_in_chaos("kill -9 of slurmd"), attempts=1),
    "network away for seconds": Row("the job continues", as_in_chaos("link down for seconds"), attempts=1),
    "network of a node away, node lost": Row(
        "Slurm, errors of the other ranks or the watchdog end the attempt; requeued; a host that fails twice is "
        "excluded if the partition has enough others",
        as_in_chaos("link down, node lost"),
        lost=2 * EVERY_STEPS,
        job={"network": {"timeout": "1m"}},
    ),
    "power cut of a node": Row("the same", crash(1), lost=2 * EVERY_STEPS),
    "power cut of the batch host": Row("Slurm requeues it", crash(0), lost=2 * EVERY_STEPS),
    "a node rebooted before Slurm misses it": Row("requeued", reboot(1), lost=2 * EVERY_STEPS),
    "a node's processes vanish while its slurmd answers": Row(
        "once another node has signed off, a minute without a sign of life: the step is ended, the node recorded as "
        "lost; requeued",
        processes(r"slurmstepd: \[\d+\.0\]|cluster_ddp", 1),
        lost=2 * EVERY_STEPS,
        words=("was lost: no sign of life",),
    ),
    "Slurm's controller away when the job is to be requeued": Row(
        "tried until the allocation is nearly over, which `status` says while it lasts",
        without_controller,
        lost=2 * EVERY_STEPS,
        words=("trying to requeue the job until the allocation is nearly over",),
    ),
    "requeue refused by Slurm": Row(
        "saved; FAILED with Slurm's message and the command to continue",
        forbid_requeue,
        state="FAILED",
        attempts=1,
        words=("requeue failed: Slurm has not queued the job again", "cluster-ddp resume"),
    ),
    "node cut from Slurm's controller, but not from the storage": Row(
        "the job is started elsewhere while the old attempt keeps training; the old one ends within seconds of the "
        "newer one's start and saves nothing more (below); the node is named in `status` and excluded",
        cut_from_controller,
        lost=30,  # what the old attempt trains beyond the newer one's beginning does not count
        words=("cut from the controller",),
        job={"slurm": {"nodes": 1}, "launch": {"procs_per_node": 2}},
        task=_paced(seconds=1.5),  # it has not come to its end before it is started elsewhere
    ),
    # -- a node that cannot take part
    "runs folder missing on a node": bad(
        in_bad_node("mount", "-t", "tmpfs", "none", "FOLDER/runs"),
        in_bad_node("umount", "FOLDER/runs"),
        "has to be the same and writable",
        short=("sbatch",),
    ),
    "runs folder read-only on a node": bad(
        in_bad_node("sh", "-c", 'mount --bind "$0" "$0" && mount -o remount,ro,bind "$0"', "FOLDER/runs"),
        in_bad_node("umount", "FOLDER/runs"),
        "has to be the same and writable",
    ),
    "python missing on a node": bad(
        in_bad_node("mount", "-t", "tmpfs", "none", "PYTHON"),
        in_bad_node("umount", "PYTHON"),
        "Exited with exit code 2",
    ),
    "memory disk (`/dev/shm`) full on a node": bad(
        full("/dev/shm"), in_bad_node("umount", "/dev/shm"), "make room there"
    ),
    "temporary folder full on a node": Row(
        "not needed",
        before=full("FOLDER/tmp"),
        undo=in_bad_node("umount", "FOLDER/tmp"),
        attempts=1,
        job={"launch": {"setup": ["mkdir -p FOLDER/tmp; export TMPDIR=FOLDER/tmp"]}},
    ),
    "home missing on a node": Row(
        "not needed",
        before=in_bad_node("sh", "-c", "mkdir -p FOLDER/home; mount -t tmpfs -o ro none FOLDER/home"),
        undo=in_bad_node("umount", "FOLDER/home"),
        attempts=1,
        job={"launch": {"setup": ["mkdir -p FOLDER/home/me; export HOME=FOLDER/home/me"]}},
    ),
    "a node that joins late": Row(
        "the others wait, up to `launch.join_timeout`", stand_still(NODE_PROGRAM, 15), at=0, attempts=1
    ),
    "a node that never joins": Row(
        "torchrun gives up after `launch.join_timeout`; torchrun's message and what to do are reported; requeued",
        stand_still(r"-m cluster_ddp\.launch\.start_torchrun", None),
        at=0,
        job={"launch": {"join_timeout": 20}},
        words=("20 s",),
    ),
    "rendezvous port taken": Row(
        "a different one is chosen before torchrun starts, and for each attempt; with `launch.port` the error "
        "names the port",
        before=take_port,
        attempts=1,
    ),
    # -- before an attempt begins
    "a setup line that fails": Row(
        "FAILED with the line, its status and the name of the Slurm output file",
        state="FAILED",
        attempts=0,
        words=("launch.setup: status 127 from: no_such_module load cuda",),
        job={"launch": {"setup": ["no_such_module load cuda"]}},
    ),
    "a setup line that fails at a restart, once": Row(
        "retried, at most three times",
        preempt,
        job={"launch": {"setup": ["((${SLURM_RESTART_COUNT:-0} != 1))"]}},
    ),
    "a setup line that fails at each restart": Row(
        "tried three times, then FAILED with the line",
        preempt,
        state="FAILED",
        attempts=1,
        words=("restart failed on", "launch.setup: status 1 from:"),
        job={"launch": {"setup": ["((${SLURM_RESTART_COUNT:-0} == 0))"]}},
    ),
    # -- storage
    "disk full for a while": Row(
        "a warning and `checkpoint-failed`; training continues, earlier checkpoints are kept, the next save is "
        "tried, lines for `metrics.jsonl` are kept in memory",
        as_in_chaos("full disk"),
        attempts=1,
    ),
    "newest checkpoint damaged": Row(
        "reported, set aside as `damaged-step-...`; the one before it is used",
        damage_between,
        at=STRUCK_AT + EVERY_STEPS,
        lost=3 * EVERY_STEPS,
        words=("is skipped",),
    ),
}
