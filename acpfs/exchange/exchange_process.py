"""The exchange process of a worker: speaks with other members, moves bytes, decides nothing.

A process of its own, so that what it does takes no time of the worker's interpreter, and what it is
sent by others cannot end the worker. Ends with the worker, whose end of the channel is gone then.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

from acpfs.exchange.channel_ends import ChannelEnd, Reply
from acpfs.exchange.exchange_records import MemberAddress, Message, VersionName
from acpfs.exchange.hold_calls import HoldCalls
from acpfs.exchange.link_streams import LinkFailedError
from acpfs.exchange.listening import Listening, listening_on
from acpfs.exchange.member_calls import MemberCalls
from acpfs.exchange.member_links import OtherVersionError, OwnName
from acpfs.exchange.sealed_stream import SpoiltLinkError, can_seal
from acpfs.runtime.threads import Threads

THREAD_WAIT_S = 10.0
PR_SET_NO_NEW_PRIVS = 38
CAPABILITY_VERSION_3 = 0x20080522


class ExchangeProcess:
    """See above."""

    def __init__(self, channel: socket.socket) -> None:
        self._threads = Threads()
        self._end = ChannelEnd(channel, self._heed, self._unwanted, waits=True)
        self._calls: MemberCalls | None = None
        self._holds: HoldCalls | None = None
        self._listening: Listening | None = None

    def run(self) -> None:
        """Until the worker is gone."""
        self._threads.be_ready(THREAD_WAIT_S)
        self._end.run()

    def _unwanted(self, answer: Message) -> None:
        if self._listening is not None:
            self._listening.unwanted(answer)

    def _heed(self, message: Message, fds: list[int], reply: Reply) -> None:
        """What the worker asks; each in a thread of its own, as any of them may wait."""
        if message["do"] == "begin":
            self._begin(message, fds)
        elif message["do"] == "has":
            self._threads.start("has", _tried, self._has, message, reply)
        elif message["do"] == "get":
            self._threads.start("get", _tried, self._get, message, reply)
        elif message["do"] in ("hold", "put"):
            self._threads.start("hold", _tried, partial(self._hold, fds), message, reply)

    def _begin(self, message: Message, fds: list[int]) -> None:
        own = OwnName(
            message["volume"],
            message["node"],
            Path(message["directory"]),
            message["plain"],
            can_seal(),
        )
        self._calls = MemberCalls(own, self._linked)
        self._holds = HoldCalls(own, self._linked)
        self._listening = Listening(own, self._end, self._threads)
        self._listening.begin(listening_on(fds))
        for fd in fds:
            os.close(fd)

    def _linked(self, node: str, way: str) -> None:
        self._end.tell({"do": "linked", "node": node, "way": way})

    def _has(self, message: Message, reply: Reply) -> None:
        assert self._calls is not None
        to = MemberAddress.heard(message["to"])
        file = VersionName.heard(message["file"])
        reply(self._calls.has(to, file, message["patience_s"]).told())

    def _hold(self, fds: list[int], message: Message, reply: Reply) -> None:
        assert self._holds is not None
        to = MemberAddress.heard(message["to"])
        try:
            if message["do"] == "hold":
                reply(self._holds.hold(to, message["said"], message["patience_s"]))
            else:
                reply(
                    self._holds.put(
                        to, message["said"], (fds[0], message["from"]), message["patience_s"]
                    )
                )
        finally:
            for fd in fds:
                os.close(fd)

    def _get(self, message: Message, reply: Reply) -> None:
        assert self._calls is not None
        to = MemberAddress.heard(message["to"])
        file = VersionName.heard(message["file"])
        found = self._calls.get(to, file, message["offset"], message["size"], message["patience_s"])
        if found < 0:
            reply({"got": 0})
            return
        try:
            reply({"got": message["size"]}, [found])
        finally:
            os.close(found)


def _tried(what: Callable[[Message, Reply], None], message: Message, reply: Reply) -> None:
    """The worker learns of whatever goes wrong: it waits for an answer."""
    try:
        what(message, reply)
    except OtherVersionError as error:
        reply({"failed": str(error), "speaks": error.version})
    except SpoiltLinkError as error:
        reply({"failed": str(error), "spoilt": True})
    except (LinkFailedError, ValueError, OSError) as error:
        reply({"failed": str(error)})


def give_up_privileges() -> None:
    """A process of root keeps its user, whose files key and certificate are, and no capability.

    Best effort: what the worker would not give is not missed.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    header = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION_3, 0)
    libc.capset(header, (ctypes.c_uint32 * 6)())


def main() -> None:
    """`sys.argv[1]`: the descriptor of the channel."""
    os.umask(0o077)
    give_up_privileges()
    for one in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(one, signal.SIG_IGN)  # as long as the worker has something to give
    ExchangeProcess(socket.socket(fileno=int(sys.argv[1]))).run()
    os._exit(0)  # threads may wait for members that never answer


if __name__ == "__main__":
    main()
