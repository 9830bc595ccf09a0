"""The FUSE kernel protocol (linux/fuse.h, 7.31 to 7.45): opcodes, flags, ioctls, notifications, and
layouts that several modules read.

Owns names, sizes and layouts, and no meaning. What one operation alone reads or writes is in
`operations`. A layout is a `struct.Struct` (native byte order, no implicit padding: the protocol
pads itself), declared once from the protocol's field table; its size is checked at import. Pure
data, any thread.
"""

from __future__ import annotations

import struct
from enum import IntEnum, IntFlag

MAJOR = 7
MINOR_MIN = 31
MINOR_MAX = 45
"""Newest protocol that the layouts were taken from; a newer kernel speaks down to it."""


class Opcode(IntEnum):
    """Requests that the kernel sends."""

    LOOKUP = 1
    FORGET = 2
    GETATTR = 3
    SETATTR = 4
    READLINK = 5
    SYMLINK = 6
    MKNOD = 8
    MKDIR = 9
    UNLINK = 10
    RMDIR = 11
    RENAME = 12
    LINK = 13
    OPEN = 14
    READ = 15
    WRITE = 16
    STATFS = 17
    RELEASE = 18
    FSYNC = 20
    SETXATTR = 21
    GETXATTR = 22
    LISTXATTR = 23
    REMOVEXATTR = 24
    FLUSH = 25
    INIT = 26
    OPENDIR = 27
    READDIR = 28
    RELEASEDIR = 29
    FSYNCDIR = 30
    GETLK = 31
    SETLK = 32
    SETLKW = 33
    ACCESS = 34
    CREATE = 35
    INTERRUPT = 36
    BMAP = 37
    DESTROY = 38
    IOCTL = 39
    POLL = 40
    NOTIFY_REPLY = 41
    BATCH_FORGET = 42
    FALLOCATE = 43
    READDIRPLUS = 44
    RENAME2 = 45
    LSEEK = 46
    COPY_FILE_RANGE = 47
    SETUPMAPPING = 48
    REMOVEMAPPING = 49
    SYNCFS = 50
    TMPFILE = 51
    STATX = 52
    COPY_FILE_RANGE_64 = 53


class InitFlag(IntFlag):
    """Features in INIT; bits 32 and up travel in `flags2`."""

    ASYNC_READ = 1 << 0
    POSIX_LOCKS = 1 << 1
    ATOMIC_O_TRUNC = 1 << 3
    EXPORT_SUPPORT = 1 << 4
    BIG_WRITES = 1 << 5
    DONT_MASK = 1 << 6
    SPLICE_WRITE = 1 << 7
    SPLICE_MOVE = 1 << 8
    SPLICE_READ = 1 << 9
    FLOCK_LOCKS = 1 << 10
    AUTO_INVAL_DATA = 1 << 12
    DO_READDIRPLUS = 1 << 13
    READDIRPLUS_AUTO = 1 << 14
    ASYNC_DIO = 1 << 15
    WRITEBACK_CACHE = 1 << 16
    NO_OPEN_SUPPORT = 1 << 17
    PARALLEL_DIROPS = 1 << 18
    HANDLE_KILLPRIV = 1 << 19
    POSIX_ACL = 1 << 20
    ABORT_ERROR = 1 << 21
    MAX_PAGES = 1 << 22
    CACHE_SYMLINKS = 1 << 23
    NO_OPENDIR_SUPPORT = 1 << 24
    EXPLICIT_INVAL_DATA = 1 << 25
    HANDLE_KILLPRIV_V2 = 1 << 28
    SETXATTR_EXT = 1 << 29
    INIT_EXT = 1 << 30
    SECURITY_CTX = 1 << 32
    CREATE_SUPP_GROUP = 1 << 34
    HAS_EXPIRE_ONLY = 1 << 35
    DIRECT_IO_ALLOW_MMAP = 1 << 36
    PASSTHROUGH = 1 << 37
    NO_EXPORT_SUPPORT = 1 << 38
    HAS_RESEND = 1 << 39
    ALLOW_IDMAP = 1 << 40
    OVER_IO_URING = 1 << 41
    REQUEST_TIMEOUT = 1 << 42


class OpenFlag(IntFlag):
    """What a reply to OPEN, CREATE or OPENDIR asks of the kernel."""

    DIRECT_IO = 1 << 0
    KEEP_CACHE = 1 << 1
    NONSEEKABLE = 1 << 2
    CACHE_DIR = 1 << 3
    STREAM = 1 << 4
    NOFLUSH = 1 << 5
    PARALLEL_DIRECT_WRITES = 1 << 6
    PASSTHROUGH = 1 << 7


class SetattrFlag(IntFlag):
    """Which fields of a SETATTR are meant."""

    MODE = 1 << 0
    UID = 1 << 1
    GID = 1 << 2
    SIZE = 1 << 3
    ATIME = 1 << 4
    MTIME = 1 << 5
    FH = 1 << 6
    ATIME_NOW = 1 << 7
    MTIME_NOW = 1 << 8
    LOCKOWNER = 1 << 9
    CTIME = 1 << 10
    KILL_SUIDGID = 1 << 11


class Notify(IntEnum):
    """What the daemon may tell the kernel unasked."""

    INVAL_INODE = 2
    INVAL_ENTRY = 3
    DELETE = 6
    RESEND = 7


GETATTR_FH = 1 << 0
WRITE_CACHE = 1 << 0
"""Pages that were written to before, by whomever."""
WRITE_KILL_SUIDGID = 1 << 2
OPEN_KILL_SUIDGID = 1 << 0
FSYNC_DATASYNC = 1 << 0
EXPIRE_ONLY = 1 << 0
STATX_BASIC_STATS = 0x7FF

