"""Node records: `.acpfs/nodes/<node id>`, by which the mounts of one backing directory know of each
other.

One small JSON file per node, replaced whole by a rename at each heartbeat, so that a reader sees
one state or the one before, and its client notices a new file. Where there is no room for another
file, the record is written over in place: it has room to grow, and a checksum that one that is read
half-written does not have. A hidden file beside it, its mark, is renamed then, which the client
notices as well. Whoever reads a record may see an old one: everything in it stays true for ever
("all that was closed up to T is persisted"), so that costs time, and nothing else. Neither locks
nor times of files are used. Decides nothing. Thread-safe; blocks as the backing directory does.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from enum import Enum
from typing import Any

import xxhash

from acpfs.backing.directory import BackingDirectory
from acpfs.errors import FULL_ERRNOS, unknown_version

RECORD_VERSION = 1
"""Of a record. New fields with a default do not count: whoever does not know them does without."""
DIRECTORY = b"nodes"
ANYTHING = "+"
"""In `NodeRecord.held` instead of keys, where they would be too many."""
RECORD_BYTES_MAX = 1 << 18
BLOCK_BYTES = 4096
SPARE_BYTES = 2048
"""A record may grow by so much, that is by the names that are pending there, where the file system
is full.
"""
_TEMPORARY = b"."
_MARKS = (b".%s.mark-a", b".%s.mark-b")
_SUM = b'{"sum":"%s",'
_SUMMED = re.compile(rb'\{"sum":"([0-9a-f]{16})",')


class NodeState(str, Enum):
    """What a node says of itself, or another one of it."""

    LIVE = "live"
    AWAY = "away"
    """Unmounted, or ended, with something in its RAM tier that is not persisted."""
    LEFT = "left"
    """Unmounted in order: all is persisted."""
    GONE = "gone"
    """Its machine was started again since: its RAM tier is lost, and its node id with it."""


@dataclass(frozen=True, slots=True)
class NodeRecord:
    """What one node tells the others. Times are its own clock's, seconds since the epoch."""

    node: str
    incarnation: str = ""
    """Of its RAM tier: another one, and what was in the last one is lost."""
    beat: int = 0
    """Another number at each heartbeat: the only sign of life."""
    state: NodeState = NodeState.LIVE
    clock: float = 0.0
    """When this was written."""
    watermark: float = 0.0
    """All that was closed (renamed …) on this node before then is persisted."""
    pointers: float | None = None
    """No pointer that was closed or removed on this node before then is still to come, withheld or
    guarded; None: an older acpfs.
    """
    held: dict[str, float] = field(default_factory=dict)
    """What is withheld there, of which the watermark says nothing: keys
    (`writeback.members.scopes`) → when it was closed, at the earliest.

    Empty from an older acpfs, which does not say.
    """
    placed: dict[str, float] = field(default_factory=dict)
    """Pointer files that were made there last: key of the name (`writeback.members.scopes`) → when
    the newest of that name was closed.

    Empty from an older acpfs.
    """
    standing: dict[str, float] = field(default_factory=dict)
    """Pointer files on the backing directory that are to be changed by what is withheld there, or
    held behind that: their path there (`os.fsdecode`), or `ANYTHING` → when that was closed. Others
    move or remove nothing that these name. Empty from an older acpfs.
    """
    standing_of_lost: dict[str, float] = field(default_factory=dict)
    """The same, where what it waits for is lost, so that it may never come."""
    gated: float | None = None
    """Close time of a pointer that only waits for other members, all before it persisted; None:
    there is none.
    """
    drift_s: float = 0.0
    """What its wall clock is ahead of its own, because somebody set it; or was, as something was
    closed that is to come.
    """
    moved_s: float | None = None
    """By how much its clock was moved for that since the first of what is to come was closed; None:
    an older acpfs.
    """
    heard: dict[str, float] = field(default_factory=dict)
    """Other node → seconds that its clock is at least ahead of this one's (or, negative, at most
    behind), by its last records.
    """
    lost: tuple[float, float] | None = None
    """What it closed between these times may have been lost with its RAM tier."""
    pending: str = ""
    """Names that were made there and are not persisted, as `NameFilter.to_text` has them; "": none,
    or an older acpfs.
    """
    heartbeat_s: float = 0.0
    operations: int = 0
    dirty_bytes: int = 0
    withheld: int = 0
    """Pointers that it holds back because of other members."""
    errors: tuple[str, ...] = ()
    version: str = ""
    state_version: int = 0
    host: str = ""
    hardware: str = ""
    boot_id: str = ""
    mountpoint: str = ""
    lock: str = ""
    """Which file of its machine it has locked for this node id: whoever has that lock knows that
    this one has ended.
    """
    started_at: float = 0.0
    addresses: list[str] = field(default_factory=list)
    """Where it gives others what it has; empty: it does not, or an older acpfs."""
    port: int = 0
    key: str = ""
    """SHA-256 of the certificate by which it is known there, in hex."""
    domain: str = ""
    """What fails together with it, where that is not its host."""
    holds: int = -1
    """Bytes of RAM that it still gives to copies of others; -1: to none, or an older acpfs."""
    record_version: int = RECORD_VERSION

    def to_bytes(self) -> bytes:
        """For the file: JSON, with a checksum of the rest in front, and blanks that make room for
        longer ones.
        """
        told = {name: getattr(self, name) for name in _NAMES}  # `asdict` copies all of it first
        rest = json.dumps(told, separators=(",", ":")).encode()[1:]
        content = _SUM % xxhash.xxh3_64_hexdigest(rest).encode() + rest
        size = -(-(len(content) + SPARE_BYTES) // BLOCK_BYTES) * BLOCK_BYTES
        return content.ljust(size - 1) + b"\n"

    @classmethod
    def from_bytes(cls, content: bytes) -> NodeRecord:
        """Inverse of `to_bytes`; unknown fields are a newer acpfs'.

        Raises:
            ValueError: not a record, or not a whole one, or one of a newer form.
        """
        summed = _SUMMED.match(content)
        if (
            summed is not None
            and xxhash.xxh3_64_hexdigest(content[summed.end() :].rstrip()).encode() != summed[1]
        ):
            raise ValueError("not a whole record")
        found = json.loads(content[:RECORD_BYTES_MAX])
        if not isinstance(found, dict) or not isinstance(found.get("node"), str):
            raise ValueError("not a node record")  # noqa: TRY004 - of content, not of a caller
        known: dict[str, Any] = {name: found[name] for name in _NAMES if name in found}
        version = found.get("record_version", 1)
        way_out = "pointers wait until it is updated"
        if why := unknown_version("its record", version, RECORD_VERSION, way_out):
            raise ValueError(why)
        for name, (required, fits) in _FITS.items():
            if (required and name not in known) or (name in known and not fits(known[name])):
                raise ValueError(f"a node record without {name}")
        known["state"] = NodeState(known.get("state", "live"))
        known["errors"] = tuple(known.get("errors", ()))
        known["lost"] = tuple(known["lost"]) if known.get("lost") else None
        return cls(**known)


_NAMES = tuple(one.name for one in fields(NodeRecord))


def _shortest(record: NodeRecord) -> bytes:
    held, standing, of_lost = (
        {ANYTHING: min(told.values())} if told else {}
        for told in (record.held, record.standing, record.standing_of_lost)
    )
    return replace(
        record, pending="", held=held, placed={}, standing=standing, standing_of_lost=of_lost
    ).to_bytes()


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and type(value) is not bool and math.isfinite(value)


def _is_count(value: object) -> bool:
    return type(value) is int


def _is_text(value: object) -> bool:
    return isinstance(value, str)


_FITS: dict[str, tuple[bool, Callable[[Any], bool]]] = {
    "beat": (True, _is_count),
    "clock": (True, _is_number),
    "watermark": (True, _is_number),
    "pointers": (False, lambda value: value is None or _is_number(value)),
    "gated": (False, lambda value: value is None or _is_number(value)),
    "moved_s": (False, lambda value: value is None or _is_number(value)),
    "drift_s": (False, _is_number),
    **dict.fromkeys(
        ("heard", "held", "placed", "standing", "standing_of_lost"),
        (
            False,
            lambda value: isinstance(value, dict) and all(map(_is_number, value.values())),
        ),
    ),
    "lost": (
        False,
        lambda value: (
            value is None
            or (isinstance(value, list) and len(value) == 2 and all(map(_is_number, value)))
        ),
    ),
    "heartbeat_s": (False, _is_number),
    **dict.fromkeys(
        ("errors", "addresses"),
        (False, lambda value: isinstance(value, list) and all(map(_is_text, value))),
    ),
    "started_at": (False, _is_number),
    **dict.fromkeys(
        (
            "operations",
            "dirty_bytes",
            "withheld",
            "state_version",
            "record_version",
            "port",
            "holds",
        ),
        (False, _is_count),
    ),
    **dict.fromkeys(
        (
            "incarnation",
            "state",
            "version",
            "host",
            "hardware",
            "boot_id",
            "mountpoint",
            "lock",
            "pending",
            "key",
            "domain",
        ),
        (False, _is_text),
    ),
}
"""Field → whether there is no record without it, and whether a value is one: whoever may write
there must not end every node's worker.
"""


class NodeRecords:
    """The records of one backing directory."""

    def __init__(self, directory: BackingDirectory) -> None:
        """`directory`: of which mount is meant says its node id."""
        self._directory = directory
        self._marked: set[bytes] = set()
        """Nodes that have a mark."""
        self._read: dict[str, tuple[int, NodeRecord]] = {}
        """Node → checksum of its file when that was last read, and what is in it."""

    def publish(self, record: NodeRecord) -> None:
        """Replace the record of its node: written, flushed, renamed, the directory flushed; or in
        place where there is no room for that.
        """
        name = record.node.encode()
        try:
            self._directory.write_own((DIRECTORY, name), record.to_bytes())
        except OSError as error:
            if error.errno not in FULL_ERRNOS or not self._publish_in_place(name, record):
                raise
        else:
            self._mark(name)

    def _publish_in_place(self, name: bytes, record: NodeRecord) -> bool:
        """Whether that could be done.

        Names that are pending are left out where they are too many: then nobody waits for them.

        Where what is withheld is too much as well, all of others' pointers wait for it.
        """
        contents = (record.to_bytes(), replace(record, pending="").to_bytes(), _shortest(record))
        written = any(
            self._directory.overwrite_own((DIRECTORY, name), content) for content in contents
        )
        return written and self._notice(name)

    def _mark(self, name: bytes) -> None:
        """Have a mark for the time when there is no room for one."""
        if name not in self._marked:
            with contextlib.suppress(OSError):
                self._directory.write_own((DIRECTORY, _MARKS[0] % name), b"")
                self._marked.add(name)

    def _notice(self, name: bytes) -> bool:
        """Change the directory, so that this client lists it anew: all relies on listings that
        begin after a record was published.
        """
        for old, new in (_MARKS, _MARKS[::-1]):
            with contextlib.suppress(FileNotFoundError):
                self._directory.rename_own((DIRECTORY, old % name), (DIRECTORY, new % name))
                return True
        self._marked.discard(name)
        return False

    def names(self) -> list[str]:
        """Nodes that have a record."""
        return [
            name.decode("utf-8", "replace")
            for name in self._directory.list_own_files((DIRECTORY,))
            if not name.startswith(_TEMPORARY)
        ]

    def read(self, node: str) -> NodeRecord | None:
        """None: there is none.

        Raises:
            OSError: it cannot be read now.
            ValueError: it is none, or not whole.
        """
        try:
            content = self._directory.read_own((DIRECTORY, node.encode()))
        except FileNotFoundError:
            self._read.pop(node, None)
            return None
        # While a pointer waits for a thousand members, each is read again and again. Most have
        # written nothing new, and to understand a record costs twice what it costs to read it.
        checksum = xxhash.xxh3_128_intdigest(content)
        known = self._read.get(node)
        if known is not None and known[0] == checksum:
            return known[1]
        record = NodeRecord.from_bytes(content)
        self._read[node] = (checksum, record)
        return record

    def remove(self, node: str) -> None:
        """Nothing when it is not there."""
        self._read.pop(node, None)
        self._directory.remove_own((DIRECTORY, node.encode()))
        for mark in _MARKS:
            self._directory.remove_own((DIRECTORY, mark % node.encode()))

    def remove_temporary(self, node: str) -> None:
        """What workers that were killed while they wrote have left."""
        # Whole names, not beginnings: `.a.` begins what node `a.b` is writing just now, and its
        # marks.
        ours = [
            re.escape(name) for name in (node.encode(), *(mark % node.encode() for mark in _MARKS))
        ]
        temporary = re.compile(rb"\.(?:%s)\.[0-9a-f]{8}" % b"|".join(ours))
        for name in self._directory.list_own((DIRECTORY,)):
            if temporary.fullmatch(name):
                with contextlib.suppress(OSError):
                    self._directory.remove_own((DIRECTORY, name))
