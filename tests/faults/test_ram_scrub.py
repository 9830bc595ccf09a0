"""Bytes that change in RAM, behind everybody's back, are found and, where there is a good copy, not
served any more.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from acpfs.errors import ExitCode
from tests.rig.mounts import AcpfsMount, MakeMount

pytestmark = [pytest.mark.mount, pytest.mark.clause("S235")]


def flip(mount: AcpfsMount, size: int) -> None:
    """One bit of the file of that size in the RAM tier."""
    (path,) = [
        path
        for path in (Path(mount.status()["ram"]["directory"]) / "data").iterdir()
        if path.stat().st_size == size
    ]
    st = path.stat()
    with open(path, "r+b") as file:
        byte = os.pread(file.fileno(), 1, size // 2)
        os.pwrite(file.fileno(), bytes([byte[0] ^ 1]), size // 2)
    os.utime(path, ns=(st.st_atime_ns, st.st_mtime_ns))


def read_from_daemon(path: Path) -> bytes:
    """Not what the kernel has kept of it since it was written."""
    with open(path, "rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        return file.readall()


def logged(mount: AcpfsMount) -> str:
    return "".join(path.read_text() for path in (mount.runtime_dir / "logs").iterdir())


@pytest.mark.transports("libfuse", "native-direct", "native-passthrough")
def test_an_operator_finds_and_mends_what_changed_in_ram(
    transport: str, make_mount: MakeMount, tmp_path: Path
) -> None:
    (tmp_path / "backing").mkdir()
    mount = make_mount(tmp_path / "backing", transport, scrub_ram=0)
    contents = {f"f{size}": os.urandom(size) for size in (100, 5000, 3_000_001)}
    for name, data in contents.items():
        (mount.path / name).write_bytes(data)
    mount.flush()
    assert {row["status"] for row in mount.ctl("verify", "--ram")} == {"ok"}
    flip(mount, 3_000_001)
    assert read_from_daemon(mount.path / "f3000001") != contents["f3000001"]
    done = mount.run("acpfs-ctl", str(mount.path), "verify", "--ram", "f3000001")
    assert "repaired" in done.stdout
    assert "1 repaired" in done.stdout
    for name, data in contents.items():
        assert (mount.path / name).read_bytes() == data
    assert mount.status()["counters"]["ram_repaired_files"] == 1
    assert "RAM has other bytes of a file than were stored" in logged(mount)
    mount.umount()
    assert (tmp_path / "backing/f3000001").read_bytes() == contents["f3000001"]


def test_ram_is_looked_through_in_the_background(
    transport: str, make_mount: MakeMount, tmp_path: Path
) -> None:
    (tmp_path / "backing").mkdir()
    mount = make_mount(tmp_path / "backing", transport, scrub_ram=0.2)
    data = os.urandom(50_000)
    (mount.path / "f").write_bytes(data)
    mount.flush()
    flip(mount, len(data))
    mount.wait_status(lambda status: status["counters"]["ram_repaired_files"] == 1)
    assert (mount.path / "f").read_bytes() == data
    assert mount.status()["counters"]["ram_scrubbed_bytes"] >= len(data)


def test_what_is_not_persisted_is_named_until_it_is_saved_again(
    transport: str, make_mount: MakeMount, tmp_path: Path
) -> None:
    (tmp_path / "backing").mkdir()
    mount = make_mount(tmp_path / "backing", transport, bandwidth=1, scrub_ram=0)
    (mount.path / "f").write_bytes(os.urandom(200_000))
    mount.wait_status(lambda _status: mount.ask("ls", paths=["f"])["items"][0]["checksum"])
    flip(mount, 200_000)
    done = mount.run("acpfs-ctl", str(mount.path), "verify", "--ram", check=False)
    assert done.returncode == ExitCode.FAILED
    assert "1 damaged" in done.stdout
    assert "save it again" in done.stdout
    (warning,) = [text for text in mount.status()["warnings"] if "RAM has other bytes" in text]
    assert "f: it is not persisted yet" in warning
    (mount.path / "f").write_bytes(b"again")
    mount.run("acpfs-ctl", str(mount.path), "set", "bandwidth=0")
    mount.flush()
    assert (
        mount.run("acpfs-ctl", str(mount.path), "verify", "--ram", check=False).returncode
        == ExitCode.OK
    )
    assert not [text for text in mount.status()["warnings"] if "RAM has other bytes" in text]
    mount.umount()
    assert (tmp_path / "backing/f").read_bytes() == b"again"
