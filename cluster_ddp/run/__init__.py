"""A run on shared storage: its directory, record, events, attempts, stop requests and state.

Nothing here imports torch: login nodes, the node program and the ranks all use it.

directory, runs, storage, reading, lock    the run's folder, and how its files are read and written
record, via, jobs, code                    which run it is, how it is started, its Slurm jobs, the copy of its code
start_failed.sh, setup_guard.sh            what its batch script calls
attempt, attempt_record, liveness          its attempts, at most one of them alive
events, digest, condense, node_log         what happened
phase, node_outcome, stopfile, run_state   what ranks do, how nodes end, why training stops, where a run stands
history, lineage, metrics, unfinished      what can be computed from all of that
causes, ending, decision                   what failed in an attempt, how it ended, and what follows
status/                                    where the run stands, and why, for people
sweep, errors                              many runs as one; the errors of a run
"""
