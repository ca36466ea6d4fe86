"""``python -m cluster_ddp.train RUN_DIR``: one rank of a run. The node program starts it through torchrun.

It ends with status 0 when training was completed or stopped, and with 1 when it failed; what happened is in the run's
events.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from cluster_ddp.leave import leave
from cluster_ddp.run.directory import RunDirectory
from cluster_ddp.startup import no_garbage


def main(arguments: list[str]) -> None:
    """Run a rank; `arguments` is the run directory, else $CLUSTER_DDP_RUN names it."""
    place = arguments[0] if arguments else os.environ.get("CLUSTER_DDP_RUN")
    if place is None:
        print("usage: python -m cluster_ddp.train RUN_DIR", file=sys.stderr)
        leave(2)
    with no_garbage():
        import torch._dynamo  # noqa: F401 - else the optimizer brings it in, a second of imports, later

        from cluster_ddp.train.program import run_rank
    end = run_rank(RunDirectory(Path(place).absolute()), int(os.environ.get("CLUSTER_DDP_ATTEMPT", "0")))
    leave(end.status, at_once=end.at_once)


if __name__ == "__main__":
    main(sys.argv[1:])
