"""The capabilities of a daemon of root: what it needs, and nothing else from its first moment on.

Standard library only: the supervisor calls it before it does anything, and all that it starts
inherits. Nobody else drops or takes capabilities, but for the process that takes inode locks, which
keeps one. To be called before there are threads: each has its own.
"""

from __future__ import annotations

import ctypes
import os
import struct
from pathlib import Path

KEPT = {
    "CHOWN": 0,
    "DAC_OVERRIDE": 1,
    "DAC_READ_SEARCH": 2,
    "FOWNER": 3,
    "FSETID": 4,
    "SYS_PTRACE": 19,
    "SYS_ADMIN": 21,
    "SYS_NICE": 23,
    "MKNOD": 27,
    "SETFCAP": 31,
}
"""Name → number; docs/OPERATIONS.md says what each is for. Left out on purpose: SYS_RESOURCE, with
which the drain would use up the blocks that the backing file system reserves, and go past its
quotas.
"""
_PR_CAPBSET_DROP = 24
_PR_SET_NO_NEW_PRIVS = 38
_PR_CAP_AMBIENT = 47
_PR_CAP_AMBIENT_CLEAR_ALL = 4
_VERSION_3 = 0x20080522
_LAST = Path("/proc/sys/kernel/cap_last_cap")
_LAST_ANYWHERE = 63

_libc = ctypes.CDLL(None, use_errno=True)


def kept_mask() -> int:
    """As /proc/PID/status shows them."""
    return sum(1 << number for number in KEPT.values())


def confine() -> None:
    """Keep `KEPT`, as far as it is there, for this process and all that it will start; no program
    can give back what is gone.

    Nothing without root: there are no capabilities to drop, and fusermount3 is set-uid, which "no
    new privileges" would defeat.
    """
    if os.geteuid() != 0:
        return
    kept = kept_mask()
    for number in range(_last() + 1):
        if not kept >> number & 1:
            _libc.prctl(
                _PR_CAPBSET_DROP, number, 0, 0, 0
            )  # fails without CAP_SETPCAP: then the two lines below have to do
    _libc.prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0)
    _libc.prctl(
        _PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0
    )  # so an exec as root gets no capability that was not there before it
    _set(kept & _permitted())


def _permitted() -> int:
    header = struct.pack("=Ii", _VERSION_3, 0)
    data = ctypes.create_string_buffer(24)
    if _libc.capget(header, data) != 0:
        return 0
    low, high = struct.unpack("=6I", data.raw)[1::3]
    return int(low) | int(high) << 32


def _set(permitted: int) -> None:
    low = permitted & 0xFFFFFFFF
    high = permitted >> 32
    words = struct.pack("=6I", low, low, 0, high, high, 0)
    if _libc.capset(struct.pack("=Ii", _VERSION_3, 0), words) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"capabilities cannot be dropped: {os.strerror(number)}")


def _last() -> int:
    try:
        return int(_LAST.read_text())
    except (OSError, ValueError):
        return _LAST_ANYWHERE
