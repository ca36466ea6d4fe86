"""What a batch script does before its keeper: reporting failures, handling early signals, and launch.setup.

Shared by our own script and submitit's. It is bash, so that it also works on a host where Python does not start.
"""

from __future__ import annotations

from collections.abc import Iterator

from cluster_ddp.job import JobSpec
from cluster_ddp.launch.processes import ASK_TO_END
from cluster_ddp.launch.variables import SAFE_PATH_VARIABLE
from cluster_ddp.run.runs import START_FAILED

IGNORE_SIGNALS = """trap '' "${cluster_ddp_signals[@]}" # Python is not killed while it starts"""
"""The line before the last command of a batch script, which runs the keeper."""

TRIES = 3
"""The limit on requeues after starts that failed before their keeper ran; the same as in `run/start_failed.sh`."""

_ASK_TO_END = tuple(number.name.removeprefix("SIG") for number in ASK_TO_END)

_FAIL = r"""# Ends this start, which has failed before the keeper runs. With "again" the job is requeued, a few times: a
# different host may do better. The script beside this one in the run directory decides that, and explains it.
cluster_ddp_fail() {
    @drop_traps@
    echo "job.sbatch: $2" >&2
    if [[ -f @policy@ ]]; then
        trap 'kill $!' "${cluster_ddp_signals[@]}" # which only this script receives
        # shellcheck source=/dev/null
        (set +eu +o posix && . "@policy@" "$cluster_ddp_run" "$1" "$2") &
        while wait $!; kill -0 $! 2>/dev/null; do :; done # each signal ends one wait
    elif [[ $1 == again && -z ${SLURM_ARRAY_JOB_ID:-} ]] && ((${SLURM_RESTART_COUNT:-0} < @tries@)); then # no run yet
        sleep 10
        [[ $(timeout 60 scontrol show job -o "$SLURM_JOB_ID") != *JobState=RUNNING* ]] ||
            timeout 60 scontrol requeue "$SLURM_JOB_ID"
    fi
    exit 1
}"""

_DROP_TRAPS = "    @drop_traps@\n"

# An exec would skip an EXIT trap that launch.setup has set.
_BEFORE_SETUP = r"""# Removes the traps of this script, but not one that launch.setup has set for EXIT
cluster_ddp_drop_traps() {
    trap - ERR DEBUG
    [[ $(trap -p EXIT) != *cluster_ddp_* ]] || trap - EXIT
}

# What Slurm has set, for lines of launch.setup that unset all of it to hide Slurm from programs.
cluster_ddp_slurm=()
for cluster_ddp_name in "${!SLURM@}"; do
    cluster_ddp_slurm+=("$cluster_ddp_name=${!cluster_ddp_name}")
done
cluster_ddp_restore() {
    [[ -n ${SLURM_JOB_ID:-} ]] || export "${cluster_ddp_slurm[@]}" || : # one that is read-only now
}

# A command of launch.setup that fails ends this start, and so does one that would end this
# script or take its place. A trap of those lines for EXIT runs at the end; one for ERR takes the place of this one.
# shellcheck disable=SC2317
cluster_ddp_setup_failed() {
    local cluster_ddp_again=once cluster_ddp_what=$2 cluster_ddp_line cluster_ddp_lines=()
    local cluster_ddp_text='' cluster_ddp_whole='' cluster_ddp_name
    cluster_ddp_restore
    # Of a function that fails, such as module, bash knows what failed inside of it, and not the line that calls it.
    [[ -z ${4:-} ]] || { mapfile -t -s $(($4 - 1)) -n 5 cluster_ddp_lines <"${3:-$0}"; } 2>/dev/null
    for cluster_ddp_line in "${cluster_ddp_lines[@]:-}"; do # until they are a whole command
        cluster_ddp_text+=${cluster_ddp_text:+$'\n'}$cluster_ddp_line
        [[ $cluster_ddp_line != *\\ ]] || continue
        # Only parsed (-n), never run
        env -u BASH_ENV -u SHELLOPTS "$BASH" -n <<<"it() { $cluster_ddp_text"$'\n}' 2>/dev/null || continue
        cluster_ddp_whole=$cluster_ddp_text && break
    done
    : "${cluster_ddp_whole:=${cluster_ddp_lines[0]:-}}"
    cluster_ddp_line=${cluster_ddp_whole//[[:space:]\\]/} cluster_ddp_name=${cluster_ddp_what//[[:space:]\\]/}
    if [[ $cluster_ddp_line != *"$cluster_ddp_name"* && $cluster_ddp_name != *"$cluster_ddp_line"* ]]; then
        cluster_ddp_what=${cluster_ddp_whole#"${cluster_ddp_whole%%[![:space:]]*}"}
    fi
    ((${#cluster_ddp_what} < 500)) || cluster_ddp_what="${cluster_ddp_what:0:500} ..."
    # It has worked once, or a signal has ended it
    ((${SLURM_RESTART_COUNT:-0} == 0 && $1 <= 128)) || cluster_ddp_again=again
    # $3: a file that they read
    cluster_ddp_fail "$cluster_ddp_again" "launch.setup: status $1 from: $cluster_ddp_what${3:+ ($3, line $4)}"
}
trap 'cluster_ddp_setup_failed "$?" "$BASH_COMMAND" "${BASH_SOURCE#"$0"}" "$LINENO"' ERR
trap 'cluster_ddp_setup_failed "$?" "$BASH_COMMAND, which ends the script"' EXIT
trap '[[ ! $BASH_COMMAND =~ ^exec\ +[^\<\>\{\&0-9] ]] ||
    cluster_ddp_fail once "launch.setup: nothing of the job would follow after: $BASH_COMMAND"' DEBUG"""

