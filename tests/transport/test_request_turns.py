"""Which task of the libfuse transport takes the next request: without a kernel, over a socket that
keeps requests apart.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import signal
import socket
from collections.abc import Iterator
from typing import Any

import pyfuse3
import pytest
import trio
import trio.testing

from acpfs.transport.request_turns import BURST_MAX, ReadAlarm, RequestTurns, taken_in_turns

WAITS = b"waits"
ENDS = b"ends"


class Kernel:
    """Serves as pyfuse3 does, whose tasks start another one where nobody is left to read; and who
    served what.
    """

    def __init__(self) -> None:
        self.turns = RequestTurns(lambda: None)
        self._sending, self._taking = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.served: list[tuple[int, bytes]] = []
        self.go_on = trio.Event()
        self.tasks = 0
        self._readers = 0

    def send(self, *requests: bytes) -> None:
        for request in requests:
            self._sending.send(request)

    async def serve(self, nursery: trio.Nursery) -> None:
        """Until there are no more requests."""
        number = self.tasks
        self.tasks += 1
        while True:
            self._readers += 1
            try:
                async with self.turns:
                    await self.turns.wait_readable(self._taking.fileno())
            finally:
                self._readers -= 1
            request = self._taking.recv(100)
            if request == ENDS:
                self.send(ENDS)  # for the other tasks
                return
            if not self._readers:
                nursery.start_soon(self.serve, nursery)
            self.served.append((number, request))
            if request == WAITS:
                await self.go_on.wait()

    def close(self) -> None:
        self._sending.close()
        self._taking.close()


@pytest.fixture
def kernel() -> Iterator[Kernel]:
    kernel = Kernel()
    yield kernel
    kernel.close()


async def _begin(nursery: trio.Nursery, kernel: Kernel, tasks: int = 1) -> None:
    for _ in range(tasks):
        nursery.start_soon(kernel.serve, nursery)
    await trio.testing.wait_all_tasks_blocked()


def test_who_has_served_a_request_goes_on_with_those_that_have_come(kernel: Kernel) -> None:
    """And one task stands by, for which pyfuse3 need start no other."""

    async def history() -> None:
        async with trio.open_nursery() as nursery:
            await _begin(nursery, kernel)
            kernel.send(*[b"small"] * 30, ENDS)

    trio.run(history)
    assert [number for number, _ in kernel.served] == [0] * 30
    assert kernel.tasks <= 3  # the second one may begin only after the next request


@pytest.mark.clause("S497")
def test_one_that_waits_keeps_no_other_from_being_served(kernel: Kernel) -> None:
    async def history() -> None:
        async with trio.open_nursery() as nursery:
            await _begin(nursery, kernel, 2)
            kernel.send(b"small", WAITS, WAITS, WAITS, b"small")
            await trio.testing.wait_all_tasks_blocked()
            served = [request for _, request in kernel.served]
            assert served == [b"small", WAITS, WAITS, WAITS, b"small"]
            kernel.go_on.set()
            kernel.send(ENDS)

    trio.run(history)


@pytest.mark.clause("S497")
def test_requests_that_come_without_a_pause_leave_others_their_turn(kernel: Kernel) -> None:
    seen: list[int] = []
    requests = BURST_MAX * 5

    async def control() -> None:
        while len(kernel.served) < requests:
            seen.append(len(kernel.served))
            await trio.lowlevel.checkpoint()
        seen.append(requests)

    async def history() -> None:
        async with trio.open_nursery() as nursery:
            await _begin(nursery, kernel, 2)
            kernel.send(*[b"small"] * requests, ENDS)
            nursery.start_soon(control)

    trio.run(history)
    gaps = [later - earlier for earlier, later in itertools.pairwise(seen)]
    # control runs once in each round, and may do so before the task in one and after it in the next
    assert BURST_MAX < max(gaps) <= 2 * (BURST_MAX + 1)
    assert len(kernel.served) == requests


def test_who_is_cancelled_while_he_stands_by_leaves_the_others_theirs(kernel: Kernel) -> None:
    async def history() -> None:
        async with trio.open_nursery() as nursery:
            await _begin(nursery, kernel)
            async with trio.open_nursery() as cancelled:
                await _begin(cancelled, kernel, 2)
                cancelled.cancel_scope.cancel()
            kernel.send(b"small", WAITS, b"small")
            await trio.testing.wait_all_tasks_blocked()
            assert [request for _, request in kernel.served] == [b"small", WAITS, b"small"]
            kernel.go_on.set()
            kernel.send(ENDS)

    trio.run(history)


def test_pyfuse3_has_all_else_from_trio_and_gets_that_back() -> None:
    taker: Any = pyfuse3

    async def look() -> None:
        assert taker.trio is trio
        with taken_in_turns() as turns:
            assert taker.trio.Lock() is turns
            assert taker.trio.lowlevel.wait_readable == turns.wait_readable
            assert taker.trio.lowlevel.current_task is trio.lowlevel.current_task
            assert taker.trio.open_nursery is trio.open_nursery
        assert taker.trio is trio

    trio.run(look)


@pytest.mark.clause("S510")
def test_a_read_that_finds_nothing_ends_and_the_alarm_is_put_off() -> None:
    taking, sending = os.pipe()

    async def look() -> None:
        before = signal.getsignal(signal.SIGALRM)
        with ReadAlarm(trio.lowlevel.current_trio_token()) as alarm:
            for _ in range(2):
                alarm.set()
                with pytest.raises(InterruptedError):
                    read_as_c_does(taking)
                while signal.getitimer(signal.ITIMER_REAL) != (0.0, 0.0):
                    await trio.lowlevel.checkpoint()
            alarm.set()
        assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
        assert signal.getsignal(signal.SIGALRM) is before

    trio.run(look)
    os.close(taking)
    os.close(sending)


def read_as_c_does(fd: int) -> None:
    """With the interpreter, and not again after a signal."""
    libc = ctypes.PyDLL(None, use_errno=True)
    if libc.read(fd, ctypes.create_string_buffer(1), 1) < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
