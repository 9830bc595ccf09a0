"""Files that do not fit into the RAM tier: written straight into a staging file on the backing
directory, at its speed.

The same staging file is renamed into place when the file's turn comes, so nothing is written twice
and order and checksums are kept. Every system call on such a file may hang with the backing
directory, and is never made under the lock: a write in the caller's thread where that is spare, all
else on a thread of the pool.
"""

from __future__ import annotations

import errno
import math
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from threading import RLock
from typing import Any, TypeVar

from acpfs.backing.calls import CallPool
from acpfs.backing.filling import write_all
from acpfs.backing.lower import OVERFLOW_PREFIX, Lower
from acpfs.backing.progress import Progress
from acpfs.filesystem.content.body import Body, overflowed
from acpfs.filesystem.earlier_calls import EarlierCalls
from acpfs.filesystem.spare_threads import SpareThreads
from acpfs.filesystem.steps import broken_off, outlast, shared, unlocked, wait
from acpfs.ram.tier import Tier, fallocate
from acpfs.runtime.chance import Chance
from acpfs.types import TierId

CHUNK_BYTES = 8 << 20
LOOK_AGAIN_S = 0.001
"""Whether writes that are under way have ended, before the bytes move or are copied elsewhere."""
T = TypeVar("T")


class Overflow:
    """Makes and uses contents whose bytes are in a staging file."""

    def __init__(
        self,
        lower: Lower,
        calls: CallPool,
        tier: Tier,
        lock: RLock,
        patience_s: float,
        earlier: EarlierCalls,
        chance: Chance,
        spare: SpareThreads,
    ) -> None:
        """`calls`: threads for calls on the backing directory; `lock`: the file system's;
        `patience_s`: how long a read waits for it.

        `earlier`: what killed workers may still write. `spare`: callers' threads that may wait for
        the storage.

        A write waits as long as it takes, as it would without acpfs: one that was given up could
        still arrive, over newer bytes.
        """
        self._chance = chance
        self._spare = spare
        self._patience_s = patience_s
        self._lower = lower
        self._calls = calls
        self._tier = tier
        self._lock = lock
        self.being_made: set[str] = set()
        """Staging files that no content names yet."""
        self._writing: Counter[str] = Counter()
        self._begun: Counter[str] = Counter()
        """Of these, all that do not wait for a truncation."""
        self._truncating: dict[str, Future[None]] = {}
        self._earlier = earlier
        self._inherited: dict[str, Future[None] | None] = {}
        """Staging files that an earlier worker wrote, until they are cut to the length that is
        known of them; the future is of that.
        """
        self._opening: dict[Body, Future[None]] = {}
        """Of what an earlier worker made: one open for all who come meanwhile."""
        self.files = 0
        """How many files have taken this way so far."""

    async def from_tier(self, tier_id: TierId, size: int) -> Body:
        """A content with the first `size` bytes of a tier file."""
        return await self.filled(lambda fd: self._copy_from_tier(tier_id, fd, size))

    async def copied(self, body: Body, size: Callable[[], int]) -> Body | None:
        """A content with what is in the staging file of another one, which is sealed; None: a write
        that was late for that came meanwhile.

        Raises FileNotFoundError where it was put into place meanwhile, EIO where bytes are missing
        in it.
        """
        await wait(self._earlier.over)
        while self.is_changing(body.staging):
            await wait(self._calls.clock.after(LOOK_AGAIN_S))
        begun = body.staging_changes
        copy = await self.filled(partial(self._copy_staging, body.staging, size()))
        if body.staging_changes == begun:
            return copy
        self.let_go(copy, remove=True)
        return None

    def _copy_staging(self, name: str, size: int, fd: int) -> None:
        source = self._lower.open_staging(name)
        try:
            if self._lower.stat_fd(source).size < size:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            self._copy(source, fd, size)
        finally:
            self._lower.close(source)

    async def filled(self, fill: Callable[[int], object], progress: Progress | None = None) -> Body:
        """A content with what `fill` writes into the descriptor it is given, in a thread;
        `progress`: of that, patience goes by it.

        Raises:
            OSError: what `fill` raised; EIO: nothing came any more.
        """
        return await self._make(
            fill, progress or Progress(), math.inf if progress is None else self._patience_s
        )

    async def _make(
        self, fill: Callable[[int], object], progress: Progress, patience_s: float
    ) -> Body:
        name = f"{OVERFLOW_PREFIX}{self._chance.token(8)}"
        self.files += 1
        self.being_made.add(name)
        made = self._calls.submit("overflow", self._create, name, fill)
        try:
            return overflowed(name, await self._answer(made, patience_s, progress))
        except BaseException:
            progress.give_up()
            made.add_done_callback(lambda _made: self._not_wanted(name, made))
            raise

    def _not_wanted(self, name: str, made: Future[int]) -> None:
        """It failed, or whoever asked for it was killed while it was being made."""
        self.being_made.discard(name)
        if not made.cancelled() and made.exception() is None:
            self.let_go(overflowed(name, made.result()), remove=True)

    def in_use(self, contents: Iterable[Body]) -> set[str]:
        """Names of all staging files that have, or are about to have, a file's content."""
        names = {body.staging for body in contents} - {""}
        self.being_made -= names
        return names | self.being_made

    def _create(self, name: str, fill: Callable[[int], object]) -> int:
        fd = self._lower.create_staging(name)
        try:
            fill(fd)
        except BaseException:
            os.close(fd)
            self._lower.remove_staging(name)
            raise
        return fd

    def _copy_from_tier(self, tier_id: TierId, fd: int, size: int) -> None:
        with self._lock:
            source = self._tier.read_long(tier_id)
        try:
            self._copy(source, fd, size)
        finally:
            with self._lock:
                self._tier.read_done(tier_id, source)

    @staticmethod
    def _copy(source: int, target: int, size: int) -> None:
        done = 0
        while done < size:
            data = os.pread(source, min(CHUNK_BYTES, size - done), done)
            if not data:
                break
            write_all(target, data, done)
            done += len(data)
        os.ftruncate(target, size)

    # -- use

    async def _call(
        self,
        body: Body,
        label: str,
        function: Callable[..., T],
        *arguments: Any,
        patience_s: float = math.inf,
    ) -> T:
        body.in_flight += 1
        try:
            while body.fd < 0:  # an earlier daemon made it
                await self._answer(self._opened(body), patience_s)
            if math.isinf(patience_s) and self._spare.hold():
                here = self._calls.in_place
                return await unlocked(self._spare.call, here, label, function, body.fd, *arguments)
            call = self._calls.submit(label, function, body.fd, *arguments)
            return await (
                outlast(call) if math.isinf(patience_s) else self._answer(call, patience_s)
            )
        finally:
            body.in_flight -= 1
            if body.closing and not body.in_flight:
                self._close(body)

    def _opened(self, body: Body) -> Future[None]:
        """The descriptor is the content's, also where all who wait for it are killed meanwhile."""
        opening = self._opening.get(body)
        if opening is None:
            opening = shared()
            self._opening[body] = opening
            body.in_flight += 1
            call = self._calls.submit("open overflow", self._lower.open_staging, body.staging)
            call.add_done_callback(partial(self._was_opened, body, opening))
        return opening

    def _was_opened(self, body: Body, opening: Future[None], call: Future[int]) -> None:
        error = broken_off() if call.cancelled() else call.exception()
        with self._lock:
            del self._opening[body]
            body.in_flight -= 1
            if error is None:
                body.fd = call.result()
            if body.closing and not body.in_flight:
                self._close(body)
        if error is None:
            opening.set_result(None)
        else:
            opening.set_exception(error)

    async def patient(self, call: Future[T]) -> T:
        """The answer that a read waits for.

        Raises:
            OSError: EIO: it did not come in time.
        """
        return await self._answer(call, self._patience_s)

    async def _answer(
        self, call: Future[T], patience_s: float, progress: Progress | None = None
    ) -> T:
        if math.isinf(patience_s):
            return await wait(call)
        moved = progress.mark if progress is not None else lambda: None
        try:
            return await wait(self._calls.patient(call, patience_s, moved=moved))
        except TimeoutError:
            raise OSError(errno.EIO, "no answer from the backing directory") from None

    def inherit(self, body: Body) -> None:
        """An earlier worker wrote it."""
        if body.staging.startswith(OVERFLOW_PREFIX):
            self._inherited[body.staging] = None

    async def _make_ours(self, body: Body, size: int) -> None:
        """Before the first change of what an earlier worker wrote: nothing of its calls arrives any
        more, or lies behind the file's end.
        """
        name = body.staging
        if name not in self._inherited:
            return
        await wait(self._earlier.over)
        cut = self._inherited.get(name)
        if cut is None and name in self._inherited:
            cut = shared()
            self._inherited[name] = cut
            call = self._calls.submit("cut overflow", self._cut, name, size)
            call.add_done_callback(partial(self._was_cut, name, cut))
        if cut is not None:
            await wait(cut)

    def _cut(self, name: str, size: int) -> None:
        fd = self._lower.open_staging(name)
        try:
            if self._lower.stat_fd(fd).size > size:
                self._lower.truncate(fd, size)
        finally:
            self._lower.close(fd)

    def _was_cut(self, name: str, cut: Future[None], call: Future[None]) -> None:
        error = broken_off() if call.cancelled() else call.exception()
        with self._lock:
            if error is None:
                self._inherited.pop(name, None)
            else:
                self._inherited[name] = None  # the next change tries again
        if error is None:
            cut.set_result(None)
        else:
            cut.set_exception(error)

    async def read(self, body: Body, offset: int, size: int) -> bytes:
        """Bytes of the file; shorter at its end."""
        return await self._call(
            body, "read overflow", os.pread, size, offset, patience_s=self._patience_s
        )

    async def write(
        self, body: Body, known_size: int, offset: int, data: bytes | memoryview
    ) -> int:
        """Write all bytes. `known_size`: the file's length so far."""
        return await self._change(body, known_size, "write overflow", write_all, data, offset)

    async def truncate(
        self, body: Body, known_size: int, size: int, ended: Callable[[], None]
    ) -> None:
        """Change the file's length, which was `known_size` so far, while no other change of it is
        under way; `ended` is called before the next one begins.

        Changes are told of their ends in any order, and the length that is known has to be what the
        last one made.
        """
        name = body.staging
        body.staging_changes += 1
        with self._changing(name):
            while (other := self._truncating.get(name)) is not None:
                await wait(other)
            done = shared()
            self._truncating[name] = done
            try:
                while name in self._begun:
                    await wait(self._calls.clock.after(LOOK_AGAIN_S))
                await self._make_ours(body, known_size)
                await self._call(body, "truncate overflow", os.ftruncate, size)
                ended()
            finally:
                del self._truncating[name]
                done.set_result(None)

    async def allocate(
        self, body: Body, known_size: int, mode: int, offset: int, length: int
    ) -> None:
        """fallocate(2), as the backing file system has it."""
        await self._change(body, known_size, "allocate overflow", fallocate, mode, offset, length)

    async def _change(
        self, body: Body, known_size: int, label: str, function: Callable[..., T], *arguments: Any
    ) -> T:
        name = body.staging
        body.staging_changes += 1
        with self._changing(name):
            while (other := self._truncating.get(name)) is not None:
                await wait(other)
            with _counted(self._begun, name):
                await self._make_ours(body, known_size)
                return await self._call(body, label, function, *arguments)

    def _changing(self, name: str) -> AbstractContextManager[None]:
        """Before any wait: a version that is made meanwhile is not sealed without it."""
        return _counted(self._writing, name)

    def is_changing(self, name: str) -> bool:
        """Whether a write to a staging file is under way."""
        return name in self._writing

    def let_go(self, body: Body, *, remove: bool) -> None:
        """Nobody uses the content any more; `remove`: nor does a version."""
        body.closing = True
        self._inherited.pop(body.staging, None)
        if not body.in_flight:
            self._close(body)
        if remove:
            self._calls.submit("remove overflow", self._lower.remove_staging, body.staging)

    def _close(self, body: Body) -> None:
        if body.fd >= 0:
            self._calls.submit("close overflow", os.close, body.fd)
            body.fd = -1


@contextmanager
def _counted(counts: Counter[str], name: str) -> Iterator[None]:
    counts[name] += 1
    try:
        yield
    finally:
        counts[name] -= 1
        if not counts[name]:
            del counts[name]
