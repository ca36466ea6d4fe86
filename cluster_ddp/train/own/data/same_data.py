"""Checks that a custom loop has the data with which its checkpoint was saved."""

from __future__ import annotations

from collections.abc import Callable

from cluster_ddp.train.errors import TrainError
from cluster_ddp.train.ranks.distributed import broadcast_object


class SameData:
    """The fingerprints of the data, restored from a checkpoint and compared with what is there now.

    Parameters
    ----------
    warn
        Called with the message on rank 0.

    Attributes
    ----------
    first
        Of what is read first or held; None if only the length shows whether the data changed.
    rows
        Of what the data set holds for each of its samples, which may be a cache.
    """

    def __init__(self, warn: Callable[[str], None]) -> None:
        self._warn = warn
        self.first: int | None = None
        self.rows: int | None = None

    def expect(self, first: int | None, rows: int | None) -> None:
        """Check that these are the restored ones; all ranks call it.

        A change in `first` is refused; one in `rows` is reported.

        Raises
        ------
        TrainError
            `first` differs.
        """
        if self.first not in (None, first):
            raise TrainError(
                "the data do not begin with the same items as when the checkpoint was saved, or are split "
                "differently, so this resume could not be exact: restore the files, their order, the augmentation, "
                "and the seeds of shuffle and split (datasets: shuffle(seed=...); scikit-learn: "
                "train_test_split(random_state=...)), or start a new run"
            )
        rows = broadcast_object(rows)
        if self.rows not in (None, rows):
            self._warn(
                "the arrays, tables or lists in the data set are not what they were when the checkpoint was saved. If "
                "they are its samples and not a cache, this resume is not exact, and may train on held-out samples: "
                "restore the files and their order, and seed whatever splits, shuffles or generates them "
                "(train_test_split(random_state=...), torch.manual_seed() before it)"
            )
        self.first, self.rows = first, rows
