"""What a batch script does before its keeper: how it fails, the signals that come too early, and launch.setup.

Our own script and submitit's have it in common. It is bash, so that it also tells of a host on which no Python starts.
"""

from __future__ import annotations

from collections.abc import Iterator

from cluster_ddp.job import JobSpec
from cluster_ddp.launch.variables import SAFE_PATH_VARIABLE

_STARTS_WITHOUT_ATTEMPT = 3
_QUESTIONS = 12  # each of at most 60 s, and 10 s after the one before

_FAIL = r"""cluster_ddp_drop_traps() {
    trap - ERR DEBUG
    [[ $(trap -p EXIT) != *cluster_ddp_* ]] || trap - EXIT # not one of launch.setup
}

# A call of Slurm's commands; once more where a signal has ended it, since Slurm sends its SIGTERM to all of a job.
cluster_ddp_call() {
    local status
    for _ in 1 2; do
        timeout 60 "$@"
        status=$?
        ((status > 128)) || break
    done
    return "$status"
}

# Whether a job, as Slurm shows it, is queued again already: by Slurm, or by a call that did not live to say so.
cluster_ddp_is_queued() {
    [[ $1 =~ Restarts=([0-9]+) ]] && ((BASH_REMATCH[1] > ${SLURM_RESTART_COUNT:-0}))
}

# Has Slurm queue this job again. When it accepts, it ends all of the job, and scontrol maybe before that can say so.
cluster_ddp_requeue() {
    for _ in 1 2 3; do
        timeout 60 scontrol requeue "$1" && return 0 # in a trap, return alone gives an older status
        cluster_ddp_is_queued "$(cluster_ddp_call scontrol show job -o "$1")" && return 0
    done
    return 1
}

# Whether the partition has enough nodes besides this host.
cluster_ddp_has_others() {
    local others
    others=$(cluster_ddp_call sinfo --noheader --Node --format=%N --partition="$SLURM_JOB_PARTITION" \
        --states=idle,mixed,allocated,completing | grep -v ' ' | sort -u | grep -cvxF "$SLURMD_NODENAME")
    ((others >= SLURM_JOB_NUM_NODES))
}

# Says why this start has failed. Nobody else can queue this job again: with "again" it is tried
# @tries@ times more often than attempts have begun, since another host may do better. That would bring back a job
# which its owner has cancelled meanwhile, so Slurm is asked first, for a few minutes if its controller is away.
cluster_ddp_fail() {
    cluster_ddp_drop_traps
    set +eu
    echo "job.sbatch: $2" >&2
    local begun=("${cluster_ddp_run:-.}"/attempts/*/) task=$SLURM_JOB_ID queued=false leave='' shown='' slept
    local ending='Reason=TimeLimit|PreemptTime=[0-9]' # by Slurm, and not for good
    [[ -z ${SLURM_ARRAY_JOB_ID:-} ]] || task=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID # not its siblings
    local said=$cluster_ddp_run/events/script-$SLURM_JOB_ID-${SLURMD_NODENAME:-}.jsonl
    if [[ $1 == again ]] && ((${SLURM_RESTART_COUNT:-0} - ${#begun[@]} < @tries@)); then
        for slept in {0..@questions@}; do
            shown=$(cluster_ddp_call scontrol show job -o "$task")
            case $?,$slept in
                0,0) [[ $shown == *JobState=RUNNING* && ! $shown =~ $ending ]] || break ;; # no time is left
                0,* | 127,*) break ;; # it has answered, or there is no scontrol here
            esac
            sleep 10 &
            wait $! # which a signal ends
        done
        # It has failed here before, and is kept from no host so far. Once it is queued there may be no time to ask
        [[ -s $said && $shown == *"ExcNodeList=(null)"* ]] && cluster_ddp_has_others && leave=$SLURMD_NODENAME
        if cluster_ddp_is_queued "$shown"; then
            queued=true
        elif [[ $shown =~ JobState=RUNNING|$ending ]]; then
            cluster_ddp_requeue "$task" && queued=true
        fi
    fi
    [[ -f $cluster_ddp_run/run.json ]] || exit 1
    local words=${2//\\/\\\\}
    words=${words//\"/\\\"}
    printf '{"time": %s, "event": "start-failed", "attempt": null, "slurm_job_id": "%s", "restart_count": %s, %s}\n' \
        "$(printf '%(%s)T' -1)" "$task" "${SLURM_RESTART_COUNT:-0}" \
        "\"host\": \"${SLURMD_NODENAME:-}\", \"queued\": $queued, \"reason\": \"${words//[[:cntrl:]]/ }\"" \
        >>"$said"
    # Only a job that waits in the queue is kept from a host
    $queued && [[ -n $leave ]] && cluster_ddp_call scontrol update JobId="$task" ExcNodeList="$leave" &&
        echo "job.sbatch: $leave failed more than once: excluded from now on" >&2
    exit 1
}"""

