"""The counters in a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass

from cluster_ddp.train.errors import DataError


@dataclass
class Counts:
    """The counters that, besides the step, say where training is."""

    # skipped, bad_in_a_row: skipped updates, in total and in a row up to now
    skipped: int = 0
    bad_in_a_row: int = 0
    evaluated_step: int = -1  # the last step whose evaluation finished
    # stream_epoch, stream_offset: for iterable data sets: the epoch, and the number of its items used so far
    stream_epoch: int = 0
    stream_offset: int = 0
    stream_places: list[list[int]] | None = None  # the same for each rank, if each reads its own part
    # To recognise a training set that changed between attempts, by its first item if it is iterable, otherwise by some
    # of its samples; None: not known.
    data_length: int | None = None
    data_fingerprint: int | None = None
    samples_fingerprint: int | None = None
    threads: int | None = None  # with which torch computes on the CPU; None: not known

    def expect_length(self, length: int) -> None:
        """Raise a `DataError` unless the training set is as long as at the save; the first attempt records that."""
        if self.data_length not in (None, length):
            raise DataError(
                f"the training set has {length} items; it had {self.data_length} when the checkpoint was saved, and "
                "the order of the samples depends on it: restore the data set, or start a new run with this one"
            )
        self.data_length = length
