"""The main thread's side of a fault: parked, it does what the coordinator says, until it is told to
leave. No torch here.

`Interrupted` may come at any point until the interrupter is disarmed, which is the first thing that
every STOP does. It means that a newer command is there, or that this one was not handled yet: the
loop looks again, and everything in it may be repeated.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from acpfs.errors import AcpfsError
from acpfs.logger import get_logger
from acpfs.training import mounted
from acpfs.training.interrupt import Interrupted, Interrupter
from acpfs.training.marks import Marks
from acpfs.training.member import Member, Order
from acpfs.training.messages import (
    Ask,
    GateResult,
    Leave,
    Phase,
    Publish,
    Published,
    Save,
    Saved,
    SavedFile,
    Settle,
    Settled,
    Shard,
    Stop,
    Stopped,
    Trouble,
    TroubleKind,
)
from acpfs.training.policy import Policy
from acpfs.training.publish import publish

log = get_logger(__name__)
TEXT_CHARS_MAX = 500
BACK_S = 20.0
"""So long a mount that does not answer is waited for before a save has failed."""


class Rank(Protocol):
    """What has to be done with tensors."""

    @property
    def gate_result(self) -> GateResult | None: ...

    def finish(self, gate: GateResult | None) -> None:
        """The update that is ready, alone."""

    def finish_begun(self) -> None:
        """What is left of an update that began, and that waits for nobody."""

    def torn(self) -> tuple[Shard, ...]:
        """Shards that are not, and cannot become, what they were at the end of the last update."""

    def digests(self) -> Mapping[Shard, str]: ...

    def copies(self) -> Mapping[int, tuple[int, ...]]:
        """Step → ranks of which this one keeps a whole copy; none comes later."""

    def save(self, order: Save, directory: Path, ask: Ask) -> tuple[SavedFile, ...]:
        """Write what the cover gives this rank, together with the other savers, who meet by the
        store that `ask` reaches.

        Raises:
            OthersFailedError: it was another saver that could not.
        """


class CutOffError(Exception):
    """No coordinator says anything any more."""


class ReplacedError(Exception):
    """This thread was stuck, and another one does what is to be done."""


class OthersFailedError(AcpfsError):
    """What this rank had to write is written, and another saver failed: it says so itself."""


@dataclass(frozen=True, slots=True)
class ParkCalls:
    """What it calls."""

    is_mine: Callable[[], bool] = lambda: True
    """Whether this thread is still the one that handles the fault."""
    at: Callable[[str], object] = str
    """At points by name."""
    on_stopped: Callable[[], None] | None = None
    on_settled: Callable[[int], None] | None = None


class Park:
    """Of one rank."""

    def __init__(
        self,
        member: Member,
        interrupter: Interrupter,
        marks: Marks,
        rank: Rank,
        number: int,
        directory: Path,
        policy: Policy,
        calls: ParkCalls | None = None,
    ) -> None:
        """`number`: of the rank in the job. `directory`: below which gasps are written."""
        calls = calls or ParkCalls()
        self._member = member
        self._interrupter = interrupter
        self._marks = marks
        self._rank = rank
        self._number = number
        self._directory = directory
        self._policy = policy
        self._published: int | None = None
        self._handled = 0
        self._begun: set[Path] = set()
        """Where this rank has begun to write."""
        self._stop_failed: BaseException | None = None
        """What `on_stopped` raised: told at SETTLE, since the coordinator takes no trouble from who
        has not parked.
        """
        self._is_mine = calls.is_mine
        self._at = calls.at
        self._on_stopped = calls.on_stopped
        self._on_settled = calls.on_settled

    def run(self, trouble: Trouble) -> Leave:
        """From the exception that brought the main thread here to LEAVE.

        Raises:
            CutOffError: nobody tells it to.
            ReplacedError: another thread goes on with it.
        """
        told = False
        while True:
            try:
                self._look_whose_it_is()
                if not told and not self._member.stopped:
                    self._member.tell(trouble)
                told = True
                order = self._next()
                if isinstance(order.command, Leave):
                    self._interrupter.disarm()
                    return order.command
                self._handle(order)
                self._look_whose_it_is()
                self._handled = order.number
            except Interrupted:
                continue

    def _look_whose_it_is(self) -> None:
        if not self._is_mine():
            raise ReplacedError("another thread stands in for this one")

    def _next(self) -> Order:
        commanded_at = time.monotonic()
        if (
            not self._member.commanded
        ):  # what brings a thread out of a save that nobody commands has done so
            self._interrupter.disarm()
        while True:
            order = self._member.order(self._handled, 1.0)
            if order is not None:
                return order
            if (
                self._member.commanded
            ):  # a standby that too few can vote for commands nobody, though it is connected
                commanded_at = time.monotonic()
            elif time.monotonic() - commanded_at > self._policy.command_s:
                raise CutOffError(f"no coordinator for {self._policy.command_s:g} s")

    def _handle(self, order: Order) -> None:
        command = order.command
        try:
            if isinstance(command, Stop):
                self._stop()
            elif isinstance(command, Settle):
                self._settle(command)
            elif isinstance(command, Save):
                self._save(command)
            elif isinstance(command, Publish):
                self._publish(command)
        except Interrupted:
            if self._member.commanded or not isinstance(command, Save):
                raise
            log.warning("a save is left that nobody commands")  # else it would begin again
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            # whatever it is, another rank may be able to; torch's CheckpointException is no
            # Exception
            self._look_whose_it_is()
            until = time.monotonic() + BACK_S  # whoever asks again at once would meet the same
            mounted.wait_until_back(
                self._directory,
                lambda: self._member.order(order.number, 0.0) is None and time.monotonic() < until,
            )
            newer = self._member.order(order.number, 0.0)
            if newer is None:
                log.exception("could not do what was asked", command=type(command).__name__)
                others = isinstance(error, OthersFailedError)
                self._member.tell(
                    Trouble(TroubleKind.COLLECTIVE if others else TroubleKind.SAVE, told(error))
                )
                if not others:
                    self._remove_void()

    def _stop(self) -> None:
        self._interrupter.disarm()
        self._stop_failed = None
        if (
            torn := _failure(self._rank.finish_begun)
        ) is not None:  # the mark says so: it stays at `updating`
            log.error("an update that had begun is torn", error=told(torn), exc_info=torn)
        if self._on_stopped is not None and (failed := _failure(self._on_stopped)) is not None:
            log.error("on_stopped failed", error=told(failed), exc_info=failed)
            self._stop_failed = failed
        self._at("stopping")
        mark = self._marks.now
        self._member.tell(
            Stopped(
                mark.done,
                mark.ready,
                mark.phase,
                self._rank.torn(),
                self._rank.gate_result,
                self._published,
                self._rank.copies(),
            )
        )

    def _settle(self, command: Settle) -> None:
        if self._stop_failed is not None:
            raise self._stop_failed
        mark = self._marks.now
        self._at("settling")
        if (mark.done, mark.ready, mark.phase) == (command.step - 1, command.step, Phase.READY):
            self._rank.finish(command.gate)
        if self._on_settled is not None:
            self._on_settled(self._marks.now.done)
        self._member.tell(Settled(self._marks.now.done, self._rank.digests()))

    def _save(self, command: Save) -> None:
        self._remove_void()
        if self._number in command.savers:
            self._at("saving")
            directory = self._directory / command.directory
            self._begun.add(directory)
            with mounted.written_by_one(directory):
                files = self._rank.save(command, directory, self._member.ask)
            self._member.tell(Saved(files))

    def _remove_void(self) -> None:
        """What this rank has begun before takes the room that the next try needs.

        Whoever writes there still does so in vain.
        """
        for directory in self._begun:
            mounted.withdraw_urgent(directory)
            shutil.rmtree(directory, ignore_errors=True)
        self._begun.clear()

    def _publish(self, command: Publish) -> None:
        self._at("publishing")
        path = publish(
            self._directory,
            command,
            self._policy.tracker,
            self._policy.files_s,
            self._policy.tracker_text,
        )
        self._published = command.manifest.step
        self._at("published")
        self._member.tell(Published(str(path)))


def _failure(call: Callable[[], None]) -> BaseException | None:
    """What a call raises, but for what ends the handling of a command."""
    try:
        call()
    except (Interrupted, ReplacedError, KeyboardInterrupt):
        raise
    except BaseException as error:  # noqa: BLE001  # as in `_handle`
        return error
    return None


def told(error: BaseException) -> str:
    """An exception in one line."""
    return f"{type(error).__name__}: {error}"[:TEXT_CHARS_MAX]
