"""`resilient`: runs a training function again after a fault, in the processes that are left, and in
those that took a dead one's place.

The main thread is in the function, or parked here; the member's thread gets it out at STOP, as for
a gasp. `Interrupted` may come at any point between that and the moment in which STOP is handled: it
means that a newer command is there, and everything here may be repeated. No torch at import.
"""

from __future__ import annotations

import functools
import os
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from acpfs.errors import ConfigError, RefusedError
from acpfs.logger import get_logger
from acpfs.training import last_words
from acpfs.training.coordinator.exiting import started_at
from acpfs.training.first_update import tell_launcher
from acpfs.training.interrupt import Interrupted, Interrupter, importing
from acpfs.training.marks import Marks
from acpfs.training.member import Collectives, Member, Order, OtherJobError
from acpfs.training.memory_left import end_soon
from acpfs.training.messages import (
    Done,
    ExitStatus,
    Finished,
    Gate,
    Hello,
    Leave,
    Resume,
    Running,
    Stop,
    Stopped,
    Trouble,
    TroubleKind,
)
from acpfs.training.muster import muster, place_from
from acpfs.training.park import CutOffError, told
from acpfs.training.policy import Policy
from acpfs.training.stacks import all_stacks

if TYPE_CHECKING:
    from acpfs.training.boot import Boot
    from acpfs.training.torch.device import Device
    from acpfs.training.torch.run import Run

log = get_logger(__name__)
Result = TypeVar("Result")


def resilient(
    directory: str | os.PathLike[str],
    *,
    on_fault: str = "replace",
    device: str = "auto",
    policy: Policy | None = None,
    **settings: object,
) -> Callable[[Callable[..., Result]], Callable[..., Result]]:
    """Decorator of a function `train(run, …)` that makes its process groups and its model itself.

    It runs in all ranks, and again in all of them whenever one has died or failed: `run.restore`
    then gives it the state of the last step that was done.

    Args:
        directory: where checkpoints are, in an acpfs mount; the job's own files are in `.acpfs-job`
            there.
        on_fault: `replace`; there is nothing else yet.
        device: what its errors mean: `cpu`, `cuda`, `npu`, or `auto`. Which of them were run on a
            device: docs/TRAINING.md.
        policy: all settings; without it, those of the environment.
        settings: single settings, by name.

    Raises:
        ConfigError: a setting that makes no sense.
    """
    if on_fault != "replace":
        raise ConfigError(
            f"on_fault = {on_fault!r}: replace; for a checkpoint instead use acpfs.training.protect"
        )

    def decorate(train: Callable[..., Result]) -> Callable[..., Result]:
        @functools.wraps(train)
        def run(*args: Any, **kwargs: Any) -> Result:
            found = policy or Policy.from_environment(None, **settings)
            value: Result = Voyage(
                Path(directory), found, lambda run: train(run, *args, **kwargs), device
            ).run()
            return value

        return run

    return decorate


