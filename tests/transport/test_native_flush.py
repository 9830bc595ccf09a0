"""`acpfs-ctl flush` and a close that turns out not to have been the last one, with writes that only
the kernel sees.

And which closes the kernel tells of.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from acpfs.transport.native.negotiate import ALL_FEATURES
from acpfs.transport.native.protocol import InitFlag, Opcode
from tests.rig.mounts import AcpfsMount
from tests.rig.processes import Child
from tests.transport.mounted import NativeMount

pytestmark = [
    pytest.mark.mount,
    pytest.mark.skipif(
        os.geteuid() != 0 or not os.access("/dev/fuse", os.W_OK), reason="needs root and /dev/fuse"
    ),
]

SIZE = 4 << 20


@pytest.mark.clause("S19")
def test_flush_covers_what_the_last_close_finds(tmp_path: Path) -> None:
    """The STORE that it waits for is taken back when the copy of the descriptor is closed, and
    another is logged.
    """
    (tmp_path / "backing").mkdir()
    with AcpfsMount(
        tmp_path / "backing", tmp_path / "mnt", "native-passthrough", bandwidth=1
    ) as mount:
        fd = os.open(mount.path / "f", os.O_WRONLY | os.O_CREAT)
        os.pwrite(fd, b"1" * SIZE, 0)
        told, tell = os.pipe()
        go_on, go = os.pipe()

        def write_the_rest() -> None:
            os.write(tell, b".")
            os.read(go_on, 1)
            os.pwrite(fd, b"2" * SIZE, 0)
            os.close(fd)

        child = Child(write_the_rest)
        os.read(told, 1)
        os.close(fd)  # the first close
        assert [entry["name"] for entry in mount.status()["queue"]] == ["f"]
        seen: list[bytes] = []

        def flush() -> None:
            mount.flush()
            seen.append(
                (mount.backing / "f").read_bytes() if (mount.backing / "f").exists() else b""
            )

        thread = threading.Thread(target=flush)
        thread.start()
        for _ in range(3):
            mount.status()  # answered by the same loop: the flush has been taken up
        os.write(go, b".")
        child.result()
        mount.ask("set", key="bandwidth", value="0")
        thread.join(60)
        assert seen == [b"2" * SIZE]
        for end in (told, tell, go_on, go):
            os.close(end)


@pytest.mark.clause("S495")
@pytest.mark.parametrize("lacking", [InitFlag(0), InitFlag.PASSTHROUGH], ids=["all", "direct"])
def test_to_close_what_only_reads_asks_nothing(tmp_path: Path, lacking: InitFlag) -> None:
    with NativeMount(tmp_path, "--mask", str(ALL_FEATURES & ~int(lacking)), "--count") as mounted:
        file = mounted.path / "f"
        file.write_bytes(b"x" * 4096)  # one FLUSH
        for _ in range(10):
            assert file.read_bytes() == b"x" * 4096
        os.close(os.open(file, os.O_RDWR))  # another: it may have written through a mapping
        os.close(os.open(file, os.O_RDONLY | os.O_TRUNC))  # and this one has changed it
        assert mounted.unmount() == 0
        assert mounted.wait_for_server() == 0
    assert f"opcode {int(Opcode.FLUSH)} came 3 times" in mounted.log()


@pytest.mark.clause("S495")
def test_a_reader_that_truncates_has_its_close_heard(tmp_path: Path) -> None:
    """Also where a copy of the descriptor stays open, so that RELEASE does not come."""
    (tmp_path / "backing").mkdir()
    (tmp_path / "backing/f").write_bytes(b"old")
    with AcpfsMount(tmp_path / "backing", tmp_path / "mnt", "native-passthrough") as mount:
        fd = os.open(mount.path / "f", os.O_RDONLY | os.O_TRUNC)
        copy = os.dup(fd)
        os.close(fd)
        mount.flush()
        assert (mount.backing / "f").read_bytes() == b""
        os.close(copy)
