"""The worker's life: mount, serve, drain, end.

One trio run with one nursery. Everything that works behind the mount (engine, control, clock,
metrics) is a task of it and outlives the mount, so that the drain goes on and control answers until
the end. The mount ends in one of three ways: `acpfs umount` (drained first, refused while in use),
a signal (drained up to the deadline, then taken away from whoever uses it), or somebody else's
umount(8) (drained afterwards). What is not persisted then stays in the RAM tier for the next mount.

A session can end without its mount: `umount -f`, an abort, the kernel's request time-out. Then
every call in the mount point fails, and it falls through like one whose worker does not come back;
the rest is drained, and the exit code says that this was no unmount.
"""

from __future__ import annotations

import errno
import math
import os
import signal
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import astuple, replace
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING

import trio

from acpfs import __version__
from acpfs.backing.lower import SpaceInfo
from acpfs.config import OnFailure, Settings, Transport
from acpfs.control import registry
from acpfs.control.registry import MountRecord
from acpfs.control.server import ControlServer
from acpfs.control.verbs import answers
from acpfs.drain_records import QueueEntry
from acpfs.errors import ExitCode, MachineError, RefusedError
from acpfs.filesystem.filesystem import FileSystem
from acpfs.filesystem.steps import settled
from acpfs.logger import get_logger
from acpfs.mounting import mountpoint, transports
from acpfs.mounting.checks import BACKING_WAIT_S
from acpfs.mounting.transports import TransportChoice
from acpfs.ram import mounts
from acpfs.ram import place as places
from acpfs.ram.mounts import MountEntry, holders, mounted_at
from acpfs.supervisor import fallthrough
from acpfs.supervisor.child import Limits
from acpfs.supervisor.stopping import TOGETHER_S
from acpfs.supervisor.stuck_processes import STUCK
from acpfs.transport.timeouts import RequestTimeouts
from acpfs.types import Ino, Seq, TierId
from acpfs.worker import logs, serving
from acpfs.worker.assembly import Parts, keep
from acpfs.worker.history_watch import HistoryWatch
from acpfs.worker.link import Link
from acpfs.worker.metrics_tasks import MetricsTasks
from acpfs.worker.notify import Busy, ServiceManager, beat
from acpfs.worker.preloads import Preloads
from acpfs.worker.remains import Remains, wait_over
from acpfs.worker.subject import WorkerSubject
from acpfs.worker.waiting_reports import WaitingCall
from acpfs.worker.worker_verbs import WorkerVerbs

if TYPE_CHECKING:
    from acpfs.transport.native.holding import Holding
    from acpfs.transport.native.session import Session

FREEZE_INTERVAL_S = 1.0
ANCHOR_VARIABLE = "ACPFS_ANCHOR_INTERVAL"
"""For tests: the same in seconds."""
ANCHOR_INTERVAL_S = float(os.environ.get(ANCHOR_VARIABLE, "5"))
"""How often is looked whether the backing directory is still what lies at its path."""
RUN_DIRECTORY_INTERVAL_S = 2.0
"""Less than a client waits for a socket that is not there."""
LAST_ANSWERS_WAIT_S = 5.0
QUICK_ANSWERS_WAIT_S = 5.0
"""A worker that is to make room waits so long at most for what it answers at once."""
QUICK_ANSWERS_LOOK_S = 0.01
DRAIN_LOOK_INTERVAL_S = 0.2
ELSEWHERE_INTERVAL_S = 0.5
"""Between two looks at who else has the mount, each through the mount tables of all processes."""
LOCK_WAIT_S = 5.0
METRICS = "metrics"
"""Name under which the supervisor keeps the socket at which the metrics are served."""
SESSION_ENDS_VARIABLE = "ACPFS_SESSION_ENDS"
SESSION_ENDS_S = float(os.environ.get(SESSION_ENDS_VARIABLE, "20"))
"""After the unmount; then it is looked who has the mount elsewhere.

What just starts has a copy of every mount for a moment. For tests.
"""
LEFT_LOGGED_MAX = 20
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
HOLD = ("hold", "hold-spare")
"""Names under which the supervisor keeps the channels of the processes that take inode locks."""
DELETED = "deleted-"
"""Name, with the node's number, of a descriptor that the supervisor keeps of a deleted file that is
still open.
"""

