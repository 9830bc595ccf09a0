"""A program that reads what others write, at any moment.

Beside its calls others make theirs, so it knows little: a content is compared where nobody changed
the file from before the read until after it. But no read fails, unless the name was not there at
some moment meanwhile: not where the file is written anew, replaced or deleted while it is open.
"""

from __future__ import annotations

import errno
import os
import random
from collections import Counter
from collections.abc import Sequence

import trio

from acpfs.types import HandleId, Ino
from tests.sim.choices import Choices, Knobs
from tests.sim.kernel import Process
from tests.sim.oracles import judge_shown
from tests.sim.programs import READ_BYTES, Calls, Died, Program, by_path
from tests.sim.shown import bare, names_of
from tests.sim.trace import Finding, Trace

NAME = "reader"
PAUSES_S = (0.0, 0.0, 0.001, 0.02, 0.2, 2.0)
READS = 2
"""For each call of another program."""


class Reader:
    """See above."""

    def __init__(
        self,
        process: Process,
        programs: Sequence[Program],
        choices: Choices,
        knobs: Knobs,
        trace: Trace,
        counts: Counter[str],
    ) -> None:
        self._process = process
        self._calls = Calls(process)
        self._programs = programs
        self._choices = choices
        self._trace = trace
        self._counts = counts
        self._left = READS * knobs.calls
        self._number = 0

    async def run(self) -> None:
        """All its reads."""
        while self._left:
            self._left -= 1
            self._number += 1
            if (NAME, self._number) in self._choices.without_calls:
                continue
            chance = self._choices.stream(NAME, self._number)
            await trio.sleep(chance.choice(PAUSES_S))
            await self._read_one(chance)

    async def _read_one(self, chance: random.Random) -> None:
        program = chance.choice(self._programs)
        paths = [path for path in bare(program.told.now) if not path.endswith(b"/")]
        if not paths:
            return
        path = chance.choice(paths)
        first = len(program.told.moments) - 1
        gave_up = program.gave_up
        before = self._contents(program, path, first, gave_up)
        self._trace.note(NAME, "read", (path,))
        got = b""
        failure: OSError | None = None
        try:
            got = await self._read(path.decode(), chance)
        except OSError as error:
            failure = error
        contents = before + self._contents(program, path, first, gave_up)
        is_steady = contents[0] is not None and len(set(contents)) == 1
        if failure is not None:
            if is_steady or failure.errno != errno.ENOENT or None not in contents:
                name = errno.errorcode.get(failure.errno or 0, "?")
                raise Finding("ANSWER", f"a read of {path.decode()} fails with {name}") from failure
        elif is_steady:
            self._counts["reads beside others"] += 1
            judge_shown("READ", {path: got}, {path: contents[0] or b""})

    def _contents(
        self, program: Program, path: bytes, first: int, gave_up: int
    ) -> list[bytes | None]:
        """What the file may have had since that moment; None among them: it was not there, or what
        it has is not known.
        """
        told = program.told
        moments = [*told.moments[first:], *([told.pending] if told.pending else [])]
        found = [moment.shown.get(path) for moment in moments]
        now = told.now
        names = {name.decode() for name in names_of(now, path)} if path in now else set()
        in_flux = {*program.open, *program.mapped, *program.giving_up[gave_up:]}
        is_open = not names.isdisjoint(in_flux)
        return [*found, None] if is_open else found

    async def _read(self, path: str, chance: random.Random) -> bytes:
        """Slowly, at times. What a read fails with an application hears; only an open walks its
        path again.
        """
        ino, handle = await by_path(lambda: self._open(path))
        mount = self._process.mount
        await trio.sleep(chance.choice(PAUSES_S))
        if mount != self._process.mount:
            raise Died(mount)  # with its machine, as it slept
        try:
            content = await self._calls.request(lambda fs: fs.read(handle, 0, READ_BYTES))
        except OSError:
            await self._calls.close_handle(ino, handle)
            raise
        await self._calls.close_handle(ino, handle)
        return content

    async def _open(self, path: str) -> tuple[Ino, HandleId]:
        ino = await self._calls.ino(path)
        caller = self._calls.kernel.new_caller()
        opened = await self._calls.request(lambda fs: fs.open(ino, os.O_RDONLY, caller))
        self._calls.kernel.opened(ino, os.O_RDONLY, opened)
        return ino, opened.handle
