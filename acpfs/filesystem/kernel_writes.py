"""What the kernel writes to tier files without the daemon: noticing it, and versions whose bytes it may still change.

Writers in the passthrough lane and shared mappings leave only a new size and mtime of the tier file, mappings not even that. Knows tier
files, nodes and the log; does not know handles, room or lanes. Used under the file system's lock; nothing here waits.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from acpfs.filesystem.content import Content
from acpfs.filesystem.nodes import Node, NodeTable
from acpfs.ram.tier import Tier
from acpfs.types import VersionId
from acpfs.writeback.log import OperationLog
from acpfs.writeback.ops import Version


@dataclass(frozen=True, slots=True)
class Guard:
    """A version of a file that the kernel may still write to: its bytes are good as long as the tier file looks like this."""

    node: Node
    seen: tuple[int, int]


class KernelWrites:
    """Looks at tier files for what the kernel did to them."""

    def __init__(self, tier: Tier, log: OperationLog, table: NodeTable, opened: Callable[[Content], int]) -> None:
        """`opened`: the descriptor of a content."""
        self._tier = tier
        self._log = log
        self._table = table
        self._opened = opened
        self._guards: dict[VersionId, Guard] = {}

    def look(self, node: Node) -> bool:
        """Take over what the kernel wrote to the tier file meanwhile; whether it wrote anything."""
        content = node.content
        if content is None or content.overflow:
            return False
        st = self._tier.settle_fd(content.tier_id, self._opened(content))
        seen = (st.st_mtime_ns, st.st_size)
        if seen == content.seen:
            return False
        content.seen = seen
        node.size, node.blocks = st.st_size, st.st_blocks
        node.mtime_ns = node.ctime_ns = st.st_mtime_ns
        self.assume_changed(node)
        return True

    def assume_changed(self, node: Node) -> None:
        """The kernel may have written through a mapping, which leaves no trace."""
        content = node.content
        if content is not None and not content.modified:
            content.modified, content.interrupted, content.modified_since = True, False, time.monotonic()
            self._table.changed(node)

    def set_times(self, node: Node) -> None:
        """The file's times were set: the tier file shows them too, so that the change is not taken for a write."""
        if node.content is not None and node.kernel_writers:
            fd = self._opened(node.content)
            os.utime(fd, ns=(node.atime_ns, node.mtime_ns))
            st = os.fstat(fd)
            node.content.seen = (st.st_mtime_ns, st.st_size)

    # -- after the end of a worker

    def as_recorded(self, node: Node) -> bool:
        """Whether the tier file is as the node's row says: then the row's times are right, also those that were set."""
        assert node.content is not None
        st = self._tier.stat(node.content.tier_id)
        if st.st_mtime_ns > node.ctime_ns or st.st_size != node.size:
            return False
        node.content.seen = (st.st_mtime_ns, st.st_size)
        return True

    def watch_again(self, node: Node, versions: Iterable[Version]) -> None:
        """The kernel has been writing all the time. What the versions looked like is not known any more: they are streamed again."""
        if not self.as_recorded(node):
            self.look(node)
        for version in versions:
            self._guards[version.vid] = Guard(node, (0, 0))

    # -- versions that it may still change

    def guard(self, version: Version, node: Node) -> None:
        """The version shares its bytes with a file that the kernel may go on writing to."""
        assert node.content is not None
        self._guards[version.vid] = Guard(node, node.content.seen)

    def forget(self, version: Version) -> None:
        """Nobody needs the version any more."""
        self._guards.pop(version.vid, None)

    def still_frozen(self, version: Version) -> bool:
        """Whether the version's bytes are what they were. If not, the version is the content as it is now, and has to be streamed anew."""
        guard = self._guards.get(version.vid)
        if guard is None:
            return True
        st = self._tier.stat(version.tier_id)
        seen = (st.st_mtime_ns, st.st_size)
        if seen == guard.seen:
            return True
        self._guards[version.vid] = Guard(guard.node, seen)
        version.size = st.st_size
        version.renewals += 1
        self._log.save_version(version)
        return False

    def unguard(self, versions: Iterable[Version]) -> None:
        """Nobody writes in passthrough any more: what versions see now stays as it is."""
        for version in versions:
            self.still_frozen(version)
            self.forget(version)
