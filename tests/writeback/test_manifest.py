"""The manifest's table and its written form, read by the stock xxh128sum."""

from __future__ import annotations

import shutil
import subprocess
import threading
from pathlib import Path

import pytest
import trio
import xxhash

from acpfs.backing.attributes import DIGEST_XATTR
from acpfs.backing.directory import BackingDirectory
from acpfs.backing.lower import LowerPath
from acpfs.ram.state import StateDatabase
from acpfs.writeback.log.ops import Metadata
from acpfs.writeback.manifest.manifest import PAGE_ROWS, Manifest
from acpfs.writeback.manifest.manifest_writer import PAUSE_IDLE_S
from tests.rig.runtime import REAL
from tests.writeback.conftest import Run
from tests.writeback.memory_lower import MemoryLower
from tests.writeback.world import World, verified


@pytest.fixture
def manifest(tmp_path: Path) -> Manifest:
    return Manifest(
        StateDatabase(tmp_path / "state.db", REAL), MemoryLower(), threading.RLock(), "node"
    )


def paths(manifest: Manifest) -> dict[str, str]:
    return {path.decode(): digest for path, digest, _size in manifest.rows()}


def split(path: str) -> tuple[bytes, ...]:
    return tuple(path.encode().split(b"/"))


def fill(manifest: Manifest, *names: str) -> None:
    for name in names:
        manifest.put(split(name), name, 1)


def test_moving_a_directory_moves_what_is_below_and_nothing_else(manifest: Manifest) -> None:
    fill(manifest, "a", "a/x", "a/y/z", "a.b", "a0", "ab/x")
    manifest.move((b"a",), (b"n", b"new"))
    assert paths(manifest) == {
        "n/new": "a",
        "n/new/x": "a/x",
        "n/new/y/z": "a/y/z",
        "a.b": "a.b",
        "a0": "a0",
        "ab/x": "ab/x",
    }


def test_what_is_replaced_is_gone(manifest: Manifest) -> None:
    fill(manifest, "a", "b", "b/below")
    manifest.move((b"a",), (b"b",))
    assert paths(manifest) == {"b": "a"}
    assert manifest.entries == 1


def test_exchange_swaps_trees(manifest: Manifest) -> None:
    fill(manifest, "a/x", "b", "b/y")
    manifest.exchange((b"a",), (b"b",))
    assert paths(manifest) == {"b/x": "a/x", "a": "b", "a/y": "b/y"}


def test_names_that_are_not_text(manifest: Manifest) -> None:
    manifest.put((b"\xff", b"\x00\xfe"), "1", 1)
    manifest.move((b"\xff",), (b"\xfd",))
    assert manifest.digest((b"\xfd", b"\x00\xfe")) == "1"


def test_rows_come_page_by_page_below_a_path(manifest: Manifest) -> None:
    for i in range(PAGE_ROWS + 10):
        manifest.put((b"d", b"%06d" % i), "1", 1)
    fill(manifest, "c", "e", "d0")
    assert len(list(manifest.rows((b"d",)))) == PAGE_ROWS + 10
    assert len(list(manifest.rows())) == PAGE_ROWS + 13


def test_a_change_while_it_is_written_is_not_forgotten(manifest: Manifest) -> None:
    manifest.load()
    fill(manifest, "a")
    lower = manifest._lower
    assert isinstance(lower, MemoryLower)
    lower.fault = lambda label, _path: fill(manifest, "b") if label == "write own" else None
    manifest.write()
    assert not manifest.is_written
    lower.fault = lambda _label, _path: None
    manifest.write()
    assert manifest.is_written


AWKWARD = [
    "plain",
    " leading",
    "trailing ",
    "two  spaces",
    "#hash",
    "*star",
    "-dash",
    "ü",
    "a=b (c)",
    "tab\there",
    "'quoted\"",
    "d/e/f",
    "\x01\x7f",
]


@pytest.mark.skipif(shutil.which("xxh128sum") is None, reason="needs xxhash")
def test_the_stock_program_reads_the_written_form(tmp_path: Path) -> None:
    directory = BackingDirectory(tmp_path, "node", REAL)
    manifest = Manifest(
        StateDatabase(tmp_path.parent / f"{tmp_path.name}.db", REAL),
        directory,
        threading.RLock(),
        "node",
    )
    for name in [*AWKWARD, "new\nline", "back\\slash"]:
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(name.encode())
        manifest.put(split(name), xxhash.xxh3_128_hexdigest(name.encode()), 1)
    manifest.put((b"\xff\xfe",), xxhash.xxh3_128_hexdigest(b"raw"), 3)
    (tmp_path / "\udcff\udcfe").write_bytes(b"raw")
    manifest.write()
    check = ["xxh128sum", "-c", ".acpfs/manifest/node.xxh128"]
    checked = subprocess.run(check, cwd=tmp_path, capture_output=True, check=False)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert checked.stdout.count(b": OK") == len(AWKWARD) + 1
    (tmp_path / "plain").write_bytes(b"plaiN")
    assert subprocess.run(check, cwd=tmp_path, capture_output=True, check=False).returncode != 0
    directory.disconnect()


