"""Connections between members: ranges come as they are, and strangers, liars and those who say too
much or too little get nothing, and hold up nobody.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
import threading
from pathlib import Path

import pytest

from acpfs.exchange import member_calls
from acpfs.exchange.exchange_records import EXCHANGE_VERSION, Has, MemberAddress, VersionName
from acpfs.exchange.link_streams import PLAIN, SEALED, TLS, LinkFailedError
from acpfs.exchange.listening import ListeningLimits
from acpfs.exchange.member_calls import MemberCalls
from acpfs.exchange.member_links import MAGIC, MemberLink
from acpfs.links.frames import framed
from acpfs.links.tls import certificate_of, mutual
from tests.exchange.giving_member import (
    BEST,
    PATIENCE_S,
    VOLUME,
    WAYS,
    giving,
    key_of,
    needs_sealing,
    own_name,
    read_all,
    taker,
)

clause = pytest.mark.clause
DATA = os.urandom((2 << 20) + 4321)


@clause("S540", "S546")
@pytest.mark.parametrize("given", WAYS)
@pytest.mark.parametrize("taken", WAYS)
def test_ranges_come_as_they_are(tmp_path: Path, given: str, taken: str) -> None:
    """Also where only one of them would do without encryption, or can seal."""
    with giving(tmp_path, DATA, way=given) as member:
        calls = taker(member, tmp_path, way=taken)
        assert calls.has(member.address, member.file, PATIENCE_S).has is Has.WHOLE
        for offset, size in ((0, len(DATA)), (1, 5), (1 << 20, 1 << 20), (len(DATA) - 1, 1)):
            found = calls.get(member.address, member.file, offset, size, PATIENCE_S)
            assert read_all(found) == DATA[offset : offset + size]
        assert member.asked.count("knows") == 1, "one connection"
        assert member.ended == []
        agreed = given if given == taken else BEST if TLS not in (given, taken) else TLS
        assert sorted(member.linked) == [("n1", agreed), ("n2", agreed)], "both know"


@clause("S546")
@pytest.mark.parametrize("way", WAYS)
def test_what_goes_over_the_wire_is_readable_only_where_that_is_wanted(
    tmp_path: Path, way: str
) -> None:
    secret = b"weights of the model" * 1000
    with giving(tmp_path, secret, way=way) as member, Tap(member.port) as tap:
        calls = taker(member, tmp_path, way=way)
        to = MemberAddress("n1", ("127.0.0.1",), tap.port, key_of(member.own))
        assert read_all(calls.get(to, member.file, 0, len(secret), PATIENCE_S)) == secret
        assert (b"weights of the model" in bytes(tap.seen)) == (way == PLAIN)


@clause("S546")
@pytest.mark.parametrize("way", WAYS)
def test_a_file_goes_by_the_kernel_alone_where_nothing_is_encrypted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    sent: list[int] = []
    sendfile = os.sendfile

    def counted(out: int, fd: int, offset: int, count: int) -> int:
        sent.append(sendfile(out, fd, offset, count))
        return sent[-1]

    monkeypatch.setattr(os, "sendfile", counted)
    with giving(tmp_path, DATA, way=way) as member:
        calls = taker(member, tmp_path, way=way)
        found = calls.get(member.address, member.file, 0, len(DATA), PATIENCE_S)
        assert read_all(found) == DATA
    assert sum(sent) == (len(DATA) if way == PLAIN else 0)


class Tap:
    """Passes on what two members say to each other, and keeps it."""

    def __init__(self, to: int) -> None:
        self._to = to
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self.seen = bytearray()
        self._ends: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._take)]

    def __enter__(self) -> Tap:
        self._threads[0].start()
        return self

    def __exit__(self, *_error: object) -> None:
        for one in (self._listener, *self._ends):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        for one in (self._listener, *self._ends):
            one.close()

    def _take(self) -> None:
        with contextlib.suppress(OSError):
            ours, _address = self._listener.accept()
            self._ends.append(ours)
            theirs = socket.create_connection(("127.0.0.1", self._to))
            self._ends.append(theirs)
            for source, target in ((ours, theirs), (theirs, ours)):
                self._threads.append(threading.Thread(target=self._pass, args=(source, target)))
                self._threads[-1].start()

    def _pass(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                self.seen += data
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)


class Trickle(Tap):
    """Passes on what comes first, and then a byte now and then."""

    AT_ONCE = 20_000
    """Handshakes and questions are less."""

    def _pass(self, source: socket.socket, target: socket.socket) -> None:
        pause = threading.Event()
        with contextlib.suppress(OSError):
            while data := source.recv(1 if len(self.seen) > self.AT_ONCE else 4096):
                self.seen += data
                target.sendall(data)
                if len(self.seen) > self.AT_ONCE:
                    pause.wait(0.01)
            target.shutdown(socket.SHUT_WR)


@clause("S542")
@pytest.mark.parametrize("way", [PLAIN, pytest.param(SEALED, marks=needs_sealing)])
def test_a_member_that_sends_a_byte_now_and_then_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """It is never silent for long."""
    monkeypatch.setattr(member_calls, "RANGE_MAX_S", 1.0)
    with (
        giving(tmp_path, DATA, way=way) as member,
        Trickle(member.port) as tap,
    ):
        calls = taker(member, tmp_path, way=way)
        to = MemberAddress("n1", ("127.0.0.1",), tap.port, key_of(member.own))
        with pytest.raises(LinkFailedError, match="too slow"):
            calls.get(to, member.file, 0, len(DATA), PATIENCE_S)


@clause("S543")
@pytest.mark.parametrize("way", WAYS)
def test_bytes_that_may_have_changed_on_their_way_are_not_taken(tmp_path: Path, way: str) -> None:
    """The giver says so after all have arrived: the kernel sends pages as they are when they
    go.
    """
    with giving(tmp_path, DATA, way=way) as member:
        calls = taker(member, tmp_path, way=way)
        member.is_same = False
        assert calls.get(member.address, member.file, 0, 1000, PATIENCE_S) == -1
        member.is_same = True
        found = calls.get(member.address, member.file, 0, 1000, PATIENCE_S)
        assert read_all(found) == DATA[:1000]
        assert member.asked.count("same") == 2


@clause("S542", "S543")
@pytest.mark.parametrize("way", WAYS)
def test_a_file_that_becomes_shorter_in_the_middle_is_an_end(tmp_path: Path, way: str) -> None:
    """As one does that leaves RAM there. The loan is given back, and the next one goes well."""
    with giving(tmp_path, DATA, way=way) as member:
        calls = taker(member, tmp_path, way=way)
        os.truncate(member.path, 5000)
        with pytest.raises(LinkFailedError):
            calls.get(member.address, member.file, 0, len(DATA), PATIENCE_S)
        found = calls.get(member.address, member.file, 0, 5000, PATIENCE_S)
        assert read_all(found) == DATA[:5000]
        assert member.ended == [1]


@clause("S540")
def test_a_member_that_gives_nothing_says_so(tmp_path: Path) -> None:
    with giving(tmp_path, DATA) as member:
        calls = taker(member, tmp_path)
        member.gives = False
        assert calls.get(member.address, member.file, 0, 10, PATIENCE_S) == -1
        member.gives = True
        assert read_all(calls.get(member.address, member.file, 0, 10, PATIENCE_S)) == DATA[:10]


@clause("S542")
def test_who_waits_for_bytes_that_come_hears_of_them(tmp_path: Path) -> None:
    """It waits longer than its patience with somebody who says nothing."""
    with giving(tmp_path, DATA) as member:
        calls = taker(member, tmp_path)
        assert calls.has(member.address, member.file, PATIENCE_S).has is Has.WHOLE  # connected
        member.holds = threading.Event()
        timer = threading.Timer(1.0, member.holds.set)
        timer.start()
        # Word comes every tenth of a second.
        found = calls.get(member.address, member.file, 0, 10, 20.0)
        assert read_all(found) == DATA[:10]
        timer.join()


# -- who is let in


@clause("S545")
def test_a_member_of_another_key_than_its_record_says_gets_nothing(tmp_path: Path) -> None:
    with giving(tmp_path, DATA) as member:
        calls = taker(member, tmp_path)
        member.keys["n2"] = key_of(own_name(tmp_path / "other", "n2"))
        with pytest.raises(LinkFailedError):
            calls.get(member.address, member.file, 0, 10, PATIENCE_S)
        assert set(member.asked) == {"knows"}


@clause("S545")
def test_nobody_is_asked_who_has_another_key_than_his_record_says(tmp_path: Path) -> None:
    with giving(tmp_path, DATA) as member:
        calls = taker(member, tmp_path)
        wrong = MemberAddress("n1", ("127.0.0.1",), member.port, "0" * 64)
        with pytest.raises(LinkFailedError, match="another certificate"):
            calls.get(wrong, member.file, 0, 10, PATIENCE_S)
        assert "lend" not in member.asked


@clause("S545")
def test_a_certificate_without_its_key_is_worth_nothing(tmp_path: Path) -> None:
    """It is shown in plain: whoever listens has it."""
    with giving(tmp_path, DATA) as member:
        victim = own_name(tmp_path, "n2")
        member.keys["n2"] = key_of(victim)
        thief = own_name(tmp_path / "other", "n2")
        shown = certificate_of(victim.directory)
        with socket.create_connection(("127.0.0.1", member.port), PATIENCE_S) as plain:
            plain.sendall(
                MAGIC
                + framed(
                    json.dumps(
                        {"version": EXCHANGE_VERSION, "volume": VOLUME, "node": "n2"}
                    ).encode(),
                    1 << 16,
                )
                + framed(shown, 1 << 16)
            )
            link = MemberLink(socket.socket(fileno=os.dup(plain.fileno())))
            link.limit(PATIENCE_S)
            _said, certificate = link._introduced()
            heard = b""
            with contextlib.suppress(OSError):  # of TLS, or the connection's end
                context = mutual(thief.directory, certificate, "", server=False)
                with context.wrap_socket(plain) as secured:
                    secured.sendall(framed(b'{"plain": false}', 1 << 16))
                    heard = secured.recv(1)
            link.close()
            assert heard == b""
        assert set(member.asked) == {"knows"}


@clause("S545")
def test_another_volume_gets_nothing(tmp_path: Path) -> None:
    with giving(tmp_path, DATA) as member:
        own = own_name(tmp_path, "n2", volume="6" * 32)
        member.keys["n2"] = key_of(own)
        with pytest.raises(LinkFailedError):
            MemberCalls(own).get(member.address, member.file, 0, 10, PATIENCE_S)
        assert member.asked == []


@clause("S545")
@pytest.mark.parametrize(
    "said",
    [
        b"GET / HTTP/1.1\r\n\r\n" + bytes(64),
        MAGIC + struct.pack(">I", 0xFFFFFFFF) + bytes(1 << 16),
        MAGIC + framed(b"[" * 60_000, 1 << 16),
        MAGIC + framed(b"{}", 100) + struct.pack(">I", 1 << 20),
        MAGIC + framed(b"[]", 100) + framed(b"", 100),
    ],
    ids=["another protocol", "endless frame", "deep", "endless certificate", "no object"],
)
def test_what_makes_no_sense_ends_the_connection(tmp_path: Path, said: bytes) -> None:
    with giving(tmp_path, DATA) as member:
        with socket.create_connection(("127.0.0.1", member.port), PATIENCE_S) as plain:
            with contextlib.suppress(OSError):  # it may have closed by then
                plain.sendall(said)
            with contextlib.suppress(ConnectionResetError):
                assert plain.recv(1) == b""
        calls = taker(member, tmp_path)
        assert read_all(calls.get(member.address, member.file, 0, 10, PATIENCE_S)) == DATA[:10]


@clause("S545")
def test_a_handshake_that_does_not_end_is_ended(tmp_path: Path) -> None:
    """However slowly it goes on: a byte now and then is no handshake."""
    with (
        giving(tmp_path, DATA, limits=ListeningLimits(handshake_s=0.5)) as member,
        socket.create_connection(("127.0.0.1", member.port), PATIENCE_S) as slow,
        contextlib.suppress(ConnectionError),
    ):
        slow.settimeout(0.1)
        slow.sendall(MAGIC)
        is_open = True
        while is_open:
            slow.sendall(bytes(1))  # the length of a frame, and then a frame of nothing
            with contextlib.suppress(TimeoutError):
                is_open = slow.recv(1) != b""


@clause("S545")
def test_strangers_who_say_nothing_do_not_keep_members_out_for_long(tmp_path: Path) -> None:
    with giving(tmp_path, DATA, limits=ListeningLimits(strangers=3, handshake_s=1.0)) as member:
        calls = taker(member, tmp_path)
        mute = [socket.create_connection(("127.0.0.1", member.port), PATIENCE_S) for _ in range(3)]
        try:
            while True:
                with contextlib.suppress(LinkFailedError):
                    found = calls.get(member.address, member.file, 0, 10, PATIENCE_S)
                    assert read_all(found) == DATA[:10]
                    break
        finally:
            for one in mute:
                one.close()


@clause("S545")
@pytest.mark.parametrize(
    ("offset", "size"), [(-1, 10), (0, 0), (0, 1 << 40), (len(DATA), 1), (True, 10), (0, "10")]
)
def test_a_range_that_the_file_has_not_ends_the_connection(
    tmp_path: Path, offset: object, size: object
) -> None:
    with giving(tmp_path, DATA) as member:
        own = own_name(tmp_path, "n2")
        member.keys["n2"] = key_of(own)
        link = MemberLink.called(own, member.address, PATIENCE_S)
        link.limit(PATIENCE_S)
        link.send({"do": "get", "file": member.file.told(), "offset": offset, "size": size})
        with pytest.raises(LinkFailedError):
            link.receive()
        link.close()
        assert "lend" not in member.asked


@clause("S542")
def test_a_member_that_stands_still_costs_its_time_out_once(tmp_path: Path) -> None:
    """Those that wait behind the first two do not wait once more each."""
    with socket.create_server(("127.0.0.1", 0)) as mute:
        own = own_name(tmp_path, "n2")
        calls = MemberCalls(own)
        to = MemberAddress("n1", ("127.0.0.1",), mute.getsockname()[1], "0" * 64)
        file = VersionName(b"model", 1, 1 << 20, 1, 1)
        ends: list[BaseException] = []

        def ask() -> None:
            try:
                calls.get(to, file, 0, 10, 2.0)
            except LinkFailedError as error:
                ends.append(error)

        threads = [threading.Thread(target=ask) for _ in range(12)]
        for one in threads:
            one.start()
        for one in threads:
            one.join()
        assert len(ends) == 12
        own_time_outs = [one for one in ends if "busy, or gone" not in str(one)]
        assert len(own_time_outs) < 12
