"""SQLite with a rollback journal and with WAL, two connections at a time.

Usage: sqlite_database.py DIRECTORY.
"""

from __future__ import annotations

import sqlite3
import sys
from pathlib import Path


def fill(path: Path, journal: str) -> None:
    """Transactions, a rollback, a second reader and a vacuum."""
    database = sqlite3.connect(path, isolation_level=None)
    assert database.execute(f"PRAGMA journal_mode={journal}").fetchone()[0] == journal
    database.execute("CREATE TABLE sample (id INTEGER PRIMARY KEY, text TEXT)")
    for batch in range(10):
        database.execute("BEGIN")
        database.executemany(
            "INSERT INTO sample (text) VALUES (?)", [(f"{batch}-{n}" * 20,) for n in range(500)]
        )
        database.execute("ROLLBACK" if batch == 4 else "COMMIT")
    reader = sqlite3.connect(path)
    assert reader.execute("SELECT count(*) FROM sample").fetchone() == (4500,)
    reader.close()
    database.execute("DELETE FROM sample WHERE id % 2")
    database.execute("VACUUM")
    assert database.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    database.close()


if __name__ == "__main__":
    for mode in ("delete", "wal"):
        fill(Path(sys.argv[1]) / f"{mode}.db", mode)
