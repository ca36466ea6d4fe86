"""The lines of launch.setup in the batch script, with stand-ins for Slurm."""

from __future__ import annotations

import signal

import pytest
from stage import CRASH, UNTIL_STOPPED, Stage

from cluster_ddp.run.directory import RunDirectory
from cluster_ddp.run.record import add_slurm_job
from cluster_ddp.run.stopfile import read_stop


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
        (["module() { return 3; }", "module load cuda \\", "  nothere"], 3, "module load cuda \\\n  nothere"),
        (["module() { return 3; }", "module load 'cuda", "  x'", "true"], 3, "module load 'cuda\n  x'"),
        (["grep \\", "  -q zz \\", "  /dev/null"], 1, "grep -q zz /dev/null"),
        (["grep -q zz <<END", "one", "END"], 1, "grep -q zz <<END\none\nEND\n"),
        (["module() { return 3; }", "x=$(", "module load cuda", ")"], 3, "x=$(module load cuda)"),
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
    on_one_line = words.replace("\n", " ")
    assert f"launch.setup: status {status} from: {on_one_line} (see slurm-77.out)" in found["reason"]


def test_nothing_after_a_line_that_fails_is_run(stage: Stage) -> None:
    """Not even to find out where the command that has failed ends."""
    side = stage.folder / "side"
    setup = ["{ echo loading", "  false; }", f"echo x >>{side}", f"touch {side}", "true"]
    assert stage.perform(stage.write(launch={"setup": setup})) == 1
    assert "launch.setup: status 1 from: false" in stage.output
    assert not side.exists()


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


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("export PATH=/nowhere", "no Python with cluster_ddp starts"),
        ("export PYTHONHASHSEED=bad", "launch.python; Fatal Python error: config_init_hash_seed: PYTHONHASHSEED must"),
        ("tail() { return 3; }", "cannot determine the first node"),
    ],
)
def test_a_script_that_fails_after_its_setup_lines_says_why(stage: Stage, line: str, words: str) -> None:
    assert stage.perform(stage.write(launch={"setup": [line]})) == 1
    assert words in stage.said_by_script() and "launch.setup: status" not in stage.output


@pytest.mark.parametrize("shown", ["Reason=TimeLimit", "Reason=None PreemptTime=2026-11-20T11:08:11"])
def test_a_setup_line_that_slurm_ends_with_the_job_is_tried_again_at_once(stage: Stage, shown: str) -> None:
    """There may be 5 s until SIGKILL, and no attempt has begun that could be judged."""
    stage.does(job=f"JobId=77 JobState=COMPLETING {shown} Restarts=0 X=y")
    stage.program("sleep", "exec cat /dev/zero >/dev/null")
    assert stage.perform(stage.write(launch={"setup": ["(exit 143)"]})) == 1
    assert stage.requeues() == ["77"]
    assert '"queued": true' in stage.said_by_script()


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


def test_a_line_that_fails_is_told_though_bash_has_read_a_file_with_its_own_trap(stage: Stage) -> None:
    """Nothing said so, and training began without what the line was to set up."""
    (stage.folder / "site.sh").write_text("trap 'echo theirs' ERR DEBUG\n")
    script = stage.write(launch={"setup": ["module() { return 3; }", "module load cuda"]})
    assert stage.perform(script, BASH_ENV=str(stage.folder / "site.sh")) == 1
    assert "launch.setup: status 3 from: module load cuda" in stage.output
    assert not stage.calls("python")


def test_setup_lines_may_set_what_they_like(stage: Stage) -> None:
    setup = ["set -euo pipefail", "set -o posix", "export GREETING='it works'"]
    stage.does(**{"training.sh": CRASH})
    assert stage.perform(stage.write(launch={"setup": setup})) == 0, stage.output
    assert stage.environment_of_ranks()["GREETING"] == "it works"
    assert stage.requeues() == ["77"]
