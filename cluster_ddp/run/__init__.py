"""A run on shared storage: its directory, record, events, attempts, stop requests and state.

Nothing here imports torch: login nodes, the node program and the ranks all use it.

directory, runs, storage, reading, lock           the run's folder, and how its files are read and written
record, via, jobs, orphaned_jobs                  which run it is, how it is started, its Slurm jobs
code, start_failed.sh                             the copy of its code; reporting a start that failed
attempt, attempt_record, liveness                 its attempts, at most one of them alive
events, digest, condense, node_log                what happened
phase, node_outcome, stopfile                     words for what ranks do, how nodes end, why training stops
history, lineage, metrics, goodput                what can be computed from all of that
causes, ending, decision, keeper_at_work          what failed in an attempt, how it ended, and what follows
run_state, facts, state, starting, final_state,   where the run stands, and why, for people
unfinished, remarks, silence, outlook, status, state_cache
sweep, sweep_status                               many runs as one
errors                                            the errors of a run
"""
