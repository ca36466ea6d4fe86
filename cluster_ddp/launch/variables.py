"""The environment variables with which a launcher, the node program, its agent and its ranks identify the run."""

RUN_VARIABLE = "CLUSTER_DDP_RUN"  # the run directory
ATTEMPT_VARIABLE = "CLUSTER_DDP_ATTEMPT"  # the attempt's number
NODE_VARIABLE = "CLUSTER_DDP_NODE"  # the node's rank
HEARTBEAT_VARIABLE = "CLUSTER_DDP_HEARTBEAT"  # the node's heartbeat file; also marks every process below the agent
ADDRESS_VARIABLE = "CLUSTER_DDP_LOCAL_ADDR"  # the address by which the other nodes reach this one, if known
TERMINAL_VARIABLE = "CLUSTER_DDP_TERMINAL"  # the terminal that rank 0 may draw a progress bar on
STOP_AFTER_VARIABLE = "CLUSTER_DDP_STOP_AFTER"  # the step after which all ranks stop, as if they had been asked to
SAFE_PATH_VARIABLE = "PYTHONSAFEPATH"  # set: nothing is imported from the current folder (Python 3.11)
OPEN_FILES_VARIABLE = "CLUSTER_DDP_OPEN_FILES"  # how many files the keeper may open, a limit that Slurm propagates
