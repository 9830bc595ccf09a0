"""How many bytes the versions in the log have, and how many of these the backing directory has not
got. Knows numbers of versions only.
"""

from __future__ import annotations

from acpfs.types import VersionId
from acpfs.writeback.log.ops import Version


class VersionSizes:
    """Sums over all versions in the log."""

    def __init__(self) -> None:
        """None is there yet."""
        self.dirty_bytes = 0
        """Sum of the sizes of all."""
        self.unstored_bytes = 0
        """Of these, what the backing directory has not got yet: not in a staging file that is
        whole.
        """
        self.stored_bytes = 0
        """How many bytes have ever left `unstored_bytes` since the backing directory has them."""
        self._counted: dict[VersionId, tuple[int, int]] = {}
        """As they count in the first two; a version may become longer."""

    def __contains__(self, vid: object) -> bool:
        return vid in self._counted

    def count(self, version: Version) -> None:
        """It is new, or has changed."""
        unstored = 0 if version.is_staged or not version.is_local else version.size
        self._count_as(version.vid, version.size, unstored)

    def count_out(self, vid: VersionId) -> None:
        """It has left the log. What of it was not stored by then is not wanted any more."""
        _size, unstored = self._counted[vid]
        self._count_as(vid, 0, unstored)
        self.unstored_bytes -= unstored
        del self._counted[vid]

    def _count_as(self, vid: VersionId, size: int, unstored: int) -> None:
        size_before, unstored_before = self._counted.get(vid, (0, 0))
        self._counted[vid] = (size, unstored)
        self.dirty_bytes += size - size_before
        self.unstored_bytes += unstored - unstored_before
        self.stored_bytes += max(0, unstored_before - unstored)
