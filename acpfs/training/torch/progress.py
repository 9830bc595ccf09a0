"""What a rank's device has done of what was launched on it: gradients that are complete, updates
that have ended, and whether it works still.

An accelerator runs behind the host. A collective whose peer is dead spins there, its abort leaves
anything in the gradients, and an update that is queued behind it runs with that. So before an
update the host waits for an event behind the last gradient, and then looks at the hold. Whoever
aborts holds before: an event that has come, with no hold, was brought by the collective.

Where a device does all at once nothing of this waits, and nothing is asked. Main thread, or who
stands in for it; `has_updated` belongs to any thread.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from acpfs.errors import AcpfsError
from acpfs.logger import get_logger
from acpfs.training.guard import OnPurposeError
from acpfs.training.interrupt import Interrupted
from acpfs.training.marks import Marks
from acpfs.training.torch.device import Device, Event, Processor

log = get_logger(__name__)
SOON_S = 50e-6
LATER_S = 500e-6
SOON_LOOKS = 20
"""An event is asked for so often, the first times, and then more seldom: a step takes its time."""


class SuspectError(OnPurposeError):
    """A group says that it has failed: what it left in the gradients may be anything."""


class DeviceFailedError(OnPurposeError):
    """The device says that nothing works on it any more in this process."""


class LostError(AcpfsError):
    """What this rank holds cannot be read any more."""


class Progress:
    """Of one rank."""

    def __init__(
        self,
        device: Device,
        marks: Marks,
        has_failed: Callable[[], bool] = lambda: False,
        update_s: float = 30.0,
    ) -> None:
        """`has_failed`: whether a process group says that its collectives have.

        `update_s`: an update that takes longer on the device never ends.
        """
        self.device = device
        self._marks = marks
        self._has_failed = has_failed
        self._update_s = update_s
        self._updated: Event | None = None
        """Behind the update that was launched last."""

    # -- while the loop runs

    def gradients(self, step: int) -> None:
        """Returns when those of update `step` are complete.

        Raises:
            Interrupted: there is a hold: they may be what an abort has left.
            SuspectError: a group has failed by itself.
            DeviceFailedError: nothing works on the device any more.
        """
        if not self.device.is_behind:
            return
        self._wait(self._recorded(), f"gradients of update {step} are not known to be complete")
        if self._has_failed():
            raise SuspectError(f"a process group has failed before update {step}")

    def read(self) -> None:
        """Returns when the host may look at what was launched so far.

        Raises:
            Interrupted: there is a hold: a collective may never end, or has left anything.
            DeviceFailedError: nothing works on the device any more.
        """
        if self.device.is_behind:
            self._wait(self._recorded(), "what was launched may be anything")

    def _wait(self, event: Event, why: str) -> None:
        looks = 0
        while not self._has_passed(event):
            if self._marks.held:
                raise Interrupted(why)
            looks += 1
            time.sleep(SOON_S if looks < SOON_LOOKS else LATER_S)
        # last: the abort that may have brought the event comes behind the hold
        if self._marks.held:
            raise Interrupted(why)

    def _recorded(self) -> Event:
        try:
            return self.device.record()
        except RuntimeError as error:
            raise DeviceFailedError(str(error)) from error

    def _has_passed(self, event: Event) -> bool:
        try:
            return event.query()
        except RuntimeError as error:
            raise DeviceFailedError(str(error)) from error

    def launched(self) -> None:
        """The local update is; its mark says next that it is done.

        Raises:
            DeviceFailedError: nothing works on the device any more.
        """
        if self.device.is_behind:
            self._updated = self._recorded()

    def wait_updated(self) -> None:
        """Returns when the update that was launched last has ended: it waits for nobody else.

        Raises:
            DeviceFailedError: nothing works on the device any more, or it does not end.
        """
        updated = self._updated
        until = time.monotonic() + self._update_s
        while updated is not None and not self._has_passed(updated):
            if time.monotonic() > until:
                raise DeviceFailedError(
                    f"the device has not done an update in {self._update_s:g} s"
                )
            time.sleep(LATER_S)

    # -- at a fault

    def has_updated(self) -> bool:
        """Whether the update that was launched last has ended; from any thread.

        Raises:
            RuntimeError: nothing works on the device any more.
        """
        updated = self._updated
        return updated is None or updated.query()

    def settle(self, probed: Callable[[], object], probe_s: float) -> None:
        """All that was launched has ended, and tensors can be read.

        `probed`: one of this rank's tensors.

        Raises:
            LostError: they cannot.
        """
        if not self.device.is_behind:
            return
        try:
            self.wait_updated()
        except DeviceFailedError as error:
            raise LostError(str(error)) from error
        self._probe(probed, probe_s)

    def _probe(self, probed: Callable[[], object], probe_s: float) -> None:
        """In a thread of its own: where the device hangs, it never comes back."""
        failed: list[BaseException] = []
        answered = threading.Event()

        def probe() -> None:
            try:
                self.device.enter_thread()
                self.device.probe(probed())
            except BaseException as error:  # noqa: BLE001  # whatever it is, nothing can be read
                failed.append(error)
            answered.set()

        threading.Thread(target=probe, name="acpfs-probe", daemon=True).start()
        if not answered.wait(probe_s):
            raise LostError(f"the device did not answer for {probe_s:g} s after the abort")
        if failed:
            raise LostError(f"the device does not work any more: {failed[0]}") from failed[0]


def at_once(marks: Marks) -> Progress:
    """Of a rank whose device does all at once."""
    return Progress(Processor(), marks)
