"""What applications do: one program is a task that makes calls below its own directory, and
remembers what it was told.
"""

from __future__ import annotations

import contextlib
import errno
import os
import random
import stat
import traceback
from collections.abc import Awaitable, Callable, Container
from dataclasses import dataclass, field, replace
from typing import Protocol, TypeVar, cast

import trio

from acpfs.backing.posix_acl import ACCESS, DEFAULT
from acpfs.config import FsyncMode, WhenFull
from acpfs.filesystem.closing import Closing
from acpfs.filesystem.content import contents, outgrown
from acpfs.filesystem.filesystem import FileSystem
from acpfs.filesystem.records import AttributeChange, Attributes, Caller, OpenFile
from acpfs.filesystem.steps import Call
from acpfs.types import ROOT, HandleId, Ino
from tests.sim import acls
from tests.sim.choices import (
    KINDS,
    LANE_KINDS,
    MAPPED_BYTES_MAX,
    MAPPED_PREFIX,
    MAPPING_KINDS,
    Choices,
    Knobs,
)
from tests.sim.oracles import PAGE_BYTES, LateClose, Told, is_under_way, judge_shown
from tests.sim.passthrough import Mapping
from tests.sim.processes import ProcessTable
from tests.sim.shown import (
    LINKS,
    MODE,
    MTIME,
    OWNER,
    PREFIX,
    SAME,
    Shown,
    against,
    attribute,
    bare,
    differences,
    is_as_told,
    is_of,
    move,
    names_of,
    put,
    taken,
    write,
)
from tests.sim.trace import Finding, Trace

T = TypeVar("T")

PIECE_BYTES = 65536
PID = 1
"""Of who opens and closes, where /proc tells nothing of him."""
OPEN_MAX = 4
EXCHANGE = 2
READ_BYTES = 16 << 20
DEATHS_IN_A_CALL_MAX = 3
"""That are carried through by walking a path again."""
PAUSES_S = (0.0, 0.001, 0.01, 0.03, 0.2, 2.0)
DISCARDS_MAX = 1000
DISCARD_AGAIN_S = 0.01
"""Readers keep what they read open for less than all of that."""
STILL = 0.1
STILL_S = 200.0
"""Share of calls after which a program with open files does nothing for so long."""
FORGETS = 0.3
"""Share of calls after which the kernel knows only of what is open."""
ALL_KINDS = [*KINDS, *MAPPING_KINDS, *LANE_KINDS]
NEEDS_NONE = ("save", "wait until persisted", "make directory", "open new", *MAPPING_KINDS)
MAPPED_SIZES = (100, 60_000, MAPPED_BYTES_MAX)
STORED_BYTES = (1, 5000, 60_000)
KILLED_SIZES = (1, 5000, 60_000)
"""Of what somebody has written when he is killed."""
WITH_OPEN_FILE = ("write on", "fsync", "close", "delete open")
OLD_SIZES = (0, 1, 5000, 60_000)
MODES = (0o600, 0o640, 0o664)
FILE_MODE = 0o644
DIRECTORY_MODE = 0o755
RECENT = 0.4
"""Share of calls that take what came last."""


class Died(Exception):  # noqa: N818 - no error: the program ends with its machine, and begins anew
    """The program's call got no answer, and never will."""

    def __init__(self, mount: int) -> None:
        """`mount`: the life in which its machine had begun."""
        super().__init__(mount)
        self.mount = mount


class Kernel(Protocol):
    """What carries a program's calls to whatever life there is."""

    async def request(
        self, make: Callable[[FileSystem], Call[T]], is_done: Callable[[], Awaitable[bool]]
    ) -> T | None:
        """The answer; None: a life before has carried it out, and died before it could tell."""
        ...

    def new_caller(self) -> Caller: ...

    mount: int
    """The life in which its machine began."""

    @property
    def table(self) -> ProcessTable:
        """What /proc tells of processes."""
        ...

    def forget(self, but: Container[Ino]) -> None:
        """Give back what is known of nodes, but for these, as a kernel short of memory does."""
        ...

    def opened(self, ino: Ino, flags: int, opened: OpenFile) -> bool:
        """An open was answered; whether the kernel reads and writes that file itself."""
        ...

    def released(self, ino: Ino, handle: HandleId) -> None:
        """RELEASE was answered."""
        ...

    def locked(self, ino: Ino) -> contextlib.AbstractAsyncContextManager[None]:
        """With the inode's lock, where the kernel serves the file."""
        ...

    async def write(self, ino: Ino, at: int, data: bytes, chance: random.Random) -> None:
        """What the kernel writes itself."""
        ...

    def read(self, ino: Ino) -> bytes:
        """What the kernel reads itself."""
        ...

    def left_by(self, ino: Ino, handle: HandleId) -> bool:
        """The last descriptor of an open file is gone; whether the kernel serves the file."""
        ...

    def map(self, ino: Ino) -> Mapping:
        """All of a file that the kernel serves, and that is open to read and write."""
        ...

    def unmap(self, mapping: Mapping) -> None:
        """Nobody is told of it."""
        ...

    def check_alive(self) -> None:
        """Whoever stores to memory has not died with his machine; else he hears of it here."""
        ...

    def kept_back(self) -> list[str]:
        """Files that take no change, as writers of a dead session have them (S506), or of which
        nobody knows what those have made.
        """
        ...

    async def settle_mappings(self) -> None:
        """Have the daemon look which mappings are gone, as `wait` does."""
        ...

    def answered(self) -> None:
        """The program was told something: whoever judges may look now."""
        ...

    def is_durable(self, path: str, content: bytes) -> None:
        """The program was told that the file outlives a loss of power."""
        ...

    async def persisted(self) -> bool:
        """Wait until all that was done is persisted; whether it is."""
        ...

    def stored(self) -> Shown:
        """What others see on the storage now."""
        ...

    def stored_attributes(self) -> Shown:
        """The same of attributes."""
        ...

    async def decide(self, path: bytes, *, keeps: bool) -> None:
        """A person has a half stored as it is, or discards it."""
        ...

    async def is_interrupted(self, path: bytes) -> bool:
        """Whether acpfs says that it is a half."""
        ...


