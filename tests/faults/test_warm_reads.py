"""Cold files come to RAM when they are read: once for all readers, never stale, never damaged, and
in nobody's way.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.rig.faultfs import FaultFs
from tests.rig.mounts import AcpfsMount, MakeMount

clause = pytest.mark.clause
pytestmark = [pytest.mark.mount]
LANES = pytest.mark.transports("libfuse", "native-direct", "native-passthrough")
BOTH = pytest.mark.transports("libfuse", "native-passthrough")
NATIVE = pytest.mark.transports("native-passthrough")
MIB = 1 << 20
QUICK = {"retry_delay_min": 0.05, "retry_delay_max": 0.2, "attr_timeout": 0.1}
READERS = 8


@pytest.fixture
def cold(tmp_path: Path) -> Path:
    """A backing directory on disk: what is read there stays in the page cache."""
    backing = tmp_path / "disk"
    backing.mkdir()
    return backing


def whole(path: Path, step: int = MIB) -> bytes:
    """Read a file from start to end, unbuffered."""
    with open(path, "rb", buffering=0) as file:
        return b"".join(iter(lambda: file.read(step), b""))


def counter(mount: AcpfsMount, name: str) -> int:
    return int(mount.status()["counters"][name])


def wait_counted(mount: AcpfsMount, name: str, count: int) -> None:
    mount.wait_status(lambda status: status["counters"][name] >= count)


def where(mount: AcpfsMount) -> dict[str, str]:
    """Path → tier of each file that the upper layer holds."""
    return {row["path"]: row["tier"] for row in mount.ctl("ls")}


def noted_reads(fault_fs: FaultFs, glob: str) -> int:
    """A rule that does nothing but note them.

    The counters have those of acpfs' own files, too, such as the node's record.
    """
    return fault_fs.slow(0.0, ["read"], glob=glob)


def in_thread(function: Callable[..., Any], *arguments: Any) -> Future[Any]:
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(function(*arguments))
        except BaseException as error:  # noqa: BLE001 - it is the future's
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


@LANES
@clause("S100")
def test_many_readers_cost_one_read_of_the_backing_directory(
    transport: str, make_mount: MakeMount, fault_fs: FaultFs
) -> None:
    data = os.urandom(24 * MIB + 12345)
    (fault_fs.source / "f").write_bytes(data)
    mount = make_mount(fault_fs.path, transport, **QUICK)
    fault_fs.reset_counters()
    with ThreadPoolExecutor(READERS) as pool:
        assert set(pool.map(whole, [mount.path / "f"] * READERS)) == {data}
    wait_counted(mount, "warmed_files", 1)
    assert len(data) <= fault_fs.counters()["read_bytes"] <= len(data) + MIB
    assert where(mount) == {"f": "ram+backing"}
    read = noted_reads(fault_fs, "f")
    assert whole(mount.path / "f") == data
    assert fault_fs.hits(read) == 0
    ram = mount.status()["ram"]
    assert (ram["dirty_bytes"], ram["reserved_bytes"]) == (0, 0)


@BOTH
@clause("S100")
def test_what_is_read_comes_and_what_is_looked_at_does_not(
    transport: str, make_mount: MakeMount, cold: Path
) -> None:
    contents = {
        name: os.urandom(size)
        for name, size in (("empty", 0), ("small", 5000), ("large", 20 * MIB), ("header", 20 * MIB))
    }
    for name, data in contents.items():
        (cold / name).write_bytes(data)
        os.sync()
        with open(cold / name, "rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    mount = make_mount(cold, transport, **QUICK)
    with open(mount.path / "header", "rb", buffering=0) as file:
        assert file.read(4096) == contents["header"][:4096]
    for name in ("empty", "small", "large"):
        assert whole(mount.path / name) == contents[name]
    wait_counted(mount, "warmed_files", 2)
    assert where(mount) == {"small": "ram+backing", "large": "ram+backing"}
    for name, data in contents.items():
        assert whole(mount.path / name, 64 << 10) == data


@BOTH
@clause("S100")
def test_a_mapped_file_comes(transport: str, make_mount: MakeMount, cold: Path) -> None:
    import mmap

    data = os.urandom(16 * MIB)
    (cold / "f").write_bytes(data)
    mount = make_mount(cold, transport, **QUICK)
    with (
        open(mount.path / "f", "rb") as file,
        mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped,
    ):
        assert mapped[:] == data
    wait_counted(mount, "warmed_files", 1)
    assert whole(mount.path / "f") == data


@NATIVE
@clause("S100")
def test_off_means_off(transport: str, make_mount: MakeMount, cold: Path) -> None:
    (cold / "f").write_bytes(b"cold" * MIB)
    mount = make_mount(cold, transport, warm_reads="off")
    assert whole(mount.path / "f") == b"cold" * MIB
    assert (counter(mount, "warmed_files"), where(mount)) == (0, {})


@LANES
@clause("S101")
def test_hung_in_the_middle(transport: str, make_mount: MakeMount, fault_fs: FaultFs) -> None:
    """What is in RAM is read; who asks for what is missing waits, and gets it when the backing
    directory is back.
    """
    data = os.urandom(32 * MIB)
    (fault_fs.source / "f").write_bytes(data)
    mount = make_mount(fault_fs.path, transport, **QUICK)
    with (
        open(mount.path / "f", "rb", buffering=0) as first,
        open(mount.path / "f", "rb", buffering=0) as second,
    ):
        assert os.pread(first.fileno(), MIB, 0) == data[:MIB]
        fault_fs.freeze(ops=["read"])
        missing = in_thread(os.pread, second.fileno(), MIB, 9 * MIB)
        fault_fs.wait_frozen()
        assert os.pread(second.fileno(), MIB, 0) == data[:MIB]
        assert not missing.done()
        fault_fs.thaw()
        assert missing.result(120) == data[9 * MIB : 10 * MIB]
        assert whole(mount.path / "f") == data
    wait_counted(mount, "warmed_files", 1)


@NATIVE
@clause("S101")
def test_who_asks_for_what_does_not_come_gets_an_error_in_the_end(
    transport: str, make_mount: MakeMount, fault_fs: FaultFs
) -> None:
    (fault_fs.source / "f").write_bytes(b"f" * (32 * MIB))
    mount = make_mount(fault_fs.path, transport, backing_timeout=10, **QUICK)
    with open(mount.path / "f", "rb", buffering=0) as file:
        assert os.pread(file.fileno(), MIB, 0) == b"f" * MIB
        fault_fs.freeze(ops=["read"])
        with pytest.raises(OSError) as refused:
            os.pread(file.fileno(), MIB, 9 * MIB)
        assert refused.value.errno == errno.EIO
        assert os.pread(file.fileno(), MIB, 0) == b"f" * MIB
        fault_fs.thaw()
    mount.wait_status(lambda status: status["ram"]["reserved_bytes"] == 0)


@NATIVE
@clause("S101", "S81")
def test_the_worker_is_killed_in_the_middle(
    transport: str, make_mount: MakeMount, fault_fs: FaultFs
) -> None:
    data = os.urandom(32 * MIB)
    (fault_fs.source / "f").write_bytes(data)
    mount = make_mount(fault_fs.path, transport, **QUICK)
    with open(mount.path / "f", "rb", buffering=0) as file:
        assert file.read(MIB) == data[:MIB]
        fault_fs.freeze(ops=["read"])
        reader = in_thread(lambda: b"".join(iter(lambda: file.read(MIB), b"")))
        fault_fs.wait_frozen()
        pid = mount.kill_worker()
        mount.wait_status(lambda status: status["worker"]["pid"] != pid)
        fault_fs.thaw()
        assert reader.result(120) == data[MIB:]
    assert whole(mount.path / "f") == data
    wait_counted(mount, "warmed_files", 1)
    ram = mount.status()["ram"]
    assert (ram["dirty_bytes"], ram["reserved_bytes"], ram["files"]) == (0, 0, 1)


def replaced(path: Path, data: bytes) -> None:
    path.with_name("new").write_bytes(data)
    os.replace(path.with_name("new"), path)


def shortened(path: Path, data: bytes) -> None:
    os.truncate(path, len(data))
    path.write_bytes(data)


def rewritten(path: Path, data: bytes) -> None:
    with open(path, "r+b") as file:
        file.write(data)


@BOTH
@clause("S102")
def test_changed_below_in_the_middle(
    transport: str, make_mount: MakeMount, fault_fs: FaultFs
) -> None:
    old = b"a" * (16 * MIB)
    changes = (replaced, shortened, rewritten)
    for change in changes:
        (fault_fs.source / change.__name__).write_bytes(old)
    mount = make_mount(fault_fs.path, transport, **QUICK)
    for change in changes:
        seen = mount.path / change.__name__
        below = fault_fs.source / change.__name__
        new = b"b" * ((16 if change is rewritten else 3) * MIB)
        with open(seen, "rb", buffering=0) as file:
            assert file.read(MIB) == old[:MIB]
            rule = fault_fs.freeze(ops=["read"], glob=change.__name__, times=1)
            reader = in_thread(lambda file: [file.read(MIB) for _ in range(4)], file)
            fault_fs.wait_hits(rule)
            change(below, new)
            fault_fs.thaw()
            error = reader.exception(120)
            assert error is None or (
                change is replaced and isinstance(error, OSError) and error.errno == errno.ESTALE
            )  # as on NFS
        mount.wait_status(lambda status: status["ram"]["reserved_bytes"] == 0)
        mount.wait_status(
            lambda _status, seen=seen, below=below: (
                os.stat(seen).st_mtime_ns == os.stat(below).st_mtime_ns
            )
        )
        assert whole(seen) == new
        assert whole(seen) == new


@NATIVE
@clause("S102")
def test_changed_below_when_it_has_come(transport: str, make_mount: MakeMount, cold: Path) -> None:
    (cold / "f").write_bytes(b"old" * MIB)
    mount = make_mount(cold, transport, **QUICK)
    assert whole(mount.path / "f") == b"old" * MIB
    wait_counted(mount, "warmed_files", 1)
    (cold / "f").write_bytes(b"new" * MIB)
    mount.wait_status(
        lambda _status: os.stat(mount.path / "f").st_mtime_ns == os.stat(cold / "f").st_mtime_ns
    )
    assert whole(mount.path / "f") == b"new" * MIB


def overwritten(path: Path) -> None:
    with open(path, "r+b", buffering=0) as file:
        file.write(b"new")


@BOTH
@clause("S102")
def test_changed_here_in_the_middle(
    transport: str, make_mount: MakeMount, fault_fs: FaultFs
) -> None:
    """What is read ahead hangs meanwhile, so that it cannot have come whole before."""
    data = os.urandom(16 * MIB)
    changes: dict[str, tuple[Callable[[Path], Any], bytes]] = {
        "unlink": (Path.unlink, b""),
        "truncate": (lambda path: path.write_bytes(b"new"), b"new"),
        "overwrite": (overwritten, b"new" + data[3:]),
    }
    if transport != "libfuse":
        del changes["overwrite"]  # X7
    for name in changes:
        (fault_fs.source / name).write_bytes(data)
    mount = make_mount(fault_fs.path, transport, **QUICK)
    for name, (change, expected) in changes.items():
        path = mount.path / name
        with open(path, "rb", buffering=0) as file:
            assert file.read(MIB) == data[:MIB]
            rule = fault_fs.freeze(ops=["read"], glob=name)
            reader = in_thread(lambda file: b"".join(iter(lambda: file.read(MIB), b"")), file)
            fault_fs.wait_hits(rule)
            changed = in_thread(change, path)
            if (
                transport != "libfuse"
            ):  # there the kernel has it wait for the pages that are being read
                changed.result(120)
            fault_fs.thaw()
            changed.result(120)
            rest = reader.result(120)
        if name == "unlink":
            assert rest == data[MIB:]
        else:
            assert whole(path) == expected
        mount.wait_status(lambda status: status["ram"]["reserved_bytes"] == 0)
    mount.flush()
    assert {
        path.name: path.read_bytes() for path in fault_fs.source.iterdir() if path.is_file()
    } == {name: expected for name, (_change, expected) in changes.items() if name != "unlink"}


@NATIVE
@clause("S103")
def test_it_goes_when_a_writer_needs_the_room(
    transport: str, make_mount: MakeMount, fault_fs: FaultFs
) -> None:
    data = os.urandom(40 * MIB)
    (fault_fs.source / "f").write_bytes(data)
    mount = make_mount(fault_fs.path, transport, ram="64M", **QUICK)
    with open(mount.path / "f", "rb", buffering=0) as file:
        assert file.read(MIB) == data[:MIB]
        fault_fs.freeze(ops=["read"])
        reader = in_thread(lambda: b"".join(iter(lambda: file.read(MIB), b"")))
        fault_fs.wait_frozen()
        new = os.urandom(50 * MIB)
        (mount.path / "g").write_bytes(new)
        assert whole(mount.path / "g") == new
        fault_fs.thaw()
        assert reader.result(120) == data[MIB:]
    mount.flush()
    assert (fault_fs.source / "g").read_bytes() == new
    status = mount.status()
    assert status["ram"]["used_bytes"] <= 64 * MIB


@NATIVE
@clause("S103")
def test_nothing_that_is_dirty_or_used_leaves_for_it(
    transport: str, make_mount: MakeMount, fault_fs: FaultFs
) -> None:
    (fault_fs.source / "f").write_bytes(b"f" * (40 * MIB))
    mount = make_mount(fault_fs.path, transport, ram="64M", **QUICK)
    (mount.path / "g").write_bytes(b"g" * (30 * MIB))
    mount.flush()
    assert whole(mount.path / "f") == b"f" * (40 * MIB)
    assert whole(mount.path / "f") == b"f" * (40 * MIB)
    assert where(mount) == {"g": "ram+backing"}
    assert counter(mount, "warmed_files") == 0


@NATIVE
@clause("S103")
def test_with_on_clean_files_leave_for_it_and_neither_checkpoints_nor_pins(
    transport: str, make_mount: MakeMount, fault_fs: FaultFs
) -> None:
    for name in ("f", "g"):
        (fault_fs.source / name).write_bytes(name.encode() * (20 * MIB))
    mount = make_mount(fault_fs.path, transport, ram="64M", warm_reads="on", **QUICK)
    for name in ("checkpoint-1", "pinned", "loose"):
        (mount.path / name).write_bytes(name.encode() * MIB)
    mount.ctl("pin", str(mount.path / "pinned"))
    mount.flush()
    (mount.path / "clean").write_bytes(b"c" * (25 * MIB))
    mount.flush()
    kept = {"checkpoint-1": "ram+backing", "pinned": "ram+backing"}
    assert where(mount) == kept | {"loose": "ram+backing", "clean": "ram+backing"}
    for name in ("f", "g"):
        assert whole(mount.path / name) == name.encode() * (20 * MIB)
        mount.wait_status(lambda status: status["ram"]["reserved_bytes"] == 0)
        found = where(mount)
        assert found | kept == found
        assert "loose" not in found
    assert counter(mount, "warmed_files") >= 1


@NATIVE
@clause("S104")
def test_a_large_file_that_is_damaged_is_not_served_again(
    transport: str, make_mount: MakeMount, fault_fs: FaultFs
) -> None:
    """Without `verify_reads`: bytes may have been served before the last was read."""
    data = os.urandom(12 * MIB)
    mount = make_mount(fault_fs.path, transport, **QUICK)
    (mount.path / "f").write_bytes(data)
    mount.flush()
    mount.ask("evict", paths=["f"])
    fault_fs.rule("flip", ops=["read"], glob="f")
    with contextlib.suppress(OSError):
        whole(mount.path / "f")
    wait_counted(mount, "checksum_mismatches", 1)
    with pytest.raises(OSError) as refused:
        whole(mount.path / "f")
    assert refused.value.errno == errno.EIO
    assert where(mount) == {}


@NATIVE
@clause("S104")
@pytest.mark.parametrize(("size", "verify_reads"), [(5000, False), (20 * MIB, True)])
def test_what_is_not_as_it_was_stored_is_not_served(
    transport: str, make_mount: MakeMount, fault_fs: FaultFs, size: int, verify_reads: bool
) -> None:
    data = os.urandom(size)
    mount = make_mount(fault_fs.path, transport, **QUICK)
    (mount.path / "f").write_bytes(data)
    mount.flush()
    mount.umount()
    mount.start(**({"verify_reads": True} if verify_reads else {}))
    rule = fault_fs.rule("flip", ops=["read"], glob="f")
    with pytest.raises(OSError) as refused:
        whole(mount.path / "f")
    assert refused.value.errno == errno.EIO
    with pytest.raises(OSError), open(mount.path / "f", "r+b"):
        pass
    assert counter(mount, "checksum_mismatches") == 1
    text = "".join(p.read_text() for p in (mount.runtime_dir / "logs").iterdir())
    assert "not what was stored" in text
    assert "expected" in text
    fault_fs.clear(rule)
    (fault_fs.source / "f").write_bytes(data)  # restored from another copy
    mount.wait_status(
        lambda _status: (
            os.stat(mount.path / "f").st_mtime_ns == os.stat(fault_fs.source / "f").st_mtime_ns
        )
    )
    assert whole(mount.path / "f") == data


@NATIVE
@clause("S444")
def test_a_file_that_is_verified_is_served_again(
    transport: str, make_mount: MakeMount, fault_fs: FaultFs
) -> None:
    """The path to the storage gave wrong bytes for a while; the file was good all the time."""
    data = os.urandom(3 * MIB)
    mount = make_mount(fault_fs.path, transport, **QUICK)
    (mount.path / "f").write_bytes(data)
    mount.flush()
    mount.umount()
    mount.start(verify_reads=True)
    rule = fault_fs.rule("flip", ops=["read"], glob="f")
    with pytest.raises(OSError) as refused:
        whole(mount.path / "f")
    assert refused.value.errno == errno.EIO
    fault_fs.clear(rule)
    with pytest.raises(OSError):
        whole(mount.path / "f")
    assert mount.ctl("verify", str(mount.path / "f"))[0]["status"] == "ok"
    assert whole(mount.path / "f") == data


@NATIVE
@clause("S104")
def test_ram_serves_what_the_backing_directory_spoils(
    transport: str, make_mount: MakeMount, fault_fs: FaultFs
) -> None:
    data = os.urandom(3 * MIB)
    mount = make_mount(fault_fs.path, transport, **QUICK)
    (mount.path / "f").write_bytes(data)
    mount.flush()
    fault_fs.rule("flip", ops=["read"], glob="f")
    assert whole(mount.path / "f") == data
    assert counter(mount, "checksum_mismatches") == 0


@NATIVE
@clause("S104")
def test_somebody_else_may_change_a_file_that_was_stored_here(
    transport: str, make_mount: MakeMount, cold: Path
) -> None:
    """Its checksum is void then: a change is no damage."""
    mount = make_mount(cold, transport, verify_reads=True, **QUICK)
    (mount.path / "f").write_bytes(os.urandom(5000))
    mount.flush()
    with open(cold / "f", "r+b") as file:
        file.write(b"changed in place")
    mount.wait_status(
        lambda _status: os.stat(mount.path / "f").st_mtime_ns == os.stat(cold / "f").st_mtime_ns
    )
    assert whole(mount.path / "f") == (cold / "f").read_bytes()
    assert counter(mount, "checksum_mismatches") == 0
