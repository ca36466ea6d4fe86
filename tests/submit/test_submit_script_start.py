"""What the batch script does before its keeper, with stand-ins for Slurm: where ranks meet, setup lines, hosts."""

from __future__ import annotations

import shutil
import signal
import subprocess
from pathlib import Path

import pytest
from stage import CRASH, UNTIL_STOPPED, Stage

from cluster_ddp.run import runs
from cluster_ddp.run.directory import RunDirectory
from cluster_ddp.run.record import add_slurm_job
from cluster_ddp.run.stopfile import read_stop
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


@pytest.mark.parametrize(
    ("python", "words"),
    [("", "can determine the first node of node-[b,a]"), ("exit 127", "no Python with cluster_ddp starts")],
)
def test_an_scontrol_that_hangs_does_not_hold_the_nodes(stage: Stage, python: str, words: str) -> None:
    impatient = f'shift; exec {shutil.which("timeout")} 1 "$@"'
    stage.program("timeout", impatient)
    stage.program("sleep", "exit 0")
    stage.program("scontrol", f"exec {shutil.which('sleep')} 3600")
    stage.does(**{"python.sh": python})
    assert stage.perform(stage.write()) == 1
    add_slurm_job(RunDirectory(stage.run), "77")
    found = stage.status()
    assert found["state"] == "FAILED" and words in found["reason"]


def test_without_scontrol_and_clustershell_the_job_fails_clearly(tmp_path: Path) -> None:
    stage = Stage(tmp_path, scontrol=False)
    stage.does(**{"python.sh": "[[ $* != *nodelist* ]] || exit 1"})
    assert stage.perform(stage.write()) == 1
    assert "can determine the first node of node-[b,a]" in stage.output
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


@pytest.mark.parametrize(
    ("python", "said"),
    [
        (
            "echo noise >&2; echo \"ModuleNotFoundError: No module named 'cluster_ddp'\" >&2; exit 1",
            "No module named 'cl",
        ),
        ("exit 9", "launch.python; it ended with status 9 (see slurm-77.out)"),
    ],
)
def test_why_python_does_not_start_is_told(stage: Stage, python: str, said: str) -> None:
    stage.does(**{"python.sh": python})
    stage.program("sleep", "exit 0")
    assert stage.perform(stage.write(), SLURM_RESTART_COUNT="3") == 1
    add_slurm_job(RunDirectory(stage.run), "77")
    assert said in stage.status()["reason"]


def test_the_script_and_what_it_calls_have_the_same_limit_on_failed_starts() -> None:
    assert f"\ntries={TRIES} " in Path(runs.__file__).with_name("start_failed.sh").read_text()


@pytest.mark.parametrize(
    ("nodes", "requested", "kept", "excluded"),
    [
        ("node-a node-b node-c", "(null)", "(null)", ["node-b"]),
        ("node-a node-b", "(null)", "(null)", []),
        ("node-a node-b small", "(null)", "(null)", []),
        ("node-b a c", "(null)", "x[1-2]", []),
        ("node-a node-b node-c", "node-[a-b]", "(null)", []),
    ],
)
def test_a_host_where_two_starts_have_failed_is_left_where_there_are_others(
    stage: Stage, nodes: str, requested: str, kept: str, excluded: list[str]
) -> None:
    stage.does(**{"python.sh": "exit 127"})
    lists = f"ReqNodeList={requested} ExcNodeList={kept}"
    stage.does(job=f"JobId=77 JobState=RUNNING Reason=None Restarts=1 PreemptTime=None {lists} X=y")
    stage.program("sleep", "exit 0")
    kinds = {"small": "2|1000|(null)|(null)"}
    lines = " ".join(f"'{node}|{kinds.get(node, '8|64000|(null)|gpu:4(S:0-1)')}'" for node in nodes.split())
    stage.program("sinfo", f"echo 'Welcome to the cluster!'; printf '%s\\n' {lines}")
    for restart in ("1", "2"):
        assert stage.perform(stage.write(), SLURM_RESTART_COUNT=restart, SLURMD_NODENAME="node-b") == 1
        updates = [call[2] for call in stage.calls("scontrol") if call[0] == "update"]
        assert updates == ([] if restart == "1" else [f"ExcNodeList={host}" for host in excluded])
    assert stage.requeues() == ["77", "77"]


