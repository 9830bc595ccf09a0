"""Several processes at the same files: opened by more than one, with copies of descriptors, closed,
handed on and killed.

One task makes their calls, one after the other, so that it is known of each moment what is
complete: a file is when nobody who wrote to it since its last version has it open, when somebody
syncs it or names it, and when a person says so. RELEASE comes later, beside other calls. What is
complete is a moment of the file (`Told`), and the storage shows nothing else: no half of a writer
that is at it, or was killed. What is complete, and stays so, must be on the storage once all is
persisted (rule WITHHELD).

Only of files that are no logs: a log is good at any moment.
"""

from __future__ import annotations

import errno
import os
import random
import stat
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import Any

import trio

from acpfs.backing.posix_acl import ACCESS
from acpfs.filesystem.closing import Closing
from acpfs.filesystem.content.body import LOG_PIECE_BYTES_MAX
from acpfs.filesystem.filesystem import FileSystem
from acpfs.filesystem.records import AttributeChange, Caller
from tests.sim import acls
from tests.sim.choices import Choices, Knobs, Profile
from tests.sim.oracles import Told, judge_shown
from tests.sim.processes import Description, Process, ProcessTable
from tests.sim.programs import Calls, by_path
from tests.sim.rights import (
    CHANGES,
    GIVES,
    NUMBER,
    OWNERS,
    OWNERS_NUMBER,
    SHARE,
    XATTR,
    Look,
    Rights,
    drawn,
    given_away,
    look_of,
)
from tests.sim.shown import Shown, bare, below
from tests.sim.trace import Finding, Trace

KINDS = {
    "open": 4,
    "truncate and open": 1,
    "write": 8,
    "copy": 2,
    "fork": 3,
    "exec": 2,
    "close": 6,
    "exit": 1,
    "kill": 1,
    "sync": 1,
    "rename": 1,
    "truncate": 1,
    "read": 1,
    "settle": 2,
    "decide": 1,
}
HANDED_ON_KINDS = {
    "open": 3,
    "write": 4,
    "fork": 4,
    "close": 5,
    "rename": 5,
    "read": 1,
    "settle": 1,
}
"""The same, where children go on with what others have opened (`Profile.HANDED_ON`)."""
PROCESSES_MAX = 5
PAUSES_S = (0.0, 0.0, 0.001, 0.03, 0.3, 1.5, 6.0)
RELEASES_S = (0.0, 0.0, 0.001, 0.05, 2.0)
"""So long after its last close the kernel tells that an open file is gone."""
SETTLE_S = 12.0
"""In which it is known of each close whether it counts."""
LARGE = LOG_PIECE_BYTES_MAX + 5000
"""No piece of a log."""
SIZES = (1, 3000, 70_000)


@dataclass(eq=False)
class Open(Description):
    """One that the crew knows more of."""

    wrote: bool = False
    """Something that is in no version, and it was not closed since."""
    others_wrote: bool = False
    """So its opener's close is not that of the file."""
    was_killed: bool = False
    """Who wrote through it."""
    writers: set[int] = field(default_factory=set)
    """Processes that wrote that; none, where it was only made or truncated."""

    lefts: list[tuple[bytes, int]] = field(default_factory=list)
    """The file as it was each time that a copy was closed since something was written through it,
    and the event with which that had its place: its last close publishes the first of these, or a
    later one, if that one was taken back.
    """

    def is_fixed(self) -> None:
        """All that was written through it is in a version."""
        self.wrote = False
        self.lefts.clear()
        self.writers.clear()


@dataclass(eq=False)
class SharedFile:
    """One file of the crew."""

    path: str
    told: Told
    content: bytes
    """As the mount shows it."""
    is_there: bool
    is_modified: bool = False
    """It has something that is in no version."""
    is_half: bool = False
    opens: list[Open] = field(default_factory=list)
    """Until their RELEASE is answered."""
    renames: int = 0
    place: int = 0
    """When a copy of a descriptor was first closed since it was changed: it has its place from then
    on, if that turns out to count.
    """

    rights: Rights = field(default_factory=Rights)

    def is_anybody_at_it(self) -> bool:
        return any(one.wrote for one in self.opens)

    def complete(self) -> Shown:
        """What the storage is to have of it when it is complete now."""
        return {self.path.encode(): self.content}


