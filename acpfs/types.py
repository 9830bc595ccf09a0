"""Distinct types for the numbers that must not be mixed up."""

from typing import NewType

Ino = NewType("Ino", int)
"""Number of a node; also the inode number that applications see. 0 means "no node"."""

Seq = NewType("Seq", int)
"""Position in the operation log; grows by one with each operation and is never used twice."""

TierId = NewType("TierId", int)
"""Number of a file in the RAM tier."""

NO_TIER = TierId(0)
"""Of bytes that are not in the RAM tier."""

VersionId = NewType("VersionId", int)
"""Number of a frozen content of a file."""

NO_VERSION = VersionId(0)

HandleId = NewType("HandleId", int)
"""Number of an open file or directory, as the kernel names it."""

ROOT = Ino(1)
NO_INO = Ino(0)
