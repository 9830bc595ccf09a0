"""`acpfs-ctl flush` and a close that turns out not to have been the last one, with writes that only the kernel sees."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from tests.rig.mounts import AcpfsMount
from tests.rig.processes import Child

pytestmark = [
    pytest.mark.mount,
    pytest.mark.skipif(
        os.geteuid() != 0 or not os.access("/dev/fuse", os.W_OK), reason="needs root and /dev/fuse"
    ),
]

SIZE = 4 << 20


@pytest.mark.clause("S19")
def test_flush_covers_what_the_last_close_finds(tmp_path: Path) -> None:
    """The STORE that it waits for is taken back when the copy of the descriptor is closed, and another is logged."""
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
