"""The kernel of a machine: carries a program's calls to whatever daemon there is, also again to the
next one.
"""

from __future__ import annotations

import contextlib
import random
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Container
from typing import TypeVar

import trio

from acpfs.filesystem.construction import FileSystemParts
from acpfs.filesystem.filesystem import FileSystem
from acpfs.filesystem.records import Attributes, Caller, OpenFile
from acpfs.filesystem.steps import Call, wait
from acpfs.types import HandleId, Ino
from tests.sim.choices import Knobs
from tests.sim.life import Life
from tests.sim.passthrough import GoneError, Mapping, Passthrough
from tests.sim.processes import ProcessTable
from tests.sim.programs import Died
from tests.sim.scheduler import Killed
from tests.sim.shown import Shown
from tests.sim.trace import Finding

T = TypeVar("T")

CALL_MAX_S = 600.0
"""Virtual time in which each call is answered, where no storage hangs for good."""
STILL_CALL_MAX_S = 60.0
"""The same, where the storage does not fail and programs may stand still."""
HANGING_CALL_MAX_S = 4 * CALL_MAX_S
"""The same, where calls of the storage are out for up to 40 s each: who waits for all that is
logged waits for dozens of them, one after the other, and for what is repeated as others fail.
"""
WAIT_S = 0.02


class Serving:
    """One daemon after the other."""

    def __init__(self, knobs: Knobs) -> None:
        self.knobs = knobs
        self.passthrough: Passthrough | None = None
        """None: the kernel has no such lane."""
        self.life: Life | None = None
        self.changed_unseen: set[str] = set()
        """Files that dead writers have changed since programs were told what the mount shows."""
        self._requests = 0
        self.table = ProcessTable()

    def waits(self, life: Life) -> str:
        """For people: who waits, and for whom."""
        return ""

    def moments(self) -> list[int]:
        """Up to which of its moments each program was told."""
        return []

    def judge_persisted(self, moments: list[int]) -> None:
        """A wait that began then has ended."""

    def look(self) -> None:
        """A program was told something: whoever judges may look now."""
        raise NotImplementedError

    def judge_durable(self, path: bytes, content: bytes) -> None:
        """A program was told that the file outlives a loss of power."""
        raise NotImplementedError

    def stored(self) -> Shown:
        """What others see on the storage."""
        raise NotImplementedError

    def stored_attributes(self) -> Shown:
        """The same of attributes."""
        raise NotImplementedError

    def new_caller(self) -> Caller:
        self._requests += 1
        return Caller(0, 0, 1, 0, self._requests)

    def most_s(self) -> float:
        """In which each call is answered."""
        if self.knobs.stands_still:
            return STILL_CALL_MAX_S
        return HANGING_CALL_MAX_S if self.knobs.hang_rate else CALL_MAX_S

    async def ask(self, life: Life, make: Callable[[FileSystem], Call[T]]) -> tuple[T] | None:
        """The answer; None: the life has died before it could tell."""
        answer: list[T] = []
        most_s = self.most_s()
        failure: BaseException | None = None  # a dead life's is of no interest
        try:
            call = make(life.fs)
            try:
                done = life.fs.steps.step(call, None)
            except StopIteration as stop:
                answer.append(stop.value)
            else:
                with life.asked(most_s):
                    answer.append(await life.fs.steps.drive(call, done))
        except (Killed, OSError) as error:
            failure = error
        if life.turns.is_over:
            return None
        if (bug := life.state.bug) is not None:
            raise Finding("BUG", f"a step ended with {bug!r}") from bug
        if failure is not None:
            raise failure
        if not answer:
            raise Finding("LIVENESS", f"no answer within {most_s:.0f} s: {self.waits(life)}")
        life.answered += 1
        if life.answered >= life.death.calls:
            life.death.turn = 0
        return (answer[0],)

    async def serving(self) -> Life:
        while (life := self.life) is None or not life.is_serving or life.turns.is_over:  # noqa: ASYNC110
            # threads end lives, too
            await trio.sleep(WAIT_S)
        return life


