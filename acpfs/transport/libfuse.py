"""The libfuse transport: pyfuse3 and trio in front of the file system.

Translates attributes, flags and errors, and nothing else. Runs in the worker's trio loop; every
call is driven step by step through `FileSystem.steps`. An unexpected exception is a bug of ours:
logged with its stack and answered with EIO, so that the mount stays.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import pyfuse3
import trio

from acpfs.config import Settings
from acpfs.errors import MachineError
from acpfs.filesystem.filesystem import FileSystem
from acpfs.filesystem.records import AttributeChange, Attributes, Caller, OpenFile
from acpfs.filesystem.steps import Call
from acpfs.logger import get_logger
from acpfs.ram.mounts import mounted_at
from acpfs.runtime.threads import THREADS
from acpfs.transport.invalidations import Invalidations
from acpfs.transport.request_turns import taken_in_turns
from acpfs.transport.set_ids import and_clear, truncates_unprivileged
from acpfs.types import HandleId, Ino

WORKERS_MIN = 8
WORKERS_MAX = (1 << 31) - 1
"""No limit: as many requests are under way as applications have threads in calls.

Whoever would be the first too many might be one that need not wait, or `unlink`, for which the
others do. One that waits takes a task, and what it brought along twice: some KiB, a write 2 MiB at
the most.
"""
BLOCK_BYTES = 4096
KIND = "fuse.acpfs"
"""What the mount table calls it: fuse and the subtype below."""

log = get_logger(__name__)
T = TypeVar("T")


class Operations(pyfuse3.Operations):
    """pyfuse3's interface over `FileSystem`."""

    supports_dot_lookup = True
    enable_writeback_cache = False
    """The kernel would keep what was written, and its size and time (request-costs.md)."""

    def __init__(self, fs: FileSystem) -> None:
        super().__init__()
        fs.follow_kernel_times()
        self._fs = fs
        self.enable_acl = fs.has_acls

    def _at_once(self, answer: Callable[..., T | int | None], *arguments: Any) -> T | None:
        """What is answered without a call (`filesystem.at_once`); None: it takes one."""
        try:
            found = answer(*arguments)
        except Exception as error:
            log.exception("request failed by a bug", request=getattr(answer, "__qualname__", "?"))
            raise pyfuse3.FUSEError(errno.EIO) from error
        if isinstance(found, int):
            raise pyfuse3.FUSEError(found)
        return found

    async def _run(self, call: Call[T]) -> T:
        try:
            return await self._fs.steps.drive(call)
        except OSError as error:
            raise pyfuse3.FUSEError(error.errno or errno.EIO) from error
        except Exception as error:
            log.exception("request failed by a bug", request=getattr(call, "__qualname__", "?"))
            raise pyfuse3.FUSEError(errno.EIO) from error

    def _entry(self, attributes: Attributes) -> pyfuse3.EntryAttributes:
        entry = pyfuse3.EntryAttributes()
        entry.st_ino = attributes.ino
        entry.generation = 0
        entry.entry_timeout = self._fs.settings.attr_timeout_s
        entry.attr_timeout = self._fs.settings.attr_timeout_s
        entry.st_mode = attributes.mode
        entry.st_nlink = attributes.nlink
        entry.st_uid = attributes.uid
        entry.st_gid = attributes.gid
        entry.st_rdev = attributes.rdev
        entry.st_size = attributes.size
        entry.st_blksize = BLOCK_BYTES
        entry.st_blocks = attributes.blocks
        entry.st_atime_ns = attributes.atime_ns
        entry.st_mtime_ns = attributes.mtime_ns
        entry.st_ctime_ns = attributes.ctime_ns
        return entry

    # -- names

    async def lookup(
        self, parent_inode: int, name: bytes, ctx: pyfuse3.RequestContext
    ) -> pyfuse3.EntryAttributes:
        found = self._at_once(self._fs.entry_at_once, Ino(parent_inode), name)
        if found is None:
            found = await self._run(self._fs.lookup(Ino(parent_inode), name))
        return self._entry(found)

    async def forget(self, inode_list: Sequence[tuple[int, int]]) -> None:
        self._fs.forget([(Ino(inode), count) for inode, count in inode_list])

    async def readlink(self, inode: int, ctx: pyfuse3.RequestContext) -> bytes:
        return await self._run(self._fs.readlink(Ino(inode)))

    async def mknod(
        self, parent_inode: int, name: bytes, mode: int, rdev: int, ctx: pyfuse3.RequestContext
    ) -> pyfuse3.EntryAttributes:
        return self._entry(
            await self._run(self._fs.mknod(Ino(parent_inode), name, mode, rdev, _caller(ctx)))
        )

    async def mkdir(
        self, parent_inode: int, name: bytes, mode: int, ctx: pyfuse3.RequestContext
    ) -> pyfuse3.EntryAttributes:
        return self._entry(
            await self._run(self._fs.mkdir(Ino(parent_inode), name, mode, _caller(ctx)))
        )

    async def symlink(
        self, parent_inode: int, name: bytes, target: bytes, ctx: pyfuse3.RequestContext
    ) -> pyfuse3.EntryAttributes:
        return self._entry(
            await self._run(self._fs.symlink(Ino(parent_inode), name, target, _caller(ctx)))
        )

    async def link(
        self, inode: int, new_parent_inode: int, new_name: bytes, ctx: pyfuse3.RequestContext
    ) -> pyfuse3.EntryAttributes:
        return self._entry(
            await self._run(self._fs.link(Ino(inode), Ino(new_parent_inode), new_name, ctx.pid))
        )

    async def unlink(self, parent_inode: int, name: bytes, ctx: pyfuse3.RequestContext) -> None:
        await self._run(self._fs.unlink(Ino(parent_inode), name))

    async def rmdir(self, parent_inode: int, name: bytes, ctx: pyfuse3.RequestContext) -> None:
        await self._run(self._fs.rmdir(Ino(parent_inode), name))

    async def rename(
        self,
        parent_inode_old: int,
        name_old: bytes,
        parent_inode_new: int,
        name_new: bytes,
        flags: int,
        ctx: pyfuse3.RequestContext,
    ) -> None:
        await self._run(
            self._fs.rename(
                Ino(parent_inode_old), name_old, Ino(parent_inode_new), name_new, flags, ctx.pid
            )
        )

    # -- attributes

    async def getattr(self, inode: int, ctx: pyfuse3.RequestContext) -> pyfuse3.EntryAttributes:
        found = self._at_once(self._fs.attributes_at_once, Ino(inode))
        if found is None:
            found = await self._run(self._fs.getattr(Ino(inode)))
        return self._entry(found)

    async def setattr(
        self,
        inode: int,
        attr: pyfuse3.EntryAttributes,
        fields: pyfuse3.SetattrFields,
        fh: int | None,
        ctx: pyfuse3.RequestContext,
    ) -> pyfuse3.EntryAttributes:
        if fields.update_mtime:
            self._fs.hear_time(attr.st_mtime_ns)
        change = AttributeChange(
            mode=stat.S_IMODE(attr.st_mode) if fields.update_mode else None,
            uid=attr.st_uid if fields.update_uid else None,
            gid=attr.st_gid if fields.update_gid else None,
            size=attr.st_size if fields.update_size else None,
            atime_ns=attr.st_atime_ns if fields.update_atime else None,
            mtime_ns=attr.st_mtime_ns if fields.update_mtime else None,
        )
        handle = None if fh is None else HandleId(fh)
        return self._entry(
            await self._run(self._fs.setattr(Ino(inode), change, handle, _caller(ctx)))
        )

    async def getxattr(self, inode: int, name: bytes, ctx: pyfuse3.RequestContext) -> bytes:
        self._at_once(self._fs.never_kept_at_once, name)  # the kernel asks before each write
        return await self._run(self._fs.getxattr(Ino(inode), name))

    async def listxattr(self, inode: int, ctx: pyfuse3.RequestContext) -> Sequence[bytes]:
        return await self._run(self._fs.listxattr(Ino(inode), ctx.uid))

    async def setxattr(
        self, inode: int, name: bytes, value: bytes, ctx: pyfuse3.RequestContext
    ) -> None:
        kills = False if ctx.uid == 0 else None  # libfuse does not say
        await self._run(
            self._fs.setxattr(Ino(inode), name, value, uid=ctx.uid, kills_set_gid=kills)
        )

    async def removexattr(self, inode: int, name: bytes, ctx: pyfuse3.RequestContext) -> None:
        await self._run(self._fs.removexattr(Ino(inode), name, ctx.uid))

    async def access(self, inode: int, mode: int, ctx: pyfuse3.RequestContext) -> bool:
        return True  # the kernel checks (default_permissions) and does not ask

    # -- files

    async def open(self, inode: int, flags: int, ctx: pyfuse3.RequestContext) -> pyfuse3.FileInfo:
        caller = _caller(ctx)
        call = self._fs.open(Ino(inode), flags, caller)
        if truncates_unprivileged(flags, caller):
            call = and_clear(self._fs, Ino(inode), caller, call)
        return _file_info(await self._run(call))

    async def create(
        self, parent_inode: int, name: bytes, mode: int, flags: int, ctx: pyfuse3.RequestContext
    ) -> tuple[pyfuse3.FileInfo, pyfuse3.EntryAttributes]:
        opened, attributes = await self._run(
            self._fs.create(Ino(parent_inode), name, mode, flags, _caller(ctx))
        )
        return _file_info(opened), self._entry(attributes)

    async def read(self, fh: int, off: int, size: int) -> bytes:
        return await self._run(self._fs.read(HandleId(fh), off, size))

    async def write(self, fh: int, off: int, buf: bytes) -> int:
        return await self._run(self._fs.write(HandleId(fh), off, buf))

    async def flush(self, fh: int) -> None:
        await self._run(self._fs.flush(HandleId(fh)))

    async def release(self, fh: int) -> None:
        await self._run(self._fs.release(HandleId(fh)))

    async def fsync(self, fh: int, datasync: bool) -> None:
        await self._run(self._fs.fsync(HandleId(fh), datasync))

    # -- directories

    async def opendir(self, inode: int, ctx: pyfuse3.RequestContext) -> int:
        return await self._run(self._fs.opendir(Ino(inode)))

    async def readdir(self, fh: int, start_id: int, token: pyfuse3.ReaddirToken) -> None:
        full = False
        offset = start_id
        while not full:
            found = await self._run(
                self._fs.readdir(HandleId(fh), offset, with_attributes=True, without_fails=True)
            )
            entries = [e for e in found if e.next_offset > 2]
            for entry in entries:
                assert entry.attributes is not None  # pyfuse3 cannot tell a name alone
                full = full or not pyfuse3.readdir_reply(
                    token, entry.name, self._entry(entry.attributes), entry.next_offset
                )
                if full:
                    self._fs.forget([(entry.ino, 1)])
            if not entries:
                return
            offset = entries[-1].next_offset

    async def releasedir(self, fh: int) -> None:
        await self._run(self._fs.releasedir(HandleId(fh)))

    async def fsyncdir(self, fh: int, datasync: bool) -> None:
        await self._run(self._fs.fsyncdir(HandleId(fh)))

    # -- the whole

    async def statfs(self, ctx: pyfuse3.RequestContext) -> pyfuse3.StatvfsData:
        space = await self._run(self._fs.statfs(ctx.uid))
        answer = pyfuse3.StatvfsData()
        answer.f_bsize = space.block_bytes
        answer.f_frsize = space.block_bytes
        answer.f_blocks = space.blocks
        answer.f_bfree = space.blocks_free
        answer.f_bavail = space.blocks_available
        answer.f_files = space.files
        answer.f_ffree = space.files_free
        answer.f_favail = space.files_free
        answer.f_namemax = space.name_bytes_max
        return answer


