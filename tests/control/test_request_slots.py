"""However many connect, or wait, nobody is kept out for it: places at the control socket."""

import os
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path

import pytest
import trio

from acpfs.control import server
from acpfs.control.registry import MountRecord
from acpfs.control.request_slots import ROOT_SHARE, NoPlaceError, RequestSlots
from acpfs.control.server import CLIENTS_MAX, WAITING_MAX
from acpfs.errors import AcpfsError
from tests.control.double import DoubleSubject
from tests.control.test_server import ask, serve

OWNER_UID = 54321


@pytest.mark.clause("S221")
def test_too_many_that_wait_are_told_so_and_keep_nobody_else_out(tmp_path: Path) -> None:
    async def scenario(subject: DoubleSubject, record: MountRecord) -> None:
        subject.ops = [(1, "a", 5, False)]
        hanging = []
        for _ in range(WAITING_MAX):
            stream = await trio.open_unix_socket(record.socket)
            await stream.send_all(b'{"verb": "flush"}\n')
            await stream.receive_some(10)
            hanging.append(stream)
        for verb in ("flush", "watch", "verify"):
            with pytest.raises(AcpfsError, match="too many control connections that wait"):
                await ask(record, verb)
        for _ in range(2):
            await ask(record, "status")
        subject.done(1)
        for stream in hanging:
            while await stream.receive_some(65536):
                pass
            await stream.aclose()
        await ask(record, "flush")

    assert serve(tmp_path, scenario).refused_clients == 3


@pytest.mark.clause("S221")
def test_members_of_the_control_group_leave_room_for_owner_and_root() -> None:
    slots = RequestSlots(4, "connections")
    group = ExitStack()
    owner = ExitStack()
    for _ in range(2):
        group.enter_context(slots.one(owner=False))
    with pytest.raises(NoPlaceError, match=r"too many connections of the control group \(2\)"):
        group.enter_context(slots.one(owner=False))
    for _ in range(2):
        owner.enter_context(slots.one(owner=True))
    for kind in (True, False):
        with pytest.raises(NoPlaceError, match=r"too many connections \(4\)"):
            owner.enter_context(slots.one(owner=kind))
    group.close()
    for _ in range(2):
        owner.enter_context(slots.one(owner=True))
    owner.close()
    group.enter_context(slots.one(owner=False))
    assert slots.taken == 1


@pytest.mark.clause("S221")
@pytest.mark.parametrize(
    ("lasting", "request_line"), [(True, b'{"verb": "watch"}\n'), (False, b"")]
)
def test_an_owner_who_takes_all_places_leaves_some_to_root(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lasting: bool, request_line: bytes
) -> None:
    """64 programs of an owner without privilege that watch, or say nothing: root's flush, which
    waits too, and status find a place.
    """
    monkeypatch.setattr(os, "getuid", lambda: OWNER_UID)
    uid = [OWNER_UID]
    monkeypatch.setattr(server, "_credentials", lambda _connection: (1, uid[0], OWNER_UID))

    async def scenario(subject: DoubleSubject, record: MountRecord) -> None:
        subject.ops = [(1, "a", 5, False)]
        subject.done(1)
        places = WAITING_MAX if lasting else CLIENTS_MAX
        refused = trio.Event()

        async def hear(stream: trio.SocketStream) -> None:
            if b"too many control connections" in await stream.receive_some(1000):
                refused.set()
                await trio.sleep_forever()

        async with trio.open_nursery() as nursery, AsyncExitStack() as streams:
            for _ in range(places - places // ROOT_SHARE + 1):
                stream = await streams.enter_async_context(
                    await trio.open_unix_socket(record.socket)
                )
                await stream.send_all(request_line)
                nursery.start_soon(hear, stream)
            await refused.wait()
            uid[0] = 0
            await ask(record, "status")
            await ask(record, "flush")
            nursery.cancel_scope.cancel()

    serve(tmp_path, scenario)
