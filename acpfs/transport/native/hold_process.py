"""The process that takes inode locks: a thread per file calls chown(-1, -1), which changes nothing,
and the daemon does not answer at once.

A program of its own, run by file name without site-packages: a process must never wait for its own
mount, and this one does nothing else. It outlives the worker. It is told which files have writers
that only the daemon can stop, and within what time it hears of them again. When that time is up,
nobody looks after those writers (the worker is dead, or stopped): it takes the locks of all of them
by itself, and the next worker finds the calls, and answers them. It ends when nobody holds the
other end of its channel any more.

Has no /dev/fuse descriptor, and of the capabilities only the one that opens a file by its node
number, so that renamed and deleted files are found. Files are opened while the worker lives, since
that may ask it, and through a detached copy of the mount, which keeps nobody from unmounting.

It runs as a real-time task where it may: the kernel's inode lock is then handed over to it in turn
(`RWSEM_FLAG_HANDOFF`), while a normal task that waits for the lock is overtaken by a writer that
comes back for it within microseconds.

The kernel notes that a lock is to be handed over when a real-time task tries to take it while
somebody has it. A thread that comes while the lock is free, but handed to the writer before it,
sleeps without that note, and is overtaken once. That is so after a gap, where the writer does not
run at once. Any other real-time task that tries while the writer has the lock leaves the note for
whoever is first.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import select
import socket
import struct
import sys
import threading
import time
from collections import Counter

PR_SET_NO_NEW_PRIVS = 38
CAP_DAC_READ_SEARCH = 2
CAPABILITY_VERSION_3 = 0x20080522
AT_FDCWD = -100
AT_EMPTY_PATH = 0x1000
FILEID_INO64_GEN = 0x81
"""A FUSE file handle: node number, high and low half, and generation (0: numbers are never used
again).
"""
FUSE_SUPER_MAGIC = 0x65735546
STATFS_WORDS = 32
PACKET_BYTES_MAX = 1 << 17
TRIES = 5
TRY_AGAIN_S = 0.001
"""To open a file that is just being created, before the next message."""
BESIDE_MAX = 3
"""Threads that wait for a file's lock beside the first. One may come in a gap, too; a writer is
asked for again every few seconds, and may take minutes for one write.
"""

_libc = ctypes.CDLL(None, use_errno=True)


class FileHandle(ctypes.Structure):
    """struct file_handle."""

    _fields_ = (("size", ctypes.c_uint), ("kind", ctypes.c_int), ("data", ctypes.c_ubyte * 12))


def open_node(ino: int) -> int:
    """A descriptor of a file in the mount that is the working directory, good for calls on the file
    itself, by node number.
    """
    handle = FileHandle(12, FILEID_INO64_GEN)
    handle.data[:] = struct.pack("=III", ino >> 32, ino & 0xFFFFFFFF, 0)
    fd = int(_libc.open_by_handle_at(AT_FDCWD, ctypes.byref(handle), os.O_PATH | os.O_CLOEXEC))
    if fd < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return fd


def change_nothing(fd: int) -> int:
    """Have a file's inode lock for as long as the daemon does not answer; returns the error that it
    ends with.
    """
    nobody = ctypes.c_uint(0xFFFFFFFF)
    return ctypes.get_errno() if _libc.fchownat(fd, b"", nobody, nobody, AT_EMPTY_PATH) != 0 else 0


def check_is_mount(tree: int) -> None:
    """Another one may lie over it, or nothing.

    Raises:
        OSError: ESTALE.
    """
    info = (ctypes.c_long * STATFS_WORDS)()
    if _libc.fstatfs(tree, info) != 0 or info[0] != FUSE_SUPER_MAGIC:
        raise OSError(errno.ESTALE, "the mount is gone")


class Locks:
    """The files that may have to be held, and the threads that hold some of them.

    `watch` and `take`: the main thread.
    """

    def __init__(self) -> None:
        self._tree = -1
        """The copy of the mount; kept only as long as there is a file to watch, since it keeps the
        session alive.
        """
        self._files: dict[int, int] = {}
        self._missing: set[int] = set()
        """To be watched, and not found yet."""
        self._lock = threading.Lock()
        self._taking: dict[int, bool] = {}
        """Node → whether it was asked for once more since its thread began."""
        self._beside: Counter[int] = Counter()
        """Node → threads that wait beside that one."""

    def watch(self, inos: list[int], tree: int) -> None:
        """These and no others from now on; `tree`: a copy of the mount, -1: there is one
        already.
        """
        if tree >= 0:
            self._let_go_of_tree()
            self._tree = tree
        for ino in self._files.keys() - set(inos):
            os.close(self._files.pop(ino))
        self._missing = set(inos) - self._files.keys()
        for _ in range(TRIES):
            if not self.find():
                break
            time.sleep(TRY_AGAIN_S)
        if not inos:
            self._let_go_of_tree()

    def find(self) -> OSError | None:
        """Open what is not open yet; why that cannot be done, if so.

        A file that is being created is not known to the kernel at once.
        """
        failed = None
        if self._missing:
            try:
                check_is_mount(self._tree)
                os.fchdir(self._tree)
            except OSError as error:
                return error
            for ino in list(self._missing):
                try:
                    self._files[ino] = open_node(ino)
                    self._missing.remove(ino)
                except OSError as error:
                    failed = error
            os.chdir("/")
        return failed

    def _let_go_of_tree(self) -> None:
        if self._tree >= 0:
            os.close(self._tree)
            self._tree = -1

    def take_all(self) -> None:
        """Nobody else looks after them."""
        self.find()
        for ino in self._files:
            self.take(ino)

    def take(self, ino: int) -> None:
        """Begin to take the lock of a file, again and again, as long as the daemon says so.

        Where a thread does already, another one takes it once: that the first one waits does not
        say that the lock is handed to it.
        """
        error = self.find() if ino in self._missing else None
        if ino not in self._files:
            sys.stderr.write(f"acpfs: node {ino} cannot be held: {error}\n")
            return
        with self._lock:
            is_first = ino not in self._taking
            self._taking[ino] = not is_first
            if not is_first:
                if self._beside[ino] == BESIDE_MAX:
                    return
                self._beside[ino] += 1
        fd = -1
        try:
            fd = os.dup(self._files[ino])
            threading.Thread(
                target=self._hold if is_first else self._hold_once, args=(ino, fd), daemon=True
            ).start()
        except (
            OSError,
            RuntimeError,
        ) as failed:  # no descriptor, no thread: the worker asks again soon
            if fd >= 0:
                os.close(fd)
            self._ended(ino, is_first)
            sys.stderr.write(f"acpfs: node {ino} cannot be held: {failed}\n")

    def _ended(self, ino: int, is_first: bool) -> None:
        """A thread takes the file's lock no more, or never came to it."""
        with self._lock:
            if is_first:
                del self._taking[ino]
                return
            self._beside[ino] -= 1
            if not self._beside[ino]:
                del self._beside[ino]

    def _hold_once(self, ino: int, fd: int) -> None:
        change_nothing(fd)
        os.close(fd)
        self._ended(ino, False)

    def _hold(self, ino: int, fd: int) -> None:
        while True:
            while change_nothing(fd) == errno.EAGAIN:
                pass
            with self._lock:
                if not self._taking[ino]:
                    del self._taking[ino]
                    break
                self._taking[ino] = False
        os.close(fd)


