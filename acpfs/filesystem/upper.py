"""The upper layer: what the mount has of its own, which all rooms of the file system work on.

Owns the lock, and nothing of what it leads to; knows no rule. Each part is used as its own module
says, most of them under the lock.
"""

from __future__ import annotations

from threading import RLock

from acpfs.filesystem.nodes import NodeTable
from acpfs.ram.state import StateDatabase
from acpfs.ram.tier import Tier
from acpfs.runtime.given import Runtime
from acpfs.writeback.log.log import OperationLog
from acpfs.writeback.log.lower_tree import LowerTree


class UpperLayer:
    """Inodes and names, the log, the RAM tier, the state, and the one lock over them."""

    def __init__(
        self,
        state: StateDatabase,
        tier: Tier,
        log: OperationLog,
        tree: LowerTree,
        runtime: Runtime,
    ) -> None:
        """`tree`: what the backing directory has after the commits so far."""
        self.state = state
        self.tier = tier
        self.log = log
        self.tree = tree
        self.runtime = runtime
        self.lock = RLock()
        self.table = NodeTable(state, log, tree, runtime.clock)