def test_a_requeue_that_scontrol_did_not_live_to_tell_of_counts(stage: Stage) -> None:
    """Slurm ends all of the job when it accepts."""
    usual = (stage.bin / "scontrol").read_text().removeprefix("#!/bin/bash\n")
    accepted = f"JobId=77 JobState=COMPLETING Restarts=1 X=y' >{stage.folder}/job"
    stage.program("scontrol", f"[[ $1 != requeue ]] || {{ echo '{accepted}; kill -TERM $$; }}\n{usual}")
    stage.does(**{"python.sh": "exit 127"})
    stage.program("sleep", "exit 0")
    assert stage.perform(stage.write()) == 1
    assert stage.status()["state"] == "REQUEUED" or '"queued": true' in _said_by_script(stage)


def test_a_sigterm_before_the_requeue_is_accepted_does_not_lose_it(stage: Stage) -> None:
    """Of a time limit, or of a preemption: all of the job gets it, scontrol and what it is called with too."""
    usual = (stage.bin / "scontrol").read_text().removeprefix("#!/bin/bash\n")
    stage.program("scontrol", f"{_killed_once(stage)}\n{usual}")
    stage.does(**{"python.sh": "exit 127"})
    stage.program("sleep", "exit 0")
    assert stage.perform(stage.write()) == 1
    assert stage.requeues() == ["77"]
    assert '"queued": true' in _said_by_script(stage)


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
    assert _said_by_script(stage).count('"queued": true') == 2


@pytest.mark.parametrize("slept", [True, False])
def test_a_failed_start_is_queued_again_at_once_when_its_end_is_near(stage: Stage, slept: bool) -> None:
    """A SIGTERM to this script alone, as `scancel --batch` sends it, is not slept through."""
    stage.does(**{"python.sh": "exit 127"})
    stage.program("sleep", f"touch {stage.folder}/training; exec {shutil.which('sleep')} {'0' if slept else '3600'}")
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
    assert '"queued": true' in _said_by_script(stage)


def test_a_start_that_fails_while_slurm_queues_it_again_waits_in_the_queue(stage: Stage) -> None:
    stage.does(job="JobId=77 JobState=COMPLETING Reason=None Restarts=1 PreemptTime=None X=y")
    stage.does(**{"python.sh": "exit 127"})
    stage.program("sleep", "exit 0")
    assert stage.perform(stage.write()) == 1
    assert not stage.requeues()
    assert '"queued": true' in _said_by_script(stage)


def _killed_once(stage: Stage) -> str:
    """The first of a stand-in's calls of each kind is ended by a signal."""
    return f"[[ -e {stage.folder}/killed-$1 ]] || {{ touch {stage.folder}/killed-$1; kill -TERM $$; }}"


def _said_by_script(stage: Stage) -> str:
    return "".join(file.read_text() for file in (stage.run / "events").glob("script-*.jsonl"))


@pytest.mark.parametrize(
    ("setup", "status", "words"),
    [
        (["true", "no_such_module load cuda"], 127, "no_such_module load cuda"),
        (["set -e", "false"], 1, "false"),
        (["set -u", 'echo "$NOT_SET" \\', "    again"], 1, 'echo "$NOT_SET" again, which ends the script'),
        (["exit 3"], 3, "exit 3, which ends the script"),
        (["trap 'echo its own' EXIT", "set -eu", "false"], 1, "false"),
        (["fail() { :; }", "setup_failed() { :; }", "false"], 1, "false"),
        (["module() { local status=3; return $status; }", "  module load nothere"], 3, "module load nothere"),
    ],
)
def test_a_setup_line_that_fails_ends_the_job_before_an_attempt(
    stage: Stage, setup: list[str], status: int, words: str
) -> None:
    assert stage.perform(stage.write(launch={"setup": setup})) == 1
    assert f"launch.setup: status {status} from: {words}" in stage.output
    assert not stage.calls("python")
    assert not stage.requeues(), "it would fail again"
    add_slurm_job(RunDirectory(stage.run), "77")
    found = stage.status()
    assert (found["state"], found["attempts"]) == ("FAILED", 0)
    assert f"launch.setup: status {status} from: {words} (see slurm-77.out)" in found["reason"]


@pytest.mark.parametrize(
    "setup",
    [
        ["export BIG=$(printf %0200000d 0)"],
        ["for i in {1..200}; do export V$i=$(printf %020000d 0); done"],
        ['eval "big() { : $(printf %0200000d 0); }"', "export -f big"],
    ],
)
def test_an_environment_too_large_for_any_program_is_told(stage: Stage, setup: list[str]) -> None:
    """It is too large for the script that records the failure, too."""
    stage.program("sleep", "exit 0")
    assert stage.perform(stage.write(launch={"setup": setup}), SLURM_RESTART_COUNT="3") == 1
    add_slurm_job(RunDirectory(stage.run), "77")
    found = stage.status()
    assert found["state"] == "FAILED" and "Argument list too long" in found["reason"]


