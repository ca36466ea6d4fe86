"""A run on shared storage: its directory, record, events, attempts, stop requests and state.

Nothing here imports torch: login nodes, the node program and the ranks all use it.

directory, runs, storage, reading, lock           the folder of a run, and how its files are read and written
record, via, jobs, unnoted                        which run it is, how it is started, its Slurm jobs
code, start_failed.sh                             what it was made with
attempt, attempt_record, liveness                 its attempts, at most one of them alive
events, digest, condense, node_log                what happened
phase, node_outcome, stopfile                     the words for what ranks do, how nodes end, why training stops
history, lineage, metrics, goodput                what follows from all of that together
ending, decision, undecided                       how an attempt ended, and what follows
run_state, state, unfinished, remarks, status,    where the run stands, and why, for people
remembered
sweep, sweep_status                               many runs as one
errors                                            what can be wrong with a run
"""
