"""One error family for what a user can cause, one exit-code table, one classification of backing
errors.

Inside the file system and the backing layer an error is an `OSError` with its errno, because that
is what travels to the kernel; the family here is for everything a person reads.
"""

import errno
import os
from enum import IntEnum


class ExitCode(IntEnum):
    """Exit codes of `acpfs` and `acpfs-ctl`; a contract (docs/reference)."""

    OK = 0
    FAILED = 1
    """Something was not persisted, not verified, or a checksum differs; the output says what."""
    USAGE = 2
    """Bad option, unknown configuration key, nonsense value; several are mounted, and the command
    names none of them.
    """
    NOT_MOUNTED = 3
    """No acpfs answers for that mount point or path."""
    TIMEOUT = 4
    """The deadline passed; what is left is kept and named."""
    REFUSED = 5
    """In use (mount point, identity, busy mount), a RAM tier of another backing directory, or what
    a newer acpfs left in a form that this one does not know.
    """
    ENVIRONMENT = 6
    """The machine does not offer what is needed: /dev/fuse, permission, memory, backing
    directory.
    """


class AcpfsError(Exception):
    """An error with one line that a user can act on."""

    exit_code = ExitCode.FAILED


class ConfigError(AcpfsError):
    """A configuration key or value that makes no sense; the message names it."""

    exit_code = ExitCode.USAGE


class NotMountedError(AcpfsError):
    """No daemon answers for the mount point."""

    exit_code = ExitCode.NOT_MOUNTED


class SeveralMountsError(AcpfsError):
    """The command does not say which of several mounts it is about."""

    exit_code = ExitCode.USAGE


class DeadlineError(AcpfsError, TimeoutError):
    """Not done in time; nothing was lost.

    What a program that knows nothing of acpfs catches as `TimeoutError`.
    """

    exit_code = ExitCode.TIMEOUT


class RefusedError(AcpfsError):
    """Would put data at risk or collide with another mount."""

    exit_code = ExitCode.REFUSED


class MachineError(AcpfsError):
    """The machine or the backing directory does not offer what a mount needs."""

    exit_code = ExitCode.ENVIRONMENT


_SHOWN_CHARS_MAX = 20


def unknown_version(what: str, found: object, known: int, way_out: str, oldest: int = 1) -> str:
    """Why something is not read whose form this acpfs does not know; "" where it does.

    `what`: whose form, with its place. `found`: its version, as it was read: whatever is no whole
    number from `oldest` to `known` is refused (docs/FORMATS.md), `true` too, which is 1 to Python.
    `way_out`: what a person can do, which never is to remove it. Whoever asks raises an error of
    the kind that its callers know.
    """
    if type(found) is int and oldest <= found <= known:
        return ""
    said = found if type(found) is int else ascii(found)
    return f"{what} has version {str(said)[:_SHOWN_CHARS_MAX]}, this acpfs knows {known}: {way_out}"


PERMANENT_ERRNOS = frozenset(
    {
        errno.EACCES,
        errno.EPERM,
        errno.EROFS,
        errno.ENAMETOOLONG,
        errno.EISDIR,
        errno.ENOTDIR,
        errno.ENOTEMPTY,
        errno.EEXIST,
        errno.ELOOP,
        errno.EFBIG,
        errno.EMLINK,
        errno.EXDEV,
        errno.EINVAL,
        errno.EOPNOTSUPP,
        errno.EILSEQ,
    }
)
"""Refusals that retrying does not mend.

Everything else (EIO, ENOSPC, EDQUOT, ESTALE, ENOTCONN, ETIMEDOUT …) is retried for ever.
"""
FULL_ERRNOS = frozenset({errno.ENOSPC, errno.EDQUOT})
"""There is no room; the same may succeed when something was removed."""


NO_THREAD = "can't start new thread"
"""What Python says, and the only way to tell it from other RuntimeErrors."""


class NoThreadError(BlockingIOError):
    """The machine has no thread left; EAGAIN, as fork(2) says it of processes."""

    def __init__(self, name: str) -> None:
        """`name`: of the thread."""
        super().__init__(errno.EAGAIN, f"{os.strerror(errno.EAGAIN)}: no thread is left", name)


def is_no_thread(error: BaseException) -> bool:
    """Whether an error says that no thread could be started, also where a library has started
    it.
    """
    if isinstance(error, NoThreadError):
        return True
    return isinstance(error, RuntimeError) and str(error) == NO_THREAD


WANTS = {
    errno.ENOMEM: "memory",
    errno.EMFILE: "descriptors",
    errno.ENFILE: "descriptors",
}
"""What the machine had not got → its name.

EAGAIN is not among them: where it means threads, `NoThreadError` says so.
"""


def wanted(error: BaseException | None) -> str:
    """Of which resource of the machine the want has led to this error: memory, descriptors or
    threads; "" where it was no want of any.

    Looks into groups, and at causes: an error that people read is raised from the one of the
    machine.
    """
    if error is None:
        return ""
    if is_no_thread(error):
        return "threads"
    if isinstance(error, MemoryError):
        return "memory"
    if isinstance(error, OSError) and error.errno in WANTS:
        return WANTS[error.errno]
    inner = [*getattr(error, "exceptions", ()), error.__cause__]
    return next((found for one in inner if (found := wanted(one))), "")


def errno_name(number: int | None) -> str:
    """Symbolic name of an errno, e.g. `ENOSPC`; `unknown` for None."""
    if number is None:
        return "unknown"
    return errno.errorcode.get(number, str(number))
