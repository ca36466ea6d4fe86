"""``python -m cluster_ddp.launch.start_torchrun``: torchrun, with all its arguments, up in two thirds of the time.

The ranks start only after the agent has imported torch, so what is saved here is saved at each resume.
"""

from __future__ import annotations

from cluster_ddp.startup import no_garbage


def main() -> None:
    """Be torchrun."""
    with no_garbage():
        from torch.distributed import run
    run.main()


if __name__ == "__main__":
    main()
