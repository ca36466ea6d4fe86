"""How a node has ended: the `outcome` of the event `node-finished`."""

DONE = "done"
STOPPED = "stopped"
FAILED = "failed"
KILLED = "killed"
HUNG = "hang"
SUPERSEDED = "superseded"  # a newer attempt of the run had begun