log = get_logger(__name__)

ABORTED = (
    "the kernel ended the session without an unmount (umount -f, an abort, or its request time-out)"
)


class Ending(Enum):
    """How the session ended."""

    UNMOUNTED = "unmounted"
    TAKEN = "taken"
    """From its users, by us: what they had open is not complete."""
    ABORTED = "aborted"
    """By somebody else, and the mount is still there: the same, and it was no unmount."""


class Worker:
    """Runs assembled parts as a mount; `run` once."""

    def __init__(self, parts: Parts, link: Link) -> None:
        """`link`: to the supervisor, which is told when the mount can be used."""
        self._parts = parts
        self._threads = parts.given.threads
        self.link = link
        self._settings = parts.settings
        self._transport = (
            TransportChoice(Transport.NATIVE, link.facts["because"])
            if link.session
            else transports.choose(
                parts.settings.transport, needs_native=parts.settings.needs_native
            )
        )
        self._mountpoint = os.fspath(parts.settings.mountpoint)
        self._subject = WorkerSubject(parts, self)
        self._manager = ServiceManager(link)
        self._session: Session | None = None
        """That is served natively."""
        self._busy = Busy(self._current)
        self._held_up: set[TierId] = set()
        """RAM files on which a killed worker still makes a call."""
        self._record = self._make_record()
        self._serving = trio.CancelScope()
        self._drain_deadline = math.inf
        self._hurry = trio.Event()
        self._served = trio.Event()
        self._ended = trio.Event()
        self._mount: MountEntry | None = None
        """The mount that is served, as the kernel's table has it."""
        self._ending = Ending.UNMOUNTED
        self._left: list[QueueEntry] = []
        self._was_mounted = False
        self._begun = trio.Event()
        """It serves, or will not: until then there may be a mount at any moment."""
        found = (
            fallthrough.finished(parts.runtime, self._mountpoint) if link.workers_before else None
        )
        self.bypassed = (
            (found.since, found.reason)
            if found is not None and found.since and found.uncovered
            else None
        )
        """Since when, and why, new opens are native."""
        self._preloads = Preloads(parts.fs.steps, parts.inner.preloading, parts.manifest)
        self._history = HistoryWatch(parts, self._subject.status, self._subject.reports_of)
        self.beneath = False
        """Whether the backing directory lies beneath the mount."""
        self.detached = ""
        """That the mount point is free and the mount goes on all the same, in words."""

    def _make_record(self) -> MountRecord:
        parts = self._parts
        pid = self.link.supervisor_pid
        socket = parts.runtime / "sockets" / f"{registry.slug(self._mountpoint)}.sock"
        return MountRecord(
            mountpoint=self._mountpoint,
            backing=os.fspath(parts.settings.backing),
            node=parts.identity.node_id,
            pid=pid,
            pid_started=registry.process_started(pid),
            socket=os.fspath(socket),
            version=__version__,
            runtime_dir=os.fspath(parts.runtime),
        )

    async def run(self) -> ExitCode:
        """Until unmounted and drained, or the deadline has passed.

        Raises:
            MachineError: the mount could not be made, or the backing directory does not answer.
        """
        await self._start_file_system()
        self.link.step("opening the control socket")
        with ExitStack() as undo:
            undo.callback(self._unregister)
            server = ControlServer(
                self._parts.runtime / "sockets" / os.path.basename(self._record.socket),
                answers(self._subject) | WorkerVerbs(self._parts, self._preloads).answers(),
                self._settings.control_group,
                kept_fd=self.link.kept.get("control", [-1])[0],
            )
            if "control" not in self.link.kept:
                self.link.keep("control", [server.fileno()])
            self.link.listen(
                partial(self._make_room, server),
                partial(self._told_to_hurry, trio.lowlevel.current_trio_token()),
                self._adopted,
            )
            undo.callback(server.close)
            async with trio.open_nursery() as nursery:
                await self._start_tasks(nursery, server)
                await self._serve()
                await self._drain_rest()
                await self._threads.run_sync(self._history.look)
                await self._parts.cluster.leave(nothing_left=not self._left)
                self._ended.set()
                await server.last_answers(LAST_ANSWERS_WAIT_S)
                nursery.cancel_scope.cancel()
        if self._ending is Ending.ABORTED:
            return ExitCode.FAILED
        return ExitCode.TIMEOUT if self._left else ExitCode.OK

    def _unregister(self) -> None:
        """At the end of the mount; not at that of a worker that will be replaced."""
        if self._ended.is_set() or not (self._was_mounted or self.link.workers_before):
            registry.remove(self._record)

    def _make_room(self, server: ControlServer) -> None:
        """For the next worker: no step is under way from here on; requests that were read and not
        answered come to it again.

        Who asked for something that is answered at once, as for this reload, hears so before: he
        may not ask it twice.
        """
        log.info("making room for the next worker")
        clock = self._parts.given.clock
        until = clock.now() + QUICK_ANSWERS_WAIT_S
        while server.is_answering and clock.now() < until:
            clock.sleep(QUICK_ANSWERS_LOOK_S)
        self._parts.fs.lock.acquire(timeout=LOCK_WAIT_S)

    def _adopted(self, pid: int) -> None:
        """Another supervisor keeps the session now."""
        self._record = replace(self._record, pid=pid, pid_started=registry.process_started(pid))
        registry.write(self._record)

    def reload(self) -> None:
        """Restart the worker with the installed code; this one goes on until that can start.

        Raises:
            RefusedError: this transport's session cannot be taken over.
        """
        if self._transport.transport is not Transport.NATIVE:
            raise RefusedError(
                "reload needs the native transport: a libfuse mount cannot be taken over; "
                "unmount and mount again"
            )
        self.link.reload()

    @property
    def nothing_left(self) -> bool:
        """After `run`: whether the RAM tier may be removed.

        One that this worker never used and found empty may, too.
        """
        return not self._left and (
            self._ended.is_set() or not (self._was_mounted or self._parts.place.found)
        )

    @property
    def transport(self) -> str:
        """Name of the transport in use."""
        return self._transport.transport.value

    @property
    def transport_reason(self) -> str:
        """Why this transport."""
        return self._transport.reason

    @property
    def stopping(self) -> bool:
        """Whether the end has begun: a signal came, or the mount is gone."""
        return math.isfinite(self._drain_deadline)

    # -- start

    async def _start_file_system(self) -> None:
        """What an earlier daemon left is drained with care: while nothing was mounted, others could
        change the backing directory.
        """
        self._heed_stuck_workers()
        if self._parts.place.found and not self.link.session:
            with self._parts.fs.lock:
                lost = [
                    report.ino
                    for report in self._parts.fs.files_report()
                    if report.state == "interrupted"
                ]
            self._parts.engine.expect_foreign_changes(self._parts.log.last_seq, lost)
        self.link.step("restoring what is known of files")
        known = self.link.facts.get("space") if self.link.knows_lower else None
        try:
            space = await self._parts.fs.steps.drive(
                self._parts.fs.start(SpaceInfo(*known) if known else None)
            )
        except OSError as error:
            raise MachineError(
                f"backing directory {self._settings.backing}: {error.strerror}"
            ) from error
        self._name_held_up()
        if not known:
            await self._join()
            self.link.remember(space=astuple(space))
            keep(self._parts, self.link)

    def _heed_stuck_workers(self) -> None:
        """What a killed worker's call still does must not come after what this one does with the
        same file.
        """
        remains = Remains(self.link.kept.get(STUCK, ()))
        calls = self._parts.tier.calls
        self._held_up = calls.take_over(self._parts.inner.kept.ram_calls, remains.take)
        if others := remains.take_others():
            log.warning(
                "a killed worker's call on the backing directory has not returned: the drain "
                "waits for it",
                calls=len(others),
            )
            ended = self._parts.calls.commits.submit("killed worker's call", wait_over, others)
            self._parts.engine.begin_after(ended)
            self._parts.inner.earlier_calls.begin_after(ended)

    def _name_held_up(self) -> None:
        """Files in RAM on which a killed worker's call waits for an application."""
        for path, processes in self._parts.fs.writers_of(self._held_up):
            log.warning(
                "a killed worker's call on a file in RAM waits for a write of an application: "
                "that file waits for it, and no other",
                file=os.fsdecode(path),
                written_by=processes,
            )

    async def _join(self) -> None:
        """Before the first request: whoever commits a pointer later finds this node."""
        self.link.step("telling other nodes of this one")
        try:
            with trio.fail_after(BACKING_WAIT_S):
                await self._parts.cluster.join()
        except (OSError, trio.TooSlowError) as error:
            raise MachineError(
                f"backing directory {self._settings.backing}: the node record cannot be written: "
                f"{error}"
            ) from error

    async def _start_tasks(self, nursery: trio.Nursery, server: ControlServer) -> None:
        self._parts.calls.be_ready()
        self._parts.copies.be_ready()
        if self._parts.inner.spill is not None:
            self._parts.inner.spill.start()
        if self._parts.exchange is not None:
            self._parts.exchange.begin()
            self._parts.holding_watch.begin()
            self._parts.adopting.begin()
        await nursery.start(self._parts.cluster.run)  # first: it gates what the last worker left
        await nursery.start(self._parts.engine.run)
        await nursery.start(server.run)
        metrics = MetricsTasks(
            self._settings,
            self._subject.metric_registry,
            self._threads,
            self.link.kept.get(METRICS, ()),
            partial(self.link.keep, METRICS),
            taken_over=self.link.workers_before > 0,
        )
        await nursery.start(metrics.serve)
        await nursery.start(
            self._heed_signals
        )  # before it serves: the supervisor passes on then what came meanwhile
        nursery.start_soon(self._freeze_old)
        nursery.start_soon(self._load_manifest)
        nursery.start_soon(metrics.write)
        nursery.start_soon(self._preloads.run, self._settings.preload)
        nursery.start_soon(self._watch_backing)
        nursery.start_soon(self._watch_run_directory, server)
        nursery.start_soon(self._parts.scrubbing.run)
        nursery.start_soon(self._history.run)
        nursery.start_soon(partial(beat, self.link, self._alive, self._busy.longest_s))

    async def _load_manifest(self) -> None:
        """Behind the mount: it may be long, and the backing directory slow."""
        future = self._parts.calls.commits.submit("load manifest", self._parts.manifest.load)
        await settled(future)
        error = future.exception()
        if error is not None:
            log.warning(
                "the manifest could not be read; older files cannot be verified", error=str(error)
            )

    # -- while mounted

    async def _serve(self) -> None:
        try:
            await self._mount_and_serve()
        finally:
            self._begun.set()

    async def _mount_and_serve(self) -> None:
        self.link.step(f"laying the backing directory beneath {self._mountpoint}")
        await self._threads.run_sync(self._lay_beneath)
        if self.bypassed is not None and not self.link.session:
            log.warning(
                "the mount was bypassed, and ended with the worker before: what that left is "
                "drained",
                mount=self._mountpoint,
            )
            self.link.serving(self._mountpoint)
            return
        self.link.step(f"mounting on {self._mountpoint}")
        try:
            with self._serving:
                await serving.serve(
                    self._transport, self._parts.fs, self._settings, self._mounted, self._load
                )
        except BaseException:
            if self._was_mounted or self.link.session:
                # a bug ended the transport: what lies beneath is what applications go on with
                raise
            self._lift_beneath()
            raise
        if self._serving.cancelled_caught:
            self._ending = Ending.TAKEN
        elif self._mount is not None and await self._threads.run_sync(self._mount.is_there):
            self._ending = Ending.ABORTED
            await self._end_aborted()
        self._served.set()
        if self.bypassed is None:
            self._lift_beneath()
        log.info("unmounted", mount=self._mountpoint)

    async def _end_aborted(self) -> None:
        """The mount is dead and still there: what lies beneath takes its place, or with `stop`
        nothing does.
        """
        log.error("the mount is dead", mount=self._mountpoint, why=ABORTED)
        if self._transport.transport is Transport.NATIVE:
            self.link.keep("session", [])  # nobody can take it over
        if self._settings.on_failure is OnFailure.STOP:
            return
        try:
            if self.beneath:
                await self.bypass(ABORTED)
            else:
                await self._threads.run_sync(
                    partial(mountpoint.take_away, self._mountpoint, detach=True)
                )
        except (RefusedError, MachineError) as error:
            log.error("the mount point stays dead", mount=self._mountpoint, error=str(error))

    def _lay_beneath(self) -> None:
        """Before the mount, so that it can fall through."""
        if self.link.workers_before:
            self.beneath = fallthrough.beneath(self._parts.runtime, self._mountpoint) is not None
        if self.link.session or self.bypassed is not None:
            return
        if self.link.workers_before and mountpoint.is_mounted(self._mountpoint):
            mountpoint.take_away(
                self._mountpoint, detach=True, abort=True
            )  # libfuse: the last worker's mount is dead
        if self._settings.on_failure is OnFailure.STOP:
            return
        reason = fallthrough.lay(self._parts.runtime, self._settings.backing, self._mountpoint)
        self.beneath = not reason
        if reason:
            self._parts.place.warnings.append(
                "no fall-through: the backing directory cannot lie beneath the mount "
                f"({reason}), so if acpfs fails, the mount point does"
            )

    def _load(self, transport: Transport) -> serving.Serve:
        if transport is Transport.NATIVE:
            return self._serve_kept
        from acpfs.transport import libfuse  # it needs a library that native does not

        return libfuse.serve

    async def _serve_kept(
        self, fs: FileSystem, settings: Settings, ready: Callable[[], None]
    ) -> None:
        """Serve the native session, which the supervisor keeps too: an earlier worker's, or a new
        one.
        """
        from acpfs.transport.native import serve as native
        from acpfs.transport.native.negotiate import Negotiated, ProtocolError

        def serving(session: Session) -> None:
            self._parts.inner.kept.record("negotiated", session.negotiated.to_record())
            self._session = session
            session.watch(Limits().hang_s / 2)
            ready()

        negotiated = None
        deleted = {
            Ino(int(name.removeprefix(DELETED))): fds[0]
            for name, fds in self.link.kept.items()
            if name.startswith(DELETED)
        }
        fs.keep_deleted(deleted, lambda ino, fds: self.link.keep(f"{DELETED}{ino}", fds))
        if self.link.session:
            negotiated = Negotiated.from_record(self._parts.inner.kept.fact("negotiated"))
        else:
            self.link.keep("session", await self._threads.run_sync(native.make_session, settings))
            self.link.remember(because=self._transport.reason)
        try:
            await native.serve_kept(
                fs,
                self._parts.inner.kept,
                self.link.kept["session"],
                negotiated,
                serving,
                holding=self._holding(fs),
            )
        except (ProtocolError, OSError) as error:
            if self._was_mounted or self.link.session:
                raise
            await self._threads.run_sync(_detach, self._mountpoint)
            self.link.keep("session", [])  # there is none to be taken over
            raise MachineError(f"cannot mount on {settings.mountpoint}: {error}") from error

    def _holding(self, fs: FileSystem) -> Holding:
        """The processes that hold passthrough writers outlive this worker."""
        from acpfs.transport.native.holding import Holding

        kept = [self.link.kept.get(name, []) for name in HOLD]
        return Holding(fs, kept, lambda number, fds: self.link.keep(HOLD[number], fds))

    def _lift_beneath(self) -> None:
        if self.beneath:
            fallthrough.lift(self._parts.runtime, self._mountpoint)

    def _mounted(self, transport: TransportChoice) -> None:
        self._transport = transport
        self._was_mounted = True
        self._begun.set()
        entry = mounted_at(self._mountpoint)
        self._mount = entry if entry is not None and entry.kind == mountpoint.KIND else None
        registry.write(self._record)
        if text := RequestTimeouts.read().warning(asks=transport.transport is Transport.NATIVE):
            self._parts.place.warnings.append(text)
        for warning in self._parts.warnings():
            log.warning(warning)
        log.info(
            "mounted",
            mount=self._mountpoint,
            backing=self._record.backing,
            node=self._record.node,
            ram_bytes=self._parts.tier.budget_bytes,
            transport=self.transport,
            because=self.transport_reason,
            lanes=self._parts.inner.lanes.offered(),
        )
        self._manager.ready(f"{self._record.backing} on {self._mountpoint}")
        self.link.serving(self._mountpoint)
        if self.link.workers_before:
            log.warning(
                "a new worker serves", why=self.link.reason, pause_s=round(self.link.pause_s, 3)
            )
        self._parts.prefault.start()

    async def _freeze_old(self) -> None:
        """Promise 13: what stays open is committed as of now, every so often."""
        while True:
            await trio.sleep(FREEZE_INTERVAL_S)
            await self._parts.fs.steps.drive(self._parts.fs.settle_closes())
            with self._parts.fs.lock:
                self._parts.fs.freeze_old()
                self._parts.fs.look_after_waiting()
                self._subject.look()
                self._parts.state.space.look()
            try:
                places.fit(self._parts.place)
            except FileNotFoundError:
                place = self._parts.place
                if places.find_again(place.directory, place.lock_fd, place.names):
                    log.warning("the run directory was moved; the RAM tier is at its place again")

    async def _watch_backing(self) -> None:
        """Whether the descriptor still leads to what lies at the path; a hanging look waits in its
        thread.
        """
        while True:
            await trio.sleep(ANCHOR_INTERVAL_S)
            future = self._parts.calls.syncs.submit("look", self._parts.anchor.look)
            await settled(future)
            error = future.exception()
            if error is not None and not isinstance(error, OSError):
                raise error
            if error is None and future.result():
                if "backing" in self.link.kept:
                    self.link.keep("backing", [self._parts.directory.descriptor])
                self._parts.engine.retry(
                    {Seq(0)}
                )  # none that is parked, but what is scheduled: now

    async def _watch_run_directory(self, server: ControlServer) -> None:
        """The mount's record and its socket are made anew where a cleaner has removed them: else no
        verb would ever come through.
        """
        complaint = ""
        while True:
            await trio.sleep(RUN_DIRECTORY_INTERVAL_S)
            try:
                if self._was_mounted and not self._record.file.exists():
                    self._record.file.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
                    registry.write(self._record)
                    log.warning("the mount's record was removed; it is written anew")
                if server.listen_again():
                    self.link.keep("control", [server.fileno()])
                    log.warning("the control socket was removed; it is made anew")
                complaint = ""
            except OSError as error:
                if complaint != str(error):
                    log.error("the run directory cannot be restored", error=str(error))
                complaint = str(error)

    def _alive(self) -> bool:
        """Whether requests can be served: this loop runs, and the lock is to be had."""
        if not self._parts.fs.lock.acquire(timeout=LOCK_WAIT_S):
            return False
        self._parts.fs.lock.release()
        return True

    def _current(self) -> list[int]:
        return [] if self._session is None else self._session.current()

    def waiting_calls(self) -> list[WaitingCall]:
        """Of the native transport."""
        return (
            [] if self._session is None else [WaitingCall(*one) for one in self._session.waiting()]
        )

    # -- the end

    async def _heed_signals(self, task_status: trio.TaskStatus[None]) -> None:
        """SIGTERM and SIGINT: drain up to the deadline, then end; not at once, however many come.

        SIGHUP: open the logs again.
        """
        for one in _SIGNALS:
            signal.signal(
                one, signal.SIG_IGN
            )  # so it is again behind this: a signal must not end what is put away there
        with trio.open_signal_receiver(*_SIGNALS) as signals:
            task_status.started()
            async with trio.open_nursery() as nursery:
                stopping = False
                stopping_since = 0.0
                async for number in signals:
                    if number == signal.SIGHUP:
                        logs.reopen()
                    elif not stopping:
                        stopping = True
                        stopping_since = trio.current_time()
                        nursery.start_soon(self._stop)
                    elif self.link.says_hurry:
                        # it counts: this one may come from somebody who signals all processes of
                        # the mount
                        log.info(
                            "another signal: the supervisor says whether the drain goes on",
                            supervisor=self._record.pid,
                        )
                    elif self.link.is_alone and trio.current_time() - stopping_since < TOGETHER_S:
                        log.info("another signal comes with the first, and is one order with it")
                    else:
                        # Of an older supervisor, or there is none that counts, as where a service
                        # manager is to start the next one.
                        self._hurry.set()

    def _told_to_hurry(self, token: trio.lowlevel.TrioToken) -> None:
        """In the thread that hears the supervisor."""
        log.warning("told to end at once: what is not persisted stays in the RAM tier")
        try:
            token.run_sync_soon(self._hurry.set)
        except trio.RunFinishedError:
            os._exit(
                ExitCode.TIMEOUT
            )  # it puts away what it has; a storage that hangs there keeps it no longer

    async def _stop(self) -> None:
        """Drain, then take the mount away, from whoever uses it if must be."""
        since = self.link.told_to_end()
        timeout_s = max(
            0.0, self._settings.drain_timeout_s - (self._parts.given.clock.now() - since)
        )  # all workers that drain have it together
        self._drain_deadline = trio.current_time() + timeout_s
        log.info("stopping: draining first", timeout_s=timeout_s, operations=len(self._parts.log))
        self._manager.stopping("draining", timeout_s)
        await self._drain()
        await self._begun.wait()  # what is taken away before it is there stays
        try:
            # Whoever else has it does not keep it now: the mount point is free at once, and the
            # session has its time to end.
            await self._take_away()
            await self._session_ends(SESSION_ENDS_S)
        except (RefusedError, MachineError) as error:
            log.warning("the mount is taken away from its users", reason=str(error))
            await self._threads.run_sync(partial(_detach, self._mountpoint))
            self._serving.cancel()

    async def unmount(self, *, leave: bool = False, patience_s: float = math.inf) -> None:
        """Take the mount away unless it is in use. With `leave`, drain nothing more.

        Raises:
            RefusedError: it is in use, here or elsewhere, and stays; or something that nobody could
                see has it still.
        """
        if self.bypassed is not None:
            self._end_bypass(leave=leave)
            return
        patience_s = min(patience_s, SESSION_ENDS_S)
        if mountpoint.is_mounted(self._mountpoint):
            await self._nobody_else(patience_s)
        await self._take_away()
        if leave:
            self._hurry.set()
        await self._session_ends(patience_s)

    async def _nobody_else(self, patience_s: float) -> None:
        """Look before the mount point is free: what is written there afterwards goes past the
        mount. What starts has a copy for a moment.

        Raises:
            RefusedError: somebody else has the mount, and did so for all that time.
        """
        if self._mount is None:
            return
        until = trio.current_time() + patience_s
        while others := await self._threads.run_sync(
            mounts.users_elsewhere, self._mount, self._has_directory
        ):
            if trio.current_time() >= until:
                raise RefusedError(f"{self._mountpoint} is in use: {others[0]}")
            await trio.sleep(ELSEWHERE_INTERVAL_S)

    def _has_directory(self, end: str) -> bool:
        return self._parts.fs.has_directory(os.fsencode(end))

    async def _take_away(self) -> None:
        """In a thread, because this one serves it; a call before this one may have done it, and
        others have the mount.
        """
        if mountpoint.is_mounted(self._mountpoint):
            await self._threads.run_sync(
                mountpoint.take_away, self._mountpoint, abandon_on_cancel=True
            )

    async def _session_ends(self, patience_s: float) -> None:
        """The kernel ends it when the last one who has the mount is gone.

        Raises:
            RefusedError: not within that time. The mount point is free; there is no way to put the
                mount back.
        """
        with trio.move_on_after(patience_s):
            await self._served.wait()
        if self._served.is_set():
            return
        others = (
            [] if self._mount is None else await self._threads.run_sync(holders, self._mount.device)
        )
        who = (
            f"process {others[0]} still has it in another mount namespace (a container?)"
            if others
            else (
                "something in the kernel still has it (an overlay, a loop device, a mount that "
                "is attached nowhere)"
            )
        )
        self.detached = (
            f"{self._mountpoint} is unmounted here, but {who}: "
            "the daemon serves that on, and ends with it"
        )
        raise RefusedError(self.detached)

    async def bypass(self, reason: str) -> None:
        """See `Subject`.

        What is dirty is drained on, with the same care for native changes as after a restart.
        """
        if not self.beneath:
            raise RefusedError(
                f"nothing lies beneath {self._mountpoint} (not root, or on_failure = stop): "
                "unmounting it is all that can be done"
            )
        if self.bypassed is not None:
            raise RefusedError("it is bypassed already")
        statistics = self._parts.engine.statistics()
        before = self._parts.engine.expect_foreign_changes()
        self.bypassed = (self._parts.given.clock.wall(), reason)
        kept = (statistics.queued_ops, statistics.dirty_bytes)
        try:
            if not await self._threads.run_sync(
                partial(fallthrough.fall, self._parts.runtime, self._mountpoint, reason, kept=kept)
            ):
                raise FileNotFoundError(errno.ENOENT, "what lies beneath it is not known any more")
        except OSError as error:
            self.bypassed = None
            self._parts.engine.expect_foreign_changes(
                *before
            )  # else what other members write would be a conflict for as long as this mount lasts
            raise MachineError(
                f"{self._mountpoint} cannot be detached: {error.strerror}"
            ) from error

    def _end_bypass(self, *, leave: bool) -> None:
        """End what is still served of a bypassed mount."""
        with self._parts.fs.lock:
            open_files = self._parts.fs.statistics().open_files
        if open_files and not leave:
            raise RefusedError(
                f"{open_files} files are still open in the bypassed mount; --leave takes them "
                "from their users"
            )
        self._lift_beneath()
        self._serving.cancel()
        if leave:
            self._hurry.set()

    async def finished(self) -> list[QueueEntry]:
        """Wait until the worker has done what it could; what is left."""
        await self._ended.wait()
        return self._left

    async def _drain(self) -> None:
        """Until nothing is left that comes by itself, the deadline has passed, or somebody is in a
        hurry.
        """
        with trio.move_on_at(self._drain_deadline):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(_cancel_after, self._hurry, nursery.cancel_scope)
                while True:
                    rest = self._subject.remaining(self._parts.log.last_seq)
                    if rest.stuck or (rest.operations == 0 and self._parts.engine.drained()):
                        break
                    self._manager.status(
                        f"draining: {rest.operations} operations, {rest.size_bytes} bytes left"
                    )
                    await trio.sleep(DRAIN_LOOK_INTERVAL_S)
                nursery.cancel_scope.cancel()

    async def _drain_rest(self) -> None:
        """Nobody can change anything any more: what is still open is complete as it is, unless the
        mount was taken from its user.
        """
        if math.isinf(self._drain_deadline):
            self._drain_deadline = trio.current_time() + self._settings.drain_timeout_s
        if self._ending is Ending.UNMOUNTED:
            await self._parts.fs.steps.drive(self._parts.fs.settle_mappings())
            with self._parts.fs.lock:
                self._parts.fs.freeze_all()
        await self._drain()
        self._left = self._subject.everything_left()
        for entry in self._left[:LEFT_LOGGED_MAX]:
            log.warning(
                "not persisted, kept in the RAM tier",
                name=entry.name,
                operation=entry.operation,
                size=entry.size,
                state=entry.state,
            )
        log.info(
            "drained" if not self._left else "ended with something left",
            left_operations=len(self._left),
        )


async def _cancel_after(event: trio.Event, scope: trio.CancelScope) -> None:
    await event.wait()
    scope.cancel()


def _detach(path: str) -> None:
    """Best effort: closing the session ends the mount too."""
    try:
        mountpoint.take_away(path, detach=True)
    except (RefusedError, MachineError) as error:
        log.warning("the mount point could not be detached", reason=str(error))
