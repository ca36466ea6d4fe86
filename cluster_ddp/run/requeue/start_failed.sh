#!/bin/bash
# . start-failed.sh RUN_DIRECTORY again|once REASON [WHAT PYTHON SAID]
#
# Handles a start of a job that failed before its keeper ran: records an event in the run and, with "again", asks
# Slurm to requeue the job, since nothing else can and a different host may do better. If the job is not requeued, the
# next job of its chain leaves this host, or waits a while where there is no other. It is bash because Python may not
# start on this host.

# In the shell of the batch script, functions and variables may be so large that no program starts: without those, this
# script runs by itself.
if [[ ${BASH_SOURCE[0]} != "$0" ]]; then
    # A read-only one cannot be removed, and stays
    while IFS= read -r cluster_ddp_name; do unset -f -- "$cluster_ddp_name"; done < <(compgen -A function)
    while IFS= read -r cluster_ddp_name; do
        cluster_ddp_value=${!cluster_ddp_name-}
        [[ $cluster_ddp_name == SLURM* || $cluster_ddp_name == *PATH ]] || ((${#cluster_ddp_value} < 1000)) ||
            export -n "${cluster_ddp_name?}"
    done < <(compgen -e)
    ((${#4} < 20000)) || set -- "${@:1:3}" "${4: -20000}" # more may not fit into an argument
    exec "$BASH" "${BASH_SOURCE[0]}" "$@"
fi

# The limits on requeues in a row: after starts that failed, and after those that Slurm took the nodes from
tries=3 preemptions=100
pause=10minutes # before the next job of a chain starts on a host where a start has failed

run=$1 again=$2 reason=$3

if [[ -n ${4-} ]]; then # the last line says why, before what follows a fatal error of Python
    words=${4%$'\n\n'Current thread*}
    words=${words%$'\n'Python runtime state: *initialized}
    words=${words##*$'\n'}
    reason+="; ${words:0:500}"
fi

trap : USR1 USR2 HUP TERM # Slurm's signals must not end this script half-way
unset SLURM_TIME_FORMAT                # times are compared

# Calls a Slurm command; once more if a signal ended it, since Slurm sends its SIGTERM to all of a job.
call() {
    local status
    for _ in 1 2; do
        timeout 60 "$@"
        status=$?
        ((status > 128)) || break
    done
    return "$status"
}

# Whether a job, as Slurm shows it, was requeued already: by Slurm, or by a call that was killed before it returned.
is_queued() {
    [[ $1 =~ Restarts=([0-9]+) ]] && ((BASH_REMATCH[1] > ${SLURM_RESTART_COUNT:-0}))
}

# Why Slurm ends this start, from how it shows the job; empty if it does not, or ends the job for good. A preemption may
# belong to an earlier start.
why_it_ends() {
    local began=''
    [[ $1 =~ StartTime=([0-9T:-]+) ]] && began=${BASH_REMATCH[1]}
    if is_queued "$1"; then
        echo "has queued the job again"
    elif [[ $1 == *Reason=TimeLimit* ]]; then
        echo "ended the job at its time limit"
    elif [[ $1 =~ PreemptTime=([0-9T:-]+) && ! ${BASH_REMATCH[1]} < $began ]]; then
        echo "preempted the job"
    fi
}

# Requeues this job. When Slurm accepts that, it ends all of the job, possibly before scontrol can report success.
requeue() {
    for _ in 1 2 3; do
        timeout 60 scontrol requeue "$task" && return
        is_queued "$(call scontrol show job -o "$task")" && return
    done
    return 1
}

# The hosts that the job excludes, as Slurm writes them.
excluded() {
    [[ $shown =~ \ ExcNodeList=([^\ \(]+) ]] && echo "${BASH_REMATCH[1]}"
}

# Whether the partition has enough nodes besides this host and those that the job excludes, of the same kind: others may
# lack what the job requests, and those outside of its reservation are none. A job that requests hosts by name may have
# no other.
has_others() {
    [[ $shown != *' Reservation='* && ! $shown =~ \ ReqNodeList=[^\(] ]] || return
    local nodes own kind others left
    nodes=$(call sinfo --noheader --Node --format='%N|%c|%m|%f|%G' --partition="$SLURM_JOB_PARTITION" \
        --states=idle,mixed,allocated,completing | sort -u)
    own=$(printf '%s\n' "$nodes" | grep "^$SLURMD_NODENAME|")
    kind=${own#"$SLURMD_NODENAME"}
    left=$(excluded) && left=$(call scontrol show hostnames "$left")
    others=$(printf '%s\n' "$nodes" | grep -F "$kind" | grep -cvE "^(${left//$'\n'/|}|$SLURMD_NODENAME)\|")
    [[ $kind ]] && ((others >= SLURM_JOB_NUM_NODES))
}

# Whether Slurm took the nodes from a start, by why it ended it: that is no fault of the job.
is_taken() {
    [[ $1 == "preempted the job" || $1 == "has queued the job again" ]]
}

# How many such starts there were from this restart count on.
taken_since() {
    local line count=0
    while read -r line; do
        [[ $line =~ \"restart_count\":\ ([0-9]+).*\"by_slurm\":\ \"([^\"]*)\" ]] && ((BASH_REMATCH[1] >= $1)) &&
            is_taken "${BASH_REMATCH[2]}" && ((++count))
    done < <(cat "$run/events/script-$SLURM_JOB_ID-"*.jsonl 2>/dev/null)
    echo $((count < preemptions ? count : preemptions))
}

# Whether there is a run: an element of a sweep makes its own when it begins.
has_run() {
    [[ -f $run/run.json ]]
}

# Whether a start of the job failed on this host before, not ended by Slurm. Without a run there is no record of
# where starts failed, so any earlier one counts.
has_failed_here() {
    if has_run; then grep -sq '"by_slurm": ""' "$said"; else ((${SLURM_RESTART_COUNT:-0} > 0)); fi
}

# Prints what the job, or the next of its chain, is to exclude from now on.
with_this_host() {
    local before
    before=$(excluded)
    echo "${before:+$before,}$SLURMD_NODENAME"
}

# The next job of the chain: the one that was noted for the run after this one. Empty if there is none.
next_job() {
    local ids next
    [[ $(<"$run/run.json") =~ \"slurm_job_ids\":\ \[([^]]*)\] ]] || return
    ids=" ${BASH_REMATCH[1]//[^0-9_]/ } "
    [[ $ids == *" $task "* ]] && read -r next _ <<<"${ids#*" $task "}" && echo "$next"
}

task=$SLURM_JOB_ID queued=false leave='' shown='' ends='' next='' wait=''
[[ -z ${SLURM_ARRAY_JOB_ID:-} ]] || task=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID # not its sibling tasks
said=$run/events/script-$SLURM_JOB_ID-${SLURMD_NODENAME:-}.jsonl

# The last start of this job in which an attempt began; its starts are counted from 0.
begun=-1
record=$(printf '%s\n' "$run"/attempts/*/attempt.json | sort -V | tail -n 1)
[[ -f $record ]] && record=$(<"$record")
[[ $record == *"\"slurm_job_id\": \"$task\""* && $record =~ \"restart_count\":\ ([0-9]+) ]] &&
    begun=${BASH_REMATCH[1]}

if [[ $again == again ]]; then
    # A requeue would bring back a job that its owner has cancelled meanwhile, so Slurm is asked first, for a few
    # minutes if its controller is away.
    for slept in {0..12}; do
        shown=$(call scontrol show job -o "$task")
        answered=$? ends=$(why_it_ends "$shown")
        case $answered,$slept in
            0,0) [[ $shown == *JobState=RUNNING* && ! $ends ]] || break ;; # there is no time left
            0,* | 127,*) break ;; # Slurm has answered, or there is no scontrol here
        esac
        sleep 10 &
        wait $! # interrupted by a signal
    done
    failed=$((${SLURM_RESTART_COUNT:-0} - begun - $(taken_since $((begun + 1)))))
    is_taken "$ends" && ((--failed))
    if is_queued "$shown"; then
        queued=true
    elif ((failed <= tries)) && [[ $ends || $shown == *JobState=RUNNING* ]]; then
        # Exclude this host if a start failed here before, not ended by Slurm. This is determined before the requeue,
        # after which there may be no time to ask Slurm.
        [[ ! $ends ]] && has_failed_here && has_others && leave=$(with_this_host)
        requeue && queued=true
    fi
    reason+=${ends:+ (Slurm $ends)}
fi

# Sites may requeue jobs after certain exit statuses (RequeueExit), which would never end.
prevent_restart() {
    $queued && return
    shown=$(call scontrol show job -o "$task")
    is_queued "$shown" || [[ $shown != *\ Requeue=1\ * ]] || call scontrol update JobId="$task" Requeue=0
}

if has_run && ! $queued && [[ ! $ends ]]; then
    next=$(next_job)
    [[ -z $next || -n $shown ]] || shown=$(call scontrol show job -o "$task")
    if [[ -n $next && $shown == *JobState=RUNNING* ]]; then
        if has_others; then leave=$(with_this_host); else wait=$pause; fi
    fi
fi
words=${reason//\\/\\\\}
words=${words//\"/\\\"}
# Without a subshell, which Slurm's SIGTERM would end: it comes as soon as a requeue is accepted
has_run &&
    printf '{"time": %(%s)T, "event": "start-failed", "attempt": null, "slurm_job_id": "%s", %s, %s}\n' -1 "$task" \
        "\"restart_count\": ${SLURM_RESTART_COUNT:-0}, \"by_slurm\": \"$ends\"" \
        "\"host\": \"${SLURMD_NODENAME:-}\", \"queued\": $queued, \"reason\": \"${words//[[:cntrl:]]/ }\"" \
        >>"$said"

prevent_restart

# Hosts can be excluded only from a job in the queue.
$queued && next=$task
[[ -n $next && -n $leave ]] && call scontrol update JobId="$next" ExcNodeList="$leave" &&
    echo "job.sbatch: starts failed on $SLURMD_NODENAME: excluded from now on (Slurm job $next)" >&2
[[ -n $wait ]] && call scontrol update JobId="$next" StartTime="now+$wait" &&
    echo "job.sbatch: this start failed, and the partition has too few other nodes: Slurm job $next starts in $wait" >&2
