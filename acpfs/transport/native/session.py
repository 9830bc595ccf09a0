"""A FUSE session: from the descriptor to threads that serve it.

Puts device, negotiation, dispatch and readers together, either anew (INIT) or over a session that
another worker has left (no INIT: the kernel sends it once; what was negotiated then is handed in).
Does not mount. Start, stop and notifications from any thread that does not serve.
"""

from __future__ import annotations

import errno
import os
import struct
from collections.abc import Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from functools import partial

from acpfs.config import LockMode
from acpfs.filesystem.filesystem import FileSystem
from acpfs.logger import get_logger
from acpfs.ram.kept import Kept
from acpfs.transport.invalidations import Invalidations
from acpfs.transport.native.device import Device, clones
from acpfs.transport.native.dispatch import Dispatch
from acpfs.transport.native.holding import Holding
from acpfs.transport.native.hung_requests import Watch
from acpfs.transport.native.kernel_lanes import KernelLanes
from acpfs.transport.native.negotiate import (
    ALL_FEATURES,
    MAX_WRITE_BYTES_MAX,
    WITH_ACLS,
    WITHOUT_LOCKS,
    Negotiated,
    ProtocolError,
    answer_init,
    max_pages_limit,
)
from acpfs.transport.native.operations import Calls
from acpfs.transport.native.protocol import InitFlag, Opcode
from acpfs.transport.native.reader import Readers, reader_count
from acpfs.transport.native.references import References
from acpfs.transport.native.replies import Replies
from acpfs.transport.native.request import Request, RequestBuffers
from acpfs.transport.native.undo import Undo
from acpfs.transport.timeouts import RequestTimeouts
from acpfs.types import Ino

log = get_logger(__name__)


def wanted_for(fs: FileSystem) -> int:
    """Features that a mount wants besides what all do."""
    wanted = WITH_ACLS if fs.has_acls else InitFlag(0)
    if fs.settings.locks is LockMode.REFUSE:
        wanted |= WITHOUT_LOCKS
    if fs.settings.idmap:
        wanted |= InitFlag.ALLOW_IDMAP
    return int(wanted)


def negotiate(fd: int, feature_mask: int = ALL_FEATURES, *, also: int = 0) -> Negotiated:
    """Wait for INIT, the kernel's first request, and answer it. Blocks until the mount is made.

    `also`: features that this mount wants besides what all do.

    Raises:
        ProtocolError: the kernel's protocol is too old, or the first request is something else.
        OSError: the mount ended before.
    """
    buffers = RequestBuffers(MAX_WRITE_BYTES_MAX)
    while True:
        try:
            request = Request(fd, buffers, os.readv(fd, buffers.vector))
        except InterruptedError:
            continue
        if request.opcode != Opcode.INIT:
            message = f"the kernel began with opcode {request.opcode}, not with INIT"
            raise ProtocolError(message)
        try:
            answer = answer_init(
                request.body(),
                feature_mask,
                max_pages_limit(),
                RequestTimeouts.read().to_ask_for_s,
                also=also,
            )
        except (ProtocolError, struct.error):
            request.refuse(errno.EPROTO)
            raise
        request.reply(answer.body)
        if answer.negotiated is not None:
            return answer.negotiated


