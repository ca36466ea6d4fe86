"""The entry point of ``cluster-ddp`` and of ``python -m cluster_ddp``."""

import gc
from typing import NoReturn

from cluster_ddp.process import fast_exit

_RARELY = 100_000


def main() -> NoReturn:
    """Run a command. Objects made by its imports live to the end, so collecting garbage among them only costs time."""
    gc.set_threshold(_RARELY, *gc.get_threshold()[1:])
    try:
        from cluster_ddp.cli import app

        status = app.main()
    except KeyboardInterrupt:  # while it was importing
        status = 130
    fast_exit(status)


if __name__ == "__main__":
    main()