def confine() -> None:
    """Get no new privileges, keep one capability, and be handed locks in turn."""
    with contextlib.suppress(OSError):  # needs CAP_SYS_NICE
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    _libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    header = struct.pack("=Ii", CAPABILITY_VERSION_3, 0)
    kept = 1 << CAP_DAC_READ_SEARCH
    _libc.capset(header, struct.pack("=6I", kept, kept, 0, 0, 0, 0))


def serve(channel: socket.socket, locks: Locks) -> None:
    """Until nobody is at the other end.

    Messages: `watch` (nodes), `take` (node), `within_s` (until the next one; null: whenever).
    """
    within_s: float | None = None
    waiting = select.poll()
    waiting.register(channel, select.POLLIN)
    while True:
        if not waiting.poll(None if within_s is None else within_s * 1000):
            locks.take_all()
            within_s = None  # until it is heard of again
            continue
        try:
            data, fds, _flags, _address = socket.recv_fds(
                channel, PACKET_BYTES_MAX, 1, socket.MSG_CMSG_CLOEXEC
            )
        except ConnectionResetError:
            return
        if not data:
            return
        message = json.loads(data)
        if "watch" in message:
            locks.watch(message["watch"], fds[0] if fds else -1)
        else:
            locks.find()
        if "take" in message:
            locks.take(message["take"])
        if "within_s" in message:
            within_s = message["within_s"]


def main() -> None:
    """Argument: the descriptor of the channel."""
    channel = socket.socket(fileno=int(sys.argv[1]))
    confine()
    serve(channel, Locks())
    os._exit(0)  # threads may wait in the kernel


if __name__ == "__main__":
    main()