_BEFORE_SETUP = r"""# A command of launch.setup that fails ends this start, and so does one that would end this
# script or take its place. A trap of those lines for EXIT runs at the end; one for ERR takes the place of this one.
# shellcheck disable=SC2317
cluster_ddp_setup_failed() {
    local again=once
    ((${SLURM_RESTART_COUNT:-0} == 0 && $1 <= 128)) || again=again # it has worked once, or a signal has ended it
    cluster_ddp_fail "$again" "launch.setup: status $1 from: $2"
}
trap 'cluster_ddp_setup_failed "$?" "$BASH_COMMAND"' ERR
trap 'cluster_ddp_setup_failed "$?" "$BASH_COMMAND, which ends the script"' EXIT
trap '[[ ! $BASH_COMMAND =~ ^exec\ +[^\<\>\{\&0-9] ]] ||
    cluster_ddp_fail once "launch.setup: nothing of the job would follow after: $BASH_COMMAND"' DEBUG"""

_AFTER_SETUP = """cluster_ddp_drop_traps
set +eu +o pipefail +o posix # whatever those lines have set: this script looks at each status itself

# Puts the last program into this script's place, where Slurm's signals find it. Where launch.setup has left an EXIT
# trap, this script waits for that program and passes the signals on.
cluster_ddp_hand_over() {
    [[ -n $(trap -p EXIT) ]] || exec "$@"
    trap '' @signal@ TERM
    "$@" &
    trap 'kill -s @signal@ $!' @signal@
    trap 'kill -s TERM $!' TERM
    while wait $!; kill -0 $! 2>/dev/null; do :; done # each signal ends one wait
    wait $!
    exit
}"""


def hand_over(spec: JobSpec) -> str:
    """The word before the last command of a batch script, the keeper's."""
    return "cluster_ddp_hand_over" if spec.launch.setup else "exec"


def preamble(spec: JobSpec, *, signal: str, run: str, setup: str) -> Iterator[str]:
    """What a batch script does before its keeper: how it fails, the signals that come too early, and launch.setup."""
    yield f"cluster_ddp_run={run}"
    yield ""
    yield _FAIL.replace("@tries@", str(_STARTS_WITHOUT_ATTEMPT)).replace("@questions@", str(_QUESTIONS))
    yield ""
    if spec.launch.setup:
        yield from (_BEFORE_SETUP, "")
    yield "# A signal that comes before the keeper runs must not end this script: the keeper asks Slurm what it missed"
    yield f"trap : {signal} TERM"
    yield ""
    if spec.launch.setup:
        yield from ("# The lines of launch.setup", setup, "", _AFTER_SETUP.replace("@signal@", signal), "")
    yield f"export {SAFE_PATH_VARIABLE}=1 # a json.py in this folder is not imported in place of Python's own"
    yield ""


def python_starts(python: str, packages: str) -> Iterator[str]:
    """The lines by which a batch script sees that the interpreter is there, with what this start needs of it."""
    yield f"{python} -c 'import {packages}' ||"
    where = "${SLURMD_NODENAME:-this host}"
    yield f'    cluster_ddp_fail again "no Python with {packages} starts on {where}: launch.python"'
