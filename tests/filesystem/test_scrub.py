"""What RAM has is compared with what was stored; only a copy that is bad, and good elsewhere,
leaves RAM.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest
import trio
import xxhash

from acpfs.backing.directory import BackingDirectory
from acpfs.backing.lower import LowerPath
from acpfs.filesystem.scrub import RamScrub, ScrubFinding, Soundness
from acpfs.types import ROOT, Ino
from tests.filesystem.world import CALLER, World, world

pytestmark = pytest.mark.clause("S235")

DATA = b"what was saved" * 1000


class Recorded:
    """A manifest of one's own."""

    def __init__(self) -> None:
        self.digests: dict[LowerPath, str] = {(b"f",): xxhash.xxh3_128_hexdigest(DATA)}

    def digest(self, path: LowerPath) -> str:
        return self.digests.get(path, "")

    def rows(self, below: LowerPath = ()) -> Iterator[tuple[bytes, str, int]]:
        yield from ()


class Unreadable(BackingDirectory):
    """Fails where its bytes are read."""

    def open_uncached(self, path: LowerPath) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))


class Stand:
    """A world whose file `f` is clean and in RAM."""

    def __init__(self, w: World, ino: Ino) -> None:
        self.w = w
        self.ino = ino
        self.recorded = Recorded()
        self.scrub = RamScrub(
            w.inner.upper,
            w.inner.mending,
            w.inner.changes,
            self.recorded,
            w.lower,
        )
        self.between: Callable[[], object] = lambda: None
        """Done under the first piece that is read."""

    @property
    def tier_file(self) -> Path:
        return self.w.tier.directory / "data" / str(self.w.inner.table[self.ino].body.tier)

    def flip(self, path: Path, at: int = 5000) -> None:
        with open(path, "r+b") as file:
            byte = os.pread(file.fileno(), 1, at)
            os.pwrite(file.fileno(), bytes([byte[0] ^ 16]), at)

    async def look(self) -> list[ScrubFinding]:
        return await trio.to_thread.run_sync(self._look)

    def _look(self) -> list[ScrubFinding]:
        return [
            finding
            for place in self.scrub.places()
            if (finding := self.scrub.look(place, [], self._pace)) is not None
        ]

    def _pace(self, _count: int) -> None:
        do = self.between
        self.between = lambda: None
        do()

    async def said(self) -> list[Soundness]:
        return [finding.soundness for finding in await self.look()]


def run(
    tmp_path: Path,
    what: Callable[[Stand], Awaitable[None]],
    make_lower: type[BackingDirectory] = BackingDirectory,
) -> None:
    async def main() -> None:
        async with world(tmp_path, hold=False, make_lower=make_lower) as w:
            ino = await w.write(b"f", DATA)
            await w.drained()
            await what(Stand(w, ino))

    trio.run(main)


def test_a_bad_copy_of_what_is_persisted_leaves_ram(tmp_path: Path) -> None:
    async def main(stand: Stand) -> None:
        assert await stand.said() == [Soundness.OK]
        told: list[Ino] = []
        stand.w.fs.watch_outside(told.append, lambda *_what: None)
        stand.flip(stand.tier_file)
        assert await stand.w.read(stand.ino, 1 << 20) != DATA
        (finding,) = await stand.look()
        assert (finding.path, finding.soundness) == (b"f", Soundness.REPAIRED)
        assert finding.expected == xxhash.xxh3_128_hexdigest(DATA) != finding.found
        assert told == [stand.ino], "the kernel may have pages of it"
        assert await stand.w.read(stand.ino) == DATA
        assert await stand.said() in ([], [Soundness.OK])
        assert (stand.w.backing / "f").read_bytes() == DATA

    run(tmp_path, main)


