"""How a node ended: the values of `outcome` in the event `node-finished`."""

DONE = "done"
STOPPED = "stopped"
FAILED = "failed"
KILLED = "killed"
HUNG = "hang"
SUPERSEDED = "superseded"  # a newer attempt of the run had begun
