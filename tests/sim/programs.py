"""What applications do: one program is a task that makes calls below its own directory, and remembers what it was told."""

from __future__ import annotations

import errno
import os
import random
import stat
import traceback
from collections.abc import Awaitable, Callable, Container
from dataclasses import dataclass
from typing import Protocol, TypeVar, cast

import trio

from acpfs.config import FsyncMode
from acpfs.filesystem.filesystem import FileSystem
from acpfs.filesystem.records import Caller
from acpfs.filesystem.steps import Call
from acpfs.types import ROOT, HandleId, Ino
from tests.sim.choices import Choices, Knobs
from tests.sim.oracles import Told, judge_shown
from tests.sim.storage import Shown, differences
from tests.sim.trace import Finding, Trace

T = TypeVar("T")

PIECE_BYTES = 65536
OPEN_MAX = 4
EXCHANGE = 2
READ_BYTES = 16 << 20
PAUSES_S = (0.0, 0.001, 0.01, 0.03, 0.2, 2.0)
DATA_SIZES = (1, 5000, 60_000)
FORGETS = 0.3
"""Share of calls after which the kernel knows only of what is open."""
KINDS = (
    *("save",) * 3,
    "overwrite",
    "append",
    "make directory",
    "delete",
    "rename",
    "replace",
    "exchange",
    "move directory",
    "remove directory",
    "read",
    "open new",
    "open old",
    *("write on",) * 3,
    *("fsync",) * 2,
    "wait until persisted",
    "close",
)
WITH_OPEN_FILE = ("write on", "fsync", "close")


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

    def forget(self, but: Container[Ino]) -> None:
        """Give back what is known of nodes, but for these, as a kernel short of memory does."""
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


@dataclass
class Opened:
    """A file that a program has open for writing."""

    path: str
    ino: Ino
    handle: HandleId
    content: bytes
    """With all that was written."""
    is_changed: bool = False


async def _never() -> bool:
    return False


async def by_path(act: Callable[[], Awaitable[T]]) -> T:
    """As Linux does: where a node is not known any more, the path is walked once more."""
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

    async def request(self, make: Callable[[FileSystem], Call[T]]) -> T:
        """One that may be sent again."""
        answer = await self.kernel.request(make, _never)
        return cast("T", answer)  # a call may answer None, too

    async def ino(self, path: str) -> Ino:
        return await by_path(lambda: self._walk(path))

    async def _walk(self, path: str) -> Ino:
        at = ROOT
        for name in path.split("/") if path else ():
            parent, part = at, name.encode()
            at = (await self.request(lambda fs, p=parent, n=part: fs.lookup(p, n))).ino  # type: ignore[misc]
        return at

    async def place(self, path: str) -> tuple[Ino, bytes]:
        directory, _slash, name = path.rpartition("/")
        return await self.ino(directory), name.encode()

    async def create(self, path: str) -> Opened:
        return await by_path(lambda: self._create(path))

    async def _create(self, path: str) -> Opened:
        parent, name = await self.place(path)
        caller = self.kernel.new_caller()
        opened, attributes = await self.request(
            lambda fs: fs.create(parent, name, 0o644, os.O_WRONLY, caller)
        )
        return Opened(path, attributes.ino, opened.handle, b"")

    async def open(self, path: str, flags: int, content: bytes) -> Opened:
        return await by_path(lambda: self._open(path, flags, content))

    async def _open(self, path: str, flags: int, content: bytes) -> Opened:
        ino, caller = await self.ino(path), self.kernel.new_caller()
        opened = await self.request(lambda fs: fs.open(ino, flags, caller))
        return Opened(path, ino, opened.handle, content)

    async def write(self, file: Opened, at: int, data: bytes) -> None:
        done = 0
        while done < len(data):
            start, piece = at + done, data[done : done + PIECE_BYTES]
            await self.request(lambda fs, s=start, p=piece: fs.write(file.handle, s, p))  # type: ignore[misc]
            content = file.content + bytes(max(0, start - len(file.content)))
            file.content = content[:start] + piece + content[start + len(piece) :]
            file.is_changed = True
            done += len(piece)

    async def close(self, file: Opened) -> None:
        await self.request(lambda fs: fs.flush(file.handle, 1))
        await self.request(lambda fs: fs.release(file.handle))

    async def read(self, path: str) -> bytes:
        return await by_path(lambda: self._read(path))

    async def _read(self, path: str) -> bytes:
        ino, caller = await self.ino(path), self.kernel.new_caller()
        opened = await self.request(lambda fs: fs.open(ino, os.O_RDONLY, caller))
        content = await self.request(lambda fs: fs.read(opened.handle, 0, READ_BYTES))
        await self.request(lambda fs: fs.flush(opened.handle, 1))
        await self.request(lambda fs: fs.release(opened.handle))
        return content

    async def tree(self, directory: str) -> Shown:
        """What the mount shows below a directory, itself with it; nothing where it is not there."""
        try:
            return await by_path(lambda: self._tree(directory))
        except FileNotFoundError:
            return {}

    async def _tree(self, directory: str) -> Shown:
        ino = await self.ino(directory)
        found: Shown = {(directory + "/").encode(): b""} if directory else {}
        handle = await self.request(lambda fs: fs.opendir(ino))
        entries = await self.request(lambda fs: fs.readdir(handle, 0, with_attributes=False))
        await self.request(lambda fs: fs.releasedir(handle))
        for entry in entries:
            if entry.name in (b".", b".."):
                continue
            name = entry.name
            attributes = await self.request(lambda fs, n=name: fs.lookup(ino, n))  # type: ignore[misc]
            path = f"{directory}/{name.decode()}" if directory else name.decode()
            if stat.S_ISDIR(attributes.mode):
                found.update(await self._tree(path))
            else:
                found[path.encode()] = await self.read(path)
        return found