class Process:
    """A program's way to the file system: the kernel of the machine on which it runs."""

    def __init__(self, machine: Serving, uid: int = 0) -> None:
        self._machine = machine
        self._uid = uid
        self.mount = 0
        """The life in which the machine began: without a session no call reaches another one."""
        self._locked: set[Ino] = set()
        """Inodes whose lock it has: what looks at its answer does not wait for that."""
        self._known: Counter[Ino] = Counter()
        """How often each node was named in an answer."""

    def begin_at(self, mount: int) -> None:
        """Its machine has begun anew, and knows nothing of before."""
        self.mount = mount
        self._known.clear()

    @property
    def table(self) -> ProcessTable:
        """See `Kernel`."""
        return self._machine.table

    def new_caller(self) -> Caller:
        return self._machine.new_caller()._replace(uid=self._uid)

    async def request(
        self, make: Callable[[FileSystem], Call[T]], is_done: Callable[[], Awaitable[bool]]
    ) -> T | None:
        """See `Kernel`."""
        mount = self.mount
        came_again = False
        while True:
            life = await self._machine.serving()
            if not self._machine.knobs.keeps_session and life.number != mount:
                raise Died(mount)
            if came_again and await is_done():
                return None
            answer = await self._machine.ask(life, make)
            if answer is not None:
                self._learn(life, answer[0])
                return answer[0]
            came_again = True

    def _learn(self, life: Life, answer: object) -> None:
        """An entry in an answer is a reference, which the daemon counts as it answers."""
        if isinstance(answer, Attributes):
            self._known[answer.ino] += 1
            life.references.given([answer.ino])
        elif isinstance(answer, tuple):
            for part in answer:
                self._learn(life, part)

    def forget(self, but: Container[Ino]) -> None:
        """See `Kernel`."""
        life = self._machine.life
        if life is None or not life.is_serving or life.turns.is_over or life.number < self.mount:
            return
        given_back = [one for one in self._known.items() if one[0] not in but]
        for ino, _count in given_back:
            del self._known[ino]
        life.references.taken_back(given_back)
        with contextlib.suppress(Killed):  # FORGET has no answer
            life.fs.forget(given_back)

    # -- the passthrough lane

    def opened(self, ino: Ino, flags: int, opened: OpenFile) -> bool:
        """See `Kernel`."""
        passthrough = self._machine.passthrough
        return passthrough is not None and passthrough.opened(ino, flags, opened)

    def released(self, ino: Ino, handle: HandleId) -> None:
        """See `Kernel`."""
        if self._machine.passthrough is not None:
            self._machine.passthrough.released(ino, handle)

    def left_by(self, ino: Ino, handle: HandleId) -> bool:
        """See `Kernel`."""
        passthrough = self._machine.passthrough
        return passthrough is not None and passthrough.left_by(ino, handle)

    def map(self, ino: Ino) -> Mapping:
        """See `Kernel`."""
        assert self._machine.passthrough is not None
        return self._machine.passthrough.map(ino)

    def unmap(self, mapping: Mapping) -> None:
        """See `Kernel`."""
        assert self._machine.passthrough is not None
        self._machine.passthrough.unmap(mapping)

    def check_alive(self) -> None:
        """See `Kernel`."""
        life = self._machine.life
        if not self._machine.knobs.keeps_session and (
            life is None or life.number != self.mount or life.turns.is_over
        ):
            raise Died(self.mount)

    def kept_back(self) -> list[str]:
        """See `Kernel`."""
        life = self._machine.life
        if not self._machine.knobs.leaves_writers or life is None or life.turns.is_over:
            return []
        return [*life.kept_back(), *self._machine.changed_unseen]

    @contextlib.asynccontextmanager
    async def locked(self, ino: Ino) -> AsyncIterator[None]:
        """See `Kernel`."""
        if self._machine.passthrough is None or ino in self._locked:
            yield
            return
        mount = self.mount  # who is held up may hear of its end only when the next one has begun
        try:
            async with self._machine.passthrough.locked(ino):
                self._locked.add(ino)
                yield
        except GoneError:
            raise Died(mount) from None
        finally:
            self._locked.discard(ino)

    async def write(self, ino: Ino, at: int, data: bytes, chance: random.Random) -> None:
        """See `Kernel`."""
        assert self._machine.passthrough is not None
        self.check_alive()
        mount = self.mount
        try:
            await self._machine.passthrough.write(ino, at, data, chance)
        except GoneError:
            raise Died(mount) from None

    def read(self, ino: Ino) -> bytes:
        """See `Kernel`."""
        assert self._machine.passthrough is not None
        return self._machine.passthrough.read(ino)

    def answered(self) -> None:
        """See `Kernel`."""
        self._machine.look()

    def is_durable(self, path: str, content: bytes) -> None:
        """See `Kernel`."""
        self._machine.judge_durable(path.encode(), content)

    async def persisted(self) -> bool:
        """See `Kernel`."""

        async def closes_known(fs: FileSystem) -> bool:
            await wait(fs.closes_known())
            return True

        async def wait_for_all() -> bool:
            assert self._machine.life is not None
            log = self._machine.life.log
            await wait(log.when_done(log.last_seq))
            return True

        async def never() -> bool:
            return False

        moments = self._machine.moments()
        try:
            await self.request(closes_known, never)
            done = bool(await self.request(lambda _fs: wait_for_all(), never))
        except OSError:
            return False  # something was refused, and is kept
        if done:
            self._machine.judge_persisted(moments)
        return done

    def stored(self) -> Shown:
        """See `Kernel`."""
        return self._machine.stored()

    def stored_attributes(self) -> Shown:
        """See `Kernel`."""
        return self._machine.stored_attributes()

    async def settle_mappings(self) -> None:
        """See `Kernel`."""

        async def settle(fs: FileSystem) -> bool:
            await fs.settle_mappings()
            return True

        async def never() -> bool:
            return False

        await self.request(settle, never)

    async def decide(self, path: bytes, *, keeps: bool) -> None:
        """See `Kernel`."""

        def act(parts: FileSystemParts) -> bool:
            if keeps:
                parts.interrupted.store(path)
            else:
                parts.interrupted.discard(path)
            return True

        await self._control(act)

    async def is_interrupted(self, path: bytes) -> bool:
        """See `Kernel`."""
        return await self._control(lambda parts: bool(parts.reports.interrupted(path)))

    async def _control(self, act: Callable[[FileSystemParts], bool]) -> bool:
        """What control asks for, also of the next daemon where one dies."""

        async def call() -> bool:
            assert self._machine.life is not None
            return act(self._machine.life.inner)

        async def never() -> bool:
            return False

        return bool(await self.request(lambda _fs: call(), never))
