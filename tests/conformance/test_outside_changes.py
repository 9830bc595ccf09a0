"""What others do to the backing directory reaches what the kernel has cached: names, attributes,
mapped pages.
"""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.rig.mounts import AcpfsMount, MakeMount

pytestmark = [pytest.mark.mount, pytest.mark.every_lane]

TIMEOUT_S = 1.0
LONG_TIMEOUT_S = 5.0
ENDLESS_TIMEOUT_S = 3600.0
"""For so long the kernel goes on showing what it has cached, if nobody tells it."""
AT_LAST_S = 120.0
"""Only a hang breaks it."""


@pytest.fixture
def mount(make_mount: MakeMount, transport: str, tmp_path: Path) -> AcpfsMount:
    return mounted(make_mount, transport, tmp_path, TIMEOUT_S)


def mounted(
    make_mount: MakeMount, transport: str, tmp_path: Path, attr_timeout_s: float, **options: object
) -> AcpfsMount:
    (tmp_path / "backing").mkdir()
    (tmp_path / "backing/f").write_bytes(b"old" * 1000)
    (tmp_path / "backing/g").write_bytes(b"g")
    return make_mount(tmp_path / "backing", transport, attr_timeout=attr_timeout_s, **options)


def eventually(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + AT_LAST_S
    while not condition():
        assert time.monotonic() < deadline
        threading.Event().wait(0.01)  # nobody announces it


def other(text: str, path: Path) -> None:
    """Another process does something to a path."""
    subprocess.run(
        [sys.executable, "-c", f"import os, sys; path = sys.argv[1]; {text}", str(path)],
        check=True,
        timeout=120,
    )


@pytest.mark.clause("S28")
def test_a_name_that_others_removed_is_gone_when_a_listing_has_shown_it(
    make_mount: MakeMount, transport: str, tmp_path: Path
) -> None:
    mount = mounted(make_mount, transport, tmp_path, ENDLESS_TIMEOUT_S)
    assert sorted(os.listdir(mount.path)) == ["f", "g"]
    os.stat(mount.path / "f")  # from here on the kernel answers for the name by itself
    other("os.unlink(path)", mount.backing / "f")
    mount.ask("wait_nodes")  # the daemon asks anew from here on; the kernel is not told
    assert os.listdir(mount.path) == ["g"]
    eventually(lambda: not (mount.path / "f").exists())


@pytest.mark.clause("S28")
def test_mapped_pages_show_what_others_wrote(
    make_mount: MakeMount, transport: str, tmp_path: Path
) -> None:
    """Of a file that is not in RAM; of one that is, in passthrough, the next open shows it."""
    mount = mounted(make_mount, transport, tmp_path, LONG_TIMEOUT_S, warm_reads="off")
    with (
        (mount.path / "f").open("rb") as file,
        mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped,
    ):
        assert mapped[:3] == b"old"
        other("open(path, 'r+b').write(b'new' * 1000)", mount.backing / "f")
        eventually(
            lambda: (
                os.stat(mount.path / "f").st_mtime_ns == os.stat(mount.backing / "f").st_mtime_ns
            )
        )
        eventually(lambda: mapped[:3] == b"new")
        assert os.pread(file.fileno(), 3, 0) == b"new"


@pytest.mark.clause("S28")
def test_the_next_open_of_a_file_that_came_to_ram_shows_what_others_wrote(
    mount: AcpfsMount,
) -> None:
    with (
        (mount.path / "f").open("rb") as file,
        mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped,
    ):
        assert mapped[:3] == b"old"
        other("open(path, 'r+b').write(b'new' * 1000)", mount.backing / "f")
        eventually(lambda: (mount.path / "f").read_bytes()[:3] == b"new")


@pytest.mark.clause("S28")
def test_a_file_that_left_ram_and_was_changed_by_others(mount: AcpfsMount) -> None:
    """Written here, drained, pushed out of RAM, then changed underneath: size, bytes and time are
    the new ones.
    """
    path = mount.path / "mine"
    path.write_bytes(b"mine" * 5)
    mount.flush()
    other("open(path, 'wb').write(b'theirs')", mount.backing / "mine")
    eventually(lambda: os.stat(path).st_size == 6)
    assert path.read_bytes() == b"theirs"
