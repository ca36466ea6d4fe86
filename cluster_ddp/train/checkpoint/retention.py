"""Which checkpoints are kept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def surplus(
    steps: Sequence[int],
    metrics: Mapping[int, Mapping[str, float]],
    *,
    newest_proven: int,
    keep_last: int,
    keep_every: int | None,
    best: tuple[str, str] | None,
) -> list[int]:
    """The steps whose checkpoints may be removed, oldest first.

    Parameters
    ----------
    steps
        All complete checkpoints.
    metrics
        By step, the metrics recorded with it; steps that recorded none may be absent.
    newest_proven
        The step of the newest checkpoint that is known to be sound; it always stays.
    keep_last
        So many of the newest stay.
    keep_every
        Steps that are a multiple of it stay.
    best
        The name of a metric and ``min`` or ``max``: the best checkpoint by it stays, the newer of two equal ones.
    """
    kept = {newest_proven, *sorted(steps)[-max(keep_last, 1) :]}
    if keep_every:
        kept |= {step for step in steps if step % keep_every == 0}
    if best is not None:
        name, mode = best
        sign = 1.0 if mode == "max" else -1.0
        rated = [(sign * metrics[step][name], step) for step in steps if name in metrics.get(step, {})]
        if rated:
            kept.add(max(rated)[1])
    return [step for step in sorted(steps) if step not in kept]