def test_who_waits_for_the_manifest_does_not_wait_for_its_pause(world: World, run: Run) -> None:
    async def stored_twice() -> None:
        async with trio.open_nursery() as nursery:
            await nursery.start(world.engine.run)
            for data in (
                b"1",
                b"2",
            ):  # the second one finds the writer in its pause after the first
                world.store("f", data)
                while world.engine.statistics().counters.persisted_ops != int(data):  # noqa: ASYNC110
                    # counted by a thread
                    await trio.sleep(0.001)
                began = trio.current_time()
                await world.engine.recorded()
                assert world.manifest.is_written
                assert trio.current_time() - began < PAUSE_IDLE_S / 2
            nursery.cancel_scope.cancel()

    run(stored_twice)


@pytest.mark.clause("S26")
@pytest.mark.parametrize(
    ("xattrs", "status"), [(True, ["ok", "ok"]), (False, ["mismatch", "unknown"])]
)
def test_what_a_lost_node_had_not_written_to_its_manifest_is_known_by_the_file_itself(
    tmp_path: Path, xattrs: bool, status: list[str]
) -> None:
    """The state database is gone with the node; one file was stored again and one was new since the
    manifest was written last.
    """
    (tmp_path / "backing").mkdir()
    lower = BackingDirectory(tmp_path / "backing", "node", REAL)

    def store(name: str, data: bytes, manifest: Manifest) -> None:
        digest = xxhash.xxh3_128_hexdigest(data)
        fd = lower.create_staging(name)
        lower.write(fd, memoryview(data), 0)
        lower.apply_fd(fd, Metadata(xattrs={DIGEST_XATTR: digest.encode()} if xattrs else {}))
        lower.close(fd)
        lower.rename(lower.staging_path(name), split(name))
        manifest.put(split(name), digest, len(data))

    before = Manifest(StateDatabase(tmp_path / "lost.db", REAL), lower, threading.RLock(), "node")
    before.load()
    store("rewritten", b"first", before)
    before.write()
    store("rewritten", b"second", before)
    store("new", b"new", before)

    after = Manifest(StateDatabase(tmp_path / "state.db", REAL), lower, threading.RLock(), "node")
    assert after.load() == 1
    assert [found.status for found in verified(after, [split("rewritten"), split("new")])] == status


@pytest.mark.clause("S113")
def test_sizes_that_the_written_form_does_not_have_are_looked_up_once(tmp_path: Path) -> None:
    lower = MemoryLower()
    looked: list[LowerPath] = []

    def fault(label: str, path: LowerPath) -> None:
        if label == "lstat":
            looked.append(path)

    before = Manifest(StateDatabase(tmp_path / "lost.db", REAL), lower, threading.RLock(), "node")
    before.load()
    for name in ("d/f", "g", "gone"):
        before.put(split(name), "0" * 32, 3)
    before.write()
    lower.mkdir((b"d",))
    for path in ((b"d", b"f"), (b"g",)):
        fd = lower.create_staging("s")
        lower.write(fd, memoryview(b"123"), 0)
        lower.close(fd)
        lower.rename(lower.staging_path("s"), path)
    after = Manifest(StateDatabase(tmp_path / "state.db", REAL), lower, threading.RLock(), "node")
    after.load()
    assert {size for _key, _digest, size in after.rows()} == {-1}
    lower.fault = fault
    after.learn_sizes((b"d",))
    assert [(key, size) for key, _digest, size in after.rows()] == [
        (b"d/f", 3),
        (b"g", -1),
        (b"gone", -1),
    ]
    after.remove((b"gone",))
    after.learn_sizes()
    after.learn_sizes()
    assert [size for _key, _digest, size in after.rows()] == [3, 3]
    assert looked == [(b"d", b"f"), (b"g",)]


def test_what_a_killed_worker_left_of_a_writing_is_removed(world: World, run: Run) -> None:
    """Found by reading: each kill in the middle left a file as large as the manifest, for ever."""
    for name in (b".node.xxh128.1234abcd", b".other.xxh128.1234abcd"):
        world.lower.write_own((b"manifest", name), b"half")
    world.store("a", b"content")
    run(world.drain)
    assert world.lower.list_own((b"manifest",)) == [b".other.xxh128.1234abcd", b"node.xxh128"]


def test_loading_holds_the_lock_for_a_page_at_a_time_and_two_do_not_load_at_once(
    manifest: Manifest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A manifest of a million lines was one section of seconds; and a second load brought back what
    was removed after the first.
    """
    digest = "0" * 32
    for i in range(PAGE_ROWS + 10):
        manifest.put((b"f%d" % i,), digest, 1)
    manifest.write()
    lower = manifest._lower
    state = StateDatabase(tmp_path / "new.db", REAL)
    lock = threading.RLock()
    again = Manifest(state, lower, lock, "node")
    sections: list[int] = []
    change_many = state.change_many
    read_own = lower.read_own

    def counting(sql: str, rows: list[tuple[object, ...]]) -> None:
        sections.append(len(rows))
        change_many(sql, rows)

    monkeypatch.setattr(state, "change_many", counting)
    held = threading.Event()
    reading = threading.Semaphore(0)

    def slow_read(names: tuple[bytes, ...]) -> bytes:
        reading.release()
        assert held.wait(60)
        return read_own(names)

    monkeypatch.setattr(lower, "read_own", slow_read)
    loaded: list[int] = []
    loads = [threading.Thread(target=lambda: loaded.append(again.load())) for _ in range(2)]
    for load in loads:
        load.start()
    assert reading.acquire(timeout=60)
    assert not reading.acquire(timeout=0.2), "the second one reads it, too"
    held.set()
    for load in loads:
        load.join()
    assert sorted(loaded) == [0, PAGE_ROWS + 10]
    assert sections == [PAGE_ROWS, 10]
    assert paths(again) == paths(manifest)