@dataclass
class Opened:
    """A file that a program has open for writing."""

    path: str
    ino: Ino
    handle: HandleId
    content: bytes
    """With all that was written."""
    is_changed: bool = False
    has_name: bool = True
    in_kernel: bool = False
    """The kernel writes it itself."""
    reader: HandleId | None = None
    """The same program reads it, too, until it closes it."""
    mapping: Mapping | None = None
    since_close: list[bytes] = field(default_factory=list)
    """What was in it when its last descriptor was closed, and since, as it is mapped still."""
    closed_at: int = 0
    """The number of the moment at which that was."""
    outlived: list[bytes] = field(default_factory=list)
    """What was in it when its session ended, and since, as its writer lives on."""
    rights: Shown = field(default_factory=dict)
    """That it was made with."""
    later: list[list[bytes]] = field(default_factory=list)
    """For each time that it was synced: what was in it since (exception X11)."""

    def becomes(self, at: int, piece: bytes) -> None:
        """That is about to be written."""
        content = self.content + bytes(max(0, at - len(self.content)))
        self.content = content[:at] + piece + content[at + len(piece) :]
        self.is_changed = True
        for later in self.later:
            later.append(self.content)
        if self.outlived:
            self.outlived.append(self.content)

    def comes_in_pages(self, former_bytes: int) -> None:
        """A mount may take a copy in the middle of that write, which makes the file longer."""
        first = (former_bytes // PAGE_BYTES + 1) * PAGE_BYTES
        for end in range(first, len(self.content), PAGE_BYTES):
            for later in self.later:
                later.append(self.content[:end])


async def _never() -> bool:
    return False


async def by_path(act: Callable[[], Awaitable[T]]) -> T:
    """As Linux does: where a node is not known any more, the path is walked once more.

    Once for each death of a daemon in between: of two in one call a program would hear.
    """
    for _death in range(DEATHS_IN_A_CALL_MAX):
        try:
            return await act()
        except OSError as failure:
            if failure.errno != errno.ESTALE:
                raise
    return await act()


class Calls:
    """System calls by path, as the kernel makes requests of them."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.open_files: dict[str, Opened] = {}
        """Of the program that makes them."""
        self.at: Opened | None = None
        """The file that it is at."""
        self.release_pause_s: Callable[[], float] | None = None
        """How long after the last close RELEASE comes; None: at once."""

    async def pause(self, seconds: float) -> None:
        """Within what a program does: it ends where its machine does meanwhile."""
        mount = self.kernel.mount
        await trio.sleep(seconds)
        if mount != self.kernel.mount:
            raise Died(mount)

    async def request(self, make: Callable[[FileSystem], Call[T]]) -> T:
        """One that may be sent again."""
        answer = await self.kernel.request(make, _never)
        return cast("T", answer)  # a call may answer None, too

    async def ino(self, path: str) -> Ino:
        return await by_path(lambda: self._walk(path))

    async def _walk(self, path: str) -> Ino:
        at = ROOT
        for name in path.split("/") if path else ():
            parent = at
            part = name.encode()
            at = (await self.request(lambda fs, p=parent, n=part: fs.lookup(p, n))).ino  # type: ignore[misc]
        return at

    async def mtime_ns(self, path: str) -> int:
        parent, name = await self.place(path)
        return (await self.request(lambda fs: fs.lookup(parent, name))).mtime_ns

    async def place(self, path: str) -> tuple[Ino, bytes]:
        """As Linux does, what lies there is looked up, too: the kernel refers to it as long as the
        call lasts.
        """
        directory, _slash, name = path.rpartition("/")
        with contextlib.suppress(FileNotFoundError):
            await self._walk(path)
        return await self.ino(directory), name.encode()

    async def create(self, path: str, access: int = os.O_WRONLY) -> Opened:
        return await by_path(lambda: self._create(path, access))

    async def _create(self, path: str, access: int) -> Opened:
        parent, name = await self.place(path)
        caller = self.kernel.new_caller()
        opened, attributes = await self.request(
            lambda fs: fs.create(parent, name, FILE_MODE, access, caller)
        )
        in_kernel = self.kernel.opened(attributes.ino, access, opened)
        self.at = Opened(path, attributes.ino, opened.handle, b"", in_kernel=in_kernel)
        return self.at

    async def open(self, path: str, flags: int, content: bytes, pid: int = PID) -> Opened:
        return await by_path(lambda: self._open(path, flags, content, pid))

    async def _open(self, path: str, flags: int, content: bytes, pid: int) -> Opened:
        ino = await self.ino(path)
        caller = self.kernel.new_caller()._replace(pid=pid)
        opened = await self.request(lambda fs: fs.open(ino, flags, caller))
        in_kernel = self.kernel.opened(ino, flags, opened)
        self.at = Opened(path, ino, opened.handle, content, in_kernel=in_kernel)
        return self.at

    async def write(self, file: Opened, at: int, data: bytes) -> None:
        done = 0
        self.at = file
        while done < len(data):
            start = at + done
            piece = data[done : done + PIECE_BYTES]
            if file.in_kernel:
                file.becomes(start, piece)
                await self.kernel.write(file.ino, start, piece, random.Random(piece[:8]))
            else:
                await self.request(lambda fs, s=start, p=piece: fs.write(file.handle, s, p))  # type: ignore[misc]
                file.becomes(start, piece)
            done += len(piece)

    async def give_up(self, file: Opened) -> None:
        """Close it, whatever that says."""
        for handle in (file.reader, file.handle):
            if handle is not None:
                with contextlib.suppress(OSError):
                    await self.close_handle(file.ino, handle)
                    continue
                await self.request(lambda fs, h=handle: fs.release(h))  # type: ignore[misc]
                self.kernel.released(file.ino, handle)

    async def close(self, file: Opened, pid: int = PID) -> None:
        self.at = file
        if file.reader is not None:
            await self.close_handle(file.ino, file.reader)
            file.reader = None
        await self.close_handle(file.ino, file.handle, pid)

    async def open_reader(self, file: Opened) -> None:
        """One that reads the file while it is written: its bytes have to stay where they are
        (S480).
        """
        caller = self.kernel.new_caller()
        opened = await self.request(lambda fs: fs.open(file.ino, os.O_RDONLY, caller))
        self.kernel.opened(file.ino, os.O_RDONLY, opened)
        file.reader = opened.handle

    async def close_handle(self, ino: Ino, handle: HandleId, pid: int = PID) -> None:
        """FLUSH, and RELEASE."""
        async with self.kernel.locked(ino):
            pass  # for a write that is under way
        await self.request(lambda fs: fs.flush(handle, pid))
        if self.release_pause_s is not None:
            await self.pause(self.release_pause_s())
        if self.kernel.left_by(ino, handle) and await self.request(
            lambda fs: fs.goes_on_mapped(handle)
        ):
            return  # until the mapping is gone
        await self.request(lambda fs: fs.release(handle))
        self.kernel.released(ino, handle)

    async def read(self, path: str) -> bytes:
        try:
            return await by_path(lambda: self._read(path))
        except OSError as failure:
            file = self.open_files.get(path)
            if failure.errno != errno.EBUSY or file is None or not file.in_kernel:
                raise
            return file.content  # it has outgrown RAM, and nobody else opens it before its close

    async def _read(self, path: str) -> bytes:
        ino = await self.ino(path)
        caller = self.kernel.new_caller()
        opened = await self.request(lambda fs: fs.open(ino, os.O_RDONLY, caller))
        if self.kernel.opened(ino, os.O_RDONLY, opened):
            content = self.kernel.read(ino)
        else:
            content = await self.request(lambda fs: fs.read(opened.handle, 0, READ_BYTES))
        await self.close_handle(ino, opened.handle)
        return content

    async def tree(self, directory: str, *, attributes: bool = False) -> Shown:
        """What the mount shows below a directory, itself with it; nothing where it is not there."""
        try:
            return await by_path(lambda: self._tree(directory, attributes=attributes))
        except FileNotFoundError:
            return {}

    async def _attributes(self, path: bytes, st: Attributes) -> Shown:
        ino = st.ino
        found = {
            attribute(path, MODE): b"%o" % stat.S_IMODE(st.mode),
            attribute(path, OWNER): b"%d:%d" % (st.uid, st.gid),
            attribute(path, LINKS): b"%d" % st.nlink,
            attribute(path, MTIME): b"%d" % st.mtime_ns,
        }
        for name in await self.request(lambda fs: fs.listxattr(ino)):
            value = await self.request(lambda fs, n=name: fs.getxattr(ino, n))  # type: ignore[misc]
            found[attribute(path, name)] = value
        return found

    async def _tree(self, directory: str, *, attributes: bool) -> Shown:
        ino = await self.ino(directory)
        found: Shown = {(directory + "/").encode(): b""} if directory else {}
        unique = self.kernel.new_caller().unique
        handle = await self.request(lambda fs: fs.opendir(ino, unique))
        entries = await self.request(lambda fs: fs.readdir(handle, 0, with_attributes=False))
        await self.request(lambda fs: fs.releasedir(handle))
        for entry in entries:
            if entry.name in (b".", b".."):
                continue
            name = entry.name
            st = await self.request(lambda fs, n=name: fs.lookup(ino, n))  # type: ignore[misc]
            path = f"{directory}/{name.decode()}" if directory else name.decode()
            place = path.encode()
            if stat.S_ISDIR(st.mode):
                place += b"/"
                found.update(await self._tree(path, attributes=attributes))
            elif stat.S_ISLNK(st.mode):
                found[place] = await self.request(lambda fs, i=st.ino: fs.readlink(i))  # type: ignore[misc]
            else:
                found[place] = await self.read(path)
            if attributes:
                found.update(await self._attributes(place, st))
        return found


class Program:
    """See above."""

    def __init__(
        self, name: str, calls: Calls, choices: Choices, knobs: Knobs, trace: Trace, told: Told
    ) -> None:
        self.name = name
        self.told = told
        self._calls = calls
        self._choices = choices
        self._knobs = knobs
        self._trace = trace
        self.open: dict[str, Opened] = {}
        calls.open_files = self.open
        self.nameless: list[Opened] = []
        """Open, and deleted."""
        self.giving_up: list[str] = []
        """Paths of files that there was no room for: each shows anything until it is discarded."""
        self.gave_up = 0
        """How many of these were."""
        self.mapped: dict[str, Opened] = {}
        """Closed, and still mapped."""
        self.number = 0
        """Of its next call."""
        self.under_way = ""
        self._has_frozen = False
        self.stands_still = False
        self._sets_acls = acls.sets_acls(choices, knobs)

    # -- what it knows

    def _shown(self) -> Shown:
        return dict(self.told.now)

    def _directories(self) -> list[str]:
        return [path[:-1].decode() for path in self.told.now if path.endswith(b"/")]

    def _files(self) -> list[str]:
        """That are not open, under whatever name."""
        now = self.told.now
        open_names = {name for path in self.open for name in names_of(now, path.encode())}
        not_these = {*self.open, *self.mapped, *self._calls.kernel.kept_back()}
        return [
            path.decode()
            for path in now
            if not path.endswith(b"/")
            and PREFIX not in path
            and path not in open_names
            and path.decode() not in not_these
            and not self._is_torn(path)
        ]

    def _is_torn(self, path: bytes) -> bool:
        """Whether somebody has removed its directory, which what is to come there makes again."""
        return any(path.startswith(torn) for torn in self.told.torn)

    def _pick(self, chance: random.Random, paths: list[str]) -> str:
        """One of them, often the last: what has just come is where most is under way."""
        return paths[-1] if chance.random() < RECENT else chance.choice(paths)

    def _movable(self) -> list[str]:
        """Directories below its own with nothing open in them."""
        return [
            directory
            for directory in self._directories()
            if directory != self.name
            and not any(path.startswith(directory + "/") for path in (*self.open, *self.mapped))
            and not any(torn.startswith(f"{directory}/".encode()) for torn in self.told.torn)
            and not self._is_torn(f"{directory}/".encode())
        ]

    def _fresh(self, chance: random.Random) -> str:
        return f"{self._pick(chance, self._directories())}/{self.number}"

    # -- its life

    async def run(self) -> None:
        """All its calls."""
        if not self.told.now:
            await self._begin()
        while self.number < self._knobs.calls:
            number = self.number
            self.number += 1
            if (self.name, number) in self._choices.without_calls:
                continue
            chance = self._choices.stream(self.name, number)
            await self._call(chance)
            self._calls.kernel.answered()
            if self._sets_acls:
                await self._set_an_acl(self._choices.stream(self.name, number, "acl"))
            if chance.random() < FORGETS:
                self._calls.kernel.forget({file.ino for file in self.open.values()})
            await trio.sleep(0.0 if self._has_frozen else chance.choice(PAUSES_S))
            if self._knobs.stands_still and self.open and chance.random() < STILL:
                self._trace.note(self.name, "stands still")
                self.stands_still = True
                await trio.sleep(STILL_S)
                self.stands_still = False
        for path in sorted(self.open):
            await self._or_give_up(self.close(self.open[path]))
        for path in sorted(self.mapped):
            await self._or_give_up(self._end_mapping(self.mapped[path]))
        for file in list(self.nameless):
            await self._or_give_up(self._calls.close(file))

    async def _begin(self) -> None:
        own = f"{self.name}/".encode()
        shown = {own: b"", attribute(own, MODE): b"755"}
        await self._change("make directory", shown, self._make_own)

    async def _make_own(self) -> None:
        await self._make_directory_at(self.name)

    async def _or_give_up(self, act: Awaitable[None]) -> None:
        try:
            await act
        except OSError as failure:
            if failure.errno != errno.ENOSPC or self._knobs.when_full is not WhenFull.ERROR:
                raise
            await self._give_up()

    async def _call(self, chance: random.Random) -> None:
        if not self._directories():  # they were lost with RAM
            self._calls.kernel.check_alive()
            await self._begin()
        weights = self._knobs.kinds
        kind = chance.choices(ALL_KINDS[: len(weights)], weights)[0]
        if self._has_frozen and self.open and chance.random() < 0.7:
            kind = "write on"  # at once into what was just frozen
        self._has_frozen = False
        if kind == "wait until persisted" and (
            self._knobs.stands_still
            or any(file.in_kernel for file in (*self.open.values(), *self.nameless))
            or self.mapped
        ):
            kind = "save"  # it may wait for an open file of another one (S18), or for its own close
        if kind in WITH_OPEN_FILE and not self.open:
            kind = "open new"
        if kind not in (*NEEDS_NONE, *WITH_OPEN_FILE) and not self._files():
            kind = "save"
        method: Callable[[random.Random], Awaitable[None]]
        method = self.habit() or getattr(self, "_" + kind.replace(" ", "_"))
        await self._try(method, chance)

    async def _try(
        self, method: Callable[[random.Random], Awaitable[None]], chance: random.Random
    ) -> None:
        self._calls.at = None
        try:
            await method(chance)
        except OSError as failure:
            if failure.errno == errno.ENOSPC and self._knobs.when_full is WhenFull.ERROR:
                await self._give_up()
                return
            name = errno.errorcode.get(failure.errno or 0, "?")
            self._trace.note(self.name, self.under_way, (), name)
            raise Finding(
                "ANSWER", f"{self.under_way} of {self.name} fails with {name} at {_place(failure)}"
            ) from failure

    async def _pause(self, chance: random.Random) -> None:
        await self._calls.pause(chance.choice(PAUSES_S))

    def habit(self) -> Callable[[random.Random], Awaitable[None]] | None:
        """What it does instead of that call; None: the call."""
        return None

    async def _give_up(self) -> None:
        """RAM had no room for what it wrote: it closes the file, and has that discarded."""
        self._trace.note(self.name, self.under_way, (), "ENOSPC")
        file = self._calls.at
        if file is not None:
            self.giving_up.append(file.path)
            if file.mapping is not None:
                self._unmapped(file)
            self.open.pop(file.path, None)
            self.mapped.pop(file.path, None)
            if file in self.nameless:
                self.nameless.remove(file)
            await self._calls.give_up(file)
        if self.told.pending is not None:
            self.told.never()
        got = await self._discarded(file)
        for _time in range(DISCARDS_MAX):
            if got == bare(self.with_written(self.told.now)):
                self.gave_up = len(self.giving_up)
                return
            await trio.sleep(DISCARD_AGAIN_S)  # it stays as long as somebody reads it
            got = await self._discarded(file)
        judge_shown("GIVEN UP", got, bare(self.with_written(self.told.now)))

    async def _discarded(self, file: Opened | None) -> Shown:
        """What is shown when a half was discarded."""
        if file is not None:
            await self._calls.kernel.decide(file.path.encode(), keeps=False)
        got = await self._calls.tree(self.name)
        if file is not None:  # what was synced of it stays, with later writes (X11)
            place = file.path.encode()
            self.told.overwrite({path: got[path] for path in (place,) if path in got})
        return got

    async def _change(
        self,
        what: str,
        shown: Shown,
        act: Callable[[], Awaitable[None]],
        *words: object,
        is_gradual: bool = False,
    ) -> None:
        """A call that makes it so."""
        self.under_way = what
        self._trace.note(self.name, what, words)
        self.told.begin(shown, is_gradual=is_gradual)
        await act()
        self.told.end()
        self._trace.note(self.name, what, (), "done")

    async def _named(self, make: Callable[[FileSystem], Call[T]], shown: Shown) -> None:
        """One that changes names: where it comes again, it may have been carried out before.

        A transport keeps a record of that (`transport.native.resent_requests`).
        """

        async def is_done() -> bool:
            return await self._calls.tree(self.name) == bare(self.with_written(shown))

        await self._calls.kernel.request(make, is_done)

    def with_written(self, shown: Shown) -> Shown:
        """As the mount shows it: with what was written into open files."""
        found = dict(shown)
        for one in (*self.open.values(), *self.mapped.values()):
            if one.is_changed:
                write(found, one.path.encode(), one.content)
        return found

    # -- its calls: whole files

    async def _save(self, chance: random.Random) -> None:
        path = self._fresh(chance)
        await self._save_as(path, chance.randbytes(chance.choice(self._knobs.sizes)))

    async def _save_as(self, path: str, data: bytes) -> None:
        async def act() -> None:
            file = await self._calls.create(path)
            await self._calls.write(file, 0, data)
            await self._calls.close(file)

        await self._change("save", self._made(path, data), act, path, len(data))

    def _made(self, path: str, data: bytes) -> Shown:
        place = path.encode()
        return self._shown() | {place: data} | acls.of_new(place, FILE_MODE, self.told.now)

    def _rewritten(self, path: str, data: bytes) -> tuple[Shown, bool]:
        """What is so then, and whether others see it name by name."""
        shown = self._shown()
        place = path.encode()
        write(shown, place, data)
        return shown, len(names_of(shown, place)) > 1

    async def _overwrite(self, chance: random.Random) -> None:
        await self._write_again(chance, self._pick(chance, self._files()), keeps=False)

    async def _append(self, chance: random.Random) -> None:
        await self._write_again(chance, self._pick(chance, self._files()), keeps=True)

    async def _write_again(self, chance: random.Random, path: str, *, keeps: bool) -> None:
        await self._rewrite(path, chance.randbytes(chance.choice(OLD_SIZES)), keeps=keeps)

    async def _rewrite(self, path: str, data: bytes, *, keeps: bool) -> None:
        old = self.told.now[path.encode()] if keeps else b""
        what = "append" if keeps else "overwrite"

        async def act() -> None:
            await self._look_at_names(path)
            flags = os.O_WRONLY if keeps else os.O_WRONLY | os.O_TRUNC
            file = await self._calls.open(path, flags, old)
            await self._look_at_names(path)  # another daemon may have opened it
            await self._calls.write(file, len(old), data)
            await self._calls.close(file)

        shown, is_gradual = self._rewritten(path, old + data)
        if keeps and not data and attribute(path.encode(), MTIME) in self.told.now:
            return  # nothing is changed, its time neither
        await self._change(what, shown, act, path, len(data), is_gradual=is_gradual)

    async def _cut(self, chance: random.Random) -> None:
        """truncate(2), which also makes a file longer."""
        path = self._pick(chance, self._files())
        old = self.told.now[path.encode()]
        size = chance.choice((0, len(old) // 2, len(old) + 5000))
        content = old[:size] + bytes(max(0, size - len(old)))

        async def act() -> None:
            await self._look_at_names(path)
            ino = await self._calls.ino(path)
            caller = self._calls.kernel.new_caller()
            change = AttributeChange(size=size)
            await self._calls.request(lambda fs: fs.setattr(ino, change, None, caller))

        shown, is_gradual = self._rewritten(path, content)
        await self._change("cut", shown, lambda: by_path(act), path, size, is_gradual=is_gradual)

    async def _read(self, chance: random.Random) -> None:
        await self._read_file(self._pick(chance, self._files()))

    async def _read_file(self, path: str) -> None:
        self.under_way = "read"
        self._trace.note(self.name, "read", (path,))
        got = {path.encode(): await self._calls.read(path)}
        wanted = self.told.overwritten({path.encode(): self.told.now[path.encode()]}, got)
        judge_shown("READ", got, wanted)

    # -- names

    async def _make_directory(self, chance: random.Random) -> None:
        await self._make_directory_as(self._fresh(chance))

    async def _make_directory_as(self, path: str) -> None:
        place = f"{path}/".encode()
        new = acls.of_new(place, DIRECTORY_MODE, self.told.now)
        shown = self._shown() | {place: b""} | new
        await self._change(
            "make directory", shown, lambda: self._make_directory_at(path, shown), path
        )

    async def _make_directory_at(self, path: str, shown: Shown | None = None) -> None:
        await by_path(lambda: self._make_directory_there(path, shown))

    async def _make_directory_there(self, path: str, shown: Shown | None) -> None:
        parent, name = await self._calls.place(path)
        caller = self._calls.kernel.new_caller()
        await self._named(
            lambda fs: fs.mkdir(parent, name, DIRECTORY_MODE, caller),
            shown or {f"{path}/".encode(): b""},
        )

    async def _delete(self, chance: random.Random) -> None:
        await self._delete_file(self._pick(chance, self._files()))

    async def _delete_file(self, path: str) -> None:
        shown = self._shown()
        taken(shown, path.encode())

        async def act() -> None:
            parent, name = await self._calls.place(path)
            await self._named(lambda fs: fs.unlink(parent, name), shown)

        await self._change("delete", shown, lambda: by_path(act), path)

    async def _remove_directory(self, chance: random.Random) -> None:
        empty = [
            directory
            for directory in self._movable()
            if not any(
                path.startswith(f"{directory}/".encode())
                for path in bare(self.told.now)
                if path != f"{directory}/".encode()
            )
            and not any(path.startswith(f"{directory}/") for path in self.open)
        ]
        if not empty:
            return
        await self._remove_directory_at(self._pick(chance, empty))

    async def _remove_directory_at(self, path: str) -> None:
        shown = self._shown()
        taken(shown, f"{path}/".encode())

        async def act() -> None:
            parent, name = await self._calls.place(path)
            await self._named(lambda fs: fs.rmdir(parent, name), shown)

        await self._change("remove directory", shown, lambda: by_path(act), path)

    async def _rename(self, chance: random.Random) -> None:
        await self._rename_file(self._pick(chance, self._files()), self._fresh(chance))

    async def _replace(self, chance: random.Random) -> None:
        source = self._pick(chance, self._files())
        target = chance.choice(self._files())
        if target.encode() not in names_of(self.told.now, source.encode()):
            await self._rename_file(source, target)

    async def _look_at_names(self, path: str) -> None:
        """Who writes to a file of several names has seen them all just now: else each may be a file
        of its own (S190).
        """
        names = names_of(self.told.now, path.encode())
        if len(names) < 2:
            return
        inos = {await self._calls.ino(name.decode()) for name in names}
        if len(inos) > 1:
            raise Finding("LINKS", f"names of {path} lead to {len(inos)} files")

    async def _rename_file(self, source: str, target: str) -> None:
        shown = self._shown()
        move(shown, source.encode(), target.encode())
        await self._change(
            "rename", shown, lambda: self._rename_to(source, target, shown), source, target
        )

    async def _exchange(self, chance: random.Random) -> None:
        await self._exchange_files(self._pick(chance, self._files()), chance.choice(self._files()))

    async def _exchange_files(self, a: str, b: str) -> None:
        if b.encode() in names_of(self.told.now, a.encode()):
            return
        shown = self._shown()
        what_a = taken(shown, a.encode())
        what_b = taken(shown, b.encode())
        put(shown, a.encode(), what_b)
        put(shown, b.encode(), what_a)
        await self._change("exchange", shown, lambda: self._rename_to(a, b, shown, EXCHANGE), a, b)

    async def _move_directory(self, chance: random.Random) -> None:
        directories = self._movable()
        if not directories:
            return
        source = self._pick(chance, directories)
        target = self._fresh(chance)
        if target.startswith(source + "/"):
            return
        shown = self._shown()
        move(shown, f"{source}/".encode(), f"{target}/".encode())
        await self._change(
            "move directory", shown, lambda: self._rename_to(source, target, shown), source, target
        )

    async def _rename_to(self, source: str, target: str, shown: Shown, flags: int = 0) -> None:
        async def act() -> None:
            here = await self._calls.place(source)
            there = await self._calls.place(target)
            await self._named(lambda fs: fs.rename(*here, *there, flags), shown)

        await by_path(act)

    async def _link(self, chance: random.Random) -> None:
        await self._link_to(self._pick(chance, self._files()), self._fresh(chance))

    async def _link_to(self, source: str, target: str) -> None:
        shown = self._shown()
        old = source.encode()
        new = target.encode()
        shown.setdefault(attribute(old, SAME), f"{self.name} {self.number}".encode())
        put(shown, new, {key[len(old) :]: shown[key] for key in shown if is_of(key, old)})

        async def act() -> None:
            ino = await self._calls.ino(source)
            (parent, name) = await self._calls.place(target)
            await self._named(lambda fs: fs.link(ino, parent, name), shown)

        await self._change("link", shown, lambda: by_path(act), source, target)

    # -- attributes

    def _named_thing(self, chance: random.Random) -> str:
        """A file, or a directory below its own."""
        directories = [
            path
            for path in self._directories()
            if path != self.name and not self._is_torn(f"{path}/".encode())
        ]
        return self._pick(chance, [*directories, *self._files()])

    async def _change_mode(self, chance: random.Random) -> None:
        await self._set_mode_of(chance, self._named_thing(chance))

    async def _set_mode_of(self, chance: random.Random, path: str) -> None:
        mode = chance.choice(MODES)
        await self._set(chance, "change mode", path, AttributeChange(mode=mode), MODE, b"%o" % mode)

    async def _set_time(self, chance: random.Random) -> None:
        await self._set_time_of(chance, self._pick(chance, self._files()))

    async def _set_time_of(self, chance: random.Random, path: str) -> None:
        time_ns = chance.randrange(10**9) * 10**9
        change = AttributeChange(mtime_ns=time_ns)
        await self._set(chance, "set time", path, change, MTIME, b"%d" % time_ns)

    async def _note_time(self, path: str) -> None:
        """It has the time that it is said to have until somebody changes it."""
        self.under_way = "look at time"
        self._trace.note(self.name, self.under_way, (path,))
        time_ns = await by_path(lambda: self._calls.mtime_ns(path))
        self.told.begin(self._with_attribute(path, MTIME, b"%d" % time_ns))
        self.told.end()

    async def _set(
        self,
        chance: random.Random,
        what: str,
        path: str,
        change: AttributeChange,
        name: bytes,
        value: bytes,
    ) -> None:
        async def act() -> None:
            if not self._is_directory(path):
                await self._look_at_names(path)
            ino = await self._calls.ino(path)
            caller = self._calls.kernel.new_caller()
            if change.mode is not None:
                kind = stat.S_IFDIR if self._is_directory(path) else stat.S_IFREG
                whole = replace(change, mode=kind | change.mode)
            else:
                whole = change
            await self._calls.request(lambda fs: fs.setattr(ino, whole, None, caller))

        shown = self._with_attribute(path, name, value)
        await self._change(what, shown, lambda: by_path(act), path, value)

    async def _set_xattr(self, chance: random.Random) -> None:
        await self._set_xattr_of(chance, self._named_thing(chance))

    async def _set_xattr_of(self, chance: random.Random, path: str) -> None:
        name = b"user." + chance.choice((b"a", b"b"))
        is_there = attribute(self._place(path), name) in self.told.now
        removes = is_there and chance.random() < 0.4
        value = chance.randbytes(chance.choice((0, 5, 200)))

        async def act() -> None:
            await self._look_at_names(path)
            ino = await self._calls.ino(path)
            if not removes:
                await self._calls.request(lambda fs: fs.setxattr(ino, name, value))
                return

            async def is_done() -> bool:
                return name not in await self._calls.request(lambda fs: fs.listxattr(ino))

            await self._calls.kernel.request(lambda fs: fs.removexattr(ino, name), is_done)

        shown = self._with_attribute(path, name, None if removes else value)
        await self._change("set xattr", shown, lambda: by_path(act), path, name, int(removes))

    def _is_directory(self, path: str) -> bool:
        return f"{path}/".encode() in self.told.now

    def _place(self, path: str) -> bytes:
        return f"{path}/".encode() if self._is_directory(path) else path.encode()

    def _with_attribute(self, path: str, name: bytes, value: bytes | None) -> Shown:
        shown = self._shown()
        for one in names_of(shown, self._place(path)):
            shown.pop(attribute(one, name), None)
            if value is not None:
                shown[attribute(one, name)] = value
            if name == MODE:
                acls.mode_changed(shown, one)
        return shown

    async def _set_an_acl(self, chance: random.Random) -> None:
        """Now and then."""
        is_anything = len(self._directories()) > 1 or self._files()
        if chance.random() < acls.CHANGES and is_anything:
            await self._try(self._set_acl, chance)
            self._calls.kernel.answered()

    async def _set_acl(self, chance: random.Random) -> None:
        path = self._named_thing(chance)
        place = self._place(path)
        is_default = (
            self._is_directory(path)
            and acls.hands_on(self._choices)
            and chance.random() < acls.DEFAULTS
        )
        name = DEFAULT if is_default else ACCESS
        is_there = attribute(place, name) in self.told.now
        value = None if is_there and chance.random() < acls.REMOVES else acls.drawn(chance)
        shown = self._shown()
        for one in names_of(shown, place):
            acls.changed(shown, one, name, value)

        async def act() -> None:
            if not self._is_directory(path):
                await self._look_at_names(path)
            ino = await self._calls.ino(path)
            if value is None:
                await self._calls.request(lambda fs: fs.removexattr(ino, name))
            else:
                await self._calls.request(lambda fs: fs.setxattr(ino, name, value))

        what = f"set {name.rpartition(b'_')[2].decode()} ACL"
        await self._change(what, shown, lambda: by_path(act), path, acls.words(value))

    # -- files that stay open

    @property
    def _reads_on(self) -> bool:
        """One program does: the slack has room for what cannot move of one."""
        return self.name == "p0" and self._knobs.reads_on

    def _has_reader(self) -> bool:
        return any(file.reader is not None for file in self.open.values())

    async def _open_new(self, chance: random.Random) -> None:
        if len(self.open) >= OPEN_MAX:
            return
        file = await self._begin_file(self._fresh(chance))
        if file.in_kernel and self._reads_on and not self._has_reader():
            await self._calls.open_reader(file)
        await self._calls.write(file, 0, chance.randbytes(chance.choice(self._knobs.data_sizes)))

    async def _begin_file(self, path: str) -> Opened:
        self.under_way = "open new"
        self._trace.note(self.name, "open new", (path,))
        file = await self._calls.create(path)
        file.rights = acls.of_new(path.encode(), FILE_MODE, self.told.now)
        file.is_changed = True  # it is shown, empty, and its close makes a file
        self.open[path] = file
        return file

    async def _open_old(self, chance: random.Random) -> None:
        if len(self.open) >= OPEN_MAX:
            return
        await self._open_file(chance, self._pick(chance, self._files()))

    async def _open_file(self, chance: random.Random, path: str) -> None:
        self.under_way = "open old"
        self._trace.note(self.name, "open old", (path,))
        await self._look_at_names(path)
        file = await self._calls.open(path, os.O_WRONLY, self.told.now[path.encode()])
        self.open[path] = file
        await self._look_at_names(path)
        data = chance.randbytes(chance.choice(self._knobs.data_sizes))
        await self._calls.write(file, len(file.content), data)

    async def _write_on(self, chance: random.Random) -> None:
        file = self.open[chance.choice(sorted(self.open))]
        size = len(file.content)
        at = chance.choice((size, chance.randrange(size + 1), 0))
        content = chance.randbytes(chance.choice(self._knobs.data_sizes))
        await self._write_into(file, at, content)

    async def _write_into(self, file: Opened, at: int, content: bytes) -> None:
        if file.in_kernel and at < len(file.content):
            # What has left RAM may be overwritten in whole pieces, and not with zeros (S61).
            at, content = whole_pieces(at, content)
        self.under_way = "write on"
        self._trace.note(self.name, "write on", (file.path, at, len(content)))
        await self._calls.write(file, at, content)

    async def _fsync(self, chance: random.Random) -> None:
        await self._sync_file(self.open[chance.choice(sorted(self.open))])

    async def _sync_file(self, file: Opened) -> None:
        self._calls.at = file
        self._has_frozen = True

        async def act() -> None:
            async with self._calls.kernel.locked(file.ino):
                await self._calls.request(lambda fs: fs.fsync(file.handle, datasync=False))

        await self._change(
            "fsync", self._with(file), act, file.path, is_gradual=self._is_linked(file)
        )
        file.is_changed = False
        if file.in_kernel and len(file.content) > _synced_bytes_max():
            later = self.told.became.setdefault(file.content, [file.content])
            file.later.append(later)
        if self._knobs.fsync is FsyncMode.DURABLE and file.path.encode() in self.told.now:
            self._calls.kernel.is_durable(file.path, file.content)

    async def _wait_until_persisted(self, chance: random.Random) -> None:
        self.under_way = "wait until persisted"
        now = len(self.told.moments) - 1
        self._trace.note(self.name, "wait until persisted")
        if await self._calls.kernel.persisted():
            self._trace.note(self.name, "wait until persisted", (), "persisted")
            self.told.durable_at = now

    async def _close(self, chance: random.Random) -> None:
        file = self.open[chance.choice(sorted(self.open))]
        if file.mapping is not None and chance.random() < 0.5:
            await self._close_but_for_mapping(file)
            return
        await self.close(file)

    async def close(self, file: Opened) -> None:
        """Also at the end."""
        if file.mapping is not None:
            self._unmapped(file)
        is_gradual = self._is_linked(file)
        await self._change(
            "close",
            self._with(file),
            lambda: self._calls.close(file),
            file.path,
            is_gradual=is_gradual,
        )
        del self.open[file.path]

    def _is_linked(self, file: Opened) -> bool:
        return len(names_of(self.told.now, file.path.encode())) > 1

    def _with(self, file: Opened) -> Shown:
        shown = self._shown()
        path = file.path.encode()
        if file.is_changed:
            write(shown, path, file.content)
            if attribute(path, MODE) not in shown:
                shown.update(file.rights)
        return shown

    async def _delete_open(self, chance: random.Random) -> None:
        await self._delete_open_file(chance, self.open[chance.choice(sorted(self.open))])

    async def _delete_open_file(self, chance: random.Random, file: Opened) -> None:
        path = file.path
        if self._is_linked(file) or file.mapping is not None:
            return
        shown = self._shown()
        taken(shown, path.encode())
        if not file.in_kernel and file.reader is None and chance.random() < 0.5:
            await self._calls.open_reader(file)
        file.has_name = False
        self.nameless.append(self.open.pop(path))

        async def act() -> None:
            parent, name = await self._calls.place(path)
            async with self._calls.kernel.locked(self.nameless[-1].ino):
                await self._named(lambda fs: fs.unlink(parent, name), shown)

        await self._change("delete open", shown, lambda: by_path(act), path)
        await self._calls.write(file, 0, chance.randbytes(100))
        reader = file.reader
        if reader is not None and not file.in_kernel:
            content = await self._calls.request(lambda fs: fs.read(reader, 0, READ_BYTES))
            judge_shown("READ", {path.encode(): content}, {path.encode(): file.content})

    async def _be_killed(self, chance: random.Random) -> None:
        """Another process goes on with a file that the kernel serves, and is killed before it has
        closed it: what there is then is a half, until a person says what becomes of it.
        """
        path = self._pick(chance, self._files())
        place = path.encode()
        kernel = self._calls.kernel
        before = self.told.now[place]
        self.under_way = "be killed"
        self._trace.note(self.name, self.under_way, (path,))
        process = kernel.table.start()
        file = await self._calls.open(path, os.O_WRONLY, before, process.pid)
        self.open[path] = file
        if file.in_kernel:
            data = chance.randbytes(chance.choice(KILLED_SIZES))
            await self._calls.write(file, len(before), data)
            process.closing = Closing.KILL
        await self._calls.close(file, process.pid)
        kernel.table.gone(process)
        del self.open[path]
        if not file.in_kernel:
            return
        if not await kernel.is_interrupted(place):
            raise Finding("KILLED", f"{path} is no half, though its writer was killed")
        if chance.random() < 0.5:
            shown = self._shown()
            write(shown, place, file.content)
            await self._change("retry", shown, lambda: kernel.decide(place, keeps=True), path)
            return
        self._trace.note(self.name, "discard", (path,))
        await kernel.decide(place, keeps=False)
        got = {place: await self._calls.read(path)}
        judge_shown("DISCARDED", got, self.told.overwritten({place: before}, got))

    # -- mappings

    async def _map_new(self, chance: random.Random) -> None:
        """A file that is written, and mapped."""
        if len(self.open) >= OPEN_MAX:
            return
        directory = self._pick(chance, self._directories())
        path = f"{directory}/{MAPPED_PREFIX.decode()}{self.number}"
        await self._map_as(path, chance.randbytes(chance.choice(MAPPED_SIZES)))

    async def _map_as(self, path: str, data: bytes) -> Opened:
        self.under_way = "open new"
        self._trace.note(self.name, "map new", (path,))
        file = await self._calls.create(path, os.O_RDWR)
        file.rights = acls.of_new(path.encode(), FILE_MODE, self.told.now)
        file.is_changed = True
        self.open[path] = file
        await self._calls.write(file, 0, data)
        if file.in_kernel:
            self._calls.kernel.check_alive()
            file.mapping = self._calls.kernel.map(file.ino)
            self._trace.note(self.name, "map new", (path,), "mapped")
        return file

    def _all_mapped(self) -> list[Opened]:
        files = (*self.open.values(), *self.mapped.values())
        return sorted((file for file in files if file.mapping), key=lambda one: one.path)

    async def _store(self, chance: random.Random) -> None:
        """Through a mapping."""
        mapped = self._all_mapped()
        if not mapped:
            await self._map_new(chance)
            return
        self._store_to(chance, chance.choice(mapped))

    def _store_to(self, chance: random.Random, file: Opened) -> None:
        assert file.mapping is not None
        self._calls.kernel.check_alive()
        at = chance.randrange(file.mapping.size)
        data = chance.randbytes(min(chance.choice(STORED_BYTES), file.mapping.size - at))
        self._trace.note(self.name, "store", (file.path, at, len(data)))
        file.becomes(at, data)
        file.mapping.store(at, data)

    def _unmapped(self, file: Opened) -> None:
        assert file.mapping is not None
        self._trace.note(self.name, "unmap", (file.path,))
        self._calls.kernel.unmap(file.mapping)
        file.mapping = None

    async def _unmap(self, chance: random.Random) -> None:
        mapped = self._all_mapped()
        if not mapped:
            await self._save(chance)
            return
        file = chance.choice(mapped)
        if file.path in self.mapped:
            await self._end_mapping(file)
        else:
            self._unmapped(file)

    async def _close_but_for_mapping(self, file: Opened) -> None:
        """What it has is a half (S502)."""
        self.under_way = "close but for a mapping"
        self._trace.note(self.name, self.under_way, (file.path,))
        self.mapped[file.path] = self.open.pop(file.path)
        file.since_close.append(file.content)
        file.later.append(file.since_close)
        file.closed_at = len(self.told.moments) - 1
        await self._calls.close(file)

    async def _end_mapping(self, file: Opened) -> None:
        """The last that keeps the file open: then it is complete."""

        async def act() -> None:
            self._calls.kernel.check_alive()
            if file.mapping is not None:
                self._unmapped(file)
            await self._calls.kernel.settle_mappings()

        self.under_way = "unmap"
        self._trace.note(self.name, "unmap", (file.path,))
        self.told.begin(self._with(file))
        await act()
        del self.mapped[file.path]
        path = file.path.encode()
        if self._knobs.when_full is WhenFull.ERROR and await self._calls.kernel.is_interrupted(
            path
        ):  # RAM was short meanwhile, and nobody was there to be told
            self.told.never()
            await self._calls.kernel.decide(path, keeps=False)
            return
        self.told.end()
        self._trace.note(self.name, "unmap", (), "done")

    # -- after a death of everything

    def written_files(self) -> list[Opened]:
        """That it has open, or mapped, under their names."""
        return [*self.open.values(), *self.mapped.values()]

    def lets_go(self) -> None:
        """All of acpfs was killed: nothing waits for files that had no name any more (S435)."""
        self.told.let_go |= {file.path.encode() for file in self.nameless}

    def may_count_closes(self) -> None:
        """All of acpfs was killed: the close of what is mapped still counts (S466)."""
        for file in self.mapped.values():
            at_close = LateClose(file.since_close, file.closed_at)
            self.told.late_closes[file.path.encode()] = at_close

    def judge_halves(self, got: Shown) -> None:
        """Files that it had open are shown as far as they were written, or as they were before."""
        for file in self.written_files():
            found = got.get(file.path.encode())
            before = self.told.now.get(file.path.encode())
            if found is None or found == before or self.under_way == "write on":
                continue
            if file.outlived and is_under_way(found, file.outlived):
                continue
            if not file.content.startswith(found[: len(file.content)]):
                raise Finding(
                    "HALF",
                    differences({file.path.encode(): found}, {file.path.encode(): file.content}),
                )

    def died(self, got: Shown) -> None:
        """It died with its machine; this is what the mount shows since, without halves."""
        self.told.count_closes(got)
        self.open.clear()
        self.nameless.clear()
        self.mapped.clear()
        self._has_frozen = False
        pending = self.told.pending
        if pending is not None and is_as_told(got, self.told.overwritten(pending.shown, got)):
            self.told.end()
        elif is_as_told(got, self.told.overwritten(self.told.now, got)):
            self.told.never()
        else:
            either = "" if pending is None else f"; or {against(got, pending.shown)}"
            raise Finding(
                "SHOWN",
                f"after a death in `{self.under_way}`: {against(got, self.told.now)}{either}",
            )
        self.told.overwrite(got)


def _synced_bytes_max() -> int:
    """What is synced in the passthrough lane stays as it was up to here; more may have later
    writes, too (X11, S478).
    """
    least_that_moves = (2 * outgrown.KEEP_PIECES + 1) * outgrown.PIECE
    return min(contents.COPY_AT_FREEZE_BYTES_MAX, least_that_moves - 1)


def whole_pieces(at: int, content: bytes) -> tuple[int, bytes]:
    """What has left RAM may be overwritten in whole pieces, and not with zeros (S61)."""
    piece = outgrown.PIECE
    count = -(-len(content) // piece) * piece
    return at // piece * piece, content.replace(b"\0", b"\1").ljust(count, b"\1")


def _place(failure: OSError) -> str:
    frames = [
        f"{frame.filename.partition('/acpfs/')[2]}:{frame.lineno}"
        for frame in traceback.extract_tb(failure.__traceback__)
        if "/acpfs/" in frame.filename
    ]
    return " < ".join(reversed(frames[-3:])) or "?"
