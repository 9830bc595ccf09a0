"""Files that outgrow RAM while the kernel writes them: what is written so far moves to a staging
file, piece by piece, the rest at close.

Only while the file's writers are held (`hold`), so that the bytes stand still. A piece that is gone
from the tier file is a hole there, and the staging file has it; every piece is in one of the two.
If the application writes to a gone piece again, the kernel fills the rest of its page with zeros:
that is merged where it is exact, and where it cannot be told apart the file fails, loudly. Order:
the row that says "gone" is committed before the hole is punched, so a crash between leaves both.
Threads of the pool copy without the lock. Whatever takes the tier file's inode lock is done while
the file is held, when no application can have that lock, or in the file's own thread
(`Contents.locking`).
"""

from __future__ import annotations

import errno
import itertools
import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

from acpfs.backing.calls import CallPool
from acpfs.backing.filling import write_all
from acpfs.backing.lower import OVERFLOW_PREFIX, Lower
from acpfs.filesystem.admission import Admission
from acpfs.filesystem.content.body import OUTGROWN_PIECE_BYTES, Body, MovingOut, Staging, overflowed
from acpfs.filesystem.content.contents import Contents
from acpfs.filesystem.content.runs import ALL
from acpfs.filesystem.earlier_calls import EarlierCalls
from acpfs.filesystem.hold import Held, Relief
from acpfs.filesystem.nodes import Node
from acpfs.filesystem.steps import outlast, shared, wait
from acpfs.filesystem.upper import UpperLayer
from acpfs.logger import get_logger, shown
from acpfs.ram.state import LateError
from acpfs.ram.tier import punch_hole
from acpfs.types import NO_TIER, Seq
from acpfs.writeback.log.ops import Op
from acpfs.writeback.log.stages import Step

PIECE = OUTGROWN_PIECE_BYTES
KEEP_PIECES = 2
"""At either end so much stays in RAM: headers are rewritten at last, and the end is where the
writer is.
"""
SENT_PIECES = 32
"""Of the rest of a file so much is flushed at a time, and sent again where that fails: 64 MiB."""
RETRY_DELAY_MIN_S = 0.1
RETRY_DELAY_MAX_S = 10.0
RELEASE_WAIT_S = 5.0
STEADY_WAIT_S = 5.0

log = get_logger(__name__)
_ZERO_TO_ONE = bytes([1]) + bytes(255)
_NONZERO_TO_ONE = bytes(1) + b"\1" * 255


class TornError(OSError):
    """A piece was overwritten after it had gone, and what is in it now cannot be told."""


