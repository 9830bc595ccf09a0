"""What may still be under way at a node whose log is to be adopted: calls that no fence stops.

Its files come through the staging directory, and what comes late through that is refused
(`backing.terms`); so does a file with the rename behind it (`Pairs`). Removals, other renames, new
names and attributes do not: one that a storage client still holds, or that a process which stands
still is about to make, could come at any time. But a node whose copy counts begins none before the
journal says so (`Mirror.before`), and who claims the log takes no more of the journal. So the
journal has all of them.
"""

from __future__ import annotations

import sqlite3

from acpfs.writeback.log.ops import WITH_CONTENT, OpKind

TOLD_MAX = 3
"""So many are named."""


def not_fenced(db: sqlite3.Connection) -> list[str]:
    """Operations of a journal's state that were begun, and that a fence does not stop: kind and
    name, the first ones.

    Raises:
        sqlite3.Error: it is no state of this acpfs.
    """
    rows = db.execute(
        "SELECT kind, name FROM op WHERE committed != 0 AND kind != ? "
        "AND NOT (kind = ? AND payload = ?) ORDER BY seq LIMIT ?",
        (OpKind.STORE.value, OpKind.RENAME.value, WITH_CONTENT, TOLD_MAX),
    )
    return [f"{kind} {_shown(name)}".rstrip() for kind, name in rows]


def _shown(name: object) -> str:
    return name.decode("utf-8", "backslashreplace") if isinstance(name, bytes) else ""


def sentence(found: list[str]) -> str:
    """Why nobody adopts that without being asked."""
    return (
        f"it had begun what no fence stops ({', '.join(found)}), and may still do it: "
        "`acpfs-ctl adopt` goes on when its machine is off"
    )
