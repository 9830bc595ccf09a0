"""A rank's side of the coordinator's dialogue, in this interface: a thread obeys, and calls what
the framework has registered.

    STOP marks are held; an update that is under way ends; stop and clean, where the framework wants
    that before a save SAVE save_ckpt, in a thread of its own, in the ranks of the cover PUBLISH
    rename, in one of them LEAVE exit, or the end of the process after ten seconds

The main thread is not got out of anything here: the framework's stop handler does that, or the end
of the process.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from enum import Enum
from pathlib import Path

from acpfs.compatible.handlers import Handlers
from acpfs.compatible.product_values import Action
from acpfs.compatible.replicas import save_info
from acpfs.compatible.update_marks import UpdateMarks
from acpfs.errors import RefusedError
from acpfs.logger import get_logger
from acpfs.training.credentials import Credentials, connect
from acpfs.training.interrupt import Interrupter
from acpfs.training.member import Collectives, Member, Order
from acpfs.training.messages import (
    Gate,
    Hello,
    Leave,
    Publish,
    Published,
    Save,
    Saved,
    Settle,
    Settled,
    Shard,
    Stop,
    Stopped,
    Trouble,
    TroubleKind,
)
from acpfs.training.policy import Policy
from acpfs.training.wire import LinkClosedError, SocketLink

log = get_logger("acpfs.compatible")
UPDATE_S = 15.0
"""So long an update may take that is under way at STOP; the coordinator counts a rank as lost after
20.
"""
STOP_S = 15.0
"""So long the main thread may take to report after the stop handler."""
EXIT_S = 10.0
"""From LEAVE to the end of the process, as in the product."""
LOOK_S = 0.02
NAME = "step-{step}"


class RepairAs(Enum):
    """What `tft_get_repair_type` says."""

    UNKNOWN = "unknown"
    DUMP = "dump"
    RECOVER = "recover"
    RETRY = "retry"


class _NeverInterrupts(Interrupter):
    """The main thread is the framework's."""

    def arm(self) -> None:
        """Not here."""


