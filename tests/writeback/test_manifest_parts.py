"""The written form in parts: a change costs one of them, and together they always say what the
table says.
"""

from __future__ import annotations

import random
import shutil
import subprocess
import threading
from pathlib import Path

import pytest
import xxhash

from acpfs.backing.directory import BackingDirectory
from acpfs.backing.lower import LowerPath
from acpfs.ram.state import StateDatabase
from acpfs.writeback.manifest.manifest import PART_LINES, Manifest
from tests.rig.runtime import REAL
from tests.writeback.memory_lower import FailNth, MemoryLower, error

pytestmark = pytest.mark.clause("S239")
DIGEST = "0" * 32
PART_LINES_MAX = 2 * PART_LINES
FEW = 8


class Counting(MemoryLower):
    """Counts what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.written: list[tuple[bytes, int]] = []

    def write_own(self, names: LowerPath, content: bytes) -> None:
        super().write_own(names, content)
        self.written.append((names[-1], len(content)))


def make(
    state: Path, lower: MemoryLower | BackingDirectory, part_lines: int = PART_LINES
) -> Manifest:
    return Manifest(StateDatabase(state, REAL), lower, threading.RLock(), "node", part_lines)


def path(number: int) -> LowerPath:
    return (b"run-%02d" % (number % 20), b"step-%04d" % (number // 20), b"shard")


def lines(lower: MemoryLower) -> list[bytes]:
    return sorted(
        line
        for name, text in lower.own_files().items()
        if name.endswith(b".xxh128")
        for line in text.splitlines()
    )


def table(manifest: Manifest) -> list[bytes]:
    return sorted(b"%s  %s" % (digest.encode(), key) for key, digest, _size in manifest.rows())


def test_a_change_writes_one_part_and_a_next_worker_writes_what_is_out_of_date(
    tmp_path: Path,
) -> None:
    lower = Counting()
    files = 10 * PART_LINES_MAX
    manifest = make(tmp_path / "state.db", lower)
    for number in range(files):
        manifest.put(path(number), DIGEST, 1)
    manifest.write()
    whole = sum(size for _name, size in lower.written)
    assert lines(lower) == table(manifest)
    lower.written.clear()
    manifest.put(path(files // 2), "1" * 32, 1)
    manifest.write()
    assert len(lower.written) == 1
    assert lower.written[0][1] < whole / 8
    manifest.put(path(1), "2" * 32, 1)
    manifest._state.commit()
    expected = table(manifest)
    manifest._state.close()
    lower.written.clear()
    after = make(tmp_path / "state.db", lower)
    assert not after.is_written
    after.write()
    assert len(lower.written) == 1
    assert lines(lower) == table(after) == expected


def test_parts_that_somebody_removed_are_written_by_the_next_worker(tmp_path: Path) -> None:
    lower = Counting()
    manifest = make(tmp_path / "state.db", lower)
    for number in range(2 * PART_LINES_MAX):
        manifest.put(path(number), DIGEST, 1)
    manifest.write()
    expected = table(manifest)
    manifest._state.close()
    names = lower.list_own((b"manifest",))
    lower.remove_own((b"manifest", names[1]))
    lower.written.clear()
    make(tmp_path / "state.db", lower).write()
    assert [name for name, _size in lower.written] == [names[1]]
    assert lines(lower) == expected


@pytest.mark.parametrize("number", range(20))
def test_together_they_say_what_the_table_says_wherever_a_writing_is_cut_off(
    tmp_path: Path, number: int
) -> None:
    """The worker dies in the middle of a writing, or the node with its table."""
    chance = random.Random(number)
    lower = Counting()
    manifest = make(tmp_path / "0.db", lower, FEW)
    manifest.load()
    for attempt in range(30):
        for _change in range(chance.randrange(60)):
            change(manifest, chance)
        if chance.random() < 0.5:
            lower.fault = FailNth("write own", 1 + chance.randrange(4), 5)
        try:
            manifest.write()
        except OSError:
            again = chance.choice(["again", "worker", "node"])
            lower.fault = lambda _label, _path: None
            if again == "worker":
                manifest._state.commit()
                manifest._state.close()
                manifest = make(
                    max(tmp_path.glob("*.db"), key=lambda file: int(file.stem)), lower, FEW
                )
            elif again == "node":
                manifest._state.close()
                said = {line.partition(b"  ")[2] for line in lines(lower)}
                manifest = make(tmp_path / f"{attempt + 1}.db", lower, FEW)
                manifest.load()
                assert {key for key, _digest, _size in manifest.rows()} == said
                change(manifest, chance)
            manifest.write()
        lower.fault = lambda _label, _path: None
        assert lines(lower) == table(manifest)
    assert manifest.entries == len(table(manifest))


def change(manifest: Manifest, chance: random.Random) -> None:
    """One of what commits do."""
    one = path(chance.randrange(200))
    other = path(chance.randrange(200))
    kind = chance.choice(["put"] * 6 + ["remove", "remove below", "move", "move below", "exchange"])
    if kind == "put":
        manifest.put(one, f"{chance.randrange(1 << 32):032x}", 1)
    elif kind == "remove":
        manifest.remove(one)
    elif kind == "remove below":
        manifest.remove(one[:1])
    elif kind == "move" and one != other:
        manifest.move(one, other)
    elif kind == "move below" and one[0] != other[0]:
        manifest.move(one[:1], other[:1])
    elif kind == "exchange" and one != other:
        manifest.exchange(one, other)


def test_one_file_of_an_earlier_acpfs_is_taken_over_and_divided(tmp_path: Path) -> None:
    lower = Counting()
    text = b"".join(
        b"%s  %s\n" % (DIGEST.encode(), b"/".join(path(number)))
        for number in range(2 * PART_LINES_MAX)
    )
    lower.write_own((b"manifest", b"node.xxh128"), text)
    manifest = make(tmp_path / "state.db", lower)
    assert manifest.load() == 2 * PART_LINES_MAX
    manifest.put(path(0), "1" * 32, 1)
    manifest.write()
    assert len(lower.list_own((b"manifest",))) > 2
    assert lines(lower) == table(manifest)


def test_a_storage_that_refuses_one_part_is_asked_again_for_that(tmp_path: Path) -> None:
    lower = Counting()
    manifest = make(tmp_path / "state.db", lower, FEW)
    for number in range(100):
        manifest.put(path(number), DIGEST, 1)

    def full(label: str, names: LowerPath) -> None:
        if label == "write own" and names[-1] == b"node.xxh128":
            raise error(28)

    lower.fault = full
    with pytest.raises(OSError, match="space"):
        manifest.write()
    lower.fault = lambda _label, _path: None
    lower.written.clear()
    manifest.write()
    assert [name for name, _size in lower.written] == [b"node.xxh128"]
    assert manifest.is_written
    assert lines(lower) == table(manifest)


@pytest.mark.skipif(shutil.which("xxh128sum") is None, reason="needs xxhash")
def test_the_stock_program_reads_all_parts(tmp_path: Path) -> None:
    (tmp_path / "backing").mkdir()
    directory = BackingDirectory(tmp_path / "backing", "node", REAL)
    manifest = make(tmp_path / "state.db", directory, FEW)
    for number in range(40):
        (tmp_path / "backing" / str(number)).write_bytes(b"%d" % number)
        manifest.put((b"%d" % number,), xxhash.xxh3_128_hexdigest(b"%d" % number), 1)
    manifest.write()
    parts = sorted(
        str(file.relative_to(tmp_path / "backing"))
        for file in (tmp_path / "backing/.acpfs/manifest").iterdir()
    )
    assert len(parts) == 5
    checked = subprocess.run(
        ["xxh128sum", "-c", *parts], cwd=tmp_path / "backing", capture_output=True, check=False
    )
    assert (checked.returncode, checked.stdout.count(b": OK")) == (0, 40)
    directory.disconnect()
