"""The cluster that the other tests stand on: it works as Slurm does, and it leaves no trace."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import slurm_cluster
import virtual_hosts
from slurm_cluster import SlurmCluster, why_unavailable


def of_another_session(text: str) -> bool:
    """Whether a name or a command line belongs to a cluster of another test session that runs on this machine now."""
    owners = set(re.findall(rf"\b{virtual_hosts.PREFIX}(\d+)-\d", text)) - {str(os.getpid())}
    return any(Path("/proc", owner).exists() for owner in owners)


def trace_of_the_machine() -> dict[str, object]:
    """What a cluster could leave behind: interfaces, mounts, names, folders, namespaces and daemons."""
    seen: dict[str, tuple[str, set[str]]] = {}
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit():
                line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                kinds = ("pid", "net", "mnt", "uts", "ipc")
                seen[entry.name] = line, {str((entry / "ns" / kind).readlink()) for kind in kinds}
    # All processes of a host share its namespaces with the first one, whose command line names the session.
    foreign = {name for line, spaces in seen.values() for name in spaces if of_another_session(line)}
    foreign -= seen[str(os.getpid())][1]
    mine = {pid: known for pid, known in seen.items() if not of_another_session(known[0]) and not known[1] & foreign}
    daemon = re.compile(r"slurm(ctld|d|stepd)\b|munged|first_process")
    return {
        "interfaces": sorted(p.name for p in Path("/sys/class/net").iterdir() if not of_another_session(p.name)),
        # The small disk of a chaos run that goes on beside this one comes and goes.
        "mounts": sorted(m for m in Path("/proc/self/mounts").read_text().splitlines() if not m.startswith("chaos ")),
        "names": Path("/etc/hosts").read_bytes(),
        "folders": sorted(p for p in virtual_hosts.folders() if not of_another_session(p.name)),
        "namespaces": sorted(set().union(*(spaces for _, spaces in mine.values()))),
        "daemons": sorted(f"{pid} {line}" for pid, (line, _) in mine.items() if daemon.search(line)),
    }


def assert_as_before(untouched: dict[str, object]) -> None:
    """Fail with what is left after a moment: other sessions beside this one begin and end meanwhile."""
    for _ in range(20):
        if trace_of_the_machine() == untouched:
            return
        time.sleep(0.2)
    assert trace_of_the_machine() == untouched


@pytest.fixture
def untouched() -> dict[str, object]:
    """The machine's state before the test; skips where no cluster can run."""
    if reason := why_unavailable():
        pytest.skip(reason)
    virtual_hosts.remove_leftovers()
    return trace_of_the_machine()


def test_three_nodes_run_a_step(cluster: SlurmCluster, tmp_path: Path) -> None:
    output = tmp_path / "out"
    job = cluster.sbatch("srun hostname", "echo $SLURM_CONF", nodes=3, output=output)
    cluster.wait_for_state(job, "COMPLETED", timeout=30)
    lines = output.read_text().split()
    assert sorted(lines[:3]) == ["node1", "node2", "node3"]
    assert lines[3] == str(cluster.conf)


def test_nodes_are_hosts_of_their_own(cluster: SlurmCluster) -> None:
    assert "node2" in cluster.node_exec("node1", "getent", "hosts", "node2")
    addresses = {cluster.node_exec(node, "hostname", "-I").split()[0] for node in cluster.nodes}
    assert len(addresses) == 3
    cluster.node_exec("node1", "touch", "/dev/shm/mine")
    with pytest.raises(RuntimeError, match="No such file"):
        cluster.node_exec("node2", "ls", "/dev/shm/mine")


