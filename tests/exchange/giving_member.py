"""The giving side of an exchange process, in this process, with a worker that does as it is told,
and members that call it.
"""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from acpfs.exchange.channel_ends import ChannelEnd, Reply
from acpfs.exchange.exchange_records import Availability, Has, MemberAddress, Message, VersionName
from acpfs.exchange.link_streams import PLAIN, SEALED, TLS
from acpfs.exchange.listening import Listening, ListeningLimits
from acpfs.exchange.member_calls import MemberCalls
from acpfs.exchange.member_links import OwnName, fingerprint
from acpfs.exchange.sealed_stream import can_seal
from acpfs.links.keys import make_key
from acpfs.links.tls import certificate_of
from acpfs.runtime.threads import Threads

VOLUME = "5" * 32
PATIENCE_S = 60.0
"""Longer than a busy machine keeps anybody waiting."""


needs_sealing = pytest.mark.skipif(not can_seal(), reason="the package cryptography is missing")
WAYS = [PLAIN, TLS, pytest.param(SEALED, marks=needs_sealing)]
BEST = SEALED if can_seal() else TLS
"""What members agree on where nobody asks for something else."""


def own_name(directory: Path, node: str, volume: str = VOLUME, *, way: str = BEST) -> OwnName:
    """A member with a key of its own, who would have that way."""
    make_key(directory / node, "acpfs member", "it")
    return OwnName(volume, node, directory / node, way == PLAIN, way != TLS and can_seal())


def key_of(own: OwnName) -> str:
    return fingerprint(certificate_of(own.directory))


class GivingMember:
    """`n1`, which lends one file."""

    def __init__(self, directory: Path, data: bytes, limits: ListeningLimits, way: str) -> None:
        self.path = directory / "lent"
        self.path.write_bytes(data)
        self.file = VersionName(b"model", 5, len(data), 6, 7)
        self.own = own_name(directory, "n1", way=way)
        self.keys: dict[str, str] = {}
        """Whose key it takes: as records have it."""
        self.is_same = True
        self.gives = True
        self.is_claimed = False
        """When bytes are there that it is to hold."""
        self.has_room = True
        """For them."""
        self.is_writable = True
        """What they are written to."""
        self.holds: threading.Event | None = None
        """Loans wait for it."""
        self.ended: list[int] = []
        """Loans that were not asked about."""
        self.asked: list[str] = []
        self.linked: list[tuple[str, str]] = []
        """With whom connections were made, and in which way, as either side says."""
        self.spoilt: queue.Queue[str] = queue.Queue()
        """Members from which something came that was changed."""
        self.strange: queue.Queue[tuple[str, object]] = queue.Queue()
        """Members that speak another version, and which."""
        self.takers: list[MemberCalls] = []
        self._loans = 0
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._worker = ChannelEnd(ours, self._heed)
        threads = Threads()
        self._process = ChannelEnd(
            theirs, lambda *_: None, lambda said: self.listening.unwanted(said)
        )
        self.listening = Listening(self.own, self._process, threads, limits)
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self.listener.getsockname()[1])
        for end in (self._worker, self._process):
            threads.start("end", end.run)
        self.listening.begin([self.listener])

    def _heed(self, message: Message, _fds: list[int], reply: Reply) -> None:
        if self._heard(message):
            return
        self.asked.append(message["do"])
        match message["do"]:
            case "knows":
                reply({"known": self.keys.get(message["node"]) == message["key"]})
            case "has":
                reply(Availability(Has.WHOLE).told())
            case "lend" if not self.gives:
                reply({"size": 0})
            case "lend":
                threading.Thread(target=self._lend, args=(message, reply), daemon=True).start()
            case "same":
                reply({"same": self.is_same})
            case "room" if not self.has_room:
                reply({"refused": "full"})
            case "room":
                fd = os.open(self.path, os.O_WRONLY if self.is_writable else os.O_RDONLY)
                reply({"ok": True}, [fd])
                os.close(fd)
            case "hold":
                reply({"refused": "claimed"} if self.is_claimed else {"ok": True})
            case "end":
                self.ended.append(message["loan"])

    def _heard(self, message: Message) -> bool:
        """What is said only, and not asked."""
        match message["do"]:
            case "linked":
                self.linked.append((message["node"], message["way"]))
            case "spoilt":
                self.spoilt.put(message["node"])
            case "speaks":
                self.strange.put((message["node"], message["version"]))
            case _:
                return False
        return True

    def _lend(self, message: Message, reply: Reply) -> None:
        if self.holds is not None:
            self.holds.wait()
        self._loans += 1
        fd = os.open(self.path, os.O_RDONLY)
        reply({"size": message["size"], "loan": self._loans}, [fd])
        os.close(fd)

    @property
    def address(self) -> MemberAddress:
        return MemberAddress("n1", ("127.0.0.1",), self.port, key_of(self.own))

    def close(self) -> None:
        for calls in self.takers:
            calls.close()
        with contextlib.suppress(OSError):
            self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()
        for end in (self._worker, self._process):
            end.close()


@contextmanager
def giving(
    directory: Path, data: bytes, *, way: str = BEST, limits: ListeningLimits | None = None
) -> Iterator[GivingMember]:
    """It, and its end."""
    member = GivingMember(directory, data, limits or ListeningLimits(), way)
    try:
        yield member
    finally:
        member.close()


def taker(member: GivingMember, directory: Path, *, way: str = BEST) -> MemberCalls:
    """`n2`, which the other one knows."""
    own = own_name(directory, "n2", way=way)
    member.keys["n2"] = key_of(own)
    calls = MemberCalls(own, lambda node, way: member.linked.append((node, way)))
    member.takers.append(calls)
    return calls


def read_all(fd: int) -> bytes:
    """What a range has; closes it."""
    try:
        return os.pread(fd, os.fstat(fd).st_size + 1, 0)
    finally:
        os.close(fd)
