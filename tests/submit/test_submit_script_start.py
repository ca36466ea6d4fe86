"""What the batch script does before its keeper, with stand-ins for Slurm: where ranks meet, and other hosts."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from stage import CHECKOUT, CRASH, Stage

from cluster_ddp.run import runs
from cluster_ddp.run.directory import RunDirectory
from cluster_ddp.run.events import NODE_FAILED, read_events
from cluster_ddp.run.record import add_slurm_job
from cluster_ddp.submit.preamble import TRIES


def test_ranks_inherit_the_meeting_point_and_the_cpus(stage: Stage) -> None:
    script = stage.write(network={"profile": "ethernet", "env": {"NCCL_IB_HCA": "mlx5_0,mlx5_1"}})
    assert stage.perform(script, SLURM_CPUS_PER_TASK="6") == 0
    environment = stage.environment_of_ranks()
    assert environment["MASTER_ADDR"] == "node-b"
    assert environment["MASTER_PORT"] == "20077"
    assert environment["SRUN_CPUS_PER_TASK"] == "6"
    assert environment["NCCL_IB_DISABLE"] == "1"
    assert environment["NCCL_IB_HCA"] == "mlx5_0,mlx5_1"


@pytest.mark.parametrize(("job_id", "port"), [("1", 20001), ("12767", 32767), ("12768", 20000), ("4294901760", 21920)])
def test_the_port_stays_below_the_ephemeral_ones(stage: Stage, job_id: str, port: int) -> None:
    assert stage.perform(stage.write(), SLURM_JOB_ID=job_id) == 0
    assert stage.environment_of_ranks()["MASTER_PORT"] == str(port)


def test_without_scontrol_clustershell_reads_the_node_list(tmp_path: Path) -> None:
    stage = Stage(tmp_path, scontrol=False)
    assert stage.perform(stage.write(), SLURM_JOB_NODELIST="rack[2-3]n[07,01]") == 0, stage.output
    assert stage.environment_of_ranks()["MASTER_ADDR"] == "rack2n07"


def test_a_greeting_of_scontrol_is_no_host(stage: Stage) -> None:
    """A node list that only scontrol can read, and a site whose wrapper of it greets."""
    usual = (stage.bin / "scontrol").read_text().removeprefix("#!/bin/bash\n")
    stage.program("scontrol", f"echo 'Welcome to the cluster!'; echo\n{usual}")
    assert stage.perform(stage.write()) == 0, stage.output
    assert stage.environment_of_ranks()["MASTER_ADDR"] == "node-b"


def test_a_node_list_is_read_without_scontrol(stage: Stage) -> None:
    assert stage.perform(stage.write(), SLURM_JOB_NODELIST="rack[2-3]n[07,01]") == 0, stage.output
    assert stage.environment_of_ranks()["MASTER_ADDR"] == "rack2n07"
    assert not [call for call in stage.calls("scontrol") if "hostnames" in call]


def test_an_scontrol_that_hangs_does_not_hold_the_nodes(stage: Stage) -> None:
    impatient = f'shift; exec {shutil.which("timeout")} 1 "$@"'
    stage.program("timeout", impatient)
    stage.program("sleep", "exit 0")
    stage.program("scontrol", f"exec {shutil.which('sleep')} 3600")
    stage.does(**{"python.sh": "exit 127"})
    assert stage.perform(stage.write()) == 1
    add_slurm_job(RunDirectory(stage.run), "77")
    found = stage.status()
    assert found["state"] == "FAILED" and "no Python with cluster_ddp starts" in found["reason"]


def test_without_scontrol_and_clustershell_the_job_fails_clearly(tmp_path: Path) -> None:
    stage = Stage(tmp_path, scontrol=False)
    stage.does(**{"python.sh": "[[ $* != *nodelist* ]] || exit 1"})
    assert stage.perform(stage.write()) == 1
    assert "cannot determine the first node of node-[b,a]" in stage.output
    assert not stage.calls("srun")


@pytest.mark.parametrize(("restarts", "requeues"), [("0", ["77"]), ("2", ["77"]), ("3", [])])
def test_where_python_does_not_start_another_host_is_tried_a_few_times(
    stage: Stage, restarts: str, requeues: list[str]
) -> None:
    stage.does(**{"python.sh": "exit 127"})
    stage.program("sleep", "exit 0")
    assert stage.perform(stage.write(), SLURM_RESTART_COUNT=restarts, SLURMD_NODENAME="node-b") == 1
    assert "no Python with cluster_ddp starts on node-b" in stage.output
    assert stage.requeues() == requeues
    assert not stage.calls("srun")


def test_a_host_whose_python_lacks_pydantic_is_left_for_another_before_an_attempt_begins(stage: Stage) -> None:
    (stage.bin / "pydantic.py").write_text("raise ModuleNotFoundError(\"No module named 'pydantic'\")\n")
    stage.does(**{"python.sh": f'exec env PYTHONPATH={CHECKOUT}:{stage.bin} {sys.executable} "$@"'})
    stage.program("sleep", "exit 0")
    assert stage.perform(stage.write(), SLURM_RESTART_COUNT="1") == 1
    assert "ModuleNotFoundError: No module named 'pydantic'\njob.sbatch: no Python with cluster_ddp" in stage.output
    assert stage.requeues() == ["77"]
    assert "launch.python; ModuleNotFoundError: No module named 'pydantic'" in stage.said_by_script()


@pytest.mark.parametrize(
    ("python", "said"),
    [
        (
            "echo noise >&2; echo \"ModuleNotFoundError: No module named 'cluster_ddp'\" >&2; exit 1",
            "No module named 'cl",
        ),
        ("exit 9", "launch.python; it ended with status 9 (see slurm-77.out)"),
        ("export PYTHONHOME=/nowhere", "launch.python; ModuleNotFoundError: No module named 'encodings' (see"),
        (r"printf 'no \377 here\n' >&2; exit 1", "launch.python; no \N{REPLACEMENT CHARACTER} here (see"),
        # More than fits into an argument of a program
        (
            "printf '%0200000d\\n' 0 >&2; echo 'ImportError: too old' >&2; exit 1",
            "launch.python; ImportError: too old (see",
        ),
        ("printf '%0200000d' 0 >&2; exit 1", f"launch.python; {'0' * 500} (see"),
    ],
)
def test_why_python_does_not_start_is_told(stage: Stage, python: str, said: str) -> None:
    stage.does(**{"python.sh": python})
    stage.program("sleep", "exit 0")
    assert stage.perform(stage.write(), SLURM_RESTART_COUNT="3") == 1
    add_slurm_job(RunDirectory(stage.run), "77")
    assert said in stage.status()["reason"]


def test_the_script_and_what_it_calls_have_the_same_limit_on_failed_starts() -> None:
    assert f"\ntries={TRIES} " in (Path(runs.__file__).parent / "requeue/start_failed.sh").read_text()


@pytest.mark.parametrize(
    ("nodes", "requested", "kept", "excluded", "has_run"),
    [
        ("node-a node-b node-c", "(null)", "(null)", ["node-b"], True),
        ("node-a node-b", "(null)", "(null)", [], True),
        ("node-a node-b small", "(null)", "(null)", [], True),
        ("node-a node-b node-c", "(null)", "x,y", ["x,y,node-b"], True),
        ("node-a node-b node-c", "(null)", "x,node-c", [], True),
        ("node-a node-b node-c", "node-[a-b]", "(null)", [], True),
        ("node-a node-b node-c", "(null)", "(null)", ["node-b"], False),  # an element of a sweep that has not begun
    ],
)
def test_a_host_where_two_starts_have_failed_is_left_where_there_are_others(
    stage: Stage, nodes: str, requested: str, kept: str, excluded: list[str], has_run: bool
) -> None:
    if not has_run:
        (stage.run / "run.json").unlink()
    stage.does(**{"python.sh": "exit 127"})
    lists = f"ReqNodeList={requested} ExcNodeList={kept}"
    stage.does(job=f"JobId=77 JobState=RUNNING Reason=None Restarts=0 PreemptTime=None {lists} X=y")
    stage.program("sleep", "exit 0")
    kinds = {"small": "2|1000|(null)|(null)"}
    lines = " ".join(f"'{node}|{kinds.get(node, '8|64000|(null)|gpu:4(S:0-1)')}'" for node in nodes.split())
    stage.program("sinfo", f"echo 'Welcome to the cluster!'; printf '%s\\n' {lines}")
    for restart in ("0", "1"):
        assert stage.perform(stage.write(), SLURM_RESTART_COUNT=restart, SLURMD_NODENAME="node-b") == 1
        updates = [call[2] for call in stage.calls("scontrol") if call[0] == "update"]
        assert updates == ([] if restart == "0" else [f"ExcNodeList={host}" for host in excluded])
    assert stage.requeues() == ["77", "77"]


@pytest.mark.parametrize(
    ("nodes", "update"),
    [("a node-b node-c", "ExcNodeList=x,node-b"), ("node-b node-c", "StartTime=now+10minutes")],
)
@pytest.mark.parametrize("failing", ["python", "setup"])
def test_the_next_job_of_a_chain_leaves_a_host_where_a_start_has_failed_or_waits(
    stage: Stage, failing: str, nodes: str, update: str
) -> None:
    """All of them failed there, within seconds."""
    for job in ("76", "77", "78", "79"):
        add_slurm_job(RunDirectory(stage.run), job)
    stage.does(requeue_status="1", **({"python.sh": "exit 127"} if failing == "python" else {}))
    stage.does(job="JobId=77 JobState=RUNNING Reason=None Restarts=0 PreemptTime=None ExcNodeList=x X=y")
    stage.program("sleep", "exit 0")
    lines = " ".join(f"'{node}|8|64000|(null)|(null)'" for node in nodes.split())
    stage.program("sinfo", f"printf '%s\\n' {lines}")
    script = stage.write(launch={"setup": ["false"]} if failing == "setup" else {})
    assert stage.perform(script, SLURMD_NODENAME="node-b") == 1
    updates = [call[1:] for call in stage.calls("scontrol") if call[0] == "update"]
    assert updates == [["JobId=78", update]]


def test_a_requeue_that_scontrol_did_not_live_to_tell_of_counts(stage: Stage) -> None:
    """Slurm ends all of the job when it accepts."""
    usual = (stage.bin / "scontrol").read_text().removeprefix("#!/bin/bash\n")
    accepted = f"JobId=77 JobState=COMPLETING Restarts=1 X=y' >{stage.folder}/job"
    stage.program("scontrol", f"[[ $1 != requeue ]] || {{ echo '{accepted}; kill -TERM $$; }}\n{usual}")
    stage.does(**{"python.sh": "exit 127"})
    stage.program("sleep", "exit 0")
    assert stage.perform(stage.write()) == 1
    assert stage.status()["state"] == "REQUEUED" or '"queued": true' in stage.said_by_script()


def test_a_sigterm_before_the_requeue_is_accepted_does_not_lose_it(stage: Stage) -> None:
    """Of a time limit, or of a preemption: all of the job gets it, scontrol and what it is called with too."""
    usual = (stage.bin / "scontrol").read_text().removeprefix("#!/bin/bash\n")
    stage.program("scontrol", f"{_killed_once(stage)}\n{usual}")
    stage.does(**{"python.sh": "exit 127"})
    stage.program("sleep", "exit 0")
    assert stage.perform(stage.write()) == 1
    assert stage.requeues() == ["77"]
    assert '"queued": true' in stage.said_by_script()


def test_what_is_known_of_a_bad_host_survives_the_end_that_an_accepted_requeue_brings(stage: Stage) -> None:
    """Slurm ends all of the job then: what has to be asked is asked before, and what is to be told is told at once."""
    usual = (stage.bin / "scontrol").read_text().removeprefix("#!/bin/bash\n")
    killed = f"[[ ! -e {stage.folder}/accepted ]] || {{ {_killed_once(stage)}; }}"
    accepted = f"[[ $1 != requeue ]] || touch {stage.folder}/accepted"
    stage.program("scontrol", f"{killed}\n{accepted}\n{usual}")
    stage.program("sinfo", f"[[ ! -e {stage.folder}/accepted ]] && printf '%s|8|1|x|y\\n' node-a node-b node-c")
    stage.program("sleep", "exit 0")
    stage.does(**{"python.sh": "exit 127"})
    stage.does(job="JobId=77 JobState=RUNNING Reason=None Restarts=0 PreemptTime=None ExcNodeList=(null) X=y")
    for restart in ("0", "1"):
        (stage.folder / "accepted").unlink(missing_ok=True)
        stage.perform(stage.write(), SLURM_RESTART_COUNT=restart, SLURMD_NODENAME="node-b")
        stage.does(job="JobId=77 JobState=RUNNING Reason=None Restarts=1 PreemptTime=None ExcNodeList=(null) X=y")
    assert [call[2] for call in stage.calls("scontrol") if call[0] == "update"] == ["ExcNodeList=node-b"]
    assert stage.said_by_script().count('"queued": true') == 2


def test_the_end_that_an_accepted_requeue_brings_does_not_spoil_what_is_told(stage: Stage) -> None:
    """The SIGTERM hit whatever else the script had started: its event had no time, so nobody could read it."""
    usual = (stage.bin / "scontrol").read_text().removeprefix("#!/bin/bash\n")
    storm = "trap '' TERM; while [[ -e /proc/$$ ]]; do :; done; for _ in {1..9999}; do kill -TERM -- -$group; done"
    of_script = "read -r _ _ _ script _ </proc/$PPID/stat; read -r _ _ _ _ group _ </proc/$script/stat"
    accepted = f"{of_script}; ({storm}) >/dev/null 2>&1 &"
    stage.program("scontrol", f"[[ $1 != requeue ]] || {{ {accepted} }}\n{usual}")
    stage.does(**{"python.sh": "exit 127"})
    stage.program("sleep", "exit 0")
    script = stage.write()
    for restart in range(3):  # it does not hit each time
        stage.perform(script, SLURM_RESTART_COUNT=str(restart))
    assert [event["restart_count"] for event in read_events(RunDirectory(stage.run))] == [0, 1, 2]


@pytest.mark.parametrize("slept", [True, False])
def test_a_failed_start_is_queued_again_at_once_when_its_end_is_near(stage: Stage, slept: bool) -> None:
    """A SIGTERM to this script alone, as `scancel --batch` sends it, is not slept through."""
    stage.does(**{"python.sh": "exit 127"})
    until_waited_for = "until [[ $(</proc/$PPID/stat) == *') S '* ]]; do :; done"  # only a `wait` is interrupted
    sleep = f"{shutil.which('sleep')} {'0' if slept else '3600'}"
    stage.program("sleep", f"{until_waited_for}; touch {stage.folder}/training; exec {sleep}")
    process = stage.start(stage.write())
    stage.wait_for_training()
    if not slept:
        process.send_signal(signal.SIGTERM)
    assert stage.finish(process) == 1
    assert stage.requeues() == ["77"]


def test_a_failed_start_waits_for_slurms_controller(stage: Stage) -> None:
    """It would otherwise be the end of a run that another host could have gone on with."""
    usual = (stage.bin / "scontrol").read_text().removeprefix("#!/bin/bash\n")
    stage.program("scontrol", f"[[ -e {stage.folder}/back ]] || {{ echo 'Unable to contact' >&2; exit 1; }}\n{usual}")
    stage.program(
        "sleep", f"echo >>{stage.folder}/slept; (($(grep -c '' {stage.folder}/slept) < 4)) || touch {stage.folder}/back"
    )
    stage.does(**{"python.sh": "exit 127"})
    assert stage.perform(stage.write()) == 1
    assert stage.requeues() == ["77"]
    assert '"queued": true' in stage.said_by_script()


def test_a_start_that_fails_while_slurm_queues_it_again_waits_in_the_queue(stage: Stage) -> None:
    stage.does(job="JobId=77 JobState=COMPLETING Reason=None Restarts=1 PreemptTime=None X=y")
    stage.does(**{"python.sh": "exit 127"})
    stage.program("sleep", "exit 0")
    assert stage.perform(stage.write()) == 1
    assert not stage.requeues()
    assert '"queued": true' in stage.said_by_script()


def _killed_once(stage: Stage) -> str:
    """The first of a stand-in's calls of each kind is ended by a signal."""
    return f"[[ -e {stage.folder}/killed-$1 ]] || {{ touch {stage.folder}/killed-$1; kill -TERM $$; }}"


