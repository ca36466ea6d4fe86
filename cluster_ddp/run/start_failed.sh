#!/bin/bash
# bash start-failed.sh RUN_DIRECTORY again|once REASON
#
# What becomes of a start of a job that has failed before its keeper ran, maybe on a host where no Python starts, which is
# why this is bash: an event of the run says so. With "again" Slurm is asked to queue the job again, since nobody else
# can and another host may do better: this many times in a row.
tries=3

run=$1 again=$2 reason=$3

trap : USR1 USR2 HUP TERM # Slurm's signals must not end it half-way
unset SLURM_TIME_FORMAT                # moments are compared

# A call of Slurm's commands; once more where a signal has ended it, since Slurm sends its SIGTERM to all of a job.
call() {
    local status
    for _ in 1 2; do
        timeout 60 "$@"
        status=$?
        ((status > 128)) || break
    done
    return "$status"
}

# Whether a job, as Slurm shows it, is queued again already: by Slurm, or by a call that did not live to say so.
is_queued() {
    [[ $1 =~ Restarts=([0-9]+) ]] && ((BASH_REMATCH[1] > ${SLURM_RESTART_COUNT:-0}))
}

# Why Slurm ends this start, as it shows the job; nothing where it does not, or for good. A preemption may be that of an
# earlier start.
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

# Has Slurm queue this job again. When it accepts, it ends all of the job, and scontrol maybe before that can say so.
requeue() {
    for _ in 1 2 3; do
        timeout 60 scontrol requeue "$task" && return
        is_queued "$(call scontrol show job -o "$task")" && return
    done
    return 1
}

# Whether the partition has enough nodes besides this host.
has_others() {
    local others
    others=$(call sinfo --noheader --Node --format=%N --partition="$SLURM_JOB_PARTITION" \
        --states=idle,mixed,allocated,completing | grep -v ' ' | sort -u | grep -cvxF "$SLURMD_NODENAME")
    ((others >= SLURM_JOB_NUM_NODES))
}

task=$SLURM_JOB_ID queued=false leave='' shown='' ends=''
[[ -z ${SLURM_ARRAY_JOB_ID:-} ]] || task=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID # not its siblings
by_slurm=' (Slurm '
said=$run/events/script-$SLURM_JOB_ID-${SLURMD_NODENAME:-}.jsonl

# Which start of this job was the last in which an attempt has begun.
begun=0
record=$(printf '%s\n' "$run"/attempts/*/attempt.json | sort -V | tail -n 1)
[[ -f $record ]] && record=$(<"$record")
[[ $record == *"\"slurm_job_id\": \"$task\""* && $record =~ \"restart_count\":\ ([0-9]+) ]] && begun=${BASH_REMATCH[1]}

if [[ $again == again ]]; then
    # To queue it again would bring back a job which its owner has cancelled meanwhile, so Slurm is asked first, for a
    # few minutes if its controller is away.
    for slept in {0..12}; do
        shown=$(call scontrol show job -o "$task")
        answered=$? ends=$(why_it_ends "$shown")
        case $answered,$slept in
            0,0) [[ $shown == *JobState=RUNNING* && ! $ends ]] || break ;; # no time is left
            0,* | 127,*) break ;; # it has answered, or there is no scontrol here
        esac
        sleep 10 &
        wait $! # which a signal ends
    done
    if is_queued "$shown"; then
        queued=true
    elif ((${SLURM_RESTART_COUNT:-0} - begun <= tries)) && [[ $ends || $shown == *JobState=RUNNING* ]]; then
        # It has failed here before by itself, and is kept from no host so far. Once it is queued, there may be no time
        # to ask.
        [[ ! $ends && $shown == *"ExcNodeList=(null)"* ]] && grep -sqv "$by_slurm" "$said" && has_others &&
            leave=$SLURMD_NODENAME
        requeue && queued=true
    fi
    reason+=${ends:+$by_slurm$ends)}
fi

[[ -f $run/run.json ]] || exit
words=${reason//\\/\\\\}
words=${words//\"/\\\"}
printf '{"time": %s, "event": "start-failed", "attempt": null, "slurm_job_id": "%s", "restart_count": %s, %s}\n' \
    "$(printf '%(%s)T' -1)" "$task" "${SLURM_RESTART_COUNT:-0}" \
    "\"host\": \"${SLURMD_NODENAME:-}\", \"queued\": $queued, \"reason\": \"${words//[[:cntrl:]]/ }\"" \
    >>"$said"

# Only a job that waits in the queue is kept from a host.
$queued && [[ -n $leave ]] && call scontrol update JobId="$task" ExcNodeList="$leave" &&
    echo "job.sbatch: $leave failed more than once: excluded from now on" >&2
