"""Older formats of the state database become today's; the number of the format is
`state.STATE_VERSION`.

One that a newer acpfs has written is refused, by whatever reads it: the mount, `salvage`, and the
recovery of a mirror. Knows columns, not what they mean to the layers that read them: their tables
are as they were when the step was written, and stay so here. A step runs inside a transaction of
its caller's, and a database that some of the tables never came to is brought up, too.
"""

from __future__ import annotations

import sqlite3

from acpfs.errors import RefusedError, unknown_version

_TO_2 = """
CREATE TABLE IF NOT EXISTS node (
  ino INTEGER PRIMARY KEY, mode INTEGER, uid INTEGER, gid INTEGER, rdev INTEGER, nlink INTEGER,
  size INTEGER, blocks INTEGER,
  atime_ns INTEGER, mtime_ns INTEGER, ctime_ns INTEGER, lower_ino INTEGER, identity TEXT,
  unlogged INTEGER,
  target BLOB, xattrs TEXT, tier_id INTEGER, modified INTEGER, overflow TEXT);
CREATE TABLE IF NOT EXISTS version (
  vid INTEGER PRIMARY KEY, ino INTEGER NOT NULL, tier_id INTEGER NOT NULL, size INTEGER NOT NULL,
  state TEXT NOT NULL,
  staging_name TEXT NOT NULL, staging_ino INTEGER NOT NULL, digest TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS remainder (
  ino INTEGER PRIMARY KEY, tier_id INTEGER NOT NULL, size INTEGER NOT NULL);

ALTER TABLE node RENAME COLUMN overflow TO staging;
ALTER TABLE node ADD COLUMN gone TEXT NOT NULL DEFAULT '';
UPDATE node SET gone = substr(staging, instr(staging, '|') + 1),
  staging = substr(staging, 1, instr(staging, '|') - 1)
  WHERE instr(staging, '|');

ALTER TABLE node ADD COLUMN spilled INTEGER NOT NULL DEFAULT 0;
UPDATE node SET spilled = tier_id - (1 << 48), tier_id = 0 WHERE tier_id >= 1 << 48;
ALTER TABLE version ADD COLUMN spilled INTEGER NOT NULL DEFAULT 0;
UPDATE version SET spilled = 1, tier_id = 0 WHERE tier_id >= 1 << 48;

ALTER TABLE node ADD COLUMN head INTEGER NOT NULL DEFAULT 0;
UPDATE node SET (tier_id, head) =
  (SELECT tier_id, size FROM remainder WHERE remainder.ino = node.ino)
  WHERE tier_id = 0 AND staging = '' AND spilled = 0 AND ino IN (SELECT ino FROM remainder);
DROP TABLE remainder;

ALTER TABLE node ADD COLUMN interrupted INTEGER NOT NULL DEFAULT 0;
ALTER TABLE node ADD COLUMN failed INTEGER NOT NULL DEFAULT 0;
ALTER TABLE node ADD COLUMN failed_at INTEGER NOT NULL DEFAULT 0;
ALTER TABLE node ADD COLUMN writing TEXT NOT NULL DEFAULT 'appending';
ALTER TABLE node ADD COLUMN last_writing TEXT NOT NULL DEFAULT 'appending';
UPDATE node SET modified = modified & 1, failed = modified >> 1 & 255, failed_at = modified >> 12,
  interrupted = modified >> 9 & 1, writing = iif(modified >> 10 & 1, 'whole', 'appending'),
  last_writing = iif(modified >> 11 & 1, 'whole', 'appending') WHERE modified;
"""
"""Where bytes are has columns of its own, not numbers from 2^48 on, a text `name|pieces`, a table
of remainders, and a column of bits.
"""

_TO_3 = """
DROP TABLE IF EXISTS listed_directory;
DROP TABLE IF EXISTS listed;
"""
"""A listing is one value. What was known of the backing directory's is asked for again."""

_STEPS = {2: _TO_2, 3: _TO_3}


def version_of(db: sqlite3.Connection, known: int, where: object) -> int:
    """Of the format of a state database; 0: it has none yet.

    `known`: today's. `where`: what to call it.

    Raises:
        RefusedError: a newer acpfs wrote it.
    """
    (found,) = db.execute("PRAGMA user_version").fetchone()
    way_out = "drain it with the newer acpfs"
    if found and (why := unknown_version(f"the state in {where}", found, known, way_out)):
        raise RefusedError(why)
    return int(found)


def migrate(db: sqlite3.Connection, known: int, where: object) -> None:
    """Bring the tables to today's format, see `version_of`; the caller has begun a transaction, and
    sets `user_version` itself.
    """
    found = version_of(db, known, where)
    for version, step in _STEPS.items():
        for statement in step.split(";") if 0 < found < version else ():
            db.execute(statement)