class Program:
    """See above."""

    def __init__(
        self, name: str, calls: Calls, choices: Choices, knobs: Knobs, trace: Trace, told: Told
    ) -> None:
        self.name, self.told = name, told
        self._calls, self._choices, self._knobs, self._trace = calls, choices, knobs, trace
        self.open: dict[str, Opened] = {}
        self.number = 0
        """Of its next call."""
        self.under_way = ""
        self._has_frozen = False

    # -- what it knows

    def _shown(self) -> Shown:
        return dict(self.told.now)

    def _directories(self) -> list[str]:
        return [path[:-1].decode() for path in self.told.now if path.endswith(b"/")]

    def _files(self) -> list[str]:
        """That are not open."""
        names = [path.decode() for path in self.told.now if not path.endswith(b"/")]
        return [name for name in names if name not in self.open]

    def _movable(self) -> list[str]:
        """Directories below its own with nothing open in them."""
        return [
            directory
            for directory in self._directories()
            if directory != self.name
            and not any(path.startswith(directory + "/") for path in self.open)
        ]

    def _fresh(self, chance: random.Random) -> str:
        return f"{chance.choice(self._directories())}/{self.number}"

    # -- its life

    async def run(self) -> None:
        """All its calls."""
        if not self.told.now:
            await self._change("make directory", {f"{self.name}/".encode(): b""}, self._make_own)
        while self.number < self._knobs.calls:
            number = self.number
            self.number += 1
            if (self.name, number) in self._choices.without_calls:
                continue
            chance = self._choices.stream(self.name, number)
            await self._call(chance)
            self._calls.kernel.answered()
            if chance.random() < FORGETS:
                self._calls.kernel.forget({file.ino for file in self.open.values()})
            await trio.sleep(0.0 if self._has_frozen else chance.choice(PAUSES_S))
        for path in sorted(self.open):
            await self.close(self.open[path])

    async def _make_own(self) -> None:
        await self._make_directory_at(self.name)

    async def _call(self, chance: random.Random) -> None:
        kind = chance.choice(KINDS)
        if self._has_frozen and self.open and chance.random() < 0.7:
            kind = "write on"  # at once into what was just frozen
        self._has_frozen = False
        if kind in WITH_OPEN_FILE and not self.open:
            kind = "open new"
        needs_none = ("save", "wait until persisted", "make directory", "open new", *WITH_OPEN_FILE)
        if kind not in needs_none and not self._files():
            kind = "save"
        method: Callable[[random.Random], Awaitable[None]]
        method = getattr(self, "_" + kind.replace(" ", "_"))
        try:
            await method(chance)
        except OSError as failure:
            name = errno.errorcode.get(failure.errno or 0, "?")
            self._trace.note(self.name, self.under_way, (), name)
            raise Finding(
                "ANSWER", f"{self.under_way} of {self.name} fails with {name} at {_place(failure)}"
            ) from failure

    async def _change(
        self, what: str, shown: Shown, act: Callable[[], Awaitable[None]], *words: object
    ) -> None:
        """A call that makes it so."""
        self.under_way = what
        self._trace.note(self.name, what, words)
        self.told.begin(shown)
        await act()
        self.told.end()
        self._trace.note(self.name, what, (), "done")

    async def _named(self, make: Callable[[FileSystem], Call[T]], shown: Shown) -> None:
        """One that changes names: where it comes again, it may have been carried out before.

        A transport keeps a record of that (`transport.native.resent_requests`).
        """

        async def is_done() -> bool:
            return await self._calls.tree(self.name) == self.with_written(shown)

        await self._calls.kernel.request(make, is_done)

    def with_written(self, shown: Shown) -> Shown:
        """As the mount shows it: with what was written into open files."""
        written = {one.path.encode(): one.content for one in self.open.values() if one.is_changed}
        return {**shown, **written}

    # -- its calls: whole files

    async def _save(self, chance: random.Random) -> None:
        path, data = self._fresh(chance), chance.randbytes(chance.choice(self._knobs.sizes))

        async def act() -> None:
            file = await self._calls.create(path)
            await self._calls.write(file, 0, data)
            await self._calls.close(file)

        await self._change("save", self._shown() | {path.encode(): data}, act, path, len(data))

    async def _overwrite(self, chance: random.Random) -> None:
        await self._write_again(chance, chance.choice(self._files()), keeps=False)

    async def _append(self, chance: random.Random) -> None:
        await self._write_again(chance, chance.choice(self._files()), keeps=True)

    async def _write_again(self, chance: random.Random, path: str, *, keeps: bool) -> None:
        old = self.told.now[path.encode()] if keeps else b""
        data = chance.randbytes(chance.choice(DATA_SIZES))
        what = "append" if keeps else "overwrite"

        async def act() -> None:
            flags = os.O_WRONLY if keeps else os.O_WRONLY | os.O_TRUNC
            file = await self._calls.open(path, flags, old)
            await self._calls.write(file, len(old), data)
            await self._calls.close(file)

        await self._change(what, self._shown() | {path.encode(): old + data}, act, path, len(data))

    async def _read(self, chance: random.Random) -> None:
        path = chance.choice(self._files())
        self.under_way = "read"
        self._trace.note(self.name, "read", (path,))
        got = {path.encode(): await self._calls.read(path)}
        judge_shown("READ", got, {path.encode(): self.told.now[path.encode()]})

    # -- names

    async def _make_directory(self, chance: random.Random) -> None:
        path = self._fresh(chance)
        shown = self._shown() | {f"{path}/".encode(): b""}
        await self._change(
            "make directory", shown, lambda: self._make_directory_at(path, shown), path
        )

    async def _make_directory_at(self, path: str, shown: Shown | None = None) -> None:
        await by_path(lambda: self._make_directory_there(path, shown))

    async def _make_directory_there(self, path: str, shown: Shown | None) -> None:
        parent, name = await self._calls.place(path)
        caller = self._calls.kernel.new_caller()
        await self._named(
            lambda fs: fs.mkdir(parent, name, 0o755, caller), shown or {f"{path}/".encode(): b""}
        )

    async def _delete(self, chance: random.Random) -> None:
        path, shown = chance.choice(self._files()), self._shown()
        del shown[path.encode()]

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
                for path in self.told.now
                if path != f"{directory}/".encode()
            )
        ]
        if not empty:
            return
        path, shown = chance.choice(empty), self._shown()
        del shown[f"{path}/".encode()]

        async def act() -> None:
            parent, name = await self._calls.place(path)
            await self._named(lambda fs: fs.rmdir(parent, name), shown)

        await self._change("remove directory", shown, lambda: by_path(act), path)

    async def _rename(self, chance: random.Random) -> None:
        await self._rename_file(chance.choice(self._files()), self._fresh(chance))

    async def _replace(self, chance: random.Random) -> None:
        source, target = chance.choice(self._files()), chance.choice(self._files())
        if source != target:
            await self._rename_file(source, target)

    async def _rename_file(self, source: str, target: str) -> None:
        shown = self._shown()
        shown[target.encode()] = shown.pop(source.encode())
        await self._change(
            "rename", shown, lambda: self._rename_to(source, target, shown), source, target
        )

    async def _exchange(self, chance: random.Random) -> None:
        a, b = chance.choice(self._files()), chance.choice(self._files())
        if a == b:
            return
        shown = self._shown()
        shown[a.encode()], shown[b.encode()] = shown[b.encode()], shown[a.encode()]
        await self._change("exchange", shown, lambda: self._rename_to(a, b, shown, EXCHANGE), a, b)

    async def _move_directory(self, chance: random.Random) -> None:
        directories = self._movable()
        if not directories:
            return
        source, target = chance.choice(directories), self._fresh(chance)
        if target.startswith(source + "/"):
            return
        old, new = f"{source}/".encode(), f"{target}/".encode()
        shown = {
            (new + path[len(old) :] if path.startswith(old) else path): content
            for path, content in self.told.now.items()
        }
        await self._change(
            "move directory", shown, lambda: self._rename_to(source, target, shown), source, target
        )

    async def _rename_to(self, source: str, target: str, shown: Shown, flags: int = 0) -> None:
        async def act() -> None:
            here, there = await self._calls.place(source), await self._calls.place(target)
            await self._named(lambda fs: fs.rename(*here, *there, flags), shown)

        await by_path(act)

    # -- files that stay open

    async def _open_new(self, chance: random.Random) -> None:
        if len(self.open) >= OPEN_MAX:
            return
        path = self._fresh(chance)
        self.under_way = "open new"
        self._trace.note(self.name, "open new", (path,))
        file = await self._calls.create(path)
        file.is_changed = True  # it is shown, empty, and its close makes a file
        self.open[path] = file
        await self._calls.write(file, 0, chance.randbytes(chance.choice(DATA_SIZES)))

    async def _open_old(self, chance: random.Random) -> None:
        if len(self.open) >= OPEN_MAX:
            return
        path = chance.choice(self._files())
        self.under_way = "open old"
        self._trace.note(self.name, "open old", (path,))
        file = await self._calls.open(path, os.O_WRONLY, self.told.now[path.encode()])
        self.open[path] = file
        data = chance.randbytes(chance.choice(DATA_SIZES))
        await self._calls.write(file, len(file.content), data)

    async def _write_on(self, chance: random.Random) -> None:
        file = self.open[chance.choice(sorted(self.open))]
        size = len(file.content)
        at, data = chance.choice((size, chance.randrange(size + 1), 0)), chance.choice(DATA_SIZES)
        self.under_way = "write on"
        self._trace.note(self.name, "write on", (file.path, at, data))
        await self._calls.write(file, at, chance.randbytes(data))

    async def _fsync(self, chance: random.Random) -> None:
        file = self.open[chance.choice(sorted(self.open))]
        self._has_frozen = True

        async def act() -> None:
            await self._calls.request(lambda fs: fs.fsync(file.handle, datasync=False))

        await self._change("fsync", self._with(file), act, file.path)
        file.is_changed = False
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
        await self.close(self.open[chance.choice(sorted(self.open))])

    async def close(self, file: Opened) -> None:
        """Also at the end."""
        await self._change("close", self._with(file), lambda: self._calls.close(file), file.path)
        del self.open[file.path]

    def _with(self, file: Opened) -> Shown:
        shown = self._shown()
        return shown | {file.path.encode(): file.content} if file.is_changed else shown

    # -- after a death of everything

    def judge_halves(self, got: Shown) -> None:
        """Files that it had open are shown as far as they were written, or as they were before."""
        for file in self.open.values():
            found = got.get(file.path.encode())
            before = self.told.now.get(file.path.encode())
            if found is None or found == before or self.under_way == "write on":
                continue
            if not file.content.startswith(found[: len(file.content)]):
                raise Finding(
                    "HALF",
                    differences({file.path.encode(): found}, {file.path.encode(): file.content}),
                )

    def died(self, got: Shown) -> None:
        """It died with its machine; this is what the mount shows since, without halves."""
        self.open.clear()
        self._has_frozen = False
        pending = self.told.pending
        if pending is not None and got == pending.shown:
            self.told.end()
        elif got == self.told.now:
            self.told.never()
        else:
            either = "" if pending is None else f"; or {differences(got, pending.shown)}"
            raise Finding(
                "SHOWN",
                f"after a death in `{self.under_way}`: {differences(got, self.told.now)}{either}",
            )


def _place(failure: OSError) -> str:
    frames = [
        f"{frame.filename.partition('/acpfs/')[2]}:{frame.lineno}"
        for frame in traceback.extract_tb(failure.__traceback__)
        if "/acpfs/" in frame.filename
    ]
    return " < ".join(reversed(frames[-3:])) or "?"