def test_preempted_job_is_requeued_under_its_id(cluster: SlurmCluster, tmp_path: Path) -> None:
    output = tmp_path / "out"
    script = ["echo start ${SLURM_RESTART_COUNT:-0}", '[ -n "$SLURM_RESTART_COUNT" ] || srun sleep 60']
    script += ['[ -n "$SLURM_RESTART_COUNT" ] || scontrol requeue $SLURM_JOB_ID']
    script += ["scontrol update JobId=$SLURM_JOB_ID Requeue=0"]  # since 24.05 it would come back once more
    job = cluster.sbatch(*script, nodes=2, output=output, options=("--requeue", "--open-mode=append"))
    cluster.wait_for(lambda: cluster.processes("node2", "^/?.*sleep 60"), 30, "the step runs")
    urgent = cluster.preempt(job)
    cluster.wait_for_state(urgent, "COMPLETED", timeout=60)
    cluster.wait_for(lambda: "start 1" in output.read_text(), 60, "it starts again")
    info = cluster.wait_for_state(job, "PREEMPTED" if cluster.version >= (24, 5) else "COMPLETED", timeout=60)
    assert info["Restarts"] == "1"
    assert re.findall(r"start \d", output.read_text()) == ["start 0", "start 1"]


def test_cancel_partition_cancels(cluster: SlurmCluster) -> None:
    job = cluster.sbatch("srun sleep 60", nodes=1, options=("--partition=cancel", "--requeue"))
    cluster.wait_for_state(job, "RUNNING")
    cluster.preempt(job)
    info = cluster.wait_for_state(job, "PREEMPTED", "CANCELLED", timeout=30)
    assert info["Restarts"] == "0"
    assert info["PreemptTime"] != "None"


def test_gpus_are_handed_out(cluster: SlurmCluster, tmp_path: Path) -> None:
    output = tmp_path / "out"
    job = cluster.sbatch("echo $CUDA_VISIBLE_DEVICES", options=("--gpus-per-node=a100:2",), output=output)
    cluster.wait_for_state(job, "COMPLETED")
    assert output.read_text().strip() == "0,1"


@pytest.mark.chaos
def test_cut_cable_and_power_failure(cluster: SlurmCluster) -> None:
    reach = ["node1", "timeout", "3", "bash", "-c", "echo > /dev/tcp/node3/6818"]
    cluster.node_exec(*reach)
    cluster.link_down("node3")
    with pytest.raises(RuntimeError):
        cluster.node_exec(*reach)
    cluster.link_up("node3")
    job = cluster.sbatch("srun sleep 100", nodes=1, options=("--nodelist=node3", "--requeue"))
    cluster.wait_for_state(job, "RUNNING")
    cluster.crash_node("node3")
    cluster.wait_for(lambda: cluster.node_state("node3") == "DOWN", 90, "the failed node is noticed")
    info = cluster.wait_for_state(job, "PENDING", timeout=20)
    assert info["Restarts"] == "1"
    cluster.boot_node("node3")


def test_a_node_that_was_switched_on_again_is_reached_at_once(cluster: SlurmCluster) -> None:
    # By a node that still has it in its table, and before it has said a word itself.
    reach = ["node1", "timeout", "3", "bash", "-c", "echo > /dev/tcp/node3/6818"]
    cluster.node_exec(*reach)
    login_node = Path(f"/sys/class/net/{cluster.folder.name}/address")
    before = login_node.read_text()
    cluster.crash_node("node3")
    cluster.power_on("node3")
    with pytest.raises(RuntimeError, match="refused"):
        cluster.node_exec(*reach)
    assert login_node.read_text() == before
    cluster.start_slurmd("node3")


@pytest.mark.chaos
def test_slurmd_dies_and_its_job_lives_on(cluster: SlurmCluster) -> None:
    job = cluster.sbatch("sleep 5", options=("--nodelist=node2",))
    cluster.wait_for(lambda: cluster.processes("node2", "sleep 5"), 20, "the job runs")
    cluster.kill_slurmd("node2")
    assert cluster.processes("node2", "sleep 5")
    cluster.start_slurmd("node2")
    cluster.wait_for_state(job, "COMPLETED", timeout=30)