class Crew:
    """See above."""

    def __init__(
        self,
        name: str,
        calls: Calls,
        choices: Choices,
        knobs: Knobs,
        trace: Trace,
        files: list[SharedFile],
        table: ProcessTable,
        counts: Counter[str],
    ) -> None:
        self.name = name
        self.files = files
        self._calls = calls
        self._choices = choices
        self._knobs = knobs
        self._trace = trace
        self._table = table
        self._counts = counts
        self._processes: list[Process] = []
        self._releases: trio.Nursery
        self._under_way = ""
        self.has_rights = choices.stream("rights", NUMBER).random() < SHARE
        """Somebody sets rights and extended attributes, at any moment."""
        self._gives = choices.stream("owners", OWNERS_NUMBER).random() < OWNERS
        """Who sets rights also gives files away."""
        self._sets_acls = (
            self.has_rights
            and knobs.has_acls
            and choices.stream("acls", acls.CREW_NUMBER).random() < acls.CREW_SHARE
        )

    async def run(self) -> None:
        """All its calls, and an end at which nobody has anything open."""
        async with trio.open_nursery() as self._releases:
            for number in range(self._knobs.calls):
                if (self.name, number) in self._choices.without_calls:
                    continue
                chance = self._choices.stream(self.name, number)
                await self._call(chance)
                if self.has_rights:
                    await self._set_attribute(self._choices.stream(self.name, number, "rights"))
                if self._sets_acls:
                    await self._set_acl(self._choices.stream(self.name, number, "acl"))
                self._calls.kernel.answered()
                await trio.sleep(chance.choice(PAUSES_S))
            chance = self._choices.stream(self.name, "end")
            for process in list(self._processes):
                await self._end(
                    process, chance, Closing.KILL if chance.random() < 0.2 else Closing.END
                )
        for file in self.files:
            await self._decide_on(file, chance)
        self._calls.kernel.answered()

    async def _call(self, chance: random.Random) -> None:
        if not self._processes:
            self._processes.append(self._table.start())
        is_handed_on = self._choices.profile is Profile.HANDED_ON
        kinds = HANDED_ON_KINDS if is_handed_on else KINDS
        kind = chance.choices(list(kinds), list(kinds.values()))[0]
        process = chance.choice(self._processes)
        method: Callable[[Process, random.Random], Awaitable[None]]
        method = getattr(self, "_" + kind.replace(" ", "_"))
        try:
            await method(process, chance)
        except OSError as failure:
            name = errno.errorcode.get(failure.errno or 0, "?")
            raise Finding(
                "ANSWER", f"{self._under_way} of {self.name} fails with {name}"
            ) from failure

    def _note(self, process: Process | None, what: str, *words: object) -> None:
        self._under_way = what
        who = self.name if process is None else f"{self.name}:{process.pid}"
        self._trace.note(who, what, words)

    def _caller(self, process: Process) -> Caller:
        return self._calls.kernel.new_caller()._replace(pid=process.pid + 1)

    async def _request(self, make: Callable[[FileSystem], Any]) -> Any:
        return await self._calls.request(make)

    async def _complete(
        self,
        file: SharedFile,
        act: Callable[[], Awaitable[None]],
        *,
        is_owed: bool = True,
        shown: Shown | None = None,
    ) -> None:
        """A call that makes it so, or what it has now complete."""
        file.told.begin(file.complete() if shown is None else shown, since=file.place)
        await act()
        file.told.end(is_owed=is_owed)
        if shown is None:
            file.is_modified = False

    def _is_in_doubt(self, file: SharedFile) -> bool:
        """Whether the daemon does not know yet of a close that it counts."""
        return any(not one.wrote and self._is_closed(one) for one in file.opens)

    def _is_closed(self, one: Open) -> bool:
        return not self._table.has(one.opener, one)

    # -- opening, and copies

    async def _open(self, process: Process, chance: random.Random) -> None:
        await self._open_file(process, chance, flags=os.O_WRONLY)

    async def _truncate_and_open(self, process: Process, chance: random.Random) -> None:
        await self._open_file(process, chance, flags=os.O_WRONLY | os.O_TRUNC)

    async def _open_file(self, process: Process, chance: random.Random, flags: int) -> None:
        file = chance.choice(self.files)
        if any(
            one.opener == process.pid or self._table.has(process.pid, one) for one in file.opens
        ):
            return  # of two opens of one process /proc tells less
        if not file.is_there:
            await self._create(process, file, chance)
            return
        self._note(process, "open", file.path, flags)
        truncates = bool(flags & os.O_TRUNC) and bool(file.content)
        access = flags if truncates else flags & ~os.O_TRUNC
        caller = self._caller(process)

        async def act() -> Any:
            ino = await self._calls.ino(file.path)
            return ino, await self._request(lambda fs: fs.open(ino, access, caller))

        ino, opened = await by_path(act)
        one = Open(ino, opened.handle, process.pid, wrote=truncates)
        if truncates:
            file.content = b""
            file.is_modified = True
            file.is_half = False
            file.place = 0
        file.opens.append(one)
        process.files.append(one)

    async def _create(self, process: Process, file: SharedFile, chance: random.Random) -> None:
        self._note(process, "create", file.path)
        caller = self._caller(process)
        parent, name = await self._calls.place(file.path)
        opened, attributes = await self._request(
            lambda fs: fs.create(parent, name, 0o644, os.O_WRONLY, caller)
        )
        one = Open(attributes.ino, opened.handle, process.pid, wrote=True)
        file.rights.is_new()
        file.content = b""
        file.is_there = True
        file.is_modified = True
        file.opens.append(one)
        process.files.append(one)
        await self._write_to(process, one, file, 0, chance.randbytes(LARGE))

    async def _copy(self, process: Process, chance: random.Random) -> None:
        if process.files:
            process.files.append(chance.choice(process.files))

    async def _fork(self, process: Process, chance: random.Random) -> None:
        if len(self._processes) < PROCESSES_MAX:
            child = self._table.fork(process) if chance.random() < 0.8 else self._table.start()
            self._note(process, "fork", child.pid, len(child.files))
            self._processes.append(child)

    async def _exec(self, process: Process, chance: random.Random) -> None:
        self._note(process, "exec")
        if chance.random() < 0.5:  # close on exec
            while process.files:
                await self._close_one(process, process.files[0], Closing.CALL)
        self._table.exec(process)

    # -- writing

    def _file_of(self, one: Description) -> SharedFile:
        return next(file for file in self.files if one in file.opens)

    async def _write(self, process: Process, chance: random.Random) -> None:
        if not process.files:
            return
        one = chance.choice(process.files)
        file = self._file_of(one)
        assert isinstance(one, Open)
        size = len(file.content)
        at = chance.choice((0, chance.randrange(size + 1), size))
        count = chance.choice(SIZES)
        if at == size:
            count = LARGE
        await self._write_to(process, one, file, at, chance.randbytes(count))

    async def _write_to(
        self, process: Process, one: Open, file: SharedFile, at: int, data: bytes
    ) -> None:
        self._note(process, "write", file.path, at, data)
        thread = process.pid + len(data) % 2
        await self._request(lambda fs: fs.write(one.handle, at, data, thread, is_mapped=False))
        file.content = file.content[:at] + data + file.content[at + len(data) :]
        file.is_modified = True
        file.is_half = False
        one.wrote = True
        file.place = 0
        one.others_wrote |= process.pid != one.opener
        one.writers.add(process.pid)
        one.lefts.clear()

    async def _sync(self, process: Process, chance: random.Random) -> None:
        if not process.files:
            return
        one = chance.choice(process.files)
        file = self._file_of(one)
        assert isinstance(one, Open)
        if file.is_half and not one.was_killed:
            return
        self._note(process, "fsync", file.path)
        for other in file.opens:
            if other is not one:
                self._may_count(file, other)
        await self._complete(
            file, lambda: self._request(lambda fs: fs.fsync(one.handle, datasync=False))
        )
        file.is_half = False
        for other in file.opens:
            other.is_fixed()

    def _may_count(self, file: SharedFile, other: Open) -> None:
        """Its close may have been that of the file: what stands behind it in the order may rely on
        that.
        """
        if self._is_left_by_writers(other):
            self._publish_left(file, other)

    def _is_left_by_writers(self, one: Open) -> bool:
        """Whether nobody who wrote through it has a descriptor: then the last close of one of them
        counts, as far as acpfs can tell, though there are copies.
        """
        return not any(self._table.has(pid, one) for pid in {one.opener, *one.writers})

    def _publish_left(self, file: SharedFile, one: Open) -> None:
        """What the file was at a close, where others have changed it since."""
        for left, at in one.lefts:
            if left != file.content:
                file.told.begin({file.path.encode(): left}, since=at)
                file.told.end(is_owed=False)

    async def _truncate(self, process: Process, chance: random.Random) -> None:
        file = chance.choice(self.files)
        if not file.is_there or file.is_half or not file.content:
            return
        size = chance.choice((0, len(file.content) // 2, len(file.content) + 5000))
        self._note(process, "truncate", file.path, size)
        caller = self._caller(process)

        async def act() -> None:
            ino = await self._calls.ino(file.path)
            change = AttributeChange(size=size)
            await self._request(lambda fs: fs.setattr(ino, change, None, caller))

        file.place = 0
        file.content = file.content[:size] + bytes(max(0, size - len(file.content)))
        file.is_modified = True
        if file.is_anybody_at_it():
            await by_path(act)
        else:
            await self._complete(file, lambda: by_path(act), is_owed=not self._is_in_doubt(file))

    # -- closing

    async def _close(self, process: Process, chance: random.Random) -> None:
        if process.files:
            await self._close_one(process, chance.choice(process.files), Closing.CALL)

    async def _exit(self, process: Process, chance: random.Random) -> None:
        await self._end(process, chance, Closing.END)

    async def _kill(self, process: Process, chance: random.Random) -> None:
        await self._end(process, chance, Closing.KILL)

    async def _end(self, process: Process, chance: random.Random, how: Closing) -> None:
        """All its descriptors are gone at once, and then closed one by one."""
        self._note(process, how.value)
        process.closing = how
        files = process.files
        process.files = []
        self._processes.remove(process)
        for at, one in enumerate(files):
            await self._flush(process, one, how, is_last=one not in files[at + 1 :])
        self._table.gone(process)

    async def _close_one(self, process: Process, one: Description, how: Closing) -> None:
        process.files.remove(one)
        await self._flush(process, one, how, is_last=True)

    async def _flush(
        self, process: Process, description: Description, how: Closing, *, is_last: bool
    ) -> None:
        """`is_last`: of those that the process closes in one go; the first one has the place in the
        order.
        """
        one = description
        file = self._file_of(description)
        assert isinstance(one, Open)
        self._note(process, "close", file.path, how.value)
        is_gone = not self._table.is_held(one)
        opener_has_it = self._table.has(one.opener, one)

        async def act() -> None:
            await self._request(lambda fs: fs.flush(one.handle, process.pid))

        may_be_half = (
            how is Closing.KILL
            and one.wrote
            and file.is_modified
            and not opener_has_it
            and not file.is_half
        )
        is_half = may_be_half and one.wrote and process.pid in (one.writers or {one.opener})
        if is_half:
            file.is_half = True
            one.was_killed = True
            self._counts["halves"] += 1
        is_close = is_gone or (not opener_has_it and not one.others_wrote)
        if not is_close or file.is_half or not one.wrote:
            file.place = file.place or file.told.event()
            if one.wrote and file.is_modified and [o for o in file.opens if o.wrote] == [one]:
                at = file.told.event()
                if not one.lefts or one.lefts[-1][0] != file.content:
                    one.lefts.append((file.content, at))
            if is_gone and file.is_half and not one.was_killed:
                self._publish_left(file, one)  # the half is that of others
            await act()
            if may_be_half and not file.is_half:
                file.is_half = await self._is_interrupted(file)
                one.was_killed = file.is_half
        elif may_be_half:
            await self._flush_in_doubt(file, one, act)
        else:
            await self._flush_last(file, one, act, is_gone=is_gone)
        if is_gone and file.is_half:
            one.is_fixed()  # nobody goes on with it; what there is stays a half
        if is_half and not await self._is_interrupted(file):
            raise Finding("KILLED", f"{file.path} is no half, though its writer was killed")
        if is_gone and is_last:
            delay_s = self._choices.stream(self.name, "release", one.handle).choice(RELEASES_S)
            self._releases.start_soon(self._release, file, one, delay_s)

    async def _flush_last(
        self, file: SharedFile, one: Open, act: Callable[[], Awaitable[None]], *, is_gone: bool
    ) -> None:
        """Who opened it, or wrote, has no copy any more."""
        self._publish_left(file, one)
        one.is_fixed()
        if not is_gone:
            self._counts["closes beside a copy"] += 1
        if file.is_modified and not file.is_anybody_at_it():
            beside = self._is_in_doubt(file) if is_gone else True
            await self._complete(file, act, is_owed=not beside)
            return
        self._counts["closes beside a writer"] += file.is_modified
        if file.is_modified and all(
            self._is_left_by_writers(other) for other in file.opens if other.wrote
        ):
            # those whose closes wait only for this one count with it
            file.told.begin(file.complete(), since=file.place)
            await act()
            file.told.end(is_owed=False)
            return
        await act()

    async def _flush_in_doubt(
        self, file: SharedFile, one: Open, act: Callable[[], Awaitable[None]]
    ) -> None:
        """One that wrote nothing was killed, and was the last to have it: what others wrote is a
        half, or is not.
        """
        one.is_fixed()
        is_last = file.is_modified and not file.is_anybody_at_it()
        if is_last:
            file.told.begin(file.complete(), since=file.place)
        await act()
        file.is_half = await self._is_interrupted(file)
        one.was_killed = file.is_half
        if is_last and file.is_half:
            file.told.never()
        elif is_last:
            file.told.end(is_owed=False)
            file.is_modified = False

    async def _is_interrupted(self, file: SharedFile) -> bool:
        """Whether acpfs says that it is a half."""

        return await self._calls.kernel.is_interrupted(file.path.encode())

    async def _release(self, file: SharedFile, one: Open, delay_s: float) -> None:
        await trio.sleep(delay_s)
        await self._request(lambda fs: fs.release(one.handle))
        one.wrote = False
        file.opens.remove(one)

    # -- names

    async def _rename(self, process: Process, chance: random.Random) -> None:
        file = chance.choice(self.files)
        if not file.is_there:
            return
        at_it = [one for one in file.opens if one.wrote]
        is_own = all({one.opener, *one.writers} == {process.pid} for one in at_it)
        is_anothers = any(
            pid != process.pid and self._table.has(pid, one)
            for one in at_it
            for pid in (one.writers or {one.opener})
        )
        waits = [one for one in file.opens if not one.wrote and self._is_closed(one)]
        if file.is_modified and not file.is_half and not is_anothers and (waits or not is_own):
            return  # whether others are done is not known yet
        if not file.told.moments[-1].is_owed:
            return  # nor what the older version is
        source = file.path
        file.renames += 1
        target = f"{file.path[: len(file.told.directory)]}{file.renames}"
        self._note(process, "rename", source, target)

        async def act() -> None:
            here = await self._calls.place(source)
            there = await self._calls.place(target)

            async def is_done() -> bool:
                return target.encode() in await self._calls.tree(self.name)

            await self._calls.kernel.request(
                lambda fs: fs.rename(*here, *there, 0, process.pid), is_done
            )

        old = next(iter(file.told.now.values()), None)
        file.path = target
        if file.is_modified and not file.is_half and is_own:
            # published first, and then renamed
            file.told.begin({source.encode(): file.content}, since=file.place)
            file.told.end(is_owed=False)
            await self._complete(file, lambda: by_path(act))
            for one in at_it:
                one.is_fixed()
            return
        shown = {} if old is None else {target.encode(): old}
        await self._complete(file, lambda: by_path(act), shown=shown)

    # -- attributes

    async def _set_attribute(self, chance: random.Random) -> None:
        """Whoever has the file open, and whichever close of it is in doubt."""
        file = chance.choice(self.files)
        if chance.random() >= CHANGES or not file.is_there:
            return
        change = drawn(chance)
        if self._gives and chance.random() < GIVES:
            change = given_away(chance)
        caller = self._calls.kernel.new_caller()

        async def act() -> None:
            ino = await self._calls.ino(file.path)
            if isinstance(change, bytes):
                await self._request(lambda fs: fs.setxattr(ino, XATTR, change))
            else:
                whole = change
                if change.mode is not None:
                    whole = replace(change, mode=stat.S_IFREG | change.mode)
                await self._request(lambda fs: fs.setattr(ino, whole, None, caller))

        self._counts["attributes set beside a close in doubt"] += self._is_in_doubt(file) or any(
            one.lefts for one in file.opens
        )
        if isinstance(change, bytes):
            self._note(None, "set xattr", file.path, change)
            await by_path(act)
            file.rights.xattr = change
            return
        await self._give(file, file.rights.last.changed(change), act)

    async def _give(self, file: SharedFile, look: Look, act: Callable[[], Awaitable[None]]) -> None:
        """A call that gives a file these rights."""
        file.rights.begin(look)
        self._note(None, "change rights", file.path, str(look))
        await by_path(act)
        file.rights.end(file.told.event())

    async def _set_acl(self, chance: random.Random) -> None:
        """Now and then, also behind a close of which it is not known yet whether it counts."""
        file = chance.choice(self.files)
        if chance.random() >= acls.CHANGES or not file.is_there:
            return
        last = file.rights.last
        value = acls.drawn(chance)
        removes = last.acl is not None and chance.random() < acls.REMOVES

        async def act() -> None:
            ino = await self._calls.ino(file.path)
            if removes:
                await self._request(lambda fs: fs.removexattr(ino, ACCESS))
            else:
                await self._request(lambda fs: fs.setxattr(ino, ACCESS, value))

        self._counts["ACLs set beside a close in doubt"] += self._is_in_doubt(file)
        await self._give(file, last.with_acl(None if removes else value), act)

    def attributes(self) -> Shown:
        """What is known of those of its files."""
        found: Shown = {}
        for file in self.files if self.has_rights else ():
            if file.is_there:
                found.update(file.rights.at_the_end(file.path))
        return found

    # -- looking

    async def _read(self, process: Process, chance: random.Random) -> None:
        file = chance.choice(self.files)
        if file.is_there:
            self._note(process, "read", file.path)
            got = {file.path.encode(): await self._calls.read(file.path)}
            judge_shown("READ", got, file.complete())

    async def _settle(self, process: Process, chance: random.Random) -> None:
        """When all is known, and persisted: what is complete is there."""
        self._note(None, "settles")
        await trio.sleep(SETTLE_S)
        is_persisted = await self._calls.kernel.persisted()
        self._calls.kernel.answered()
        if not is_persisted:
            return
        stored = self._calls.kernel.stored()
        for file in self.files:
            quiet = not (file.is_half or file.is_modified or file.is_anybody_at_it())
            if quiet and below(stored, file.told.directory) != file.told.now:
                judge_shown("WITHHELD", below(stored, file.told.directory), file.told.now)
            if self.has_rights and file.is_there:
                attributes = self._calls.kernel.stored_attributes()
                file.rights.judge(file.path, attributes, file.rights.last.may(), is_persisted=True)

    # -- a person

    async def _decide(self, process: Process, chance: random.Random) -> None:
        await self._decide_on(chance.choice(self.files), chance)

    async def _decide_on(self, file: SharedFile, chance: random.Random) -> None:
        """What becomes of a half."""
        if not file.is_half:
            return
        path = file.path.encode()
        if file.opens or chance.random() < 0.5:
            self._note(None, "retry", file.path)

            await self._complete(file, lambda: self._calls.kernel.decide(path, keeps=True))
            file.is_half = False
            for one in file.opens:
                one.is_fixed()
            return
        self._note(None, "discard", file.path)

        await self._calls.kernel.decide(path, keeps=False)
        file.is_half = False
        file.is_modified = False
        got = below(
            await self._calls.tree(self.name, attributes=self.has_rights), file.told.directory
        )
        shown = bare(got)
        if shown not in file.told.since_owed():
            judge_shown("DISCARDED", shown, file.told.now)
        # A close beside a copy through which somebody went on writing may count, or not.
        file.told.begin(shown)
        file.told.end(is_owed=False)
        file.is_there = bool(shown)
        if self.has_rights and (look := look_of(file.path, got)) is not None:
            file.rights.shown(look)
        file.content = next(iter(shown.values()), b"")
