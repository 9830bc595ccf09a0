"""Cold files come to RAM when they are read: which ones, when, and what becomes of them.

Owns the files that are on their way (`fill.Fill`), the evidence that one is really read, and what
was found damaged. Policy only: the bytes are moved by the fill, readers in the passthrough lane
read the backing directory's file meanwhile, natively. Nothing dirty and nothing that is kept ever
leaves RAM for a cold file; what is on its way goes at once when somebody needs the room. Used under
the file system's lock; one thread of its own looks what the page cache has of files that are read
in passthrough.
"""

from __future__ import annotations

import contextlib
import errno
import os
from concurrent.futures import Future
from functools import partial

from acpfs.backing.calls import CallPool
from acpfs.backing.lower import Lower, LowerStat
from acpfs.backing.progress import Progress
from acpfs.config import Settings, WarmReads
from acpfs.filesystem.content.contents import Contents
from acpfs.filesystem.content.fill import PIECE_BYTES, Coming, Fill, Fills, FillSource
from acpfs.filesystem.content.from_members import FromMembers, Members
from acpfs.filesystem.content.whole_reads import DamagedFileError
from acpfs.filesystem.lowerview import LowerView
from acpfs.filesystem.nodes import Identity, Node
from acpfs.filesystem.read_handle import ReadHandle
from acpfs.filesystem.steps import unlocked
from acpfs.filesystem.upper import UpperLayer
from acpfs.types import Ino

SMALL_BYTES = PIECE_BYTES
"""Up to here a file comes whole, and is verified, before its open is answered: it takes the one
read that it takes anyway.
"""
PEEK_BYTES = 64 << 10
"""Smaller requests read for themselves: a look at a header brings nothing to RAM."""
EVIDENCE_BYTES = 8 << 20
EVIDENCE_SHARE = 16
"""A file is read ahead when 8 MiB of it, or a sixteenth, have been asked for: what is read in vain
is at most so many times that.
"""
LOOK_S = 0.05
LOOK_S_MAX = 2.0
"""Between two looks at files that the kernel reads by itself; ever longer while nothing happens."""