def test_a_batch_host_without_srun_is_named(stage: Stage) -> None:
    (stage.bin / "srun").unlink()
    assert stage.perform(stage.write(), SLURMD_NODENAME="node-b") == 0, stage.output
    assert stage.requeues() == ["77"]
    assert "node node-b failed: cannot start the job step" in stage.status()["reason"]


def test_without_slurms_commands_a_failed_attempt_does_not_hold_its_nodes_until_the_time_limit(stage: Stage) -> None:
    """As after `module purge` where Slurm is a module."""
    for name in ("srun", "scontrol"):
        (stage.bin / name).unlink()
    stage.perform(stage.write(), SLURM_JOB_NODELIST="node-b,node-a")
    assert stage.status()["state"] == "FAILED", stage.output
    assert "scontrol is not on PATH" in stage.status()["reason"] and "launch.setup" in stage.status()["reason"]


def test_a_restart_that_fails_before_its_attempt_is_tried_again_within_limits(stage: Stage) -> None:
    stage.program("sleep", "exit 0")
    stage.does(**{"training.sh": CRASH})
    line = 'echo "a \\"quoted\\" word"; ((SLURM_RESTART_COUNT == 0)) # of \\ them'
    script = stage.write(launch={"setup": [line]})
    assert stage.perform(script, SLURM_RESTART_COUNT="0") == 0, stage.output
    for restart in ("1", "2", "3"):
        stage.does(job=f"JobId=77 JobState=RUNNING Reason=None Requeue=1 Restarts={restart} PreemptTime=None X=y")
        assert stage.perform(script, SLURM_RESTART_COUNT=restart, SLURMD_NODENAME="node-b") == 1
        assert stage.status()["state"] == "REQUEUED"
    forbidden = ["update", "JobId=77", "Requeue=0"]
    assert forbidden not in stage.calls("scontrol")
    stage.does(job="JobId=77 JobState=RUNNING Reason=None Requeue=1 Restarts=4 PreemptTime=None X=y")
    assert stage.perform(script, SLURM_RESTART_COUNT="4", SLURMD_NODENAME="node-b") == 1
    assert stage.requeues() == ["77"] * 4
    assert forbidden in stage.calls("scontrol"), "a site's RequeueExit would start it again and again"
    found = stage.status()
    assert (found["state"], found["attempts"]) == ("FAILED", 1)
    assert "restart failed on node-b: launch.setup: status 1 from: ((SLURM_RESTART_COUNT == 0))" in found["reason"]
    (stage.run / "run.json").unlink()  # as of an element of a sweep, whose run is made only after these lines
    assert stage.perform(script, SLURM_RESTART_COUNT="4") == 1
    assert stage.calls("scontrol").count(forbidden) == 2


