"""Checkpoints: written in the background by all ranks, verified when read, never incomplete.

format, verify, folders, export      what lies on disk; torch-free, so that login nodes can list and export
retention, cleaning                  which checkpoints are removed, by a run that trains and by a person
plan, staging, coordinator, writer   a save, from live tensors to the folder under its final name
replicas                             whether all ranks hold the same
memory                               a checkpoint in memory, by which a training tries early whether it can be restored
restore                              from the newest intact checkpoint back to live tensors
checkpointer                         what a training holds: saving and restoring in one object
errors                               what can be wrong with a checkpoint
"""
