"""``python -m cluster_ddp.train RUN_DIR``: runs one rank of a run. The node program starts it through torchrun.

The exit status is 0 if training completed or was stopped, and 1 if it failed; the run's events say what happened.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from cluster_ddp.launch.variables import ATTEMPT_VARIABLE, RUN_VARIABLE
from cluster_ddp.process import fast_exit, gc_paused
from cluster_ddp.run.directory import RunDirectory


def main(arguments: list[str]) -> None:
    """Run a rank; `arguments` holds the run directory, by default $CLUSTER_DDP_RUN."""
    place = arguments[0] if arguments else os.environ.get(RUN_VARIABLE)
    if place is None:
        print("usage: python -m cluster_ddp.train RUN_DIR", file=sys.stderr)
        fast_exit(2)
    with gc_paused(freeze=True):
        from cluster_ddp.train.ranks.deferred_dynamo import defer_dynamo

        defer_dynamo()
        from cluster_ddp.train.task_rank import run_rank
    end = run_rank(RunDirectory(Path(place).absolute()), int(os.environ.get(ATTEMPT_VARIABLE, "0")))
    fast_exit(end.status, at_once=end.at_once)


if __name__ == "__main__":
    main(sys.argv[1:])
