"""Requests that come again after a takeover, and must not be carried out twice.

The kernel sends every request again that was read and not answered, with bit 63 of its number set.
Most calls may simply be made again (a write goes to the same offset, an open is opened anew). Those
that would then fail or do something else (MKDIR finds its own directory, a second EXCHANGE undoes
the first) are noted here in the step that carries them out, before its transaction. A note thus
means "perhaps done"; which it is shows in the names themselves, because the kernel holds the
directory's lock until the call is answered. Opens are noted with their handles
(`filesystem.kept_handles`). Any thread, inside a step.
"""

from __future__ import annotations

import errno
import threading
from typing import Any

from acpfs.filesystem.filesystem import FileSystem
from acpfs.filesystem.names import RENAME_EXCHANGE
from acpfs.filesystem.records import Attributes
from acpfs.filesystem.steps import Call
from acpfs.ram.kept import Kept
from acpfs.transport.native.operations import (
    LINK_IN,
    MKDIR_IN,
    MKNOD_IN,
    RENAME2_IN,
    name_in,
    two_names,
)
from acpfs.transport.native.protocol import Opcode
from acpfs.transport.native.request import Request, plain
from acpfs.types import NO_INO, Ino

NOTES_MAX = 1024
"""Far more than there are calls in their last step at one time (one per thread that serves)."""
_MAKING = {
    int(Opcode.MKNOD): MKNOD_IN.size,
    int(Opcode.MKDIR): MKDIR_IN.size,
    int(Opcode.SYMLINK): 0,
    int(Opcode.LINK): LINK_IN.size,
}
"""Calls that make a name → where it stands in the request."""
_ALREADY = {
    int(Opcode.UNLINK): errno.ENOENT,
    int(Opcode.RMDIR): errno.ENOENT,
    int(Opcode.RENAME): errno.ENOENT,
    int(Opcode.RENAME2): errno.ENOENT,
    int(Opcode.SETXATTR): errno.EEXIST,
    int(Opcode.REMOVEXATTR): errno.ENODATA,
}
"""What a call is answered with whose work is done already."""
NOTED = _MAKING.keys() | _ALREADY.keys()
_RENAME2 = int(Opcode.RENAME2)
_UNIQUE = 0
_INO = 1


class ResentRequests:
    """Notes calls, and answers those that come again."""

    def __init__(self, fs: FileSystem, kept: Kept) -> None:
        """Take over the last worker's notes."""
        self._fs = fs
        self._slots = kept.calls
        self._done = {unique: Ino(ino) for _slot, (unique, ino) in self._slots if unique}
        while len(self._slots) < NOTES_MAX:
            self._slots.add(0, 0)
        notes = sorted((unique, slot) for slot, (unique, _ino) in self._slots)
        self._ring = [slot for _unique, slot in notes]
        self._next = 0
        """The oldest note, which is overwritten next."""
        self._lock = threading.Lock()
        self.answered = 0
        """Calls that came again and were done."""

    async def carried_out(self, request: Request, call: Call[Any]) -> Any:
        """The call's value; it is made if it was not."""
        unique = plain(request.unique)
        try:
            if (
                unique != request.unique and unique in self._done
            ):  # the kernel marks what it sends again in the number itself
                return await self._again(request, call, self._done.pop(unique))
            moved = await self._exchanged(request)
            value = await call
        finally:
            call.close()
        # in the call's last step, and so before the answer leaves
        self._note(unique, value.ino if isinstance(value, Attributes) else moved)
        return value

    def _note(self, unique: int, ino: int) -> None:
        with self._lock:
            slot = self._ring[self._next]
            self._next = (self._next + 1) % NOTES_MAX
        # In this order: a worker that dies between two of these leaves a void note, never one
        # call's number with another call's node.
        note = self._slots.record(slot)
        note[_UNIQUE] = 0
        note[_INO] = ino
        note[_UNIQUE] = unique

    async def _again(self, request: Request, call: Call[Any], ino: Ino) -> Any:
        opcode = request.opcode
        if opcode in _MAKING:
            body = request.body()
            made = await self._found(Ino(request.ino), name_in(body, _MAKING[opcode]))
            if made is not None and made.ino == ino:
                return self._spared(made)
            if made is not None:
                self._fs.forget([(made.ino, 1)])
        elif ino:  # an exchange
            body = request.body()
            new_parent, _flags, _ = RENAME2_IN.unpack_from(body)
            there = await self._found(Ino(new_parent), two_names(body, RENAME2_IN.size)[1])
            if there is not None:
                self._fs.forget([(there.ino, 1)])
                if there.ino == ino:
                    return self._spared(None)
        try:
            return await call
        except OSError as error:
            if error.errno == _ALREADY.get(opcode):
                return self._spared(None)
            raise

    def _spared(self, value: Any) -> Any:
        self.answered += 1
        return value

    async def _exchanged(self, request: Request) -> Ino:
        """The node that an EXCHANGE will move; 0 for every other call."""
        if request.opcode != _RENAME2:
            return NO_INO
        body = request.body()
        _new_parent, flags, _ = RENAME2_IN.unpack_from(body)
        moved = (
            await self._found(Ino(request.ino), two_names(body, RENAME2_IN.size)[0])
            if flags & RENAME_EXCHANGE
            else None
        )
        if moved is None:
            return NO_INO
        self._fs.forget([(moved.ino, 1)])
        return moved.ino

    async def _found(self, parent: Ino, name: bytes) -> Attributes | None:
        """What a name leads to, with a reference taken."""
        try:
            return await self._fs.lookup(parent, name, waits=False)
        except OSError as error:
            if error.errno != errno.ENOENT:
                raise
            return None
