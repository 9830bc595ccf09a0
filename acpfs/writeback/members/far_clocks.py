"""Says once in the log of each node whose clock begins to hold pointer files up.

Used under the file system's lock.
"""

from __future__ import annotations

from collections.abc import Iterable

from acpfs.logger import get_logger
from acpfs.writeback.members.peers import Peer, Terms

TOLD_S = 5.0
"""Pointers that wait for so long only because of clocks are worth a word."""

_log = get_logger(__name__)


class FarClocks:
    """Knows of whom it was said."""

    def __init__(self) -> None:
        self._told: frozenset[str] = frozenset()

    def look(self, peers: Iterable[Peer], terms: Terms) -> None:
        """Others' records were read."""
        waits = {
            peer.node: peer.clock_wait_s(terms)
            for peer in peers
            if peer.record is not None and not peer.is_missing(terms)
        }
        far = frozenset(node for node, wait_s in waits.items() if wait_s >= TOLD_S)
        for node in far - self._told:
            _log.warning(
                "wall clocks hold pointer files up: `acpfs-ctl status` says what helps",
                node=node,
                up_to_s=round(waits[node], 1),
            )
        self._told = far
