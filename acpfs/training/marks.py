"""A rank's own word on where it is: updates done, updates whose gradients are complete, and what it
does now.

The main thread moves the marks; any thread reads them: a mark is one immutable record, replaced as
a whole, so there is no lock. A hold keeps further updates from beginning. The main thread writes
`updating` and then looks for the hold; who holds sets it and then looks at the phase. One of the
two sees the other, so after `hold` a phase other than `updating` stays what it is.
"""

from __future__ import annotations

from dataclasses import dataclass

from acpfs.training.interrupt import Interrupted
from acpfs.training.messages import Phase


@dataclass(frozen=True, slots=True)
class Mark:
    """Where a rank is."""

    done: int
    """Updates completed."""
    ready: int
    """Updates whose gradients are complete here: `done`, or one more."""
    phase: Phase


class Marks:
    """The marks of one rank."""

    def __init__(self, begun: int = 0) -> None:
        """`begun`: updates that were completed before."""
        self._now = Mark(begun, begun, Phase.COMPUTING)
        self._held = False

    @property
    def now(self) -> Mark:
        return self._now

    @property
    def updating(self) -> bool:
        """Whether an update may be half done."""
        return self._now.phase is Phase.UPDATING

    # -- main thread

    def ready(self) -> int:
        """Gradients of the next update are complete; its number.

        Said again where its gate had failed.
        """
        now = self._now
        assert now.phase is not Phase.UPDATING, "an update begins inside another"
        self._now = Mark(now.done, now.done + 1, Phase.READY)
        return now.done + 1

    def begin(self, *, settling: bool = False) -> None:
        """The update begins. `settling`: on SETTLE's word, in spite of the hold.

        Raises:
            Interrupted: there is to be none any more; the mark stays at `ready`.
        """
        now = self._now
        if self._held and not settling:
            # before anything is written: a thread that stands in for this one may have moved the
            # mark
            raise Interrupted(f"update {now.ready} does not begin")
        assert now.phase is Phase.READY, "an update begins without its gradients"
        try:
            self._now = Mark(now.done, now.ready, Phase.UPDATING)
            if self._held and not settling:
                raise Interrupted(f"update {now.ready} does not begin")
        except BaseException:  # also one that another thread sent before it could see the new mark
            self._now = now
            raise

    def end(self) -> None:
        """The local part of the update is complete."""
        now = self._now
        assert now.phase is Phase.UPDATING, "an update ends that did not begin"
        self._now = Mark(now.ready, now.ready, Phase.COMPUTING)

    def give_up(self) -> None:
        """An update that was torn will not go on: whoever reads the marks has noted it."""
        self._now = Mark(self._now.done, self._now.done, Phase.COMPUTING)

    def stand_ready(self, step: int) -> None:
        """Gradients of update `step` are here, of the process before this one."""
        self._now = Mark(step - 1, step, Phase.READY)

    def resume(self, step: int) -> None:
        """The state is that of `step`, and the loop goes on there; updates may begin again."""
        self._now = Mark(step, step, Phase.COMPUTING)
        self._held = False

    # -- any thread

    def hold(self) -> None:
        """No update begins from here on; one that is under way ends."""
        self._held = True

    @property
    def held(self) -> bool:
        return self._held