class OutgrownFiles:
    """Moves bytes of held files to the backing directory."""

    def __init__(
        self,
        upper: UpperLayer,
        lower: Lower,
        calls: CallPool,
        contents: Contents,
        admission: Admission,
        earlier: EarlierCalls,
    ) -> None:
        """`earlier`: what killed workers may still write to the same staging files."""
        self._chance = upper.runtime.chance
        self._earlier = earlier
        self._lower = lower
        self._calls = calls
        self._tier = upper.tier
        self._contents = contents
        self._table = upper.table
        self._log = upper.log
        self._state = upper.state
        self._admission = admission
        self._lock = upper.lock
        self._running = 0
        self._moving = {node for node in upper.table if node.body.is_outgrown}
        self.files = 0
        """How many files have taken this way so far."""

    # -- while held

    def relieve(self, held: Held, tell: Callable[[], None]) -> Relief:
        """Begin to move a held file's bytes out, unless there is nothing to be moved, or it may not
        be. One file at a time.

        `tell`: called when that has ended.
        """
        node = held.node
        body = held.node.body
        if (
            self._running
            or not self._earlier.over.done()
            or held.until is None
            or body.is_cold
            or self._calls.clock.now() < held.not_before
        ):
            return Relief.COMES
        if body.failed and body.is_outgrown:
            punch_hole(
                self._contents.opened(body), 0, max(1, node.size)
            )  # its bytes are of no use any more
            return Relief.COMES
        if not self._may(node, body):
            may_soon = body.busy or body.in_flight or self._contents.frozen_bytes(node)
            return Relief.LATE if may_soon else Relief.NONE
        pieces = list(self._movable(body, node.size))
        if not pieces:
            return Relief.NONE
        held.relieving = True
        self._running += 1
        # Who copies the rest of it waits until the thread is back. The hold does not keep him away:
        # it goes on for a moment after the last close, and a piece that goes then, while it is
        # being copied, would be read as a hole.
        done = shared()
        body.busy = done
        if not body.is_outgrown:  # from here on nobody opens it any more
            self.files += 1
            body.move_out(Staging(f"{OVERFLOW_PREFIX}{self._chance.token(8)}"), 0, 0)
            self._moving = {
                node,
                *(
                    other
                    for other in self._moving
                    if other.body.moving_out is not None or self._log.unsealed_of(other.ino)
                ),
            }
            self._table.changed(node)
        self._calls.submit("outgrown", self._run, held, body, pieces).add_done_callback(
            lambda call: self._moved(held, body, call, done, tell)
        )
        return Relief.MOVES

    def _may(self, node: Node, body: Body) -> bool:
        """Whoever else has the file open in the kernel would read holes; versions need their bytes.

        So would who is at work on the tier file without the lock, or fill holes with zeros. Once
        the first piece may be gone, these ask where the bytes are.
        """
        return (
            body.tier != NO_TIER
            and not body.failed
            and body.busy is None
            and (body.is_outgrown or not body.in_flight)
            and node.kernel_handles == node.kernel_writers
            and not node.daemon_mappers
            and not node.kernel_mappers
            and not self._contents.frozen_bytes(node)
        )

    def _movable(self, body: Body, size: int) -> Iterator[int]:
        """Pieces that are in RAM and may go, first ones first."""
        fd = self._contents.opened(body)
        for piece in range(KEEP_PIECES, size // PIECE - KEEP_PIECES):
            if _has_data(fd, piece):
                yield piece

    def _run(self, held: Held, body: Body, pieces: list[int]) -> None:
        """In a thread of the pool."""
        with self._lock:
            moving = body.moving_out
            if moving is None:
                return
            self._state.commit()
            source = os.dup(self._contents.opened(body))
        try:
            target = self._own(body, moving)
            try:
                for piece in pieces:
                    if not self._move(held, body, source, target, piece):
                        return
            finally:
                os.close(target)
        finally:
            os.close(source)

    def _open(self, body: Body, moving: MovingOut) -> int:
        if moving.fd < 0:
            try:
                fd = self._lower.open_staging(body.staging)
            except FileNotFoundError:
                if body.here != ALL:
                    raise
                fd = self._lower.create_staging(body.staging)
            with self._lock:
                if moving.fd < 0:
                    moving.fd = fd
                else:  # a reader and who copies came for it together
                    self._calls.close_later(fd)
        return moving.fd

    def _own(self, body: Body, moving: MovingOut) -> int:
        """A descriptor of the staging file for a thread that writes to it.

        Its file may be let go of meanwhile, and the number of the shared one become another file's.
        """
        # Two of them would each make the file, and the later one remove the other's.
        assert body.busy is not None, body.staging
        self._open(body, moving)
        with self._lock:
            if moving.is_let_go:
                raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
            return os.dup(moving.fd)

    def _move(self, held: Held, body: Body, source: int, target: int, piece: int) -> bool:
        """One piece; False when the hold has ended meanwhile, or, which is seen under the lock, the
        file has its staging file's body.
        """
        while True:
            gaps = held.gaps
            data = os.pread(source, PIECE, piece * PIECE)
            if _is_gone(body, piece):
                _check(data, os.pread(target, PIECE, piece * PIECE))
            write_all(target, data, piece * PIECE)
            if not self._steady(held):
                return False
            with self._lock:
                if held.until is None or held.node.body is not body:
                    return False
                if held.gaps != gaps and os.pread(source, PIECE, piece * PIECE) != data:
                    continue  # somebody wrote to it in between
                self._punch(held.node, body, source, piece, data)
                return True

    def _steady(self, held: Held) -> bool:
        """Wait until the file is held (again); it is not between two slices."""
        held.steady.wait(STEADY_WAIT_S)
        return held.until is not None

    def _punch(self, node: Node, body: Body, fd: int, piece: int, data: bytes) -> None:
        """Under the lock, while the file is held.

        The hole is no change of the file: its times stay.
        """
        assert body.is_outgrown
        before = os.fstat(fd)
        self._contents.kernel.look(node)
        assert isinstance(body.rest, Staging)
        is_new = not _is_gone(body, piece)
        # The row before the hole: after a crash in between the piece is in both places, and read
        # from the staging file. The other way round the row would say that zeros are the file's
        # bytes.
        body.move_out(body.rest, piece * PIECE, (piece + 1) * PIECE)
        self._table.changed(node)
        try:
            self._state.must_commit()
        except LateError:
            if is_new:
                body.fetch(
                    body.tier, piece * PIECE, (piece + 1) * PIECE
                )  # its bytes stay in RAM, and may change there
            raise
        self._tier.look_full()
        punch_hole(fd, piece * PIECE, PIECE)
        if _has_data(fd, piece):
            write_all(
                fd, data, piece * PIECE
            )  # the kernel could not free it, and may have cleared it
        os.utime(fd, ns=(before.st_atime_ns, before.st_mtime_ns))
        st = self._tier.settle_fd(body.tier, fd)
        self._contents.kernel.note(node, (st.st_mtime_ns, st.st_size))
        node.blocks = st.st_blocks

    def _moved(
        self,
        held: Held,
        body: Body,
        call: Future[Any],
        done: Future[None],
        tell: Callable[[], None],
    ) -> None:
        with self._lock, self._state.step():
            self._running -= 1
            held.relieving = False
            error = call.exception() if not call.cancelled() else None
            if isinstance(error, TornError):
                self.fail(held.node, body)
            elif error is not None:
                log.warning(
                    "a file larger than RAM cannot be moved to the backing directory; will be "
                    "tried again",
                    error=str(error),
                )
                held.not_before = self._calls.clock.now() + RETRY_DELAY_MAX_S / 10
        self._is_back(body, done)
        tell()

    def fail(self, node: Node, body: Body) -> None:
        """What the file holds cannot be told any more: it is not published, and its kind goes
        through the daemon from now on.
        """
        body.failed = errno.EIO
        body.failed_at = 0
        self._table.changed(node)
        path = self._table.path(node.ino)
        self._admission.never(path)
        log.error(
            "a file larger than RAM was overwritten where its bytes had left RAM: it fails with "
            "EIO and is not stored",
            path=shown(path),
        )

    # -- reading

    async def closed_in_the_kernel(self, node: Node) -> None:
        """Before the file is opened: the kernel would let the opener map holes, and a mapping that
        is read fills them.

        Raises:
            OSError: EBUSY while it is being written. RELEASE comes a moment after close has
                returned, and is waited for.
        """
        body = node.body
        if body.moving_out is None or not node.kernel_handles:
            return
        if self._log.unsealed_of(node.ino):
            await wait(self._calls.clock.at_most(body.moving_out.released, RELEASE_WAIT_S))
        if node.kernel_handles:
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))

    async def whole(self, node: Node, size: int | None = None) -> None:
        """Before it is changed again; `size`: no more than the first bytes of it are wanted.

        Raises:
            OSError: the backing directory's, where somebody goes on with a half.
        """
        body = node.body
        while node.body is body and body.moving_out is not None:
            if not node.body.interrupted or node.kernel_writers:
                await wait(body.moving_out.finished)
                return
            wanted = node.size if size is None else min(size, node.size)
            if not (wanted or self._log.unsealed_of(node.ino)):
                return  # it is let go of, and the backing directory is not asked
            if body.busy is not None:
                await wait(body.busy)
            elif not self._earlier.over.done():
                await wait(self._earlier.over)
            else:
                await self._take_up(node, body, wanted)

    async def _take_up(self, node: Node, body: Body, size: int) -> None:
        """Its writer was killed, and nobody else will finish it: what there is of it goes to the
        staging file, where it can be changed.

        A place in the order that it was given while it was open stays its own, and unsealed, until
        who goes on with it has closed it. Nothing of it is cut off before it is recorded that it is
        shorter: whoever asked for that may be killed, and so may this worker.
        """
        done = shared()
        body.busy = done
        call = self._calls.submit("take up outgrown", self._complete, body, node.size, size)
        try:
            await wait(call)
            moving = body.moving_out
            if node.body is body and moving is not None and node.body.interrupted:
                moved = overflowed(body.staging, moving.fd).moved_from(body)
                is_longer = size < node.size
                node.size = size
                self._contents.adopt_overflow(node, moved, is_longer=is_longer)
                body.move_out(Staging(body.staging))  # for who has it in hand still
        except TornError:
            self.fail(node, body)
            raise
        finally:
            self._end_with(call, body, done)

    def _end_with(self, call: Future[None], body: Body, done: Future[None]) -> None:
        """The mark is the thread's, which goes on where the caller is killed."""
        if call.done():
            self._is_back(body, done)
        else:
            call.add_done_callback(lambda _call: self._is_back(body, done))

    def _is_back(self, body: Body, done: Future[None]) -> None:
        """The thread that was at work on the body's bytes is."""
        with self._lock:
            body.busy = None
        done.set_result(None)

    async def read(self, body: Body, offset: int, size: int) -> bytes:
        """Bytes of a file of which pieces are gone; shorter at its end."""
        return await wait(self._calls.submit("read outgrown", self._read, body, offset, size))

    def _read(self, body: Body, offset: int, size: int) -> bytes:
        with self._lock:
            if body.failed:
                raise OSError(body.failed, os.strerror(body.failed))
            moving = body.moving_out
            if moving is None:
                raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
            fd = os.dup(self._contents.opened(body))
        try:
            data = bytearray(os.pread(fd, size, offset))
            for piece in range(offset // PIECE, -(-(offset + len(data)) // PIECE)):
                if _is_gone(body, piece) and not _has_data(fd, piece):
                    start = max(offset, piece * PIECE)
                    end = min(offset + len(data), (piece + 1) * PIECE)
                    data[start - offset : end - offset] = os.pread(
                        self._open(body, moving), end - start, start
                    )
            return bytes(data)
        finally:
            os.close(fd)

    # -- the end

    def is_lost(self, node: Node) -> bool:
        """Whether everybody who wrote to the file was told that it failed, and nobody has it open
        any more.
        """
        return (
            bool(node.body.is_outgrown and node.body.failed)
            and not node.handles
            and not self._log.unsealed_of(node.ino)
        )

    def open_before(self, seq: Seq) -> list[Op]:
        """Stores up to `seq`, the oldest first, before which the order stops until somebody closes
        their files, or decides.
        """
        moving = (
            node for node in self._moving if node.open_writers or node.body.interrupted
        )  # or nobody has decided about a half
        ops = [op for node in moving for op in self._log.unsealed_of(node.ino) if op.seq <= seq]
        return sorted(ops, key=lambda op: op.seq)

    async def in_the_way(self, seq: Seq) -> list[Op]:
        """`open_before`, but RELEASE, which comes a moment after close has returned, is waited
        for.
        """
        until = self._calls.clock.now() + RELEASE_WAIT_S
        for op in self.open_before(seq):
            moving = self._table[op.ino].body.moving_out
            if moving is not None:
                # On no thread: as many who wait as there are threads would keep that close from
                # being answered.
                await wait(
                    self._calls.clock.at_most(
                        moving.released, max(0.0, until - self._calls.clock.now())
                    )
                )
        return self.open_before(seq)

    def refuse_to_wait(self, node: Node) -> None:
        """Somebody is about to wait until a file, or what stands behind it, is persisted: what
        outgrew RAM is, after its last close.

        Raises:
            OSError: ENOSPC.
        """
        if self._log.unsealed_of(node.ino):
            path = shown(self._table.path(node.ino))
            log.error(
                "larger than RAM, and open: a durable fsync of it, or of what is behind it, "
                "fails until its last close",
                path=path,
            )
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    async def check(self, node: Node) -> None:
        """Before a close is answered: whether gone pieces were overwritten, and can be told.

        Raises:
            OSError: EIO when not; or the backing directory's.
        """
        body = node.body
        while node.body is body and body.is_outgrown and not body.failed:
            pieces = await self._contents.locking(body, _with_data, _gone(body))
            if not pieces:
                return  # mostly: nobody writes again where bytes are gone
            if body.busy is not None:  # they may be on their way out, and are a hole a moment later
                await wait(body.busy)
                continue
            done = shared()
            body.busy = done
            call = self._calls.submit("check outgrown", self._check_pieces, body, pieces)
            try:
                await wait(call)
            except TornError:
                self.fail(node, body)
            finally:
                self._end_with(call, body, done)
            return

    def _check_pieces(self, body: Body, pieces: list[int]) -> None:
        moving = body.moving_out
        if moving is None:
            return
        with self._lock:
            source = os.dup(self._contents.opened(body))
        try:
            for piece in pieces:
                _check(
                    os.pread(source, PIECE, piece * PIECE),
                    os.pread(self._open(body, moving), PIECE, piece * PIECE),
                )
        finally:
            os.close(source)

    async def finish(self, node: Node) -> None:
        """Nobody writes to the file any more: the rest follows, and the staging file is its
        content. Tried for ever.
        """
        body = node.body
        delay_s = RETRY_DELAY_MIN_S
        moving = body.moving_out
        if moving is None:
            self.seal_taken_up(node)
            return
        if not moving.released.done():
            moving.released.set_result(None)
        elif not moving.finished.done():
            await wait(
                moving.finished
            )  # one at a time: what is still copied must not go on when the file is stored
            return
        await wait(self._earlier.over)
        while node.body is body and self._needed(node) and not body.failed:
            if body.busy is not None:
                await wait(body.busy)  # who took up a half, which it was before somebody decided
                continue
            error = await self._finish_once(node, body)
            if error is not None:
                self._note(node, error)
                await wait(self._calls.clock.after(delay_s))
                delay_s = min(2 * delay_s, RETRY_DELAY_MAX_S)
        for op in self._log.unsealed_of(node.ino) if body.failed else ():
            op.last_error = body.failed
            self._log.park(op)
        if not moving.finished.done():
            moving.finished.set_result(None)

    async def _finish_once(self, node: Node, body: Body) -> OSError | None:
        """What the backing directory said, where it has not taken all."""
        done = shared()
        body.busy = done
        try:
            await outlast(
                self._calls.submit("finish outgrown", self._complete, body, node.size, node.size)
            )
        except TornError:
            self.fail(node, body)
        except OSError as error:
            return error
        else:
            self._sealed(node, body)
        finally:
            self._is_back(body, done)
        return None

    def seal_taken_up(self, node: Node) -> None:
        """Who went on with it, be it a half, has closed it: now its place in the order has its
        bytes.

        Who only keeps it open does not hold that up. No close fixes anything of a file without a
        name; there it is the last one's.
        """
        body = node.body
        ops = self._log.unsealed_of(node.ino) if body.is_overflowed else []
        is_fixed = not body.modified or not (node.names or node.open_writers)
        if ops and is_fixed and not body.failed:
            body.sealed = True
            self._table.changed(node)
            self._seal(node, ops)

    def _needed(self, node: Node) -> bool:
        return bool(node.names or self._log.unsealed_of(node.ino))

    def _note(self, node: Node, error: OSError) -> None:
        for op in self._log.unsealed_of(node.ino):
            op.tries = op.tries + 1
            op.last_error = error.errno
            op.last_detail = error.strerror or str(error)
            self._log.save(op)

    def _complete(self, body: Body, size: int, wanted: int) -> None:
        """Nobody writes any more, and so nobody holds up who looks for data.

        What is sent stays sent: a storage that is full is not sent all of it again at each try.
        `size`: the file's; `wanted`: so many first bytes are all that anybody will want.
        """
        moving = body.moving_out
        if moving is None:
            return
        with self._lock:
            source = os.dup(self._contents.opened(body))
        try:
            for piece in _with_data(source, _gone(body)) if wanted else ():
                # else nothing of it is wanted, whatever it is
                if piece not in moving.checked:
                    self._check_pieces(body, [piece])
                    moving.checked.add(piece)
            target = self._own(body, moving)
            try:
                self._send(moving, source, target, -(-wanted // PIECE))
                os.ftruncate(target, size)
            finally:
                os.close(target)
        finally:
            os.close(source)

    def _send(self, moving: MovingOut, source: int, target: int, count: int) -> None:
        """What is here of so many first pieces, and was not sent before."""
        pieces = (
            piece for piece in range(count) if piece not in moving.sent and _has_data(source, piece)
        )
        while batch := list(itertools.islice(pieces, self._at_once(moving))):
            moving.sends_failed = min(moving.sends_failed + 1, SENT_PIECES.bit_length())
            for piece in batch:
                write_all(target, os.pread(source, PIECE, piece * PIECE), piece * PIECE)
            # Before anything fails: a storage that has no room may say so of what it took
            # earlier, and whoever asks after that is not told again.
            os.fdatasync(target)
            moving.sent.update(batch)
            moving.sends_failed = max(0, moving.sends_failed - 2)

    @staticmethod
    def _at_once(moving: MovingOut) -> int:
        """Half as many after each failure but the first: where one call in ten fails, 32 pieces
        hardly ever come through together, and would be sent again for ever.
        """
        return SENT_PIECES >> max(0, moving.sends_failed - 1)

    def _sealed(self, node: Node, body: Body) -> None:
        if body.moving_out is None or node.body is not body:
            return
        # What no close has fixed is half of what somebody in the daemon's lane is at: his close
        # seals it (`seal_taken_up`).
        is_at_it = body.modified and node.names and node.open_writers
        ops = [] if is_at_it else self._log.unsealed_of(node.ino)
        moved = overflowed(body.staging, body.moving_out.fd, sealed=bool(ops)).moved_from(body)
        self._contents.adopt_overflow(node, moved)
        body.move_out(Staging(body.staging))  # for who has it in hand still
        self._seal(node, ops)

    def _seal(self, node: Node, ops: list[Op]) -> None:
        for op in ops:
            assert op.version is not None
            op.version.size = node.size
            op.take(Step.SEALED)
            self._log.save_version(op.version)
            self._log.on_append(op)


def _is_gone(body: Body, piece: int) -> bool:
    """Whether the staging file has it; in the tier file it is a hole, or what was written to it
    since.
    """
    return not body.here.covers(piece * PIECE, (piece + 1) * PIECE)


def _gone(body: Body) -> list[int]:
    """Pieces that the staging file has."""
    return [
        piece for start, end in body.here.gaps() for piece in range(start // PIECE, end // PIECE)
    ]


def _with_data(fd: int, pieces: list[int]) -> list[int]:
    """Of these, what is in the file."""
    return [piece for piece in pieces if _has_data(fd, piece)]


def _has_data(fd: int, piece: int) -> bool:
    """Whether a piece, or a part of it, is in the file."""
    try:
        return os.lseek(fd, piece * PIECE, os.SEEK_DATA) < (piece + 1) * PIECE
    except OSError as error:
        if error.errno != errno.ENXIO:
            raise
        return False


def _check(new: bytes, old: bytes) -> None:
    """Where `new` has zeros, they may be the kernel's filling: it is what the file holds now unless
    `old` has something there.
    """
    if new == old:
        return
    zeros = new.translate(_ZERO_TO_ONE)
    somethings = old[: len(new)].translate(_NONZERO_TO_ONE)
    if int.from_bytes(zeros, "little") & int.from_bytes(
        somethings.ljust(len(zeros), b"\0"), "little"
    ):
        raise TornError(errno.EIO, "overwritten after it had left RAM")
