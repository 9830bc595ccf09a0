"""A rank's marks as this interface gives them: an update begins, and ends with a step's number.

There is no "gradients are complete".

So nobody can finish an update for the caller, and S is the newest step for which those who have
done it are a cover. The begin may also come from MindSpore's runtime, in C and in a thread of its
own.
"""

from __future__ import annotations

from acpfs.compatible.c_library import EntryPoints
from acpfs.training.guard import OnPurposeError
from acpfs.training.marks import Mark, Marks
from acpfs.training.messages import Phase

STOPPED = "FORCE STOP: acpfs stops this job, and no update begins"
"""A text that scripts of the product look for."""


class UpdateStoppedError(OnPurposeError, RuntimeError):
    """There is to be no update any more."""


class UpdateMarks(Marks):
    """Written by whoever trains, read by any thread."""

    def __init__(self, entry_points: EntryPoints | None = None) -> None:
        """`entry_points`: where the runtime writes, if it is there."""
        super().__init__()
        self._entry_points = entry_points

    @property
    def now(self) -> Mark:
        mark = self._now
        words = self._entry_points
        if words is None:
            return mark
        done = max(mark.done, int(words.finished.value))
        if words.updating.value:
            return Mark(done, done + 1, Phase.UPDATING)
        return mark if mark.done == done else Mark(done, done, Phase.COMPUTING)

    @property
    def updating(self) -> bool:
        return self.now.phase is Phase.UPDATING

    def begin_update(self) -> None:
        """An update begins.

        Raises:
            UpdateStoppedError: there is to be none any more.
        """
        before = self._now
        self._now = Mark(
            before.done, before.done + 1, Phase.UPDATING
        )  # first the mark, then the look, as in `Marks`
        if self._held:
            self._now = before
            raise UpdateStoppedError(STOPPED)

    def end_update(self, step: int) -> None:
        """The update is complete; it was that of this step."""
        self._now = Mark(step, step, Phase.COMPUTING)
        if self._entry_points is not None:
            self._entry_points.updating.value = 0

    def resume(self, step: int) -> None:
        """Updates may begin again, behind this step."""
        words = self._entry_points
        if words is not None:
            words.updating.value = 0
            words.finished.value = 0
            words.held.value = 0
        super().resume(step)

    def hold(self) -> None:
        super().hold()
        if self._entry_points is not None:
            self._entry_points.held.value = 1
