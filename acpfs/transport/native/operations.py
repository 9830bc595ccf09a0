"""The operations: each opcode with its layouts, its call of the file system, and its answer.

An opcode is at home here alone (beside its number, which the list of `protocol` has): a layout that
no other module reads, a method that decodes it, the form of its answer where no other has it, and a
line in `operations`. Owns no policy: what a call means is the file system's. Decoding returns the
file system's coroutine, not yet started, so that bytes that do not parse are found before anything
happens (`errnos.MALFORMED`). Reader threads call it at once from several threads: no state but what
was negotiated.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from acpfs.backing.lower import SpaceInfo
from acpfs.filesystem.filesystem import FileSystem
from acpfs.filesystem.records import AttributeChange, Attributes, Caller, DirEntry, OpenFile
from acpfs.filesystem.steps import Call
from acpfs.transport.native.callers import user_of
from acpfs.transport.native.holding import Holding
from acpfs.transport.native.kernel_lanes import KernelLanes
from acpfs.transport.native.negotiate import Negotiated
from acpfs.transport.native.protocol import (
    FSYNC_DATASYNC,
    GETATTR_FH,
    IN_HEADER,
    OPEN_KILL_SUIDGID,
    OPEN_OUT,
    READ_IN,
    WRITE_CACHE,
    WRITE_IN,
    WRITE_KILL_SUIDGID,
    InitFlag,
    Layout,
    Opcode,
    SetattrFlag,
)
from acpfs.transport.native.replies import Replies, with_room
from acpfs.transport.native.request import Request, plain
from acpfs.transport.native.undo import Undo
from acpfs.transport.set_ids import and_clear, truncates_unprivileged
from acpfs.types import HandleId, Ino

NS = 1_000_000_000
TIME_NS_MIN = -(1 << 63)
TIME_NS_MAX = (1 << 63) - 1
_BODY = IN_HEADER.size
_FORGET = int(Opcode.FORGET)

_MODE, _UID, _GID, _SIZE = (
    int(f) for f in (SetattrFlag.MODE, SetattrFlag.UID, SetattrFlag.GID, SetattrFlag.SIZE)
)
_ATIME = int(SetattrFlag.ATIME)
_MTIME = int(SetattrFlag.MTIME)
_FH = int(SetattrFlag.FH)
_ATIME_NOW = int(SetattrFlag.ATIME_NOW)
_MTIME_NOW = int(SetattrFlag.MTIME_NOW)
_KILL = int(SetattrFlag.KILL_SUIDGID)

# -- layouts that only their operation knows

# names and attributes

FORGET_IN = Layout("fuse_forget_in", 8, "u64 nlookup")
FORGET_ONE = Layout("fuse_forget_one", 16, "u64 nodeid, u64 nlookup")
BATCH_FORGET_IN = Layout("fuse_batch_forget_in", 8, "u32 count, u32 dummy")
GETATTR_IN = Layout("fuse_getattr_in", 16, "u32 getattr_flags, u32 dummy, u64 fh")
SETATTR_IN = Layout(
    "fuse_setattr_in",
    88,
    "u32 valid, u32 padding, u64 fh, u64 size, u64 lock_owner, i64 atime, i64 mtime, i64 ctime, "
    "u32 atimensec, u32 mtimensec, u32 ctimensec, u32 mode, u32 unused4, u32 uid, u32 gid, u32 "
    "unused5",
)
STATX_IN = Layout(
    "fuse_statx_in", 24, "u32 getattr_flags, u32 reserved, u64 fh, u32 sx_flags, u32 sx_mask"
)

# changes of names; the names themselves follow, each ended by a zero byte

MKNOD_IN = Layout("fuse_mknod_in", 16, "u32 mode, u32 rdev, u32 umask, u32 padding")
MKDIR_IN = Layout("fuse_mkdir_in", 8, "u32 mode, u32 umask")
RENAME_IN = Layout("fuse_rename_in", 8, "u64 newdir")
RENAME2_IN = Layout("fuse_rename2_in", 16, "u64 newdir, u32 flags, u32 padding")
LINK_IN = Layout("fuse_link_in", 8, "u64 oldnodeid")

# files

OPEN_IN = Layout("fuse_open_in", 8, "u32 flags, u32 open_flags")
CREATE_IN = Layout("fuse_create_in", 16, "u32 flags, u32 mode, u32 umask, u32 open_flags")
WRITE_OUT = Layout("fuse_write_out", 8, "u32 size, u32 padding")
FLUSH_IN = Layout("fuse_flush_in", 24, "u64 fh, u32 unused, u32 padding, u64 lock_owner")
RELEASE_IN = Layout("fuse_release_in", 24, "u64 fh, u32 flags, u32 release_flags, u64 lock_owner")
FSYNC_IN = Layout("fuse_fsync_in", 16, "u64 fh, u32 fsync_flags, u32 padding")
FALLOCATE_IN = Layout(
    "fuse_fallocate_in", 32, "u64 fh, u64 offset, u64 length, u32 mode, u32 padding"
)
LSEEK_IN = Layout("fuse_lseek_in", 24, "u64 fh, u64 offset, u32 whence, u32 padding")
LSEEK_OUT = Layout("fuse_lseek_out", 8, "u64 offset")
COPY_FILE_RANGE_IN = Layout(
    "fuse_copy_file_range_in",
    56,
    "u64 fh_in, u64 off_in, u64 nodeid_out, u64 fh_out, u64 off_out, u64 len, u64 flags",
)
COPY_FILE_RANGE_OUT = Layout("fuse_copy_file_range_out", 8, "u64 bytes_copied")

# locks, asked for only where they are refused

LOCK_IN = Layout(
    "fuse_lk_in",
    48,
    "u64 fh, u64 owner, u64 start, u64 end, u32 type, u32 pid, u32 lk_flags, u32 padding",
)

# extended attributes and space

SETXATTR_IN_COMPAT = Layout("fuse_setxattr_in without SETXATTR_EXT", 8, "u32 size, u32 flags")
SETXATTR_IN = Layout("fuse_setxattr_in", 16, "u32 size, u32 flags, u32 setxattr_flags, u32 padding")
ACL_KILL_SGID = 1 << 0
"""Of `setxattr_flags`: the caller is not in the file's group."""
GETXATTR_IN = Layout("fuse_getxattr_in", 8, "u32 size, u32 padding")
STATFS_OUT = Layout(
    "fuse_statfs_out",
    80,
    "u64 blocks, u64 bfree, u64 bavail, u64 files, u64 ffree, u32 bsize, u32 namelen, u32 "
    "frsize, u32 padding, u32*6 spare",
)