class Warming:
    """See above."""

    def __init__(
        self,
        settings: Settings,
        upper: UpperLayer,
        contents: Contents,
        view: LowerView,
        requests: CallPool,
        ahead: CallPool,
        fills: Fills,
        members: Members,
    ) -> None:
        """`requests`, `ahead`: as `Fill` has them."""
        self._members = members
        self._settings = settings
        self._table = upper.table
        self._contents = contents
        self._view = view
        self._tier = upper.tier
        self._requests = requests
        self._ahead = ahead
        self._lock = upper.lock
        self._step = upper.state.step
        self._fills = fills
        self.counts = fills.counts
        self._watched: dict[Ino, tuple[Node, int]] = {}
        self._damaged: dict[Ino, Identity] = {}
        self._suspected: dict[Ino, Coming] = {}
        """Came otherwise than it was stored, and is read once more: nothing of it is served until
        it is known which was right.
        """
        self._threads = upper.runtime.threads
        self._bell = self._threads.event()
        self._looking = False
        self._read_together = Progress()

    @property
    def _lower(self) -> Lower:
        return self._view.lower

    def _on_its_way(self, node: Node) -> Coming | None:
        """What is on its way for a node as it is now."""
        coming = node.body.filling
        if coming is not None and coming.identity != node.identity:
            self._fills.give_up(coming)
            return None
        return coming

    # -- whether

    def _may_come(self, node: Node) -> bool:
        return (
            self._settings.warm_reads is not WarmReads.OFF
            and node.body.is_cold
            and node.size > 0
            and not node.is_removed
            and node.identity is not None
            and not self._view.held(node)
            and self._has_room(node.size)
        )

    def _has_room(self, size: int) -> bool:
        if self._tier.waiting():
            return False
        return self._tier.free_bytes() >= size or (
            self._settings.warm_reads is WarmReads.ON and self._made_room(size)
        )

    def _made_room(self, size: int) -> bool:
        """Let clean files go that no checkpoint or pin keeps, for one that is read now; none where
        that would not be enough.
        """
        kept = self._contents.retention.statistics() if size > SMALL_BYTES else None
        if (
            kept is not None
            and self._tier.free_bytes() + kept.clean_bytes - kept.retained_bytes < size
        ):
            return False
        self._contents.retention.let_leave(size - self._tier.free_bytes(), also_retained=False)
        return self._tier.free_bytes() >= size

    def through_daemon(self, node: Node) -> str:
        """Why readers share a cold file through the daemon; "": they do not.

        Where the kernel keeps nothing for them, each would read for itself; where other members may
        have it, the kernel would ask the storage alone.
        """
        if not self._lower.features.page_cache:
            why = "comes to RAM, and the kernel caches nothing of the backing directory"
        elif node.size > SMALL_BYTES and self._members.are_there():
            why = "comes to RAM, from other members where they have it"
        else:
            return ""
        return why if node.body.filling is not None or self._may_come(node) else ""

    # -- opening and reading

    async def before_reading(self, node: Node) -> None:
        """A cold file is about to be opened for reading: small ones come whole, and so do all with
        `verify_reads`.

        Raises:
            OSError: EIO, it is known not to be what was stored.
        """
        if self._suspected:
            await self.settled(node)
        if self._damaged:
            self.check(node)
        if not node.body.is_cold or not (self._settings.verify_reads or node.size <= SMALL_BYTES):
            return
        if (
            not node.in_kernel
            and node.body.filling is None
            and node.size <= SMALL_BYTES
            and self._may_come(node)
        ):
            await self._bring_small(node)
        elif self._settings.verify_reads:
            await self._verify(node)
        if self._damaged:
            self.check(node)

    async def _bring_small(self, node: Node) -> None:
        """In one call on the backing directory, the one that the open takes anyway."""
        size = node.size
        identity = node.identity
        path = self._view.path(node)
        if path is None or identity is None or not self._tier.reserve_nowait(size):
            return
        try:
            tier_id, st = await self._view.read_up(path, size)
        except DamagedFileError:
            self._damaged[node.ino] = identity
            return
        except OSError:
            return  # it is read as if nothing had been tried, and whoever reads it is told
        finally:
            self._tier.release(size)
        if (
            not node.body.is_cold
            or not (st.identity() == node.identity == identity)
            or self._view.held(node)
        ):
            self._tier.remove(tier_id)
        else:
            self._contents.adopt(node, tier_id)
            self._contents.stored(node)
            self._came(size)

    async def _verify(self, node: Node) -> None:
        """With `verify_reads`: have all of it compared before the first byte is served; without
        room for it in RAM it is read twice.
        """
        coming = self._on_its_way(node)
        if coming is None and self._may_come(node) and not node.in_kernel:
            coming = await self._begin(node)
        if coming is not None:
            coming.fill.lead()
            await self._outcome(coming)
        if node.body.is_cold and node.sound != node.identity and node.ino not in self._damaged:
            await self._verify_in_place(node)

    async def _verify_in_place(self, node: Node) -> None:
        identity = node.identity
        path = self._view.path(node)
        if path is None or identity is None:
            return
        progress = Progress(self._read_together)
        try:
            verified = self._ahead.submit("verify", self._view.whole.verify, path, progress)
            st = await self._view.questions.answer("verify", verified, progress)
        except DamagedFileError:
            self._damaged[node.ino] = identity
        else:
            if st.identity() == identity:
                node.sound = identity
        finally:
            progress.give_up()

    async def _outcome(self, coming: Coming) -> str:
        """How it ends, however long that takes.

        Raises:
            OSError: EIO: nothing of it comes any more.
        """
        return await self._view.questions.answer(
            "bring to RAM", coming.settled, coming.fill.progress
        )

    async def settled(self, node: Node) -> None:
        """Wait until it is known of a file that came wrong whether it is damaged.

        Raises:
            OSError: EIO: nothing of it comes any more.
        """
        coming = self._suspected.get(node.ino)
        if coming is not None and coming.identity == node.identity:
            await self._outcome(coming)

    def absolve(self, node: Node) -> None:
        """Somebody has verified it. Under the lock."""
        self._damaged.pop(node.ino, None)

    def check(self, node: Node) -> None:
        """Refuse a file that was found damaged, as long as it is the same.

        Raises:
            OSError: EIO.
        """
        if node.body.is_cold and node.ino in self._damaged:
            if self._damaged[node.ino] == node.identity:
                raise OSError(
                    errno.EIO,
                    "the backing directory's copy is not what was stored, and there is no other",
                )
            del self._damaged[node.ino]

    async def read(self, reader: ReadHandle, offset: int, size: int) -> bytes | None:
        """Bytes of a file that is on its way; None: read them as if it were not.

        Raises:
            OSError: EIO, the file is damaged, or the backing directory does not answer.
        """
        node = reader.node
        await self.settled(node)
        self.check(node)
        coming = self._on_its_way(node)
        if coming is None:
            if size < min(PEEK_BYTES, node.size) or not self._may_come(node):
                return None
            await self._view.reads.ready_again(reader)
            coming = self._begin_from(node, reader.lower_fd)
        if coming is None or not coming.fill.use():
            return None
        try:
            if reader.lower_fd < 0:
                # as it is open here, whatever happens to its name
                reader.lower_fd = coming.fill.source_copy()
                reader.lower_ino = node.lower_ino
            return b"" if offset >= node.size else await self._read(coming, offset, size)
        finally:
            coming.fill.unuse()

    async def _read(self, coming: Coming, offset: int, size: int) -> bytes | None:
        fill = coming.fill
        if not fill.has(offset, size):
            if fill.ended or (size < min(PEEK_BYTES, fill.size) and fill.is_missing(offset, size)):
                return None
            for piece in fill.ask(offset, size):
                await self._view.questions.answer("read", piece)
            if fill.asked_bytes >= evidence_bytes(fill.size):
                fill.lead()
        return await unlocked(fill.read, offset, size) if fill.has(offset, size) else None

    async def bring(self, node: Node) -> tuple[str, str]:
        """Bring a file by itself; how it ended, as `Coming.settled` has it, or `in RAM`, `no room`,
        and its checksum if it was read.

        The caller keeps the node open.

        Raises:
            OSError: the backing directory refused it, or does not answer.
        """
        if not node.body.is_cold or node.size == 0:
            return "in RAM", ""
        coming = self._on_its_way(node)
        if coming is None and not (
            self._tier.free_bytes() >= node.size or self._made_room(node.size)
        ):
            return "no room", ""
        coming = coming or await self._begin(node)
        if coming is None:
            return ("in RAM" if node.body.filling is not None else "no room"), ""
        coming.asked_for = True
        coming.fill.lead()
        outcome = await self._outcome(coming)
        return outcome, coming.fill.done.result() if coming.fill.done.exception() is None else ""

    def there_bytes(self, node: Node) -> int:
        """How much of a file has come so far."""
        coming = node.body.filling
        return (
            node.size if not node.body.is_cold else 0 if coming is None else coming.fill.there_bytes
        )

    # -- beginning

    async def _begin(self, node: Node) -> Coming | None:
        fd = await self._view.open_lower(node)
        cached = self._lower.cached_bytes(fd)
        direct = node.size > SMALL_BYTES and cached is not None and cached < node.size // 2
        if direct:
            self._lower.expect_bulk(fd)
        try:
            return self._begin_from(node, fd, direct=direct)
        finally:
            self._view.close_later(fd)

    def _begin_from(self, node: Node, fd: int, *, direct: bool = False) -> Coming | None:
        """Reserve, and make the tier file; from then on pieces can be asked for.

        Keeps the descriptor's file, not the descriptor.
        """
        coming = self._on_its_way(node)
        if coming is not None:
            return coming
        if not node.body.is_cold or node.identity is None or self._tier.free_bytes() < node.size:
            return None  # the room that there was has gone: what is kept does not leave for this
        if not self._tier.reserve_nowait(node.size):
            return None
        source = -1
        made = None
        try:
            source = os.dup(fd)
            made = self._tier.create_open()
            fill = self._fill(source, made[1], node, direct=direct)
        except (
            OSError
        ):  # no descriptors left, or no address space: it is read as if nothing had been tried
            self._tier.release(node.size)
            if made is not None:
                os.close(made[1])
                self._tier.discard(made[0])
            if source >= 0:
                self._view.close_later(source)
            return None
        coming = Coming(fill, made[0], node.identity)
        self._contents.comes(node, coming)
        fill.done.add_done_callback(lambda done: self._ended(node, coming, done))
        return coming

    def _fill(self, source: int, target: int, node: Node, *, direct: bool) -> Fill:
        os.ftruncate(target, node.size)
        identity = node.identity
        progress = Progress(self._read_together)
        return Fill(
            FillSource(self._lower, source, direct),
            target,
            node.size,
            requests=self._requests,
            ahead=self._ahead,
            progress=progress,
            wanted=lambda: node.body.is_cold and node.identity == identity and not node.is_removed,
            members=self._from_members(node),
        )

    def _from_members(self, node: Node) -> FromMembers | None:
        """Small files take one read, and no questions."""
        if node.size <= SMALL_BYTES or node.identity is None:
            return None
        return self._members.of(self._view.path(node), node.identity)

    # -- files that the kernel reads by itself

    def watch(self, reader: ReadHandle) -> None:
        """The kernel reads the backing directory's file for an open: look from time to time how
        much it has read.
        """
        node = reader.node
        if node.ino in self._watched or node.body.filling is not None or not self._may_come(node):
            return
        self._watched[node.ino] = (node, os.dup(reader.lower_fd))
        self._bell.set()
        if not self._looking:
            self._looking = True
            self._threads.start("warming", self._look_around)

    def _look_around(self) -> None:
        pause_s = LOOK_S
        known = -1
        while True:
            self._bell.wait(pause_s)
            self._bell.clear()
            with self._lock:
                looks = [(node, os.dup(fd)) for node, fd in self._watched.values()]
                self._looking = bool(looks)
            if not looks:
                return
            seen = 0
            for node, fd in looks:
                seen += self._look(node, fd)
                os.close(fd)
            pause_s = LOOK_S if seen != known else min(2 * pause_s, LOOK_S_MAX)
            known = seen

    def _look(self, node: Node, fd: int) -> int:
        """Begin where enough of the file is in the page cache; the look itself without the lock: it
        takes milliseconds where all is.
        """
        cached = self._lower.cached_bytes(fd) or 0
        if cached >= evidence_bytes(node.size):
            with self._lock, self._step():
                self._enough(node, fd)
        return cached

    def _enough(self, node: Node, fd: int) -> None:
        if node.ino in self._watched and self._may_come(node):
            coming = self._begin_from(node, fd)
            if coming is not None:
                coming.fill.lead()
        self._unwatch(node.ino)

    def _unwatch(self, ino: Ino) -> None:
        _node, fd = self._watched.pop(ino, (None, -1))
        if fd >= 0:
            self._view.close_later(fd)

    # -- closing

    def released(self, node: Node) -> None:
        """A handle left its lane: what the kernel has read by then counts, and what waited for the
        kernel to let go becomes the content.
        """
        if node.ino in self._watched and not node.kernel_handles:
            _node, fd = self._watched[node.ino]
            if (self._lower.cached_bytes(fd) or 0) >= evidence_bytes(node.size):
                self._enough(node, fd)
            self._unwatch(node.ino)
        coming = node.body.filling
        if coming is not None and coming.sound and not node.in_kernel:
            self._adopt(node, coming)

    def closed(self, node: Node) -> None:
        """The last handle is gone: a file of which only a part was asked for does not come."""
        coming = node.body.filling
        if coming is None or self._suspected.get(node.ino) is coming:
            return
        if not (coming.fill.led or coming.asked_for):
            self._fills.give_up(coming)

    # -- the end

    def _ended(self, node: Node, coming: Coming, done: Future[str]) -> None:
        """In the thread that brought the last piece, or under the lock where it was given up."""
        outcome: str | None = "given up"
        if not coming.gone:
            with self._lock, self._step():
                if not coming.gone:
                    outcome = self._judge(node, coming, done)
        if outcome is not None:
            coming.settled.set_result(outcome)

    def _judge(self, node: Node, coming: Coming, done: Future[str]) -> str | None:
        """How it ended; None: it is read once more."""
        fill = coming.fill
        error = done.exception()
        st = fill.after
        if error is not None or st is None or fill.before is None:
            self._fills.give_up(coming)
            gone = isinstance(error, OSError) and error.errno in (errno.ESTALE, errno.ECANCELED)
            return "changed" if gone else f"failed: {getattr(error, 'strerror', error)}"
        if self._table.get(node.ino) is not node or not (
            fill.before.identity() == st.identity() == coming.identity == node.identity
        ):
            node.checked_at = 0.0
            node.checked = 0
            self._fills.give_up(coming)
            return "changed"
        verified, differs = self._view.whole.compared(st, fill.note, done.result())
        if differs is not None:
            return self._suspect(node, coming)
        self.counts.warmed_verified += verified
        coming.sound = True
        if not node.in_kernel:
            self._adopt(node, coming)
        return "verified" if verified else "unknown"

    def _suspect(self, node: Node, coming: Coming) -> str | None:
        """It came otherwise than it was stored.

        Nothing of it counts; whether the file is damaged another reading says.
        """
        path = self._view.path(node)
        node.keep_cache = False
        if node.lookups:
            self._view.notices.changed(node.ino)  # pages that the kernel has of it go
        if path is None:
            self._fills.give_up(coming)
            return "changed"
        self._suspected[node.ino] = coming
        again = self._ahead.submit("verify", self._view.whole.confirm, path, coming.fill.progress)
        again.add_done_callback(partial(self._confirmed, node, coming))
        return None

    def _confirmed(self, node: Node, coming: Coming, again: Future[LowerStat]) -> None:
        """In the thread that has read it once more."""
        error = again.exception()
        with self._lock, self._step():
            if self._suspected.get(node.ino) is coming:
                del self._suspected[node.ino]
            if isinstance(error, DamagedFileError):
                outcome = "mismatch"
                self._damaged[node.ino] = coming.identity
            elif error is not None:
                outcome = f"failed: {getattr(error, 'strerror', error)}"
            else:
                outcome = (
                    "failed: it came otherwise than it was stored, and was right when it was "
                    "read once more"
                )
                if again.result().identity() == coming.identity == node.identity:
                    node.sound = coming.identity
            if not coming.gone:
                self._fills.give_up(coming)
        coming.settled.set_result(outcome)

    def _adopt(self, node: Node, coming: Coming) -> None:
        """Make it the node's content, if that is still what the backing directory has."""
        if coming.identity != node.identity or self._view.held(node):
            self._fills.give_up(coming)
            return
        self._fills.leave(coming)
        self._tier.settle(coming.tier_id)
        self._tier.release(coming.fill.size)
        self._contents.adopt(node, coming.tier_id)
        self._contents.stored(node)
        self._came(node.size)

    def _came(self, size: int) -> None:
        self.counts.warmed_files += 1
        self.counts.warmed_bytes += size

    async def whole(self, node: Node) -> None:
        """The content is about to be brought up for a change: if it is on its way, have that done
        first.
        """
        coming = self._on_its_way(node)
        if coming is not None:
            coming.fill.lead()
            with contextlib.suppress(OSError):
                await self._outcome(coming)
            if node.body.filling is coming and coming.sound:
                self._adopt(node, coming)


def evidence_bytes(size: int) -> int:
    """How much of a file must have been read before the rest is."""
    return max(1, min(max(EVIDENCE_BYTES, size // EVIDENCE_SHARE), size // 4))
