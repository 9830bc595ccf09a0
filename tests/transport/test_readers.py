"""Whose turn it is to read: without a kernel, over a socket that keeps requests apart as /dev/fuse
does.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from queue import SimpleQueue

import pytest

from acpfs.filesystem.spare_threads import SpareThreads
from acpfs.runtime.threads import THREADS
from acpfs.transport.native.protocol import IN_HEADER, READ_IN, Opcode
from acpfs.transport.native.reader import BULK_BYTES_MIN, Readers
from acpfs.transport.native.request import RequestBuffers
from tests.rig.scarcity import no_thread_left

PAYLOAD_BYTES = 1 << 20
WAIT_S = 120.0


class DispatchDouble:
    """Says which thread handled which request; handling a bulk request, or a write to the storage,
    takes until `go_on`.
    """

    def __init__(self) -> None:
        self.handled: SimpleQueue[tuple[int, int]] = SimpleQueue()
        self.held: SimpleQueue[bool] = SimpleQueue()
        """Of each write to the storage: whether its thread waits for that."""
        self.go_on = threading.Event()
        self.spare = SpareThreads()

    @staticmethod
    def waits_for_storage(header: memoryview) -> bool:
        """A short WRITE is one to the storage."""
        length, opcode, *_rest = IN_HEADER.unpack_from(header)
        return bool(opcode == Opcode.WRITE and length < BULK_BYTES_MIN)

    def handle(self, _fd: int, buffers: RequestBuffers, length: int) -> bool:
        opcode = IN_HEADER.unpack_from(buffers.header)[1]
        if opcode == Opcode.IOCTL:
            raise MemoryError
        self.handled.put((opcode, threading.get_ident()))
        if self.waits_for_storage(buffers.header):
            held = self.spare.hold()
            self.held.put(held)
            if held:
                self.spare.call(self.go_on.wait, WAIT_S)
            return False
        if opcode in (Opcode.READ, Opcode.WRITE):
            self.go_on.wait(WAIT_S)
        return False


class Kernel:
    """Three readers over one socket."""

    def __init__(self) -> None:
        self._socket, daemon = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.dispatch = DispatchDouble()
        self._daemon = daemon
        self.ended = threading.Event()
        self.failed: SimpleQueue[BaseException] = SimpleQueue()
        self.readers = Readers(
            self.dispatch,  # type: ignore[arg-type]
            [daemon.fileno()] * 3,
            PAYLOAD_BYTES,
            self.ended.set,
            self.failed.put,
        )

    def send(self, opcode: Opcode, body: bytes = b"") -> None:
        header = IN_HEADER.pack(IN_HEADER.size + len(body), opcode, 2, 1, 0, 0, 0, 0, 0)
        self._socket.send(header + body)

    def ask(self, opcode: Opcode, body: bytes = b"") -> int:
        """The thread that handles the request."""
        self.send(opcode, body)
        found, thread = self.dispatch.handled.get(timeout=WAIT_S)
        assert found == opcode
        return thread

    def end(self) -> None:
        """The mount has ended."""
        self._socket.close()

    def close(self) -> None:
        self.dispatch.go_on.set()
        self.end()
        assert self.readers.join(WAIT_S)
        self._daemon.close()


@pytest.fixture
def kernel() -> Iterator[Kernel]:
    kernel = Kernel()
    kernel.readers.start()
    yield kernel
    kernel.close()


def test_short_requests_stay_with_one_thread(kernel: Kernel) -> None:
    assert len({kernel.ask(Opcode.GETATTR) for _ in range(50)}) == 1


@pytest.mark.parametrize(
    ("opcode", "body"),
    [
        (Opcode.WRITE, os.urandom(BULK_BYTES_MIN)),
        (Opcode.READ, READ_IN.pack(1, 0, BULK_BYTES_MIN, 0, 0, 0, 0)),
    ],
    ids=["write", "read"],
)
def test_a_thread_that_moves_bytes_gives_the_turn_away(
    kernel: Kernel, opcode: Opcode, body: bytes
) -> None:
    busy = kernel.ask(opcode, body)
    also_busy = kernel.ask(opcode, body)
    others = {kernel.ask(Opcode.GETATTR) for _ in range(5)}
    assert len({busy, also_busy} | others) == 3
    kernel.dispatch.go_on.set()
    assert kernel.ask(Opcode.GETATTR) in others


@pytest.mark.clause("S496")
def test_the_storage_holds_up_one_of_three_and_that_one_waits(kernel: Kernel) -> None:
    dispatch = kernel.dispatch
    readers = kernel.readers
    held = kernel.ask(Opcode.WRITE)
    assert dispatch.held.get(timeout=WAIT_S)
    assert [call[:3] for call in readers.waiting()] == [("write", 1, 0)]
    assert (
        readers.current[readers.identities.index(held)] == 0
    )  # it is not taken for one that hangs
    assert held not in {kernel.ask(Opcode.GETATTR) for _ in range(5)}
    for _ in range(4):
        assert kernel.ask(Opcode.WRITE) != held
        assert not dispatch.held.get(timeout=WAIT_S)
    dispatch.go_on.set()
    while readers.waiting():
        assert kernel.ask(Opcode.GETATTR)
    kernel.ask(Opcode.WRITE)
    assert dispatch.held.get(timeout=WAIT_S)


@pytest.mark.clause("S496")
def test_a_mount_ends_though_the_storage_holds_one_up(kernel: Kernel) -> None:
    kernel.ask(Opcode.WRITE)
    assert kernel.dispatch.held.get(timeout=WAIT_S)
    kernel.end()
    assert kernel.ended.wait(WAIT_S)
    assert kernel.readers.waiting()


@pytest.mark.clause("S440")
def test_one_that_has_no_memory_left_is_told_of(kernel: Kernel) -> None:
    """The next worker answers what it has read; as long as this one lives nobody would."""
    kernel.send(Opcode.IOCTL)
    assert isinstance(kernel.failed.get(timeout=WAIT_S), MemoryError)
    assert not kernel.ended.is_set()


@pytest.mark.clause("S440")
def test_those_that_had_no_thread_at_first_serve_when_they_have_one() -> None:
    THREADS.be_ready(WAIT_S)
    kernel = Kernel()
    with no_thread_left():
        kernel.readers.start()
        assert THREADS.lack() is not None
    assert isinstance(kernel.ask(Opcode.GETATTR), int)
    kernel.close()
    assert kernel.ended.wait(WAIT_S)