def name_in(body: bytes, start: int = 0) -> bytes:
    """The name that starts there and ends before a zero byte.

    Raises:
        ValueError: no zero byte, or an empty name.
    """
    end = body.index(b"\0", start)
    if end == start:
        message = "empty name"
        raise ValueError(message)
    return body[start:end]


def two_names(body: bytes, start: int = 0) -> tuple[bytes, bytes]:
    """Two names, one after the other; the second may be empty (a symlink's target cannot, but the
    kernel sees to that).
    """
    first = name_in(body, start)
    second = start + len(first) + 1
    return first, body[second : body.index(b"\0", second)]


def time_ns(seconds: int, nanoseconds: int) -> int:
    """One number; times that 64 bits of nanoseconds cannot hold (before 1677, after 2262) become
    the nearest that they can.
    """
    return max(TIME_NS_MIN, min(TIME_NS_MAX, seconds * NS + nanoseconds))


def is_unlock(request: Request) -> bool:
    """Whether a SETLK lets go of a lock, or of a part of one."""
    return bool(LOCK_IN.unpack_from(request.body())[4] == fcntl.F_UNLCK)


def caller_of(request: Request, umask: int = 0) -> Caller:
    """Who makes the call."""
    uid, gid = user_of(request.uid, request.gid, request.pid)
    return Caller(uid, gid, request.pid, umask, plain(request.unique))


def uid_of(request: Request) -> int:
    """The user who makes the call."""
    return user_of(request.uid, request.gid, request.pid)[0]


