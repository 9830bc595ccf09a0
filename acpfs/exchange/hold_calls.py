"""The side of an exchange process that has copies kept by another member: sends it bytes of files
and what becomes of them.

Its connections are not those of readers, who would wait behind large files. Decides nothing.
"""

from __future__ import annotations

from acpfs.exchange.exchange_records import MemberAddress, Message
from acpfs.exchange.member_calls import Linked, MemberCalls, nobody
from acpfs.exchange.member_links import OwnName

HOLD_LINKS_MAX = 4
"""To one holder: of files that are copied at the same time, with the journal's."""


class HoldCalls:
    """To all holders: mostly one."""

    def __init__(self, own: OwnName, linked: Linked = nobody) -> None:
        self._calls = MemberCalls(own, linked, HOLD_LINKS_MAX)

    def hold(self, to: MemberAddress, said: Message, patience_s: float) -> Message:
        """Say something about what is held; the holder's answer.

        Raises:
            LinkFailedError: none comes within `patience_s`.
        """
        with self._calls.link(to, patience_s) as link:
            link.limit(patience_s)
            link.send({"do": "hold", "said": said})
            return link.receive()

    def put(
        self, to: MemberAddress, said: Message, piece: tuple[int, int], patience_s: float
    ) -> Message:
        """Send bytes of a file: `said["size"]` from where `piece` says, a descriptor and a position
        in it; the holder's answer.

        Raises:
            LinkFailedError: the bytes do not go out, or no answer comes, within `patience_s` each.
        """
        fd, position = piece
        with self._calls.link(to, patience_s) as link:
            link.limit(patience_s)
            link.send({"do": "put", "said": said})
            link.send_file(fd, position, said["size"], is_steady=True)  # `CopyBuffers`, memfds
            return link.receive()