class Voyage:
    """Of one process, from its first generation to its last."""

    def __init__(
        self, directory: Path, policy: Policy, train: Callable[[Run], Any], device: str = "auto"
    ) -> None:
        """`device`: where the rank's tensors are."""
        from acpfs.training.torch.device import device_named

        self._directory = directory
        self._policy = policy
        self._train = train
        self._device: Device = device_named(device)
        self._place = place_from(os.environ)
        self._marks = Marks()
        main = threading.get_ident()
        self._interrupter = Interrupter(
            *(main, lambda: self._marks.updating or importing(main, Voyage._enter.__code__)),
            *(policy.interrupt_after_s, policy.interrupt_every_s, policy.stuck_s),
            spins=lambda: self._run.is_behind,
        )
        self._run: Run
        self._member: Member
        self._handled = 0
        self._is_running = False
        """Whether this generation has made an update."""
        self._damaged = False
        self._value: Any = None
        self._error: BaseException | None = None
        """What the loop raised last, for the case that nobody commands any more; and of which kind
        it was.
        """
        self._kind = TroubleKind.ERROR
        self._ended_by: BaseException | None = None
        """What the loop of this generation raised."""

    def run(self) -> Any:
        """What the function gives, when it has ended in all ranks.

        Raises:
            RefusedError: there is no coordinator.
        """
        from acpfs.training.torch.rendezvous import rendezvous_by

        place = self._place
        with (
            suppress(OSError) if place.generation else nullcontext()
        ):  # a mount that does not answer right now is no reason to stay away
            self._directory.mkdir(parents=True, exist_ok=True)
        try:
            self._register()
            with rendezvous_by(self._run.rendezvous):
                return self._serve()
        finally:
            if hasattr(self, "_member"):
                self._member.end()

    def _register(self) -> None:
        """With the coordinators of this rank's own job: another one may have its name.

        Raises:
            RefusedError: there are none, or they do not take it.
        """
        refused: set[str] = set()
        deadline = time.monotonic() + self._policy.protected_s
        while True:
            booted = muster(self._directory, self._place, self._policy, refused=frozenset(refused))
            member = self._member_of(booted)
            self._member = member
            try:
                return member.start(booted.links, self._policy.protected_s)
            except OtherJobError:
                member.end()
                refused.add(booted.job)
                if self._place.is_named or time.monotonic() > deadline:
                    raise

    def _member_of(self, booted: Boot) -> Member:
        from acpfs.training.torch.run import Run

        place = self._place
        self._run = Run(
            *(self._directory, booted.job, place.rank, place.world),
            *(self._marks, self._policy, self._updated),
        )
        hello = Hello(
            place.rank,
            place.world,
            booted.node,
            os.getpid(),
            started_at(os.getpid()),
            Gate.EXPLICIT,
            {},
            self._policy.name,
            first=not place.generation,
        )
        member = Member(
            booted.job,
            hello,
            self._marks,
            Collectives(self._run.abort),
            self._interrupter,
            self._policy,
            booted.call,
            on_stuck=self._stuck,
        )
        member.parked = True
        self._run.guard.begin(
            lambda: member.order(self._handled, 0.0) is not None,
            member.leave,
        )
        return member

    def _stuck(self) -> None:
        """Nothing brings the main thread out of C: another process takes this one's place, and has
        what this one has.
        """
        end_soon()
        try:
            left = f"it finds {self._run.leave()} bytes of what this one holds"
        except Exception as error:  # noqa: BLE001
            # whatever it is, this process ends: others may have copies
            left = f"what this one holds ends with it: {told(error)}"
        self._make_room(f"the main thread is stuck ({left})", all_stacks())

    def _make_room(self, why: str, where: str) -> NoReturn:
        """End this process, so that another one takes its place."""
        log.error("another process has to take this one's place", why=why, stacks=where)
        last_words.tell(f"acpfs: {why}: another process has to take this rank's place\n{where}")
        os._exit(ExitStatus.TAKEN_FOR_LOST)

    # -- what the coordinator says

    def _serve(self) -> Any:
        while True:
            try:
                if self._run.guard.is_off:
                    return self._left_alone()
                order = self._next()
                if isinstance(order.command, Stop):
                    self._stop()
                    self._handled = order.number
                elif isinstance(order.command, Resume):
                    self._handled = order.number
                    self._enter(order)
                elif isinstance(order.command, Done):
                    self._interrupter.disarm()
                    self._run.end()
                    return self._value
                elif isinstance(order.command, Leave):
                    self._leave(order.command)
            except Interrupted:
                continue
            except CutOffError as cut_off:
                self._interrupter.disarm()
                log.error("nobody says how it goes on", error=str(cut_off))
                if self._error is None or self._kind is TroubleKind.COLLECTIVE:
                    raise RefusedError(str(cut_off)) from self._error
                raise self._error from None

    def _left_alone(self) -> Any:
        """Acpfs has failed in this rank: its loop has ended as it would have without.

        Raises:
            BaseException: what the loop raised.
        """
        self._interrupter.disarm()
        if self._ended_by is not None:
            raise self._ended_by from None
        return self._value

    def _next(self) -> Order:
        commanded_at = time.monotonic()
        while True:
            order = self._member.order(self._handled, 1.0)
            if order is not None:
                return order
            if self._member.commanded:
                commanded_at = time.monotonic()
            elif time.monotonic() - commanded_at > self._policy.command_s:
                raise CutOffError(f"no coordinator for {self._policy.command_s:g} s")

    def _stop(self) -> None:
        self._interrupter.disarm()
        self._member.parked = True
        mark = self._marks.now
        if self._run.is_behind:
            self._settle()
        else:
            self._device.stop()
            self._run.stop(damaged=self._damaged)
            self._device.restart()
        self._damaged = False
        self._member.tell(Stopped(mark.done, mark.ready, mark.phase))

    def _settle(self) -> None:
        """Stop where a device does the collectives: what it was told is done, or this process is of
        no use.
        """
        from acpfs.training.torch.progress import LostError

        try:
            self._run.stop(damaged=self._damaged)
        except LostError as error:
            self._make_room(f"this rank's state is lost: {error}", all_stacks())

    def _leave(self, leave: Leave) -> None:
        self._interrupter.disarm()
        if self._error is not None:
            last_words.tell_error(self._error)
        log.warning("this rank ends", status=leave.status, text=leave.text)
        self._member.end()
        last_words.end_process(leave.status)

    # -- the loop

    def _enter(self, order: Order) -> None:
        """Run the function in this generation."""
        self._run.enter(order.generation, self._member.ask)
        self._is_running = False
        self._ended_by = None
        try:
            self._value = self._train(self._run)
        except SystemExit as error:
            if error.code not in (None, 0):
                raise
        except (KeyboardInterrupt, GeneratorExit):
            raise
        except BaseException as error:  # noqa: BLE001
            # whatever it is, another process or another try may do
            self._member.parked = True
            self._ended_by = error
            self._failed(error)
            return
        self._member.parked = False
        self._member.tell(Finished())

    def _updated(self) -> None:
        """Behind each update: the first of a generation says that it runs."""
        if not self._is_running:
            self._is_running = True
            self._member.parked = False  # the store has done its work
            self._member.tell(Running())
            tell_launcher()

    def _failed(self, error: BaseException) -> None:
        """The loop was left by an exception: the fault's cause, or what the abort of its
        collectives raised.
        """
        from acpfs.training.torch.progress import DeviceFailedError
        from acpfs.training.torch.rank import trouble_kind

        if isinstance(error, DeviceFailedError) or self._device.ends_process(error):
            self._make_room(
                "the device can be used no more in this process",
                "".join(traceback.format_exception(error)),
            )
        self._damaged = self._damaged or self._device.lost_memory(error)
        traceback.clear_frames(error.__traceback__)  # they hold the model that was
        if isinstance(error, Interrupted):
            return
        self._error = error
        kind = TroubleKind.MEMORY if self._damaged else trouble_kind(error)
        self._kind = kind
        if self._member.order(self._handled, 0.0) is None:
            if kind is TroubleKind.ERROR:
                last_words.tell_error(error)
            self._member.tell(Trouble(kind, told(error)))
