"""Comparing what RAM has of files with their checksums, long after it came there.

Bytes lie in RAM for days; memory fails, and strangers write into the RAM tier. A clean file whose
copy in RAM is not what was stored, while the backing directory has that, loses the copy in RAM.
Bytes that are nowhere else are named, and no more. Blocks on the backing directory where something
differs, or only the file itself has its checksum: run it on a thread. Takes the lock for moments.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

from acpfs.backing.lower import Lower, LowerPath
from acpfs.checksum import of_reads
from acpfs.filesystem.eviction import below
from acpfs.filesystem.mending import Clean, Mending
from acpfs.filesystem.upper import UpperLayer
from acpfs.types import Ino, Seq
from acpfs.writeback.evidence.verify import Recorded, digest_of
from acpfs.writeback.listener import Listener
from acpfs.writeback.log.ops import Op, Version
from acpfs.writeback.log.stages import Stage
from acpfs.writeback.sources.source import AbandonedError
from acpfs.writeback.streams.bandwidth import SLICE_MAX_BYTES
from acpfs.writeback.streams.checksums import digest_in_ram

NOTE_BYTES = 1 << 20
"""Asking the backing directory for a checksum counts as so many bytes: many small files must not
become a load there.
"""

Pace = Callable[[int], None]
"""Called before so many bytes are read; waits where that is too fast."""


class Soundness(Enum):
    """What became of a comparison."""

    OK = "ok"
    UNKNOWN = "unknown"
    """There is no checksum to compare with, or it is not of the file that lies there now."""
    REPAIRED = "repaired"
    """RAM had other bytes, and has none any more: the backing directory has the right ones."""
    DAMAGED = "damaged"
    """RAM has other bytes, and goes on having them."""


@dataclass(frozen=True, slots=True)
class ScrubFinding:
    """One file."""

    path: bytes
    soundness: Soundness
    size: int
    expected: str = ""
    found: str = ""
    why: str = ""


@dataclass(frozen=True, slots=True)
class ScrubPlace:
    """Where to look: at the clean content of a node, or at the version of an operation that
    waits.
    """

    number: Ino | Seq
    size: int
    waits: bool


class RamScrub:
    """Compares one file at a time. Thread-safe."""

    def __init__(
        self,
        upper: UpperLayer,
        mending: Mending,
        listener: Listener,
        manifest: Recorded,
        lower: Lower,
    ) -> None:
        """`manifest`: what this node has stored; of other files the backing directory is asked."""
        self._mending = mending
        self._log = upper.log
        self._listener = listener
        self._tier = upper.tier
        self._tree = upper.tree
        self._manifest = manifest
        self._lower = lower
        self._lock = upper.lock
        self._step = upper.state.step
        self.read_bytes = 0
        self.repaired_files = 0

    def places(self) -> list[ScrubPlace]:
        """Where there is something to look at now."""
        with self._lock:
            waiting = [op for op in self._log if self._version(op) is not None]
            found = [
                ScrubPlace(op.seq, op.version.size, waits=True)
                for op in waiting
                if op.version is not None
            ]
            return found + [
                ScrubPlace(ino, size, waits=False) for ino, size in self._mending.in_ram()
            ]

    def look(self, place: ScrubPlace, paths: Sequence[bytes], pace: Pace) -> ScrubFinding | None:
        """Compare, if it lies at or below one of the paths (all, where none is named); None: it
        does not, or has changed meanwhile.
        """
        try:
            return (
                self._waiting(Seq(place.number), paths, pace)
                if place.waits
                else self._clean(Ino(place.number), paths, pace)
            )
        except (OSError, AbandonedError):
            return None  # it has just left RAM, or cannot be opened now

    # -- what waits for the drain

    def _version(self, op: Op) -> Version | None:
        """What can be compared and matters: it has a checksum, its bytes are only here, and it was
        not saved again.
        """
        version = op.version
        if version is None or not version.digest or version.is_staged or not version.tier_id:
            return None
        if (
            op.stage < Stage.LOGGED
            or self._tier.is_lost(version.tier_id)
            or self._listener.version_of_open_file(version)
        ):
            return None
        return (
            None
            if any(
                later.version is not None and later.seq > op.seq
                for later in self._log.pending_of(op.ino)
            )
            else version
        )

    def _waiting(self, seq: Seq, paths: Sequence[bytes], pace: Pace) -> ScrubFinding | None:
        with self._lock:
            op = self._log.get(seq)
            version = self._version(op) if op is not None else None
            if (
                op is None
                or version is None
                or not _below_any(path := self._listener.display_path(op), paths)
            ):
                return None
            before = (version.digest, version.size, version.renewals)
        found = self._version_digest(version, before[1], pace)
        if found != before[0]:
            found = self._version_digest(
                version, before[1], pace
            )  # a single wrong read is no damage
        if not found:
            return None  # so much of it is holes by now that no checksum is taken (S229)
        if found == before[0]:
            return ScrubFinding(path, Soundness.OK, before[1], found, found)
        with self._lock:
            if (
                self._log.get(seq) is not op
                or self._version(op) is not version
                or before != (version.digest, version.size, version.renewals)
            ):
                return None
        return ScrubFinding(
            path,
            Soundness.DAMAGED,
            before[1],
            before[0],
            found,
            "it is not persisted yet, and not stored like this: save it again",
        )

    def _version_digest(self, version: Version, size: int, pace: Pace) -> str:
        self.read_bytes += size
        return digest_in_ram(
            version, size, self._tier, self._lock, memoryview(bytearray(SLICE_MAX_BYTES)), pace
        )

    # -- what the backing directory has, too

    def _clean(self, ino: Ino, paths: Sequence[bytes], pace: Pace) -> ScrubFinding | None:
        with self._lock:
            clean = self._mending.clean(ino)
            lower_path = self._tree.path(ino)
            if clean is None or lower_path is None or not _below_any(clean.path, paths):
                return None
            expected = self._manifest.digest(lower_path)
        expected = expected or self._noted(lower_path, clean, pace)
        if not expected:
            return ScrubFinding(clean.path, Soundness.UNKNOWN, clean.size)
        found = self._digest(clean, pace)
        if found != expected:
            found = self._digest(clean, pace)
        if found == expected:
            return ScrubFinding(clean.path, Soundness.OK, clean.size, expected, found)
        return self._judge(ino, clean, lower_path, expected, found)

    def _noted(self, path: LowerPath, clean: Clean, pace: Pace) -> str:
        """The checksum at the file, if it is that of the file as it lies there."""
        pace(NOTE_BYTES)
        try:
            st = self._lower.lstat(path)
            note = self._lower.note(path)
        except OSError:
            return ""
        is_about = (
            note is not None
            and st.identity() == clean.identity
            and note.is_about(st, self._lower.features.time_granularity_ns)
        )
        return note.digest if note is not None and is_about else ""

    def _digest(self, clean: Clean, pace: Pace) -> str:
        fd = self._tier.open(clean.tier_id)
        try:
            buffer = memoryview(bytearray(min(clean.size, SLICE_MAX_BYTES)))
            digest, read_bytes = of_reads(
                lambda piece, at: os.preadv(fd, [piece], at), buffer, clean.size, before=pace
            )
        finally:
            os.close(fd)
        self.read_bytes += read_bytes
        return digest

    def _judge(
        self, ino: Ino, clean: Clean, lower_path: LowerPath, expected: str, found: str
    ) -> ScrubFinding | None:
        """RAM has other bytes than were recorded: which copy is the good one?"""

        def finding(soundness: Soundness, why: str) -> ScrubFinding:
            return ScrubFinding(clean.path, soundness, clean.size, expected, found, why)

        try:
            stored = digest_of(self._lower, lower_path)[0]
            why = (
                "the backing directory has not what was stored, either: restore it from another "
                "copy"
            )
        except OSError as error:
            stored = ""
            why = f"the backing directory's copy cannot be read ({error.strerror})"
        with self._lock, self._step():
            if self._mending.clean(ino) != clean or self._tree.path(ino) != lower_path:
                return None
            if stored == found:
                return finding(
                    Soundness.UNKNOWN, ""
                )  # somebody else has replaced it since it was recorded
            if stored != expected:
                return finding(Soundness.DAMAGED, why)
            if not self._mending.drop(ino, clean):
                return finding(
                    Soundness.DAMAGED,
                    "the backing directory has the right ones, and is read again when nobody has "
                    "the file open",
                )
            self.repaired_files += 1
        return finding(
            Soundness.REPAIRED, "the backing directory has the right ones, and is read from now on"
        )


def _below_any(path: bytes, paths: Sequence[bytes]) -> bool:
    return not paths or any(below(path, prefix) for prefix in paths)
