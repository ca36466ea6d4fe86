"""Checkpoints: written in the background by all ranks, verified when read, never incomplete.

format, verify, folders, export      what is on disk; torch-free, so that login nodes can list and export
compare                              whether two checkpoints have the same bits; torch-free too
retention, cleaning                  which checkpoints are removed, by a run in training and by `cluster-ddp clean`
plan, staging, coordinator, writer   a save, from live tensors to the folder under its final name
replicas                             whether all ranks hold the same tensors
memory                               a checkpoint in memory, to check early that the state can be restored
restore                              from the newest intact checkpoint back to live tensors
checkpointer                         the object a training uses for saving and restoring
errors                               what can be wrong with a checkpoint
"""