class Session:
    """A file system served over one /dev/fuse session."""

    def __init__(
        self,
        fs: FileSystem,
        kept: Kept,
        fds: Sequence[int],
        negotiated: Negotiated,
        *,
        readers: int = 0,
        holding: Holding | None = None,
    ) -> None:
        """`fds`: the session's descriptor and clones, owned from now on; readers share them.

        `readers`: threads, 0 for as many as the machine is worth. `holding`: where its processes
        outlive this one; not started.

        What was read through a clone and not answered fails when the last copy of the clone is
        closed. Where the kernel resends, copies are kept, and the next worker answers. Where it
        does not, nobody ever would: there all reading is done through clones of this process alone,
        so that its end is the end of its calls.
        """
        count = readers or reader_count()
        own = [] if negotiated.has(InitFlag.HAS_RESEND) else clones(fds[0], count + 1)[1:]
        self.device = Device([*fds, *own])
        self.negotiated = negotiated
        self.ended: Future[None] = Future()
        """Done when the kernel has ended the mount; fails where a reader ended for want of a
        resource of the machine.
        """
        lanes = KernelLanes(fs, kept, self.device, negotiated)
        references = References(kept)
        self._holding = holding or Holding(fs)
        self._invalidations = Invalidations(fs, self.device.notify_inval_inode, self._tell_gone)
        undo = Undo(fs, lanes, references)
        calls = Calls(fs, negotiated, lanes, self._holding)
        replies = Replies(lanes, undo, references, fs.settings.attr_timeout_s)
        self._dispatch = Dispatch(fs, kept, calls, replies, undo)
        shared = own or fds
        of_readers = [shared[n % len(shared)] for n in range(count)]
        self._lock = fs.lock
        self._watch: Watch | None = None
        self._readers = Readers(
            self._dispatch,
            of_readers,
            negotiated.max_write_bytes,
            partial(_settle, self.ended),
            partial(_settle, self.ended),
        )

    @classmethod
    def begin(
        cls,
        fs: FileSystem,
        kept: Kept,
        fds: Sequence[int],
        *,
        feature_mask: int = ALL_FEATURES,
        readers: int = 0,
        holding: Holding | None = None,
    ) -> Session:
        """A session over a descriptor that was just given to mount.

        Blocks until the kernel has sent INIT; raises as `negotiate`.

        Raises:
            ProtocolError: also where the kernel has no idmapped mounts of FUSE, and they are to be.
        """
        negotiated = negotiate(fds[0], feature_mask, also=wanted_for(fs))
        if fs.settings.idmap and not negotiated.has(InitFlag.ALLOW_IDMAP):
            raise ProtocolError("idmap = true needs a kernel of Linux 6.12 or newer")
        return cls(fs, kept, fds, negotiated, readers=readers, holding=holding)

    @classmethod
    def take_over(
        cls,
        fs: FileSystem,
        kept: Kept,
        fds: Sequence[int],
        negotiated: Negotiated,
        *,
        readers: int = 0,
        holding: Holding | None = None,
    ) -> Session:
        """A session that another worker has left, over descriptors that were kept; asks the kernel
        again for what was under way.
        """
        session = cls(fs, kept, fds, negotiated, readers=readers, holding=holding)
        # the kernel asks for what INIT said, which comes once: another setting counts from the next
        # mount
        if fs.settings.locks is LockMode.REFUSE and not negotiated.has(InitFlag.POSIX_LOCKS):
            log.warning("this mount began with locks = local, and grants locks until it ends")
        if fs.settings.idmap and not negotiated.has(InitFlag.ALLOW_IDMAP):
            log.warning("this mount began with idmap = false, and cannot be idmapped until it ends")
        if negotiated.has(InitFlag.HAS_RESEND):
            session.device.resend()
        else:
            log.warning(
                "the kernel cannot resend requests: calls that were under way when the last "
                "worker died have failed"
            )
        return session

    def start(self) -> None:
        """Begin to serve."""
        self._dispatch.continuations.start()
        if self.negotiated.has(InitFlag.PASSTHROUGH):
            self._holding.start()
        self._readers.start()
        self._invalidations.start()

    def _tell_gone(self, parent: Ino, name: bytes, ino: Ino) -> None:
        self.device.notify_delete(parent, ino, name)

    def waiting_calls(self) -> int:
        """Calls that wait for the backing directory, for room, or to be persisted."""
        return len(self._dispatch.continuations) + len(self._readers.held)

    def waiting(self) -> list[tuple[str, Ino, int, float]]:
        """(call, inode, process, monotonic time since when) of the calls that wait."""
        waiting = self._dispatch.continuations.waiting()
        return [
            (
                Opcode(one.request.opcode).name.lower(),
                Ino(one.request.ino),
                one.request.pid,
                one.since_s,
            )
            for one in waiting
        ] + self._readers.waiting()

    def current(self) -> list[int]:
        """Per thread: the number of the request that it serves, 0 when it waits for one."""
        return [*self._readers.current, self._dispatch.continuations.current]

    def _seats(self) -> list[tuple[int, int]]:
        """Threads that serve requests, and the request of each."""
        continuations = self._dispatch.continuations
        return [
            *zip(self._readers.identities, self._readers.current, strict=True),
            (continuations.identity, continuations.current),
            *list(self._dispatch.apart.items()),
        ]

    def watch(self, hung_after_s: float) -> None:
        """From now on the next worker is told which requests hung this one."""
        self._watch = Watch(self._dispatch.hung, self._seats, self._lock, hung_after_s)
        self._watch.start()

    def close(self, timeout_s: float) -> bool:
        """After the mount has ended: wait for the threads, and let go of the descriptors.

        Returns False, and keeps the descriptors, when threads still serve: a lazily detached mount
        lives as long as a file is open in it.
        """
        if not self._readers.join(timeout_s):
            return False
        self._holding.stop()
        self._invalidations.stop(timeout_s)
        self._dispatch.continuations.stop()
        if self._watch is not None:
            self._watch.stop()
        self.device.close()
        return True


def _settle(ended: Future[None], error: BaseException | None = None) -> None:
    """The first reason counts."""
    with suppress(InvalidStateError):
        if error is None:
            ended.set_result(None)
        else:
            ended.set_exception(error)
