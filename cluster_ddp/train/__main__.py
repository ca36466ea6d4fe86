"""``python -m cluster_ddp.train RUN_DIR``: one rank of a run. The node program starts it through torchrun.

It ends with status 0 when training was completed or stopped, and with 1 when it failed; what happened is in the run's
events.
"""

from __future__ import annotations

import contextlib
import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from cluster_ddp.leave import leave
from cluster_ddp.run.directory import RunDirectory


def main(arguments: list[str]) -> None:
    """Run a rank; `arguments` is the run directory, else $CLUSTER_DDP_RUN names it."""
    place = arguments[0] if arguments else os.environ.get("CLUSTER_DDP_RUN")
    if place is None:
        print("usage: python -m cluster_ddp.train RUN_DIR", file=sys.stderr)
        leave(2)
    with _no_garbage():
        import torch._dynamo  # noqa: F401 - else the optimizer brings it in, a second of imports, later

        from cluster_ddp.train.program import run_rank
    end = run_rank(RunDirectory(Path(place).absolute()), int(os.environ.get("CLUSTER_DDP_ATTEMPT", "0")))
    leave(end.status, at_once=end.at_once)


@contextlib.contextmanager
def _no_garbage() -> Iterator[None]:
    """Keep Python's garbage collector away from what is made in here, which stays to the end.

    Importing torch makes half a million objects. The collector would look at them again and again, to find nothing: a
    fifth of the time that the imports take. The little that it would find costs 6 MiB.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


if __name__ == "__main__":
    main(sys.argv[1:])
