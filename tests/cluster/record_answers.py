"""Record what a Slurm answers in each situation of a job: what the tests of the parsers read (tests/slurm/answers).

    TEST_SLURM=/opt/slurm-26.05 python tests/cluster/record_answers.py

writes tests/slurm/answers/26.05.json; with ``jobs`` or ``accounting`` behind it, only that part. TEST_SLURM is as in
`slurm_cluster`.
"""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path

from login_node import OVER
from slurm_cluster import CHECKOUT, SlurmCluster

from cluster_ddp.slurm.commands import ENDED_FIELDS, QUEUE_FORMAT
from cluster_ddp.slurm.partitions import NODES_FORMAT
from cluster_ddp.slurm.states import ACTIVE, WAITING

FOLDER = CHECKOUT / "tests" / "slurm" / "answers"
STUBBORN = ("trap '' TERM", "sleep 100 &", "wait", "sleep 100")
# Of this machine, or of no interest.
PRIVATE = re.compile(r"\b(WorkDir|Command|StdErr|StdIn|StdOut|UserId|GroupId|SLUID|MCS_label|AllocNode:Sid)=\S* ?")


class Recorder:
    """Brings a job into each situation, one after the other, and notes Slurm's answers."""

    def __init__(self, cluster: SlurmCluster) -> None:
        self.cluster = cluster
        self.answers: dict[str, dict[str, str]] = {}

    def job(self, *options: str, lines: tuple[str, ...] = ("sleep 100",)) -> int:
        """Submit a job of two nodes with a comment as ours have it."""
        return self.cluster.sbatch(*lines, nodes=2, options=("--comment=cluster_ddp a-run", "--time=20", *options))

    def note(self, situation: str, job: int | str) -> None:
        """Note what Slurm says of the job now."""
        run = self.cluster.run
        queue = run("squeue", "--noheader", "--states=all", "--array", f"--jobs={job}", f"--format={QUEUE_FORMAT}")
        shown = run("scontrol", "show", "job", "-o", str(job))
        self.answers[situation] = {"squeue": queue, "scontrol": PRIVATE.sub("", shown)}

    def when(self, job: int, situation: str, ready: Callable[[dict[str, str]], bool], *, end: bool = True) -> None:
        """Note the situation once the job's fields say that it is there."""
        self.cluster.wait_for(lambda: ready(self.cluster.job_info(job)), 100, situation, every=0.05)
        self.note(situation, job)
        if end:
            self.cluster.reset()


def record(cluster: SlurmCluster) -> dict[str, dict[str, str]]:
    """All situations; the last are those of the nodes, the partitions and the configuration."""
    recorder = Recorder(cluster)
    run, job, when = cluster.run, recorder.job, recorder.when

    def state(word: str) -> Callable[[dict[str, str]], bool]:
        return lambda info: info["JobState"] == word

    when(job(), "running", state("RUNNING"))
    preempted = job(lines=STUBBORN)
    cluster.wait_for_state(preempted, "RUNNING")
    cluster.preempt(preempted)
    when(preempted, "preempted with grace", lambda info: info["PreemptTime"] != "None")
    preempted = job("--partition=cancel", lines=STUBBORN)
    cluster.wait_for_state(preempted, "RUNNING")
    time.sleep(1)
    cluster.preempt(preempted)
    when(preempted, "preempted without grace, not requeued", state("COMPLETING"))
    run("scontrol", "update", "PartitionName=debug", "GraceTime=0")
    preempted = job(lines=STUBBORN)
    cluster.wait_for_state(preempted, "RUNNING")
    time.sleep(1)
    cluster.preempt(preempted)
    when(preempted, "preempted without grace, requeued", state("COMPLETING"))
    run("scontrol", "update", "PartitionName=debug", "GraceTime=10")
    when(job("--time=1", lines=STUBBORN), "time limit", state("COMPLETING"))
    requeued = job()
    cluster.wait_for_state(requeued, "RUNNING")
    run("scontrol", "requeue", str(requeued))
    when(requeued, "requeued", state("PENDING"))
    for situation, command in {
        "held by an administrator": "hold",
        "held by its user": "uhold",
    }.items():
        held = job("--begin=now+1hour")
        run("scontrol", command, str(held))
        when(held, situation, lambda info: info["Priority"] == "0")
    for situation, options in {"requeued and held": (), "special exit": ("State=SpecialExit",)}.items():
        held = job()
        cluster.wait_for_state(held, "RUNNING")
        run("scontrol", "requeuehold", *options, str(held))
        when(held, situation, lambda info: info["JobState"] not in ("RUNNING", "COMPLETING"))
    with cluster.configured("Prolog=/bin/false"):
        failed = job()
        when(
            failed,
            "prolog failed",
            lambda info: info["Priority"] == "0" and info["JobState"] != "COMPLETING",
            end=False,
        )
    cluster.reset()
    failed = job()
    node = cluster.wait_for_state(failed, "RUNNING")["BatchHost"]
    cluster.crash_node(node)
    when(failed, "node failed, requeued", lambda info: info["Restarts"] == "1", end=False)
    recorder.answers["a node is down"] = {
        "sinfo": run(
            "sinfo", "--noheader", "--all", "--Node", "--format=%N", "--states=down,fail", "--nodes=node1,node2,node3",
        ),
        "usable": run(
            "sinfo", "--noheader", "--Node", "--partition=debug", "--format=%N",
            "--states=idle,mixed,allocated,completing",
        ),
        "scontrol": run("scontrol", "show", "node", "-o", node),
        "down": node,
    }  # fmt: skip
    cluster.reset()
    failed = job("--no-requeue")
    node = cluster.wait_for_state(failed, "RUNNING")["BatchHost"]
    run("scontrol", "update", f"NodeName={node}", "State=DOWN", "Reason=test")
    when(failed, "node failed, not requeued", lambda info: info["JobState"] not in ("RUNNING", "COMPLETING"))
    cancelled = job(lines=STUBBORN)
    cluster.wait_for_state(cancelled, "RUNNING")
    time.sleep(1)
    cluster.cancel(cancelled)
    when(cancelled, "cancelled, ending", state("COMPLETING"), end=False)
    when(cancelled, "cancelled", state("CANCELLED"))
    array = job("--array=3-4")
    cluster.wait_for_state(array, "RUNNING")
    recorder.note("array", f"{array}_3")
    cluster.reset()
    if cluster.version >= (25, 11):
        record_expedited(recorder)
    recorder.answers["partitions"] = {
        "scontrol": run("scontrol", "show", "partition", "-o"),
        "sinfo": run("sinfo", "--noheader", "--exact", "--partition=debug", f"--format={NODES_FORMAT}"),
    }
    recorder.answers["configuration"] = {"scontrol": run("scontrol", "show", "config")}
    kept = re.findall(r"^(?:KillWait|SLURM_VERSION) .*\n", recorder.answers["configuration"]["scontrol"], re.MULTILINE)
    recorder.answers["configuration"] = {"scontrol": "".join(kept)}
    return recorder.answers


