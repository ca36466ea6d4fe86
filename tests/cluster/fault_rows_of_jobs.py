"""Rows of the table of faults: what Slurm and people do to the jobs of a run, and starts that fail."""

from __future__ import annotations

from fault_commands import (
    ODD_SETUP,
    cancel,
    lose_image,
    next_of_chain,
    resume_at_once,
    slow_down_scontrol,
    start_too_early,
    stop,
    stop_and_resume,
    submit_one_that_fails,
    without_second_of_chain,
)
from fault_harms import (
    EVERY_STEPS,
    FIRST,
    as_in_chaos,
    crash,
    in_node,
    preempt,
    preempt_twice,
    requeue_and_hold,
    restart_without_python,
    shorten_time_limit,
    suspend,
    warn,
)
from fault_row import Row, paced

_CANCEL = {"slurm": {"partition": "cancel"}}
_NO_REQUEUE = {"requeue": {"max_requeues": 0}}

JOBS: dict[str, Row] = {
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
    "a job of a chain that starts while an earlier one trains (its dependency was removed)": Row(
        "it ends at once, which `status` says; the next job of the chain continues once the earlier one has ended",
        without_second_of_chain(start_too_early),
        words=("was started while attempt 0 was alive",),
        job=_NO_REQUEUE,
        options=("--chain", "3"),
        ways=("sbatch",),
    ),
    "a job of a chain cancelled (`scancel`) while an earlier one trains": Row(
        "the next job of the chain continues once the earlier one has ended",
        without_second_of_chain(cancel),
        job=_NO_REQUEUE,
        options=("--chain", "3"),
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
}

STARTS: dict[str, Row] = {
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
    "a setup line that fails at restarts on one host": Row(
        "retried, and after the second failure without this host if the partition has enough others",
        preempt,
        words=(f"restart failed on {FIRST}: launch.setup: status 1 from:",),
        excluded=FIRST,
        job={"launch": {"setup": [f"[[ $SLURMD_NODENAME != {FIRST} || ${{SLURM_RESTART_COUNT:-0}} == 0 ]]"]}},
    ),
    "python missing on the batch host at a restart": Row(
        "retried, and after the second failure without this host if the partition has enough others",
        restart_without_python,
        undo=in_node(FIRST, "umount", "PYTHON"),
        words=(f"restart failed on {FIRST}",),
        excluded=FIRST,
    ),
}