def test_only_restarts_that_fail_in_a_row_are_counted(stage: Stage) -> None:
    """A run that is preempted for weeks may meet a setup line that fails, or is preempted in one, now and then."""
    stage.program("sleep", "exit 0")
    stage.does(**{"training.sh": CRASH})
    script = stage.write(launch={"setup": ["((SLURM_RESTART_COUNT % 4 == 0))"]})
    for restart in (0, 4, 5):  # in 1, 2 and 3 it has failed
        stage.does(job=f"JobId=77 JobState=RUNNING Reason=None Restarts={restart} PreemptTime=None X=y")
        stage.perform(script, SLURM_RESTART_COUNT=str(restart))
    assert stage.requeues() == ["77"] * 3


def test_starts_that_slurm_takes_the_nodes_from_do_not_count_as_failed(stage: Stage) -> None:
    """A job of a low priority may be preempted in its setup lines again and again, but not without end."""
    stage.program("sleep", "exit 0")
    script = stage.write(launch={"setup": ["(exit 143)"]})
    preempted = "JobId=77 JobState=COMPLETING Reason=None PreemptTime=2026-11-20T11:08:11 Restarts={} X=y"
    failed = "JobId=77 JobState=RUNNING Reason=None PreemptTime=None Restarts={} X=y"

    def start(restart: int, shown: str) -> list[str]:
        stage.does(job=shown.format(restart))
        assert stage.perform(script, SLURM_RESTART_COUNT=str(restart)) == 1
        return stage.requeues()

    for restart in range(7):
        assert len(start(restart, preempted)) == restart + 1
    for restart in range(7, 10):
        assert len(start(restart, failed)) == restart + 1
    assert len(start(10, preempted)) == 11
    assert len(start(11, failed)) == 11
    record = stage.run / "events" / "script-77-node-b.jsonl"
    kept = record.with_name("script-77-.jsonl").read_text().splitlines()[0]
    record.write_text("".join(kept.replace('count": 0', f'count": {n}') + "\n" for n in range(12, 200)))
    assert len(start(200, preempted)) == 11