def _caller(ctx: pyfuse3.RequestContext) -> Caller:
    return Caller(ctx.uid, ctx.gid, ctx.pid, ctx.umask)


def _file_info(opened: OpenFile) -> pyfuse3.FileInfo:
    return pyfuse3.FileInfo(fh=opened.handle, keep_cache=opened.keep_cache)


class _Option(str):
    """One that may have other bytes than ASCII; pyfuse3 would encode it as that."""

    __slots__ = ()

    def encode(self, encoding: str = "", errors: str = "") -> bytes:
        return os.fsencode(str(self))


def mount_options(settings: Settings) -> set[str]:
    """Options for fuse_session_new and mount."""
    source = os.fspath(settings.backing).replace("\\", "\\\\").replace(",", "\\,")
    options = {_Option(f"fsname={source}"), "subtype=acpfs", "default_permissions"}
    if settings.allow_other:
        options.add("allow_other")
    return options


async def serve(fs: FileSystem, settings: Settings, ready: Callable[[], None]) -> None:
    """Mount, say `ready`, and serve until the mount point is unmounted or the task cancelled.

    Raises:
        MachineError: FUSE is not permitted here.
    """
    try:
        pyfuse3.init(Operations(fs), os.fspath(settings.mountpoint), mount_options(settings))
    except RuntimeError as error:
        raise MachineError(
            f"cannot mount on {settings.mountpoint}: {error} (is /dev/fuse there, and is "
            "mounting permitted?)"
        ) from error
    invalidations = Invalidations(fs, pyfuse3.invalidate_inode, pyfuse3.invalidate_entry)
    invalidations.start()
    try:
        ready()
        with taken_in_turns():
            await pyfuse3.main(min_tasks=WORKERS_MIN, max_tasks=WORKERS_MAX)
    finally:
        invalidations.stop(0)
        with trio.CancelScope(shield=True):
            await THREADS.run_sync(_close, os.fspath(settings.mountpoint))


def _close(mountpoint: str) -> None:
    """Unmount, unless it is detached already and something else lies there; in a thread, because
    others may still touch the mount.
    """
    entry = mounted_at(mountpoint)
    pyfuse3.close(unmount=entry is not None and entry.kind == KIND)