def test_teardown_leaves_no_trace(untouched: dict[str, object]) -> None:
    with SlurmCluster(proctrack="pgid") as own:
        job = own.sbatch("setsid sleep 300 & trap '' TERM; srun sleep 300", nodes=3)
        own.wait_for(lambda: own.processes("node3", "sleep 300"), 30, "the step runs")
        assert own.state(job) == "RUNNING"
        assert trace_of_the_machine() != untouched
    assert_as_before(untouched)


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_interrupted_bring_up_leaves_no_trace(
    untouched: dict[str, object], monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    original = SlurmCluster.start_slurmd

    def fail_at_the_second(self: SlurmCluster, node: str, *, wait: bool = True) -> None:
        if node == "node2":
            raise error("half-way")
        original(self, node, wait=wait)

    monkeypatch.setattr(SlurmCluster, "start_slurmd", fail_at_the_second)
    with pytest.raises(error, match="half-way"), SlurmCluster():
        pass
    assert_as_before(untouched)


KILLED_SESSION = """
import time
from slurm_cluster import SlurmCluster
cluster = SlurmCluster()
cluster.start()
cluster.sbatch("sleep 300", nodes=3)
print(cluster.folder, flush=True)
time.sleep(300)
"""


def test_killed_session_is_cleaned_up_by_the_next(untouched: dict[str, object]) -> None:
    command = [sys.executable, "-c", KILLED_SESSION]
    env = {**os.environ, "PYTHONPATH": str(Path(slurm_cluster.__file__).parent)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env) as session:
        assert session.stdout is not None
        folder = Path(session.stdout.readline().strip())
        assert folder.name in virtual_hosts.bridges()
        os.kill(session.pid, signal.SIGKILL)
    deadline = time.monotonic() + 10
    while trace_of_the_machine()["daemons"] != untouched["daemons"] and time.monotonic() < deadline:
        time.sleep(0.1)
    assert folder.name in virtual_hosts.remove_leftovers()
    assert_as_before(untouched)


def test_live_session_is_not_a_leftover(cluster: SlurmCluster) -> None:
    assert cluster.folder.name not in virtual_hosts.remove_leftovers()  # others may have left some
    assert cluster.folder.is_dir()


def test_reset_mends_a_broken_cluster(cluster: SlurmCluster) -> None:
    cluster.sbatch("trap '' TERM; srun sleep 300", nodes=3)
    cluster.kill_slurmd("node1")
    cluster.link_down("node2")
    cluster.reset()
    job = cluster.sbatch("srun true", nodes=3)
    cluster.wait_for_state(job, "COMPLETED", timeout=30)


def test_reason_for_a_skip_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(shutil, "which", lambda name, path: None if name != "ip" else "/sbin/ip")
    reason = why_unavailable()
    assert reason is not None
    assert "apt-get install munge slurm-client slurmctld slurmd" in reason
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert "needs root" in (why_unavailable() or "")


SKIPPED_TEST = """
import pytest

def test_on_a_cluster(cluster):
    pass
"""


@pytest.mark.parametrize("required", ["1", ""])
def test_required_slurm_turns_a_skip_into_a_failure(tmp_path: Path, required: str) -> None:
    (tmp_path / "test_skipped.py").write_text(SKIPPED_TEST)
    harness = Path(slurm_cluster.__file__).parent
    (tmp_path / "pytest.ini").write_text(f"[pytest]\nmarkers = cluster\npythonpath = {harness}\n")
    conftest = harness.parent / "conftest.py"
    (tmp_path / "conftest.py").write_text(
        "import slurm_cluster\nslurm_cluster.why_unavailable = lambda **_: 'no Slurm: apt-get install it'\n"
        + conftest.read_text().replace("from __future__ import annotations", "")
    )
    env = {**os.environ, "REQUIRE_SLURM": required}
    command = [sys.executable, "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, cwd=tmp_path, env=env)
    assert "apt-get install it" in done.stdout, done.stdout + done.stderr
    assert ("1 failed" if required else "1 skipped") in done.stdout.replace("1 error", "1 failed")
    assert done.returncode == (1 if required else 0)
