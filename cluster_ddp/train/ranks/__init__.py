"""The ranks as processes that train together.

process, failure      a rank's signals, heartbeat and parent, and how it reports its error
distributed, spawn    the process group, and ranks started by a program instead of torchrun
meeting               one run directory for all ranks
stop                  how the ranks agree to stop after the same step
communicating         which methods of a task communicate, so that all ranks must call them
deferred_dynamo       an import that ranks put off until they need it
"""
