"""What a batch script does before its keeper: reporting failures, handling early signals, and launch.setup.

Shared by our own script and submitit's. It is bash, so that it also works on a host where Python does not start.
"""

from __future__ import annotations

from collections.abc import Iterator

from cluster_ddp.job import JobSpec
from cluster_ddp.launch.processes import ASK_TO_END
from cluster_ddp.launch.variables import SAFE_PATH_VARIABLE
from cluster_ddp.run.directory import SETUP_GUARD, START_FAILED

IGNORE_SIGNALS = """trap '' "${cluster_ddp_signals[@]}" # Python is not killed while it starts"""
"""The line before the last command of a batch script, which runs the keeper."""

TRIES = 3
"""The limit on requeues after starts that failed before their keeper ran, as in `run/requeue/start_failed.sh`."""

_ASK_TO_END = tuple(number.name.removeprefix("SIG") for number in ASK_TO_END)

_FAIL = r"""# Ends this start, which has failed before the keeper runs. With "again" the job is requeued, a few times: a
# different host may do better. The script beside this one in the run directory decides that, and explains it.
cluster_ddp_fail() {
    cluster_ddp_drop_traps 2>/dev/null
    printf '%s\n' "${@:3}" "job.sbatch: $2" >&2
    if [[ -f @policy@ ]]; then
        trap 'kill $!' "${cluster_ddp_signals[@]}" # which only this script receives
        # shellcheck source=/dev/null
        (set +eu +o posix && . "@policy@" "$cluster_ddp_run" "$@") &
        while wait $!; kill -0 $! 2>/dev/null; do :; done # each signal ends one wait
    elif [[ $1 == again && -z ${SLURM_ARRAY_JOB_ID:-} ]] && ((${SLURM_RESTART_COUNT:-0} < @tries@)); then # no run known
        sleep 10
        [[ $(timeout 60 scontrol show job -o "$SLURM_JOB_ID") != *JobState=RUNNING* ]] ||
            timeout 60 scontrol requeue "$SLURM_JOB_ID"
    fi
    exit 1
}"""

_DROP_TRAPS = "    cluster_ddp_drop_traps 2>/dev/null\n"

_SETUP = """# The lines of launch.setup. A command of them that fails ends this start, and the output says which.
[[ -r @guard@ ]] || # a dot without its file ends a shell in POSIX mode
    cluster_ddp_fail once "cannot read @guard@ of the run directory: sbatch job.sbatch RUN_DIRECTORY"
trap - ERR # that of a file of BASH_ENV would come back after the next line
# shellcheck source=/dev/null
. "@guard@"
@setup@
cluster_ddp_end_setup
trap - ERR DEBUG # here, too: a function that returns puts these back"""


def hand_over(spec: JobSpec) -> str:
    """Return the word before the last command of a batch script, which runs the keeper."""
    return "cluster_ddp_hand_over" if spec.launch.setup else "exec"


def preamble(spec: JobSpec, *, signal: str, run: str, setup: str, beside: str = "$cluster_ddp_run") -> Iterator[str]:
    """Yield the lines of that part of a batch script.

    Parameters
    ----------
    run
        The run directory, as a bash expression.
    setup
        The lines of launch.setup.
    beside
        The folder of the script that was submitted.
    """
    yield f"cluster_ddp_run={run}"
    yield "# Signals that Slurm, a person or a site may send; by default they would end this script"
    yield f"cluster_ddp_signals=({' '.join(dict.fromkeys((signal, 'TERM', *_ASK_TO_END)))})"
    yield ""
    fail = _FAIL.replace("@policy@", f"{beside}/{START_FAILED}").replace("@tries@", str(TRIES))
    yield fail if spec.launch.setup else fail.replace(_DROP_TRAPS, "")
    yield ""
    yield "# A signal that comes before the keeper runs must not end this script: the keeper asks Slurm what it missed"
    yield 'trap : "${cluster_ddp_signals[@]}"'
    yield ""
    if spec.launch.setup:
        yield _SETUP.replace("@guard@", f"{beside}/{SETUP_GUARD}").replace("@setup@", setup)
        yield ""
    yield f"export {SAFE_PATH_VARIABLE}=1 # a json.py in this folder is not imported instead of Python's own"
    yield ""


def interpreter_check(python: str, packages: str) -> Iterator[str]:
    """Yield the lines with which a batch script checks the interpreter, and that it has what this start needs.

    Once an attempt has begun, a host without pydantic could not decide what follows it, which would end the run.
    """
    where = "${SLURMD_NODENAME:-this host}"
    yield f"cluster_ddp_said=$({python} -c 'import {packages}, pydantic' 2>&1) ||"
    yield f'    cluster_ddp_fail again "no Python with {packages} starts on {where}: launch.python" \\'
    yield '        "${cluster_ddp_said:-it ended with status $?}"'