UNIQUE_RESENT = 1 << 63
"""Set in `unique` of a request that the kernel sends again after Notify.RESEND."""

DEV_IOC_CLONE = 0x8004E500
DEV_IOC_BACKING_OPEN = 0x4010E501
DEV_IOC_BACKING_CLOSE = 0x4004E502

ROOT_ID = 1
READ_BUFFER_MIN = 8192
PAGE_BYTES = 4096

# -- layouts

_CODES = {"u16": "H", "u32": "I", "i32": "i", "u64": "Q", "i64": "q"}


class Layout(struct.Struct):
    """One wire structure."""

    def __init__(self, name: str, size: int, fields: str) -> None:
        """`fields`: `type name` pairs separated by commas; `u32*7` repeats."""
        code = "="
        names = []
        for field in fields.split(","):
            kind, field_name = field.split()
            kind, _, count = kind.partition("*")
            code += _CODES[kind] * int(count or 1)
            names.append(field_name)
        super().__init__(code)
        self.name = name
        self.fields = tuple(names)
        if self.size != size:
            message = f"{name} has {self.size} bytes, the protocol says {size}"
            raise AssertionError(message)


IN_HEADER = Layout(
    "fuse_in_header",
    40,
    "u32 len, u32 opcode, u64 unique, u64 nodeid, u32 uid, u32 gid, u32 pid, u16 total_extlen, "
    "u16 padding",
)
OUT_HEADER = Layout("fuse_out_header", 16, "u32 len, i32 error, u64 unique")

# -- session

INIT_IN_V7_31 = Layout(
    "fuse_init_in before 7.36", 16, "u32 major, u32 minor, u32 max_readahead, u32 flags"
)
INIT_IN = Layout(
    "fuse_init_in",
    64,
    "u32 major, u32 minor, u32 max_readahead, u32 flags, u32 flags2, u32*11 unused",
)
INIT_OUT = Layout(
    "fuse_init_out",
    64,
    "u32 major, u32 minor, u32 max_readahead, u32 flags, u16 max_background, u16 "
    "congestion_threshold, u32 max_write, u32 time_gran, "
    "u16 max_pages, u16 map_alignment, u32 flags2, u32 max_stack_depth, u16 request_timeout, "
    "u16*11 unused",
)
INTERRUPT_IN = Layout("fuse_interrupt_in", 8, "u64 unique")
SYNCFS_IN = Layout("fuse_syncfs_in", 8, "u64 padding")

# -- attributes. Seconds are signed on both sides of the wire: times before 1970 exist.

ATTR_FIELDS = (
    "u64 ino, u64 size, u64 blocks, i64 atime, i64 mtime, i64 ctime, u32 atimensec, u32 "
    "mtimensec, u32 ctimensec, "
    "u32 mode, u32 nlink, u32 uid, u32 gid, u32 rdev, u32 blksize, u32 flags"
)
ATTR = Layout("fuse_attr", 88, ATTR_FIELDS)
ENTRY_FIELDS = (
    "u64 nodeid, u64 generation, u64 entry_valid, u64 attr_valid, u32 entry_valid_nsec, u32 "
    f"attr_valid_nsec, {ATTR_FIELDS}"
)
ENTRY_OUT = Layout("fuse_entry_out", 128, ENTRY_FIELDS)
ATTR_OUT = Layout(
    "fuse_attr_out", 104, f"u64 attr_valid, u32 attr_valid_nsec, u32 dummy, {ATTR_FIELDS}"
)
STATX_OUT = Layout(
    "fuse_statx_out",
    288,
    "u64 attr_valid, u32 attr_valid_nsec, u32 flags, u64*2 spare, "
    "u32 mask, u32 blksize, u64 attributes, u32 nlink, u32 uid, u32 gid, u16 mode, u16 spare0, "
    "u64 ino, u64 size, u64 blocks, u64 attributes_mask, "
    "i64 atime, u32 atimensec, i32 reserved_a, i64 btime, u32 btimensec, i32 reserved_b, "
    "i64 ctime, u32 ctimensec, i32 reserved_c, i64 mtime, u32 mtimensec, i32 reserved_m, "
    "u32 rdev_major, u32 rdev_minor, u32 dev_major, u32 dev_minor, u64*14 spare2",
)
ACCESS_IN = Layout("fuse_access_in", 8, "u32 mask, u32 padding")

# -- files

OPEN_OUT = Layout("fuse_open_out", 16, "u64 fh, u32 open_flags, i32 backing_id")
READ_IN = Layout(
    "fuse_read_in",
    40,
    "u64 fh, u64 offset, u32 size, u32 read_flags, u64 lock_owner, u32 flags, u32 padding",
)
WRITE_IN = Layout(
    "fuse_write_in",
    40,
    "u64 fh, u64 offset, u32 size, u32 write_flags, u64 lock_owner, u32 flags, u32 padding",
)

# -- extended attributes

GETXATTR_OUT = Layout("fuse_getxattr_out", 8, "u32 size, u32 padding")

# -- directories

DIRENT = Layout("fuse_dirent", 24, "u64 ino, u64 off, u32 namelen, u32 type")
RECORD_ALIGNMENT = 8

# -- notifications and ioctls on the device

NOTIFY_INVAL_INODE_OUT = Layout("fuse_notify_inval_inode_out", 24, "u64 ino, i64 off, i64 len")
NOTIFY_INVAL_ENTRY_OUT = Layout(
    "fuse_notify_inval_entry_out", 16, "u64 parent, u32 namelen, u32 flags"
)
NOTIFY_DELETE_OUT = Layout(
    "fuse_notify_delete_out", 24, "u64 parent, u64 child, u32 namelen, u32 padding"
)
BACKING_MAP = Layout("fuse_backing_map", 16, "i32 fd, u32 flags, u64 padding")
