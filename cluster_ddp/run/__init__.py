"""A run on shared storage: its directory, record, events, attempts, stop requests and state.

Nothing here imports torch: login nodes, the node program and the ranks all use it.

directory, runs, storage, reading, lock    the run's folder, and how its files are read and written
record, via, jobs, code                    which run it is, how it is started, its Slurm jobs, the copy of its code
setup_guard.sh                             what its batch script calls around the lines of launch.setup
attempt, attempt_record, liveness          its attempts, at most one of them alive
events, digest, condense, node_log         what happened
phase, node_outcome, stopfile, run_state   what ranks do, how nodes end, why training stops, where a run stands
history, lineage, metrics, unfinished      what can be computed from all of that
causes, ending                             what failed in an attempt, and how it ended
requeue/                                   what follows: whether Slurm is to requeue the job
status/                                    where the run stands, and why, for people
sweep, errors                              many runs as one; the errors of a run
"""
