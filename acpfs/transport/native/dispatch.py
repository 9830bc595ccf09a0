"""From request to answer: which call, one step of it, and the reply.

Owns the table of operations and the life of calls that have to wait. A call that ends in its first
step is answered by the reader thread that read the request, without any task switch; one that waits
is continued by the `Continuations` thread when its future is done. Nothing that a request does, or
that a call raises, ends the session. A bug is logged with its stack and answered with EIO; where
its step has changed something, the worker ends with it (`StateDatabase.abandon`), and it is the
next one that answers so.
"""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from acpfs.filesystem.filesystem import FileSystem
from acpfs.filesystem.steps import Call
from acpfs.logger import get_logger
from acpfs.ram.kept import Kept
from acpfs.runtime.threads import THREADS
from acpfs.transport.native.callers import Fate, fate_of
from acpfs.transport.native.continuations import DYING_CHECK_INTERVAL_S, Continuations
from acpfs.transport.native.errnos import MALFORMED, MalformedError, errno_of
from acpfs.transport.native.hung_requests import HungRequests
from acpfs.transport.native.operations import Calls, Operation, is_unlock, operations
from acpfs.transport.native.protocol import IN_HEADER, INTERRUPT_IN, WRITE_IN, Opcode
from acpfs.transport.native.replies import Replies
from acpfs.transport.native.request import Request, RequestBuffers, plain, resent
from acpfs.transport.native.resent_requests import NOTED, ResentRequests
from acpfs.transport.native.undo import Undo
from acpfs.types import HandleId

T = TypeVar("T")

log = get_logger(__name__)

GONE = frozenset({errno.ENOENT, errno.ENODEV, errno.ECONNABORTED})
"""Answers of the kernel to a reply that nobody waits for any more."""