def test_what_is_open_is_named_and_repaired_later(tmp_path: Path) -> None:
    async def main(stand: Stand) -> None:
        opened = await stand.w.do(stand.w.fs.open(stand.ino, os.O_RDONLY, CALLER))
        stand.flip(stand.tier_file)
        (finding,) = await stand.look()
        assert finding.soundness is Soundness.DAMAGED
        assert "when nobody has the file open" in finding.why
        await stand.w.close(opened)
        assert await stand.said() == [Soundness.REPAIRED]
        assert await stand.w.read(stand.ino) == DATA

    run(tmp_path, main)


def test_a_copy_that_is_nowhere_better_stays(tmp_path: Path) -> None:
    async def main(stand: Stand) -> None:
        stand.flip(stand.tier_file)
        stand.flip(stand.w.backing / "f", at=1)
        (finding,) = await stand.look()
        assert finding.soundness is Soundness.DAMAGED
        assert "restore it from another copy" in finding.why
        assert stand.tier_file.exists()

    run(tmp_path, main)


def test_where_the_backing_directory_does_not_read_nothing_leaves_ram(tmp_path: Path) -> None:
    async def main(stand: Stand) -> None:
        stand.flip(stand.tier_file)
        (finding,) = await stand.look()
        assert finding.soundness is Soundness.DAMAGED
        assert "cannot be read" in finding.why
        assert stand.tier_file.exists()

    run(tmp_path, main, Unreadable)


def test_a_record_that_is_out_of_date_is_no_damage(tmp_path: Path) -> None:
    """Another node has stored the file since; RAM has it from there."""

    async def main(stand: Stand) -> None:
        stand.recorded.digests[(b"f",)] = "0" * 32
        assert await stand.said() == [Soundness.UNKNOWN]
        assert stand.tier_file.exists()

    run(tmp_path, main)


@pytest.mark.parametrize("noted", [True, False], ids=["noted", "not of this file"])
def test_without_a_record_the_note_at_the_file_counts(tmp_path: Path, noted: bool) -> None:
    async def main(stand: Stand) -> None:
        stand.recorded.digests.clear()
        if not stand.w.lower.features.xattrs:
            pytest.skip("no xattrs here")
        if not noted:
            os.removexattr(stand.w.backing / "f", "user.acpfs.xxh3")
        stand.flip(stand.tier_file)
        assert await stand.said() == [Soundness.REPAIRED if noted else Soundness.UNKNOWN]
        assert await stand.w.read(stand.ino) == DATA or not noted

    run(tmp_path, main)


def test_what_is_rewritten_meanwhile_is_not_judged(tmp_path: Path) -> None:
    """Bytes that somebody saves while the old ones are read must never leave RAM."""

    async def main(stand: Stand) -> None:
        stand.flip(stand.tier_file)
        stand.between = lambda: trio.from_thread.run(stand.w.write, b"f", b"newer")
        assert await stand.said() == []
        assert await stand.w.read(stand.ino) == b"newer"
        await stand.w.drained()
        assert (stand.w.backing / "f").read_bytes() == b"newer"

    run(tmp_path, main)


def test_what_leaves_ram_or_goes_meanwhile_is_not_judged(tmp_path: Path) -> None:
    async def main(stand: Stand) -> None:
        stand.flip(stand.tier_file)
        stand.between = lambda: trio.from_thread.run(stand.w.do, stand.w.fs.unlink(ROOT, b"f"))
        assert await stand.said() == []

    run(tmp_path, main)


def test_what_waits_for_the_drain_is_compared_and_only_named(tmp_path: Path) -> None:
    async def main() -> None:
        async with world(tmp_path) as w:
            stand = Stand(w, await w.write(b"f", DATA))
            assert await stand.look() == []  # it has no checksum yet
            (op,) = w.log
            assert op.version is not None
            op.version.digest = xxhash.xxh3_128_hexdigest(DATA)
            assert await stand.said() == [Soundness.OK]
            stand.flip(stand.tier_file)
            (finding,) = await stand.look()
            assert (finding.path, finding.soundness) == (b"f", Soundness.DAMAGED)
            assert "save it again" in finding.why
            assert stand.tier_file.exists()
            await w.write(b"f", b"saved again")
            assert await stand.look() == []

    trio.run(main)