class Operation(NamedTuple):
    """How one opcode is handled."""

    decode: Callable[[Request], Call[Any]]
    encode: Callable[[Request, Any], bytes | memoryview]
    undo: Callable[[Any], None] | None = None
    """Gives back what the call took, when the kernel did not get the reply."""
    at_once: Callable[[Request], Any | int | None] | None = None
    """The value, or an errno, where that needs no call; None: make the call."""


class Calls:
    """From request to coroutine."""

    def __init__(
        self, fs: FileSystem, negotiated: Negotiated, lanes: KernelLanes, holding: Holding
    ) -> None:
        """`negotiated` decides how SETXATTR is laid out and who takes set-uid away.

        `lanes` is told what is released; `holding` knows who holds writers.
        """
        self._holding = holding
        self._fs = fs
        self._released = lanes.released
        self._kills = negotiated.has(InitFlag.HANDLE_KILLPRIV_V2)
        self._setxattr_in = (
            SETXATTR_IN if negotiated.has(InitFlag.SETXATTR_EXT) else SETXATTR_IN_COMPAT
        )

    # -- nodes and attributes

    def lookup(self, request: Request) -> Call[Attributes]:
        return self._fs.lookup(Ino(request.ino), name_in(request.body()))

    def lookup_at_once(self, request: Request) -> Attributes | int | None:
        return self._fs.entry_at_once(Ino(request.ino), name_in(request.body()))

    @staticmethod
    def forget(request: Request) -> list[tuple[int, int]]:
        """(node, references to give back), for FORGET and BATCH_FORGET alike."""
        body = request.body()
        if request.opcode == _FORGET:
            return [(request.ino, FORGET_IN.unpack_from(body)[0])]
        count, _ = BATCH_FORGET_IN.unpack_from(body)
        start = BATCH_FORGET_IN.size
        return list(FORGET_ONE.iter_unpack(body[start : start + count * FORGET_ONE.size]))

    def getattr(self, request: Request) -> Call[Attributes]:
        flags, _, handle = GETATTR_IN.unpack_from(request.body())
        return self._fs.getattr(Ino(request.ino), HandleId(handle) if flags & GETATTR_FH else None)

    def getattr_at_once(self, request: Request) -> Attributes | None:
        return self._fs.attributes_at_once(Ino(request.ino))

    def statx(self, request: Request) -> Call[Attributes]:
        flags, _, handle, _, _ = STATX_IN.unpack_from(request.body())
        return self._fs.getattr(Ino(request.ino), HandleId(handle) if flags & GETATTR_FH else None)

    def setattr(self, request: Request) -> Call[Attributes]:
        valid, _, fh, size, _, atime, mtime, _, atime_ns, mtime_ns, _, mode, _, uid, gid, _ = (
            SETATTR_IN.unpack_from(request.body())
        )
        if not valid and self._holding.is_ours(request.pid):
            return self._fs.hold_taken(Ino(request.ino))
        now = time.time_ns() if valid & (_ATIME_NOW | _MTIME_NOW) else 0
        change = AttributeChange(
            mode=mode & 0o7777 if valid & _MODE else None,
            uid=uid if valid & _UID else None,
            gid=gid if valid & _GID else None,
            size=size if valid & _SIZE else None,
            atime_ns=(now if valid & _ATIME_NOW else time_ns(atime, atime_ns))
            if valid & _ATIME
            else None,
            mtime_ns=(now if valid & _MTIME_NOW else time_ns(mtime, mtime_ns))
            if valid & _MTIME
            else None,
        )
        handle = HandleId(fh) if valid & _FH else None
        call = self._fs.setattr(Ino(request.ino), change, handle, caller_of(request))
        # Nothing to change: that is chown(-1, -1), which takes the bits away as every chown does,
        # or fallocate and copy_file_range by whoever may write. The kernel does not say which, so a
        # stranger's chown is not refused as elsewhere: it takes them away, too.
        given_away = valid & (_UID | _GID) or not valid & (_SIZE | _ATIME | _MTIME)
        kill = valid & _KILL or (self._kills and given_away and not valid & _MODE)
        return self._and_kill(request, call) if kill else call

    def readlink(self, request: Request) -> Call[bytes]:
        return self._fs.readlink(Ino(request.ino))

    # -- names

    def mknod(self, request: Request) -> Call[Attributes]:
        body = request.body()
        mode, rdev, umask, _ = MKNOD_IN.unpack_from(body)
        return self._fs.mknod(
            Ino(request.ino), name_in(body, MKNOD_IN.size), mode, rdev, caller_of(request, umask)
        )

    def mkdir(self, request: Request) -> Call[Attributes]:
        body = request.body()
        mode, umask = MKDIR_IN.unpack_from(body)
        return self._fs.mkdir(
            Ino(request.ino), name_in(body, MKDIR_IN.size), mode, caller_of(request, umask)
        )

    def symlink(self, request: Request) -> Call[Attributes]:
        name, target = two_names(request.body())
        return self._fs.symlink(Ino(request.ino), name, target, caller_of(request))

    def link(self, request: Request) -> Call[Attributes]:
        body = request.body()
        (ino,) = LINK_IN.unpack_from(body)
        name = name_in(body, LINK_IN.size)
        return self._fs.link(Ino(ino), Ino(request.ino), name, request.pid)

    def unlink(self, request: Request) -> Call[None]:
        return self._fs.unlink(Ino(request.ino), name_in(request.body()))

    def rmdir(self, request: Request) -> Call[None]:
        return self._fs.rmdir(Ino(request.ino), name_in(request.body()))

    def rename(self, request: Request) -> Call[None]:
        body = request.body()
        (new_parent,) = RENAME_IN.unpack_from(body)
        return self._rename(request, body, RENAME_IN.size, new_parent, 0)

    def rename2(self, request: Request) -> Call[None]:
        body = request.body()
        new_parent, flags, _ = RENAME2_IN.unpack_from(body)
        return self._rename(request, body, RENAME2_IN.size, new_parent, flags)

    def _rename(
        self, request: Request, body: bytes, start: int, new_parent: int, flags: int
    ) -> Call[None]:
        name, new_name = two_names(body, start)
        return self._fs.rename(
            Ino(request.ino), name, Ino(new_parent), new_name, flags, request.pid
        )

    # -- files

    def open(self, request: Request) -> Call[OpenFile]:
        flags, open_flags = OPEN_IN.unpack_from(request.body())
        request.argument = flags
        caller = caller_of(request)
        call = self._fs.open(Ino(request.ino), flags, caller)
        kill = (
            open_flags & OPEN_KILL_SUIDGID if self._kills else truncates_unprivileged(flags, caller)
        )
        return self._and_kill(request, call) if kill else call

    def create(self, request: Request) -> Call[tuple[OpenFile, Attributes]]:
        body = request.body()
        flags, mode, umask, _ = CREATE_IN.unpack_from(body)
        request.argument = flags
        return self._fs.create(
            Ino(request.ino), name_in(body, CREATE_IN.size), mode, flags, caller_of(request, umask)
        )

    def tmpfile(self, request: Request) -> Call[tuple[OpenFile, Attributes]]:
        flags, mode, umask, _ = CREATE_IN.unpack_from(request.body())
        request.argument = flags
        return self._fs.tmpfile(Ino(request.ino), mode, flags, caller_of(request, umask))

    def read(self, request: Request) -> Call[bytes | memoryview]:
        handle, offset, size, _, _, _, _ = READ_IN.unpack_from(request.body())
        return self._fs.read(HandleId(handle), offset, size)

    def write(self, request: Request) -> Call[int]:
        handle, offset, size, flags, _, open_flags, _ = WRITE_IN.unpack_from(
            request.buffers.header, _BODY
        )
        # pages of a mapping, or of a cache, are written back by whoever comes by
        pid = 0 if flags & WRITE_CACHE else request.pid
        # of the descriptor, or of this write alone (RWF_DSYNC); pages that are written back have
        # those of any descriptor
        is_durable = bool(open_flags & os.O_DSYNC) and not flags & WRITE_CACHE
        call = self._fs.write(
            HandleId(handle),
            offset,
            request.payload(size),
            pid,
            is_durable=is_durable,
            is_mapped=bool(flags & WRITE_CACHE),
        )
        return self._and_kill(request, call) if flags & WRITE_KILL_SUIDGID else call

    def flush(self, request: Request) -> Call[None]:
        return self._fs.flush(HandleId(FLUSH_IN.unpack_from(request.body())[0]), request.pid)

    def release(self, request: Request) -> Call[None]:
        return self._release(HandleId(RELEASE_IN.unpack_from(request.body())[0]))

    async def _release(self, handle: HandleId) -> None:
        """Where a mapping lives on, the kernel keeps its backing file, too: who opens the file
        meanwhile is to map the same one.
        """
        if not await self._fs.goes_on_mapped(handle):
            self._released(handle)
            await self._fs.release(handle)

    def fsync(self, request: Request) -> Call[None]:
        handle, flags, _ = FSYNC_IN.unpack_from(request.body())
        return self._fs.fsync(HandleId(handle), bool(flags & FSYNC_DATASYNC))

    def fallocate(self, request: Request) -> Call[None]:
        handle, offset, length, mode, _ = FALLOCATE_IN.unpack_from(request.body())
        return self._fs.fallocate(HandleId(handle), mode, offset, length)

    def lseek(self, request: Request) -> Call[int]:
        handle, offset, whence, _ = LSEEK_IN.unpack_from(request.body())
        return self._fs.lseek(HandleId(handle), offset, whence)

    def copy_file_range(self, request: Request) -> Call[int]:
        source, source_offset, _, handle, offset, size, flags = COPY_FILE_RANGE_IN.unpack_from(
            request.body()
        )
        if flags:
            message = f"unknown flags {flags:#x}"
            raise ValueError(message)
        return self._fs.copy_range(HandleId(source), source_offset, HandleId(handle), offset, size)

    def _and_kill(self, request: Request, call: Call[Any]) -> Call[Any]:
        return and_clear(self._fs, Ino(request.ino), caller_of(request), call)

    # -- directories

    def opendir(self, request: Request) -> Call[HandleId]:
        return self._fs.opendir(Ino(request.ino), plain(request.unique))

    def readdir(self, request: Request) -> Call[list[DirEntry]]:
        handle, offset, request.argument, _, _, _, _ = READ_IN.unpack_from(request.body())
        return self._fs.readdir(HandleId(handle), offset, with_attributes=False)

    def readdirplus(self, request: Request) -> Call[list[DirEntry]]:
        handle, offset, request.argument, _, _, _, _ = READ_IN.unpack_from(request.body())
        return self._fs.readdir(
            HandleId(handle),
            offset,
            with_attributes=True,
            fitting=partial(with_room, room=request.argument),
        )

    def releasedir(self, request: Request) -> Call[None]:
        return self._fs.releasedir(HandleId(RELEASE_IN.unpack_from(request.body())[0]))

    def fsyncdir(self, request: Request) -> Call[None]:
        return self._fs.fsyncdir(HandleId(FSYNC_IN.unpack_from(request.body())[0]))

    # -- extended attributes

    def setxattr(self, request: Request) -> Call[None]:
        body = request.body()
        size, flags, *more = self._setxattr_in.unpack_from(body)
        name = name_in(body, self._setxattr_in.size)
        start = self._setxattr_in.size + len(name) + 1
        value = body[start : start + size]
        if len(value) != size:
            message = f"value of {size} bytes came with {len(value)}"
            raise ValueError(message)
        kills: bool | None = False
        if more:
            kills = bool(more[0] & ACL_KILL_SGID)
        elif uid_of(request) != 0:
            kills = None  # the kernel does not say
        return self._fs.setxattr(
            Ino(request.ino), name, value, flags, uid_of(request), kills_set_gid=kills
        )

    def getxattr(self, request: Request) -> Call[bytes]:
        body = request.body()
        request.argument, _ = GETXATTR_IN.unpack_from(body)
        return self._fs.getxattr(Ino(request.ino), name_in(body, GETXATTR_IN.size))

    def getxattr_at_once(self, request: Request) -> int | None:
        return self._fs.never_kept_at_once(name_in(request.body(), GETXATTR_IN.size))

    def listxattr(self, request: Request) -> Call[list[bytes]]:
        request.argument, _ = GETXATTR_IN.unpack_from(request.body())
        return self._fs.listxattr(Ino(request.ino), uid_of(request))

    def removexattr(self, request: Request) -> Call[None]:
        return self._fs.removexattr(Ino(request.ino), name_in(request.body()), uid_of(request))

    def statfs(self, request: Request) -> Call[Any]:
        return self._fs.statfs(uid_of(request))