class Dispatch:
    """Handles requests."""

    def __init__(
        self, fs: FileSystem, kept: Kept, calls: Calls, replies: Replies, undo: Undo
    ) -> None:
        self._step = fs.steps.step
        self._writes_to_storage = fs.writes_to_storage
        self.spare = fs.steps.spare
        self._serving = kept.serving
        self._given_up = frozenset(resent(unique) for unique in kept.given_up)
        self.hung = HungRequests(kept)
        self._to_set_apart = self.hung.to_set_apart
        self.resent = ResentRequests(fs, kept)
        self._operations = operations(calls, replies, undo)
        self._without_call = self._table_without_call(calls, undo)
        self.apart: dict[int, int] = {}
        """Threads that are with a request that hung a worker, and its number; 0: it waits."""
        self.continuations = Continuations(fs.steps, self._begin, self._finish, self._fail)

    def waits_for_storage(self, header: memoryview) -> bool:
        """Whether it is a WRITE whose bytes go to the storage: nobody may need the thread that
        handles it.
        """
        return header[4] == _WRITE and self._writes_to_storage(
            HandleId(WRITE_IN.unpack_from(header, IN_HEADER.size)[0])
        )

    def handle(self, fd: int, buffers: RequestBuffers, length: int) -> bool:
        """Handle one request that was read from `fd`; returns True when it keeps the buffers for
        later.
        """
        try:
            request = Request(fd, buffers, length)
        except MALFORMED:
            log.exception("not a FUSE request", bytes=length)
            return False
        self._serving.unique = plain(request.unique)
        if request.unique in self._given_up:
            self._refuse(request, errno.EIO)
            self.hung.ended(request.unique)
            return False
        if request.unique in self._to_set_apart:
            log.warning("a request hung the last worker: tried apart", opcode=request.opcode)
            THREADS.start("fuse-apart", self._carry_out_apart, request)
            return True
        operation = self._operations.get(request.opcode)
        if operation is None:
            self._handle_without_call(request)
            return False
        call = self._call_of(operation, request)
        if call is None:
            return False
        try:
            future = self._step(call, None)
        except StopIteration as stop:
            self._finish(operation, request, stop.value)
        except BaseException as error:  # noqa: BLE001 - _fail logs what is not an errno
            self._fail(request, error)
        else:
            keeps = bool(request.opcode == _WRITE)
            if keeps:
                buffers.give_back_rest(length)
            self.continuations.suspend(operation, request, call, future)
            return keeps
        return False

    def _call_of(self, operation: Operation, request: Request) -> Call[Any] | None:
        """None: it is answered already."""
        try:
            if operation.at_once is not None and self._answered(operation, request):
                return None
            call = operation.decode(request)
        except MALFORMED as error:
            self._malformed(request, error)
            return None
        if request.opcode in NOTED:
            call = self.resent.carried_out(request, call)
        return call

    # -- requests that hung a worker

    def _carry_out_apart(self, request: Request) -> None:
        """To its end: nobody else goes on with it, who might hang as well."""
        self._begin(request)
        seat = threading.get_ident()
        self.apart[seat] = request.unique
        operation = self._operations.get(request.opcode)
        if operation is None:
            self._handle_without_call(request)
        elif (call := self._call_of(operation, request)) is not None:
            try:
                value = self._to_its_end(request, call)
            except BaseException as error:  # noqa: BLE001 - _fail logs what is not an errno
                self._fail(request, error)
            else:
                self._finish(operation, request, value)
        del self.apart[seat]
        self.hung.ended(request.unique)

    def _to_its_end(self, request: Request, call: Call[T]) -> T:
        """Step by step; where it waits it does not hang, and is broken off when its caller dies."""
        seat = threading.get_ident()
        done: Future[Any] | None = None
        while True:
            try:
                done = self._step(call, done)
            except StopIteration as stop:
                return stop.value  # type: ignore[no-any-return]
            self.apart[seat] = 0
            if not self._waited_for(request, done):
                done = Future()
                done.cancel()
            self.apart[seat] = request.unique

    @staticmethod
    def _waited_for(request: Request, future: Future[Any]) -> bool:
        """Until it is done, or the caller dies: False where that leaves it under way."""
        done = threading.Event()
        future.add_done_callback(lambda _future: done.set())
        while not done.wait(DYING_CHECK_INTERVAL_S):
            if fate_of(request.pid) is Fate.DYING and not future.cancel():
                return False
        return True

    def _answered(self, operation: Operation, request: Request) -> bool:
        """Whether no call was needed; raises what decoding raises."""
        assert operation.at_once is not None
        try:
            found = operation.at_once(request)
        except MALFORMED:
            raise
        except Exception as error:  # noqa: BLE001 - _fail logs it
            self._fail(request, error)
            return True
        if isinstance(found, int):
            self._refuse(request, found)
        elif found is not None:
            self._finish(operation, request, found)
        return found is not None

    def _begin(self, request: Request) -> None:
        """One that waited goes on in this thread: if that ends the worker, the next one is to know
        which it was.
        """
        self._serving.unique = plain(request.unique)

    def _finish(self, operation: Operation, request: Request, value: Any) -> None:
        """The call is done: tell the kernel."""
        try:
            body = operation.encode(request, value)
        except Exception as error:  # noqa: BLE001 - _fail logs what is not an errno
            self._fail(request, error)
            return
        try:
            request.reply(body)
        except OSError as error:
            self._reply_refused(request, error)
            if operation.undo is not None:
                operation.undo(value)

    def _fail(self, request: Request, error: BaseException) -> None:
        """The call failed: tell the kernel why, and the log if it is a bug."""
        number = errno_of(error)
        if number is None:
            log.error(
                "bug in a file system call", opcode=request.opcode, ino=request.ino, exc_info=error
            )
            number = errno.EIO
        self._refuse(request, number)

    def _malformed(self, request: Request, error: Exception) -> None:
        log.error("malformed request", opcode=request.opcode, bytes=request.length, exc_info=error)
        number = errno_of(MalformedError())
        assert number is not None
        self._refuse(request, number)

    def _refuse(self, request: Request, number: int) -> None:
        try:
            request.refuse(number)
        except OSError as error:
            self._reply_refused(request, error)

    @staticmethod
    def _reply_refused(request: Request, error: OSError) -> None:
        if error.errno not in GONE:
            log.error("the kernel did not take a reply", opcode=request.opcode, exc_info=error)

    # -- requests that are no call of the file system

    def _table_without_call(self, calls: Calls, undo: Undo) -> dict[int, Callable[[Request], None]]:
        return {
            Opcode.FORGET: lambda request: undo.references(calls.forget(request)),
            Opcode.BATCH_FORGET: lambda request: undo.references(calls.forget(request)),
            Opcode.INTERRUPT: self._interrupt,
            Opcode.NOTIFY_REPLY: lambda _request: None,
            # permissions are the kernel's business (default_permissions)
            Opcode.ACCESS: lambda request: request.reply(b""),
            # sync(2) means what fsync in ordered mode means: the order is fixed already
            Opcode.SYNCFS: lambda request: request.reply(b""),
            # these come only where locks are refused (`negotiate.WITHOUT_LOCKS`)
            Opcode.GETLK: lambda request: self._refuse(request, errno.ENOLCK),
            Opcode.SETLK: self._refuse_lock,
            Opcode.SETLKW: self._refuse_lock,
            Opcode.DESTROY: lambda request: request.reply(b""),
        }

    def _handle_without_call(self, request: Request) -> None:
        handler = self._without_call.get(request.opcode)
        if handler is None:
            self._refuse(request, errno.ENOSYS)
            return
        try:
            handler(request)
        except MALFORMED:
            log.exception("malformed request", opcode=request.opcode, bytes=request.length)
        except OSError as error:
            self._reply_refused(request, error)
        except Exception:
            log.exception("bug in a file system call", opcode=request.opcode, ino=request.ino)

    def _refuse_lock(self, request: Request) -> None:
        """To let go of what nobody could lock is no error."""
        try:
            unlocks = is_unlock(request)
        except MALFORMED as error:
            self._malformed(request, error)
            return
        if unlocks:
            request.reply(b"")
        else:
            self._refuse(request, errno.ENOLCK)

    def _interrupt(self, request: Request) -> None:
        self.continuations.interrupt(INTERRUPT_IN.unpack_from(request.body())[0])


_WRITE = int(Opcode.WRITE)
