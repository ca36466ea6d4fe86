"""Names what training changes and no checkpoint contains, before a resume could show it."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable

from cluster_ddp.train.data.made_from import MadeFrom
from cluster_ddp.train.errors import TaskError
from cluster_ddp.train.ranks.communicating import IN_CHECKS, Alone
from cluster_ddp.train.state.training import State
from cluster_ddp.words import listed

MAX_NAMES = 5  # names listed in a warning
SHORT_SECONDS = 0.1  # that looking may always take before a save
_LONG_SECONDS = 1.0  # that it may take at most then: there may be little time left for the save
_SHARE = 0.001  # of the time that may be spent looking
_SHARE_AT_SAVES = 0.01  # the same before saves, where a look is worth more


class UnsavedChanges:
    """Looks for such changes and warns of them, on rank 0.

    Parameters
    ----------
    warn
        Prints a warning on rank 0.
    is_saved
        Whether there are checkpoints at all.
    """

    def __init__(self, rank: int, warn: Callable[[str], None], *, is_saved: bool) -> None:
        self._rank, self._warn, self._is_saved = rank, warn, is_saved
        self.made_from = MadeFrom()  # what samples are made from
        self._has_begun = False
        self._warned: set[str] = set()
        # The last look: when it was, and how long it took; at first there is nothing to compare with.
        self._looked_at, self._took = time.monotonic(), math.inf
        self._has_looked_after_evaluation = self._has_looked_before_save = False

    def begin(self, state: State) -> None:
        """Look for the first time, once the optimizer has created its state and used it."""
        self._has_begun = True
        self.look(state)

    def look_now_and_then(self, state: State) -> None:
        """Look between steps, in at most a thousandth of the training time."""
        if self._has_time(_SHARE) and not state.communicates:  # the ranks' clocks differ
            self.look(state)

    def look_after_evaluation(self, state: State) -> None:
        """Look after the first evaluation, and later now and then: the next step may use up what one leaves."""
        if self._has_begun and self._has_looked_after_evaluation:
            self.look_now_and_then(state)
        elif self._has_begun:
            self._has_looked_after_evaluation = True
            self.look(state)

    def look_before_save(self, state: State) -> None:
        """Look before almost every save, since the next step may use up what the last step of an epoch leaves.

        If training is killed right after the save, a resume repeats no step whose loss could tell.
        """
        is_first = not self._has_looked_before_save
        if self._has_begun and (is_first or state.communicates or self._is_quick()):
            self._has_looked_before_save = True
            self.look(state)

    def look(self, state: State) -> None:
        """Warn of changes in model, task and optimizer that no checkpoint contains and that a step may depend on."""
        if not self._is_saved or (self._rank != 0 and not state.communicates):
            return
        begun = time.thread_time()
        with Alone(IN_CHECKS) if not state.communicates else contextlib.nullcontext() as alone:
            try:
                names = state.unsaved()
            except TaskError:
                if alone is None or not alone.has_tried:
                    raise
        if alone is not None and alone.has_tried:  # all ranks see in the next save that state_dict() communicates now
            self._took = math.inf
            return
        if self._has_begun:
            self.made_from.end()
        self._warn_of_samples()
        self._looked_at, self._took = time.monotonic(), time.thread_time() - begun
        others = {name: state.other_names(name) for name in names if name not in self._warned}
        names = [name for name, more in others.items() if not self.made_from.has_told(name, more)]
        if names := [name for name in names if not self.made_from.is_only_of_samples(name, others[name])]:
            self._warned.update(names)
            self._warn(
                f"training changes {listed(names, MAX_NAMES)}, which no checkpoint contains: a resume is exact only if "
                "no step depends on what an earlier one left there. Nothing has to be done if each step sets it before "
                "reading it, if it is made again when it is missing, or if it is only printed or logged: "
                "`cluster-ddp rehearse` shows whether a resume is exact. Otherwise make it a buffer of the model, or "
                "include it in the state_dict() of the task, of the optimizer, or of something else that is passed in"
            )

    def note_restored(self) -> None:
        """Call after a restore; warns if that has changed what samples are made from although a resume must not."""
        if self._rank == 0:
            self.made_from.restored()
            self._warn_of_samples()

    def _is_quick(self) -> bool:
        return self._took < SHORT_SECONDS or (self._took < _LONG_SECONDS and self._has_time(_SHARE_AT_SAVES))

    def _has_time(self, share: float) -> bool:
        return time.monotonic() - self._looked_at >= self._took / share

    def _warn_of_samples(self) -> None:
        if self._rank == 0 and (message := self.made_from.changed()) is not None:
            self._warn(message)
