"""``python -m cluster_ddp.train RUN_DIR``: one rank of a run. The node program starts it through torchrun.

It ends with status 0 when training was completed or stopped, and with 1 when it failed; what happened is in the run's
events.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from cluster_ddp.launch.variables import ATTEMPT_VARIABLE, RUN_VARIABLE
from cluster_ddp.process import fast_exit, gc_paused
from cluster_ddp.run.directory import RunDirectory


def main(arguments: list[str]) -> None:
    """Run a rank; `arguments` is the run directory, else $CLUSTER_DDP_RUN names it."""
    place = arguments[0] if arguments else os.environ.get(RUN_VARIABLE)
    if place is None:
        print("usage: python -m cluster_ddp.train RUN_DIR", file=sys.stderr)
        fast_exit(2)
    with gc_paused():
        import torch._dynamo  # noqa: F401 - else the optimizer brings it in, a second of imports, later

        from cluster_ddp.train.trainer import run_rank
    end = run_rank(RunDirectory(Path(place).absolute()), int(os.environ.get(ATTEMPT_VARIABLE, "0")))
    fast_exit(end.status, at_once=end.at_once)


if __name__ == "__main__":
    main(sys.argv[1:])