def test_the_place_of_a_failure_in_a_file_that_setup_lines_read_is_told(stage: Stage) -> None:
    """That command is none of the setup lines."""
    (file := stage.folder / "profile.sh").write_text("true\ngrep -q a /dev/null\ntrue\n")
    assert stage.perform(stage.write(launch={"setup": [f"source {file}"]})) == 1
    assert f"launch.setup: status 1 from: grep -q a /dev/null ({file}, line 2)" in stage.output


def test_a_setup_line_that_puts_another_program_in_the_scripts_place_is_named(stage: Stage) -> None:
    setup = ["exec 3>log 2>&1", "if true; then", "    exec bash train.sh", "fi"]
    assert stage.perform(stage.write(launch={"setup": setup})) == 1
    add_slurm_job(RunDirectory(stage.run), "77")
    found = stage.status()
    assert found["state"] == "FAILED"
    assert "launch.setup: nothing of the job would follow after: exec bash train.sh" in found["reason"]


def test_an_exit_trap_of_setup_lines_runs_as_in_any_script(stage: Stage) -> None:
    """Behind the keeper, with the names that those lines have set; and where a line fails."""
    trap = ["place=scratch", "trap 'echo \"ends $? $place\"' EXIT"]
    assert stage.perform(stage.write(launch={"setup": [*trap, "(exit 3)"]})) == 1
    assert "ends 1 scratch" in stage.output
    assert stage.perform(stage.write(launch={"setup": [*trap, "(trap 'echo inner' EXIT)"]})) == 0, stage.output
    assert stage.output.startswith("inner\n")
    assert stage.output.splitlines()[-1] == "ends 0 scratch"
    assert stage.status()["state"] == "COMPLETED"


def test_a_script_that_waits_for_its_keeper_passes_signals_on(stage: Stage) -> None:
    stage.does(**{"training.sh": UNTIL_STOPPED})
    process = stage.start(stage.write(launch={"setup": ["trap 'echo the end' EXIT"]}))
    stage.wait_for_training()
    process.send_signal(signal.SIGUSR1)
    assert stage.finish(process) == 0, stage.output
    request = read_stop(RunDirectory(stage.run).attempt(0))
    assert request is not None and request.reason == "time-limit"
    assert stage.requeues() == ["77"]
    assert stage.output.splitlines()[-1] == "the end"


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


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("export PATH=/nowhere", "no Python with cluster_ddp starts"),
        ("tail() { return 3; }", "can determine the first node"),
    ],
)
def test_a_script_that_fails_after_its_setup_lines_says_why(stage: Stage, line: str, words: str) -> None:
    assert stage.perform(stage.write(launch={"setup": [line]})) == 1
    assert words in stage.output and "launch.setup: status" not in stage.output


def test_a_restart_that_fails_before_its_attempt_is_tried_again_within_limits(stage: Stage) -> None:
    stage.program("sleep", "exit 0")
    stage.does(**{"training.sh": CRASH})
    line = 'echo "a \\"quoted\\" word"; ((SLURM_RESTART_COUNT == 0)) # of \\ them'
    script = stage.write(launch={"setup": [line]})
    assert stage.perform(script, SLURM_RESTART_COUNT="0") == 0, stage.output
    stage.does(job="JobId=77 JobState=RUNNING Reason=None Restarts=1 PreemptTime=None X=y")
    for restart in ("1", "2", "3"):
        assert stage.perform(script, SLURM_RESTART_COUNT=restart, SLURMD_NODENAME="node-b") == 1
        assert stage.status()["state"] == "REQUEUED"
    assert stage.perform(script, SLURM_RESTART_COUNT="4", SLURMD_NODENAME="node-b") == 1
    assert stage.requeues() == ["77"] * 4
    found = stage.status()
    assert (found["state"], found["attempts"]) == ("FAILED", 1)
    assert "restart failed on node-b: launch.setup: status 1 from: ((SLURM_RESTART_COUNT == 0))" in found["reason"]


@pytest.mark.parametrize("shown", ["Reason=TimeLimit", "Reason=None PreemptTime=2026-11-20T11:08:11"])
def test_a_setup_line_that_slurm_ends_with_the_job_is_tried_again_at_once(stage: Stage, shown: str) -> None:
    """There may be 5 s until SIGKILL, and no attempt has begun that could be judged."""
    stage.does(job=f"JobId=77 JobState=COMPLETING {shown} Restarts=0 X=y")
    stage.program("sleep", "exec cat /dev/zero >/dev/null")
    assert stage.perform(stage.write(launch={"setup": ["(exit 143)"]})) == 1
    assert stage.requeues() == ["77"]
    assert '"queued": true' in _said_by_script(stage)


