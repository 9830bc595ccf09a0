"""Many calls that wait for room in RAM at once: others are answered, and memory for what they
brought is all that they take.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from acpfs.transport.native.request import HEADER_BYTES, RequestBuffers
from tests.rig.files import write_blocks
from tests.rig.mounts import AcpfsMount, MakeMount
from tests.rig.processes import Child

MIB = 1 << 20
RAM = 16 * MIB
PIECE = bytes(64 << 10)
WRITERS = 400
MANY = 300
"""At least so many of them find RAM full."""


@pytest.fixture
def full(tmp_path: Path, transport: str, make_mount: MakeMount) -> AcpfsMount:
    """Whose RAM is full, and drains at a byte per second."""
    backing = tmp_path / "backing"
    backing.mkdir()
    mount = make_mount(backing, transport, ram=RAM, bandwidth=1)
    write_blocks(mount.path / "before", bytes(MIB), RAM // MIB - 2)
    return mount


def write_each(directory: Path) -> None:
    """A file from each of so many threads."""

    def write(number: int) -> None:
        with open(directory / f"w{number}", "wb", buffering=0) as file:
            file.write(PIECE)

    writers = [threading.Thread(target=write, args=(number,)) for number in range(WRITERS)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()


@pytest.mark.slow
@pytest.mark.clause("S497")
@pytest.mark.transports("libfuse", "native-direct")
def test_others_are_answered(full: AcpfsMount) -> None:
    child = Child(lambda: write_each(full.path))
    full.wait_status(lambda status: len(status["waiting"]) >= MANY)
    assert not (full.path / "nothing").exists()
    assert (full.path / "before").read_bytes() == bytes(RAM - 2 * MIB)
    (full.path / "before").rename(full.path / "renamed")
    full.ask("set", key="bandwidth", value="0")
    child.result()
    full.flush()
    assert len(os.listdir(full.backing)) == 1 + WRITERS + (full.backing / ".acpfs").exists()


@pytest.mark.clause("S511")
@pytest.mark.parametrize("size", [1, 5000, MIB])
def test_a_write_that_waits_keeps_what_it_brought_and_no_more(size: int) -> None:
    buffers = RequestBuffers(MIB)
    buffers.payload[:] = b"x" * MIB
    payload = buffers.payload[:size]
    buffers.give_back_rest(HEADER_BYTES + size)
    assert payload == b"x" * size
    kept = -(-size // os.sysconf("SC_PAGESIZE")) * os.sysconf("SC_PAGESIZE")
    assert bytes(buffers.payload[kept:]) == bytes(MIB - kept)