_AFTER_SETUP = """cluster_ddp_drop_traps
trap - ERR DEBUG # here, too: a function that returns puts these back
set +eu +o pipefail +o posix # whatever those lines have set: this script looks at each status itself
cluster_ddp_restore

# Puts the last program into this script's place, where Slurm's signals find it. Where launch.setup has left an EXIT
# trap, this script waits for that program and passes the signals on.
cluster_ddp_hand_over() {
    [[ -n $(trap -p EXIT) ]] || exec "$@"
    "$@" & # which ignores them until it listens
    for cluster_ddp_name in "${cluster_ddp_signals[@]}"; do
        trap "kill -s $cluster_ddp_name "'$!' "$cluster_ddp_name"
    done
    while wait $!; kill -0 $! 2>/dev/null; do :; done # each signal ends one wait
    wait $!
    exit
}"""


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
    yield fail.replace("@drop_traps@", "cluster_ddp_drop_traps") if spec.launch.setup else fail.replace(_DROP_TRAPS, "")
    yield ""
    if spec.launch.setup:
        yield from (_BEFORE_SETUP, "")
    yield "# A signal that comes before the keeper runs must not end this script: the keeper asks Slurm what it missed"
    yield 'trap : "${cluster_ddp_signals[@]}"'
    yield ""
    if spec.launch.setup:
        yield from ("# The lines of launch.setup", setup, "", _AFTER_SETUP, "")
    yield f"export {SAFE_PATH_VARIABLE}=1 # a json.py in this folder is not imported instead of Python's own"
    yield ""


def interpreter_check(python: str, packages: str) -> Iterator[str]:
    """Yield the lines with which a batch script checks the interpreter, and that it has what this start needs.

    Once an attempt has begun, a host without pydantic could not decide what follows it, which would end the run.
    """
    where = "${SLURMD_NODENAME:-this host}"
    yield f"cluster_ddp_said=$({python} -c 'import {packages}, pydantic' 2>&1) || {{"
    yield "    cluster_ddp_said=${cluster_ddp_said:-it ended with status $?}"
    yield """    printf '%s\\n' "$cluster_ddp_said" >&2"""
    yield "    cluster_ddp_said=${cluster_ddp_said%$'\\n\\n'Current thread*} # what follows a fatal error of Python"
    yield "    cluster_ddp_said=${cluster_ddp_said%$'\\n'Python runtime state: *initialized}"
    yield "    cluster_ddp_said=${cluster_ddp_said##*$'\\n'} # the last line says why"
    yield "    cluster_ddp_fail again \\"
    yield f'        "no Python with {packages} starts on {where}: launch.python; $cluster_ddp_said"'
    yield "}"
