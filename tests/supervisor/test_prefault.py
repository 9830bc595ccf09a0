"""Memory made ready ahead, with a real mount: it is there, it is not counted as used, the first
writer gets it, and it never stays.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from acpfs.config import share_of
from acpfs.errors import ExitCode
from acpfs.ram.memory import read_memory
from acpfs.ram.prefault_default import choose
from tests.rig.mounts import AcpfsMount, CommandError, MakeMount

pytestmark = [
    pytest.mark.mount,
    pytest.mark.transports("native"),
    pytest.mark.skipif(
        os.getuid() != 0 or not os.path.exists("/dev/fuse"), reason="needs root and /dev/fuse"
    ),
]
BOTH = pytest.mark.transports("libfuse", "native")

MIB = 1 << 20
READY = 128 * MIB
WRITTEN = b"x" * (200 * MIB)
"""More than the budget has beside what is ready.

Not zeros that were never touched: of these the kernel sends a page per request.
"""


@pytest.fixture
def backing(tmp_path: Path) -> Path:
    path = tmp_path / "backing"
    path.mkdir()
    return path


def ready(status: dict[str, Any]) -> bool:
    return bool(status["ram"]["prefaulted_bytes"] == READY)


def is_written_once_given_back(mount: AcpfsMount) -> bool:
    """To be opened anew until it is: where nothing is written for some seconds, and be it that the
    machine stands still, it comes again.
    """
    with open(mount.path / "whole", "wb") as file:
        if mount.status()["ram"]["prefaulted_bytes"]:
            return False
        file.write(WRITTEN)
    return True


@BOTH
def test_the_first_writer_gets_what_was_made_ready(
    make_mount: MakeMount, transport: str, backing: Path
) -> None:
    mount = make_mount(backing, transport, ram="256M", prefault="50%")
    status = mount.wait_status(ready)
    assert status["ram"]["used_bytes"] == 0
    assert "128 MiB more made ready" in mount.run("acpfs-ctl", str(mount.path), "status").stdout
    mount.wait_status(lambda _status: is_written_once_given_back(mount))
    ram = mount.status()["ram"]
    assert ram["used_bytes"] == len(WRITTEN)
    assert (
        ram["used_bytes"] + ram["prefaulted_bytes"] <= ram["budget_bytes"]
    )  # it has come again where ten seconds have passed
    assert (mount.path / "whole").stat().st_size == len(WRITTEN)
    mount.umount()
    assert mount.leaks() == []


@pytest.mark.clause("S250")
def test_what_the_default_means_here_is_in_the_status(
    make_mount: MakeMount, transport: str, backing: Path
) -> None:
    mount = make_mount(backing, transport, ram="256M", prefault="auto")
    here = choose(read_memory().cgroup_bytes)
    ram = mount.status()["ram"]
    assert ram["prefault"] == here.reason
    assert ram["prefaulted_bytes"] <= share_of(here.wanted, ram["budget_bytes"])


def test_the_next_daemon_begins_anew(make_mount: MakeMount, transport: str, backing: Path) -> None:
    mount = make_mount(backing, transport, ram="256M", prefault="128M")
    mount.wait_status(ready)
    mount.terminate()
    mount.start()
    mount.wait_status(ready)


def test_a_memory_policy_that_this_machine_has_not_got(
    make_mount: MakeMount, transport: str, backing: Path
) -> None:
    with pytest.raises(CommandError, match="no memory on NUMA node 77") as raised:
        make_mount(backing, transport, numa="bind:77")
    assert raised.value.code == ExitCode.ENVIRONMENT
