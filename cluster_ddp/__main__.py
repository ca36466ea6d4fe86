"""``python -m cluster_ddp``: the same as the command ``cluster-ddp``."""

from cluster_ddp.cli.app import main

if __name__ == "__main__":
    main()