def test_a_restart_that_its_owner_cancels_is_not_tried_again(stage: Stage) -> None:
    """The SIGTERM of a cancel ends the setup line, too; Slurm would take the job back into its queue."""
    stage.program("sleep", "exit 0")
    stage.does(job="JobId=77 JobState=COMPLETING Reason=None Restarts=1 PreemptTime=None X=y")
    assert stage.perform(stage.write(launch={"setup": ["exit 143"]}), SLURM_RESTART_COUNT="1") == 1
    assert not stage.requeues()


@pytest.mark.parametrize("arguments", [[], ["a", "b"], ["/nowhere"]])
@pytest.mark.parametrize("setup", [[], ["true"]])
def test_a_wrong_call_says_what_is_wrong(stage: Stage, arguments: list[str], setup: list[str]) -> None:
    done = subprocess.run(
        ["bash", str(stage.write(launch={"setup": setup})), *arguments],
        env={"PATH": str(stage.bin), "SLURM_JOB_ID": "77", "POSIXLY_CORRECT": "1"},
        capture_output=True,
        text=True,
        timeout=20,
    )
    assert done.returncode == 1
    assert "run directory" in done.stderr


def test_a_cluster_without_pyxis_is_told_of(stage: Stage) -> None:
    stage.does(**{"training.sh": "echo \"srun: unrecognized option '--container-image=a.sqsh'\" >&2; exit 1"})
    container = {"runtime": "pyxis", "image": "a.sqsh"}
    assert stage.perform(stage.write(launch={"container": container}), SLURMD_NODENAME="node-b") == 0, stage.output
    assert "srun started nothing: unrecognized option '--container-image" in stage.status()["reason"]
    assert "pyxis needs that plugin" in stage.status()["reason"]


def test_an_srun_without_files_to_open_blames_no_node(stage: Stage) -> None:
    lines = (
        "Munge encode failed: Failed to create socket: Too many open files",
        "Task launch for StepId=77.0 failed on node node-b: Protocol authentication error",
    )
    said = "; ".join(f"echo 'srun: error: {line}' >&2" for line in lines)
    stage.does(**{"training.sh": f"{said}; exit 1"})
    assert stage.perform(stage.write(), SLURMD_NODENAME="node-b") == 0, stage.output
    (failed,) = [event for event in read_events(RunDirectory(stage.run)) if event["event"] == NODE_FAILED]
    assert not failed["suspect"]
    assert f"srun started nothing: {lines[0]}; raise the limit in a line of launch.setup" in failed["error"]