def test_a_setup_line_that_slurm_ends_is_told_so_and_no_fault_of_its_host(stage: Stage) -> None:
    """As when it takes longer than the time limit: each start of the job ends in it, on the same host."""
    stage.program("sleep", "exit 0")
    stage.program("sinfo", "printf '%s|8|1|x|y\\n' node-a node-b node-c")
    script = stage.write(launch={"setup": ["(exit 143)"]})
    for restart in (0, 1, 4):
        shown = f"JobId=77 JobState=COMPLETING Reason=TimeLimit Restarts={restart} ExcNodeList=(null) X=y"
        stage.does(job=shown)
        assert stage.perform(script, SLURM_RESTART_COUNT=str(restart), SLURMD_NODENAME="node-b") == 1
    assert stage.requeues() == ["77"] * 2
    assert not [call for call in stage.calls("scontrol") if call[0] == "update"]
    words = (
        "restart failed on node-b: launch.setup: status 143 from: ( exit 143 ) (Slurm ended the job at its time limit)"
    )
    add_slurm_job(RunDirectory(stage.run), "77")
    found = stage.status()
    assert found["state"] == "FAILED" and found["reason"].startswith(words)


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


def test_setup_lines_are_a_script_of_their_own(stage: Stage) -> None:
    """Heredocs, lines that go on, other folders and arguments, and names that the script might use."""
    setup = [
        f"cat >{stage.folder}/written <<END", "  one", "", "", "", "checked two", "END", "export LONG=a\\", "b",
        "if true; then", "    run=7 python=8 task=9 begun=10", "fi", "set -- x y", "cd /", "false || true",
    ]  # fmt: skip
    assert stage.perform(stage.write(launch={"setup": setup})) == 0, stage.output
    assert (stage.folder / "written").read_text() == "  one\n\n\n\nchecked two\n"
    assert stage.environment_of_ranks()["LONG"] == "ab"
    assert str(stage.run) in stage.calls("srun")[0]


@pytest.mark.parametrize(
    "line",
    [
        "unset SLURM_JOB_ID",
        "for name in ${!SLURM_@}; do unset $name; done",
        "readonly SLURM_JOB_NODELIST; set -e; unset SLURM_JOB_ID",
    ],
)
def test_setup_lines_cannot_make_the_script_forget_its_job(stage: Stage, line: str) -> None:
    """As programs are told that they are not under Slurm."""
    assert stage.perform(stage.write(launch={"setup": [line]})) == 0, stage.output
    assert stage.environment_of_ranks()["SLURM_JOB_NODELIST"] == "node-[b,a]"
    assert stage.status()["state"] == "COMPLETED"


def test_a_line_that_fails_is_told_though_those_before_it_unset_what_slurm_has_set(stage: Stage) -> None:
    assert stage.perform(stage.write(launch={"setup": ["unset ${!SLURM_@}", "false"]})) == 1
    add_slurm_job(RunDirectory(stage.run), "77")
    assert "launch.setup: status 1 from: false (see slurm-77.out)" in stage.status()["reason"]


@pytest.mark.parametrize(
    "line",
    [
        "set -e; own() { :; }; readonly -f own",
        "readonly again=1 line=2 name=3 policy=4 value=5 what=6",
    ],
)
def test_a_line_that_fails_is_told_though_those_before_it_are_strict(stage: Stage, line: str) -> None:
    """Nothing had recorded the failure, and the run was LOST."""
    assert stage.perform(stage.write(launch={"setup": [line, "false"]})) == 1
    add_slurm_job(RunDirectory(stage.run), "77")
    assert "launch.setup: status 1 from: false (see slurm-77.out)" in stage.status()["reason"]


def test_setup_lines_may_set_what_they_like(stage: Stage) -> None:
    setup = ["set -euo pipefail", "set -o posix", "export GREETING='it works'"]
    stage.does(**{"training.sh": CRASH})
    assert stage.perform(stage.write(launch={"setup": setup})) == 0, stage.output
    assert stage.environment_of_ranks()["GREETING"] == "it works"
    assert stage.requeues() == ["77"]


@pytest.mark.parametrize("arguments", [[], ["a", "b"], ["/nowhere"]])
def test_a_wrong_call_says_what_is_wrong(stage: Stage, arguments: list[str]) -> None:
    done = subprocess.run(
        ["bash", str(stage.write()), *arguments],
        env={"PATH": str(stage.bin), "SLURM_JOB_ID": "77"},
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
