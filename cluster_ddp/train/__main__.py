"""``python -m cluster_ddp.train RUN_DIR``: one rank of a run. The node program starts it through torchrun.

It ends with status 0 when training was completed or stopped, and with 1 when it failed; what happened is in the run's
events.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from cluster_ddp.leave import leave
from cluster_ddp.run.directory import RunDirectory
from cluster_ddp.train import garbage

if TYPE_CHECKING:
    from cluster_ddp.train.program import End


def main(arguments: list[str]) -> End:
    """Run a rank; `arguments` is the run directory, else $CLUSTER_DDP_RUN names it."""
    garbage.put_off()
    from cluster_ddp.train.program import End, run_rank  # this takes seconds: it brings torch

    place = arguments[0] if arguments else os.environ.get("CLUSTER_DDP_RUN")
    if place is None:
        print("usage: python -m cluster_ddp.train RUN_DIR", file=sys.stderr)
        return End(status=2, at_once=True)
    return run_rank(RunDirectory(Path(place).absolute()), int(os.environ.get("CLUSTER_DDP_ATTEMPT", "0")))


if __name__ == "__main__":
    end = main(sys.argv[1:])
    leave(end.status, at_once=end.at_once)
