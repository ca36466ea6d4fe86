"""Rows of the table of faults: what happens to the processes of a run, to its nodes, and between them."""

from __future__ import annotations

from chaos_faults import NODE_PROGRAM
from fault_commands import first_node_is, stop_first_srun
from fault_harms import (
    BAD,
    EVERY_STEPS,
    KEEPER,
    as_in_chaos,
    crash,
    cut_from_controller,
    forbid_requeue,
    full,
    full_runs_folder,
    in_bad_node,
    in_small_cgroup,
    kill_batch_slurmstepd,
    limit_memory,
    listen_everywhere,
    processes,
    reboot,
    remove_cgroup,
    stand_still,
    stop_keeper,
    take_port,
    vanish,
    vanish_and_stop,
    without_controller,
)
from fault_row import Row, bad, paced
from training_job import STEPS

_FAULTY = "faulty_digits.py:FaultyDigits"
_MARKER = {"marker": "FOLDER/struck"}

NODES: dict[str, Row] = {
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
        "its ranks have 3 s to save, then they are killed; the node is named; requeued, and after the second failure "
        "without it",
        as_in_chaos("kill -9 of a node program"),
        words=("its node program was killed from outside",),
        lost=2 * EVERY_STEPS,
        short=("submitit",),
    ),
    "the keeper killed (as for memory)": Row(
        "Slurm ends the job, and training saves if it still can; nothing is left to requeue it: LOST until `resume`",
        processes(KEEPER, 0),
        state="LOST",
        attempts=1,
    ),
    "the keeper stopped (SIGSTOP) while its nodes end": Row(
        "`status` says after two minutes that the keeper still has to decide; continued (SIGCONT), it requeues",
        stop_keeper,
        lost=2 * EVERY_STEPS,
        words=("attempt 0 has ended on its nodes: its keeper on",),
    ),
    "srun stopped (SIGSTOP) before any node has started": Row(
        "after a minute the job step is ended and the signal reported, and no node is suspected; requeued",
        before=stop_first_srun,
        words=("srun was stopped by a signal (SIGSTOP) before any node had started",),
        job={"launch": {"setup": ["export PATH=FOLDER/bin:$PATH"]}},
    ),
    "slurmstepd of the batch script killed": Row(
        "the run ends as it otherwise would, but Slurm does not notice: `status` names the job that still holds its "
        "nodes, and the command that ends it",
        kill_batch_slurmstepd,
        attempts=1,
        words=("though nothing of the run is left there to wait for",),
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
    "slurmd killed and restarted": Row("the job continues", as_in_chaos("kill -9 of slurmd"), attempts=1),
    "network down for a few seconds": Row("the job continues", as_in_chaos("link down for seconds"), attempts=1),
    "network of a node down, node lost": Row(
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
        vanish,
        lost=2 * EVERY_STEPS,
        words=("was lost: no sign of life",),
    ),
    "`cluster-ddp stop` after a node's processes have vanished": Row(
        "saved by the other nodes if they still can; STOPPED within two minutes",
        vanish_and_stop,
        state="STOPPED",
        attempts=1,
        words=("stopped by",),
    ),
    "Slurm's controller down when the job is to be requeued": Row(
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
        "must be the same and writable",
        short=("sbatch",),
    ),
    "runs folder read-only on a node": bad(
        in_bad_node("sh", "-c", 'mount --bind "$0" "$0" && mount -o remount,ro,bind "$0"', "FOLDER/runs"),
        in_bad_node("umount", "FOLDER/runs"),
        "must be the same and writable",
    ),
    "runs folder full on a node": bad(
        full_runs_folder,
        in_bad_node("umount", "FOLDER/runs", "FOLDER/own"),
        "its node program could not record that it had started",
        lost=STEPS,  # nothing can be saved there
        excluded=BAD,
    ),
    "python missing on a node": bad(
        in_bad_node("mount", "-t", "tmpfs", "none", "PYTHON"),
        in_bad_node("umount", "PYTHON"),
        "Exited with exit code 2",
    ),
    "python without the package on a node": bad(
        in_bad_node("mount", "-t", "tmpfs", "none", "PACKAGE"),
        in_bad_node("umount", "PACKAGE"),
        "No module named",
    ),
    "`/dev/shm` (shared memory) full on a node": bad(
        full("/dev/shm"), in_bad_node("umount", "/dev/shm"), "free some space there"
    ),
    "temporary folder full on a node": Row(
        "the run does not need it",
        before=full("FOLDER/tmp"),
        undo=in_bad_node("umount", "FOLDER/tmp"),
        attempts=1,
        job={"launch": {"setup": ["mkdir -p FOLDER/tmp; export TMPDIR=FOLDER/tmp"]}},
    ),
    "home missing on a node": Row(
        "the run does not need it",
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
        stand_still(r"-m cluster_ddp\.launch\.torchrun", None),
        at=0,
        job={"launch": {"join_timeout": 20}},
        words=("20 s",),
    ),
    "rendezvous port taken": Row(
        "a different one is chosen before torchrun starts, and for each attempt",
        before=take_port,
        attempts=1,
    ),
    "rendezvous port taken, with `launch.port`": Row(
        "the error names the port; requeued, STALLED after `requeue.max_without_progress`",
        before=listen_everywhere(29517),
        state="STALLED",
        attempts=3,
        words=("port 29517 is in use",),
        job={"launch": {"port": 29517}},
    ),
}