class Processor:
    """Of one rank; `start` when the coordinator is to be there, `register` when it is known who
    holds what.
    """

    replaces = False
    """Whether this rank goes on behind a fault (`going_on`); otherwise it leaves a checkpoint, and
    ends.
    """

    def __init__(
        self,
        rank: int,
        world: int,
        job: str,
        credentials: Credentials | None,
        marks: UpdateMarks,
        handlers: Handlers,
        policy: Policy,
    ) -> None:
        """`credentials`: the job's, or no TLS."""
        self._rank = rank
        self._world = world
        self._job = job
        self._credentials = credentials
        self._marks = marks
        self._handlers = handlers
        self._policy = policy
        self._address: str | None = None
        self._member: Member | None = None
        self._thread: threading.Thread | None = None
        self._saving: threading.Thread | None = None
        self._reported = threading.Event()
        self._over = threading.Event()
        self._published: int | None = None
        self._shards: tuple[Shard, ...] = ()
        self._device_failed = False
        self._memory_failed = False
        self.repair_as = RepairAs.UNKNOWN
        self.end_process: Callable[[int], object] = os._exit
        self.exit_s = EXIT_S
        self._on_failed: Callable[[Exception], object] = str

    # -- the main thread's side

    def follow(self, on_failed: Callable[[Exception], object]) -> None:
        """Have this called when the thread has ended by a fault of acpfs; training goes on."""
        self._on_failed = on_failed

    def start(self, host: str, port: int) -> None:
        """Look for the coordinator; waits for it.

        Raises:
            RefusedError: it is not there.
        """
        deadline = time.monotonic() + self._policy.protected_s
        while True:
            try:
                socket.create_connection((host, port), 5.0).close()
                break
            except OSError as error:
                if time.monotonic() > deadline:
                    raise RefusedError(f"no controller at {host}:{port}: {error}") from error
                time.sleep(LOOK_S)
        self._address = f"{host}:{port}"

    def register(self, holders: Mapping[Shard, tuple[int, ...]], node: str) -> None:
        """From here on a rank that dies leaves a checkpoint; returns when all ranks have come here.

        Again: nothing.

        Raises:
            RefusedError: there is no controller, or the ranks do not agree.
        """
        if self._address is None:
            raise RefusedError("tft_start_processor comes before tft_set_optimizer_replica")
        if self._member is not None:
            return
        self._shards = tuple(holders)
        hello = Hello(
            *(self._rank, self._world, node, os.getpid(), started_at(), Gate.EXPLICIT, holders),
            name=NAME,
            begun=0,
        )
        interrupter = _NeverInterrupts(
            threading.get_ident(), lambda: self._marks.updating, 1.0, 1.0
        )
        member = Member(
            self._job, hello, self._marks, Collectives(lambda: 0), interrupter, self._policy
        )
        member.parked = self.replaces
        try:
            member.start({0: self._link()}, self._policy.protected_s)
        except LinkClosedError as error:
            raise RefusedError(f"no controller at {self._address}: {error}") from error
        except BaseException:
            member.end()
            raise
        self._member = member
        self._thread = threading.Thread(target=self._run, name="acpfs-processor", daemon=True)
        try:
            self._thread.start()
        except BaseException:  # of a signal's handler: it may run all the same, and ends by this
            self._member = None
            member.end()
            raise

    def _link(self) -> SocketLink:
        assert self._address is not None
        return connect(self._address, self._credentials)

    @property
    def registered(self) -> bool:
        """Whether a fault would leave a checkpoint."""
        return self._member is not None

    def report_stopped(self) -> None:
        """The main thread has come out of what it was doing."""
        self._reported.set()

    def report_trouble(self, kind: TroubleKind, text: str) -> bool:
        """A fault in this rank; whether anybody was told."""
        self._memory_failed = self._memory_failed or kind is TroubleKind.MEMORY
        self._device_failed = self._device_failed or kind is not TroubleKind.ERROR
        self._reported.set()
        if self._member is None:
            log.error(
                "nobody is told: who holds what was not said yet (tft_set_optimizer_replica)",
                text=text,
            )
            return False
        self._member.tell(Trouble(kind, text))
        return True

    def prepared(self) -> None:
        """A process that takes another one's place has built what it needs: there is none."""

    def updated(self) -> None:
        """An update is complete."""

    def wait_action(self) -> Action:
        """What the main thread does when a fault is dealt with: it ends."""
        self.wait_over(None)
        return Action.EXIT

    def finish(self) -> bool:
        """The train function has ended; whether the rank may leave."""
        return True

    @property
    def is_done(self) -> bool:
        """Whether the train functions of all ranks have ended, whatever this one's did: nobody is
        told so here.
        """
        return False

    def wait_over(self, timeout_s: float | None) -> bool:
        """Wait until there is nothing more to do here but to end."""
        return self._member is None or self._over.wait(timeout_s)

    def switch_off(self, why: str) -> None:
        """Acpfs has failed in this rank, and its training goes on."""
        if self._member is not None:
            self._member.leave(why)
        self._over.set()

    def end(self) -> None:
        """Leave in order. May be called twice."""
        if self._member is not None:
            self._member.end()
            self._over.set()
            self._member = None  # last: where its end fails, somebody has to say goodbye for it

    # -- the thread

    def _run(self) -> None:
        try:
            self._follow()
        except Exception as error:  # noqa: BLE001  # told; the main thread would wait for ever
            self._on_failed(error)
            self._over.set()

    def _follow(self) -> None:
        handled = 0
        cut_off_at = None
        while (member := self._member) is not None and not self._over.is_set():
            order = member.order(handled, 1.0)
            if order is not None:
                handled = order.number
                cut_off_at = None
                try:
                    self._obey(member, order)
                except BaseException:  # torch's CheckpointException is no Exception
                    log.exception(
                        "could not do what was asked", command=type(order.command).__name__
                    )
                    member.tell(Trouble(TroubleKind.SAVE, type(order.command).__name__))
            elif member.cut_off_since is not None:
                cut_off_at = cut_off_at or time.monotonic()
                if time.monotonic() - cut_off_at > self._policy.command_s:
                    log.error("no checkpoint any more: there is no controller")
                    self._over.set()

    def _obey(self, member: Member, order: Order) -> None:
        command = order.command
        if isinstance(command, Stop):
            self._stop(member, order)
        elif isinstance(command, Settle):
            member.tell(Settled(self._marks.now.done))
        elif isinstance(command, Save):
            self._save(member, order, command)
        elif isinstance(command, Publish):
            step = command.manifest.step
            if self._published != step and not self._handlers.rename(step):
                member.tell(Trouble(TroubleKind.SAVE, "the rename handler failed"))
                return
            self._published = step
            member.tell(Published(command.name))
        elif isinstance(command, Leave):
            self._leave(command)

    def _stop(self, member: Member, order: Order) -> None:
        assert isinstance(order.command, Stop)
        self.repair_as = self._named(order.command)
        # an update whose rank has reported what it met will not end
        self._wait(
            member, order, lambda: not self._marks.updating or self._reported.is_set(), UPDATE_S
        )
        whole = not self._memory_failed
        if self._handlers.stops_first:
            whole = self._stop_device(member, order) and whole
        mark = self._marks.now
        self._has_stopped(
            member,
            Stopped(
                mark.done,
                mark.ready,
                mark.phase,
                () if whole else self._shards,
                None,
                self._published,
            ),
        )

    def _named(self, stop: Stop) -> RepairAs:
        """What comes of a fault."""
        return RepairAs.DUMP

    def _has_stopped(self, member: Member, stopped: Stopped) -> None:
        member.tell(stopped)

    def _stop_device(self, member: Member, order: Order) -> bool:
        """Stop, wait for the main thread's word, clean; whether this rank can save afterwards."""
        if not self._handlers.stop():
            return False
        if not self._device_failed and not self._wait(member, order, self._reported.is_set, STOP_S):
            log.error("the main thread did not report after the stop handler (RS_NORMAL)")
            return False
        return self._handlers.clean(self._memory_failed)

    def _save(self, member: Member, order: Order, command: Save) -> None:
        if self._rank not in command.savers:
            return
        before = (
            self._saving
        )  # of a generation that is over: two saves at once would write the same files
        if before is not None and not self._wait(
            member, order, lambda: not before.is_alive(), float("inf")
        ):
            return
        went_well: list[bool] = []
        info = save_info(command.cover)
        self._saving = threading.Thread(
            target=lambda: went_well.append(self._handlers.save(command.step, info)),
            name="acpfs-save",
            daemon=True,
        )
        self._saving.start()
        saving = self._saving
        if self._wait(member, order, lambda: not saving.is_alive(), float("inf")):
            member.tell(
                Saved(())
                if went_well == [True]
                else Trouble(TroubleKind.SAVE, "the save_ckpt handler failed")
            )

    def _wait(
        self, member: Member, order: Order, there: Callable[[], bool], timeout_s: float
    ) -> bool:
        """Until it is there; False: not in time, or a newer command has come."""
        deadline = time.monotonic() + timeout_s
        while not there():
            if time.monotonic() > deadline or member.order(order.number, 0.0) is not None:
                return False
            time.sleep(LOOK_S)
        return True

    def _leave(self, command: Leave) -> None:
        log.warning("the job ends", status=command.status, why=command.text)
        self._handlers.exit()  # does not come back, as a rule
        self._over.set()
        time.sleep(self.exit_s)
        self.end_process(command.status)


def started_at() -> int:
    """Field 22 of this process's stat: with it its pid cannot be somebody else's."""
    return int(Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19])