# -- answers of a form that nothing else has; the others are in `replies`


def written(_request: Request, size: int) -> bytes:
    return WRITE_OUT.pack(size, 0)


def copied(_request: Request, size: int) -> bytes:
    """For COPY_FILE_RANGE_64; the older one tells 32 bits, as WRITE."""
    return COPY_FILE_RANGE_OUT.pack(size)


def position(_request: Request, offset: int) -> bytes:
    return LSEEK_OUT.pack(offset)


def opened_directory(_request: Request, handle: int) -> bytes:
    return OPEN_OUT.pack(handle, 0, 0)


def space(_request: Request, s: SpaceInfo) -> bytes:
    size = s.block_bytes
    return STATFS_OUT.pack(
        s.blocks,
        s.blocks_free,
        s.blocks_available,
        s.files,
        s.files_free,
        size,
        s.name_bytes_max,
        size,
        0,
        0,
        0,
        0,
        0,
        0,
        0,
    )


def operations(calls: Calls, replies: Replies, undo: Undo) -> dict[int, Operation]:
    """Opcode → how it is decoded, answered, and undone where the kernel does not take the
    answer.
    """
    nothing = replies.nothing
    return {
        Opcode.LOOKUP: Operation(calls.lookup, replies.entry, undo.entry, calls.lookup_at_once),
        Opcode.GETATTR: Operation(calls.getattr, replies.attr, at_once=calls.getattr_at_once),
        Opcode.STATX: Operation(calls.statx, replies.statx),
        Opcode.SETATTR: Operation(calls.setattr, replies.attr),
        Opcode.READLINK: Operation(calls.readlink, replies.data),
        Opcode.MKNOD: Operation(calls.mknod, replies.entry, undo.entry),
        Opcode.MKDIR: Operation(calls.mkdir, replies.entry, undo.entry),
        Opcode.SYMLINK: Operation(calls.symlink, replies.entry, undo.entry),
        Opcode.LINK: Operation(calls.link, replies.entry, undo.entry),
        Opcode.UNLINK: Operation(calls.unlink, nothing),
        Opcode.RMDIR: Operation(calls.rmdir, nothing),
        Opcode.RENAME: Operation(calls.rename, nothing),
        Opcode.RENAME2: Operation(calls.rename2, nothing),
        Opcode.OPEN: Operation(calls.open, replies.opened, undo.opened),
        Opcode.CREATE: Operation(calls.create, replies.created, undo.created),
        Opcode.TMPFILE: Operation(calls.tmpfile, replies.created, undo.created),
        Opcode.READ: Operation(calls.read, replies.data),
        Opcode.WRITE: Operation(calls.write, written),
        Opcode.FLUSH: Operation(calls.flush, nothing),
        Opcode.RELEASE: Operation(calls.release, nothing),
        Opcode.FSYNC: Operation(calls.fsync, nothing),
        Opcode.FALLOCATE: Operation(calls.fallocate, nothing),
        Opcode.COPY_FILE_RANGE: Operation(calls.copy_file_range, written),
        Opcode.COPY_FILE_RANGE_64: Operation(calls.copy_file_range, copied),
        Opcode.LSEEK: Operation(calls.lseek, position),
        Opcode.OPENDIR: Operation(calls.opendir, opened_directory, undo.opened_directory),
        Opcode.READDIR: Operation(calls.readdir, replies.entries),
        Opcode.READDIRPLUS: Operation(calls.readdirplus, replies.entries),
        Opcode.RELEASEDIR: Operation(calls.releasedir, nothing),
        Opcode.FSYNCDIR: Operation(calls.fsyncdir, nothing),
        Opcode.SETXATTR: Operation(calls.setxattr, nothing),
        Opcode.GETXATTR: Operation(calls.getxattr, replies.xattr, at_once=calls.getxattr_at_once),
        Opcode.LISTXATTR: Operation(calls.listxattr, replies.xattr_names),
        Opcode.REMOVEXATTR: Operation(calls.removexattr, nothing),
        Opcode.STATFS: Operation(calls.statfs, space),
    }