def record_expedited(recorder: Recorder) -> None:
    """A job that is queued again ahead of all others: after a node failure at once, after an exit status but 0 held."""
    cluster = recorder.cluster
    failed = recorder.job("--requeue=expedite")
    node = cluster.wait_for_state(failed, "RUNNING")["BatchHost"]
    recorder.note("expedited, running", failed)
    cluster.run("scontrol", "update", f"NodeName={node}", "State=DOWN", "Reason=test")
    recorder.when(failed, "expedited, node failed", lambda info: info["Restarts"] == "1")
    failed = recorder.job("--requeue=expedite", lines=("exit 3",))
    recorder.when(failed, "expedited, exit status 3", lambda info: info["Restarts"] == "1")


def record_accounting(cluster: SlurmCluster) -> dict[str, str]:
    """What sacct says of jobs, by how they ended, and of some that are not over."""
    recorder = Recorder(cluster)
    run, answers = cluster.run, {}

    def when(jobs: str, how: str, states: frozenset[str], *, end: bool = True) -> None:
        def said() -> str | None:
            answer = run("sacct", "--noheader", "--allocations", "--parsable2", ENDED_FIELDS, f"--jobs={jobs}")
            found = [line.split("|")[2].split(" ")[0] for line in answer.splitlines()]
            return answer if len(found) == jobs.count(",") + 1 and states.issuperset(found) else None

        answers[how] = cluster.wait_for(said, 120, f"the accounting knows of a job: {how}", every=0.1)
        if end:
            cluster.reset()

    def started(*options: str, lines: tuple[str, ...] = ("sleep 100",)) -> int:
        job = recorder.job(*options, lines=lines)
        cluster.wait_for_state(job, "RUNNING")
        time.sleep(1)
        return job

    when(str(recorder.job(lines=("true",))), "completed", OVER)
    when(str(recorder.job(lines=("exit 3",))), "failed", OVER)
    when(str(recorder.job("--time=1")), "time limit", OVER)
    for how, harm in {
        "cancelled": lambda job, node: cluster.cancel(job),
        "preempted": lambda job, node: cluster.preempt(job),
        "node failed": lambda job, node: run("scontrol", "update", f"NodeName={node}", "State=DOWN", "Reason=test"),
    }.items():
        job = recorder.job("--no-requeue")
        harm(job, cluster.wait_for_state(job, "RUNNING")["BatchHost"])
        when(str(job), how, OVER)
    job = started(lines=STUBBORN)
    run("scontrol", "requeue", str(job))
    when(str(job), "requeued, ending", frozenset({"REQUEUED"}), end=False)
    when(str(job), "requeued, waiting", frozenset({"PENDING"}), end=False)
    cluster.cancel(job)
    when(str(job), "requeued, then cancelled", OVER)
    job = started(lines=('[ -n "$SLURM_RESTART_COUNT" ] || sleep 100',))
    run("scontrol", "requeue", str(job))
    when(str(job), "requeued, then completed", OVER)
    job = started()
    cluster.preempt(job, seconds=30)
    when(str(job), "preempted, waiting", frozenset({"PENDING"}))
    array = recorder.job("--array=3-4", lines=("true",))
    when(f"{array}_3,{array}_4", "array, over", OVER)
    array = started("--array=3-4")
    run("scontrol", "requeue", f"{array}_3")
    when(f"{array}_3,{array}_4", "array, a task waits again", ACTIVE | WAITING, end=False)
    run("scancel", f"{array}_3")
    when(f"{array}_3", "array, a task cancelled where it waited", OVER)
    return answers


def main(parts: list[str]) -> None:
    """Record the Slurm that TEST_SLURM names: all, or only some parts."""
    answers: dict[str, object] = {}
    if "jobs" in parts:
        with SlurmCluster() as cluster:
            answers |= record(cluster)
    if "accounting" in parts:
        with SlurmCluster(accounting=True) as cluster:
            answers["accounting"] = record_accounting(cluster)
    FOLDER.mkdir(exist_ok=True)
    path: Path = FOLDER / "{}.{:02}.json".format(*cluster.version)
    if path.exists():
        answers = {**json.loads(path.read_text()), **answers}
    path.write_text(json.dumps(answers, indent=1) + "\n")
    print(path)


if __name__ == "__main__":
    main(sys.argv[1:] or ["jobs", "accounting"])
