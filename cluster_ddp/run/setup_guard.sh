#!/bin/bash
# . setup-guard.sh
#
# Surrounds the lines of launch.setup in a batch script, which calls the functions below: a command that fails ends the
# start and says which, Slurm's variables survive, and a trap that those lines leave for EXIT runs at the end.
# shellcheck disable=SC2154  # cluster_ddp_signals and cluster_ddp_fail are the batch script's

# Removes the traps of this script, but not one that launch.setup has set for EXIT
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

# Ends the guard: sets aside whatever those lines have set, as the script looks at each status itself.
cluster_ddp_end_setup() {
    cluster_ddp_drop_traps
    set +eu +o pipefail +o posix
    cluster_ddp_restore
}

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
    cluster_ddp_fail once "launch.setup: nothing of the job would follow after: $BASH_COMMAND"' DEBUG
