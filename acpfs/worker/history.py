"""What happened to a mount: each checkpoint that was saved, each worker that took over, each
trouble with the storage. Bounded.

Rows are in the state database, and outlive workers; a small file keeps the newest for the next
mount, as `learned` does with sizes. No call of an application writes one: `HistoryWatch` does,
every few seconds. Used under the file system's lock.
"""

from __future__ import annotations

import json
import os
from collections import OrderedDict
from dataclasses import asdict, fields
from pathlib import Path

from acpfs.config import Settings
from acpfs.control.reports import HistoryEntry
from acpfs.mounting.remembered import RememberedFile
from acpfs.ram.state import StateDatabase

DDL = "CREATE TABLE IF NOT EXISTS history (number INTEGER PRIMARY KEY, entry TEXT NOT NULL);"
ENTRIES_MAX = 2000
"""In the state: a checkpoint an hour for a quarter of a year, in some 500 kB."""
REMEMBERED_MAX = 1000
"""For the next mount."""


class History:
    """Entries, oldest first."""

    def __init__(self, state: StateDatabase) -> None:
        """Load what the last worker left."""
        self._state = state
        state.create(DDL)
        self._entries: OrderedDict[int, HistoryEntry] = OrderedDict()
        for number, text in state.rows("SELECT number, entry FROM history ORDER BY number"):
            entry = _entry(json.loads(text))
            if entry is not None:
                self._entries[number] = entry
        self._saves = {
            _key(entry): number
            for number, entry in self._entries.items()
            if entry.kind == "checkpoint"
        }

    def entries(self) -> list[HistoryEntry]:
        """All that are kept, in the order of their times: a look may find what came before what the
        one before it has noted.
        """
        return sorted(self._entries.values(), key=lambda entry: entry.at)

    def note(self, entry: HistoryEntry) -> None:
        """One more. A save that is there already, and has gone on since, takes its own place."""
        number = self._saves.get(_key(entry)) if entry.kind == "checkpoint" else None
        if number is not None and self._entries[number] == entry:
            return
        if number is None:
            number = next(reversed(self._entries), 0) + 1
        self._entries[number] = entry
        if entry.kind == "checkpoint":
            self._saves[_key(entry)] = number
        self._state.change(
            "INSERT OR REPLACE INTO history VALUES (?, ?)", (number, json.dumps(asdict(entry)))
        )
        if len(self._entries) > ENTRIES_MAX:
            oldest, gone = self._entries.popitem(last=False)
            self._saves.pop(_key(gone), None)
            self._state.change("DELETE FROM history WHERE number = ?", (oldest,))

    # -- from mount to mount

    def recall(self, settings: Settings, runtime_dir: Path) -> None:
        """Begin with what the last mount kept, where the state has nothing: one whose RAM tier was
        not drained has it still.
        """
        kept = _file(settings, runtime_dir).read().get("entries")
        if self._entries or not isinstance(kept, list):
            return
        for values in kept[-REMEMBERED_MAX:]:
            entry = _entry(values)
            if entry is not None:
                self.note(entry)

    def keep(self, settings: Settings, runtime_dir: Path) -> None:
        """For the next mount."""
        if self._entries:
            _file(settings, runtime_dir).write(
                {"entries": [asdict(entry) for entry in self.entries()[-REMEMBERED_MAX:]]}
            )


def _file(settings: Settings, runtime_dir: Path) -> RememberedFile:
    return RememberedFile(settings, runtime_dir, "history")


def _key(entry: HistoryEntry) -> tuple[str, float | None]:
    return entry.path, entry.began_at


def _entry(values: object) -> HistoryEntry | None:
    """None: another version's, or damaged."""
    if not isinstance(values, dict):
        return None
    known = {field.name for field in fields(HistoryEntry)}
    try:
        return HistoryEntry(
            **{os.fspath(name): value for name, value in values.items() if name in known}
        )
    except TypeError:
        return None
