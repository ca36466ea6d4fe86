"""The table of faults: how each is struck on a real cluster, how the run is to end, and what `status` is to say.

docs/faults.md is this table with what was measured; `fault_page` makes it.
"""

from __future__ import annotations

from chaos_faults import NODE_PROGRAM
from fault_commands import (
    ODD_SETUP,
    first_node_is,
    lose_image,
    next_of_chain,
    resume_at_once,
    slow_down_scontrol,
    stop,
    stop_and_resume,
    submit_one_that_fails,
)
from fault_harms import (
    BAD,
    EVERY_STEPS,
    STRUCK_AT,
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
    suspend,
    take_port,
    warn,
    without_controller,
)
from fault_row import Row, bad, paced

_FAULTY = "faulty_digits.py:FaultyDigits"
_MARKER = {"marker": "FOLDER/struck"}
_CANCEL = {"slurm": {"partition": "cancel"}}
_NO_REQUEUE = {"requeue": {"max_requeues": 0}}

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
        task=paced(seconds=2.5),  # Slurm looks at time limits every half a minute
    ),
    "time limit made shorter (`scontrol update TimeLimit=`)": Row(
        "the warning follows the new limit: saved, requeued",
        shorten_time_limit,
        words=("stopped: time-limit",),
        job={"requeue": {"warning": "20s"}},
        task=paced(seconds=2.5),  # Slurm looks at time limits every half a minute
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
    "`scontrol` takes 40 s for each answer": Row(
        "saved and requeued; what only improves a message is asked afterwards",
        warn,
        before=slow_down_scontrol,
        words=("stopped: time-limit",),
        job={"launch": {"setup": ["export PATH=FOLDER/bin:$PATH"]}},
    ),
    # -- several jobs of one run
    "a run that was stopped is resumed on another partition": Row(
        "it continues there",
        stop_and_resume("--set", "slurm.partition=urgent"),
        words=("stopped by",),
        short=("sbatch",),
        light=True,
    ),
    "four `resume` at once": Row(
        "one submits a job, and the others say that they do not", resume_at_once, words=("stopped by",)
    ),
    "time limit near in a chain (`--chain 2`) that may not be requeued": Row(
        "saved; the next job of the chain continues",
        next_of_chain(warn),
        job=_NO_REQUEUE,
        options=("--chain", "2"),
        ways=("sbatch",),
    ),
    "power cut of a node in a chain that may not be requeued": Row(
        "the next job of the chain continues",
        next_of_chain(crash(1)),
        lost=2 * EVERY_STEPS,
        words=("failed: Slurm calls it down",),
        job=_NO_REQUEUE,
        options=("--chain", "2"),
        ways=("sbatch",),
    ),
    "`cluster-ddp stop` of a chain": Row(
        "saved, and its other jobs leave the queue: STOPPED until `resume`",
        stop_and_resume(),
        words=("stopped by",),
        job=_NO_REQUEUE,
        options=("--chain", "3"),
        ways=("sbatch",),
    ),
    "the run that this one comes after (`--after`) fails": Row(
        "it starts anyway",
        before=submit_one_that_fails,
        attempts=1,
        options=("--after", "FIRST", "--via", "sbatch"),
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
        words=("requeue failed: Slurm has not requeued the job", "cluster-ddp resume"),
    ),
    "node cut from Slurm's controller, but not from the storage": Row(
        "the job is started elsewhere while the old attempt keeps training; the old one ends within seconds of the "
        "newer one's start and saves nothing more (below); the node is named in `status` and excluded",
        cut_from_controller,
        lost=30,  # what the old attempt trains beyond the newer one's beginning does not count
        words=("cut from the controller",),
        job={"slurm": {"nodes": 1}, "launch": {"procs_per_node": 2}},
        task=paced(seconds=1.5),  # it has not come to its end before it is started elsewhere
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
    "`/dev/shm` (shared memory) full on a node": bad(
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
    "a node that cannot reach the first one": bad(
        first_node_is("192.0.2.77 node1"),
        in_bad_node("umount", "/etc/hosts"),
        "15 s",
        excluded=BAD,
        job={"launch": {"join_timeout": 15}},
        short=("sbatch",),
    ),
    "a node where the first one's name does not resolve": bad(
        first_node_is(""),
        in_bad_node("umount", "/etc/hosts"),
        "the address of the first node, node1, did not resolve on node2 within",
        job={"launch": {"join_timeout": 20}},
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
    "setup lines with here documents, continued lines, `set -e`, and names of their own": Row(
        "they run as in any script",
        preempt,
        job={"launch": {"setup": [*ODD_SETUP]}},
    ),
    "container image missing": Row(
        "the container's message is shown",
        before=lose_image,
        state="STALLED",
        attempts=3,
        words=("could not open image",),
        job={
            "launch": {
                "setup": ["export PATH=FOLDER/bin:$PATH"],
                "container": {"image": "FOLDER/my.sif", "runtime": "apptainer"},
            }
        },
        ways=("sbatch",),
    ),
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
        job={"launch": {"setup": ["set -e", "((${SLURM_RESTART_COUNT:-0} != 1))"]}},
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
