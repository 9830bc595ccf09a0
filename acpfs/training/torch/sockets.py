"""Gets a main thread out of a gloo collective: the connections of its groups are shut down, from
another thread.

gloo's own `abort` and `shutdown` return at once and do nothing (torch 2.13): a rank whose
neighbours live and wait elsewhere would wait for its time-out. A socket is known by its identity
(device and inode of /proc/self/fd), never by its number, which another one may have by now: it is
duplicated, the duplicate is compared, and then shut down.
"""

from __future__ import annotations

import os
import socket
import stat
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress

from acpfs.training.wire import Identity, identity_of, own_sockets

Endpoint = tuple[str, int]
Connection = tuple[Endpoint, Endpoint]
"""This end, the other end."""
_MAPPED = "::ffff:"


def _descriptors() -> Iterator[tuple[int, Identity]]:
    """Sockets of this process."""
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # closed meanwhile
            found = os.stat(int(name))
            if stat.S_ISSOCK(found.st_mode):
                yield int(name), (found.st_dev, found.st_ino)


@contextmanager
def _duplicate(descriptor: int, identity: Identity) -> Iterator[socket.socket | None]:
    """A socket of one's own for this identity; None where the number is another's now."""
    try:
        copy = os.dup(descriptor)
    except OSError:
        yield None
        return
    if identity_of(copy) != identity:
        os.close(copy)
        yield None
        return
    with socket.socket(fileno=copy) as duplicated:
        yield duplicated


def _connection(connected: socket.socket) -> Connection | None:
    """Both ends of a TCP connection; None for anything else."""
    if (
        connected.family not in (socket.AF_INET, socket.AF_INET6)
        or connected.type != socket.SOCK_STREAM
    ):
        return None
    try:
        here = connected.getsockname()
        there = connected.getpeername()
    except OSError:
        return None
    return (str(here[0]).removeprefix(_MAPPED), here[1]), (
        str(there[0]).removeprefix(_MAPPED),
        there[1],
    )


def connections() -> dict[Identity, Connection]:
    """All TCP connections that this process has."""
    found = {}
    for descriptor, identity in _descriptors():
        with _duplicate(descriptor, identity) as connected:
            if connected is not None and (ends := _connection(connected)) is not None:
                found[identity] = ends
    return found


class GroupSockets:
    """The connections of process groups. `shut_down` may be called from any thread, at any time."""

    def __init__(self) -> None:
        self._noted: set[Identity] = set()
        self._before: set[Identity] | None = None
        """What there was when a group that is being made began."""
        self._noting = threading.Lock()

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Whatever is opened inside belongs to a group, but for acpfs's own: a coordinator may be
        called meanwhile, by another thread.

        A thread that is stuck inside stays there, and the one that stands in for it makes another
        group.
        """
        with self._noting:
            self._noted |= self._opened()
            before = {identity for _, identity in _descriptors()}
            self._before = before
        try:
            yield
        finally:
            with self._noting:
                if self._before is before:
                    self._noted |= self._opened()
                    self._before = None

    def _opened(self) -> set[Identity]:
        before = self._before
        return set() if before is None else connections().keys() - before - own_sockets()

    def note_shared(self, mine: dict[Identity, Connection], theirs: Iterable[Connection]) -> None:
        """Groups that were made before: connections whose other end is another rank's."""
        reversed_ends = {(there, here) for here, there in theirs}
        with self._noting:
            self._noted |= {identity for identity, ends in mine.items() if ends in reversed_ends}

    def shut_down(self) -> int:
        """End them all; how many there were. Who waits for one of them gets an error at once."""
        with self._noting:
            wanted = (self._noted | self._opened()) - own_sockets()
            count = 0
        for descriptor, identity in list(_descriptors()):
            if identity not in wanted:
                continue
            with _duplicate(descriptor, identity) as connected, suppress(OSError):
                if connected is not None:
                    connected.shutdown(socket.SHUT_RDWR)
                    count += 1
        return count
