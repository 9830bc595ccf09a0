"""A directory of 100,000 entries, in RAM alone and on the backing directory alone.

On mounts of their own, so that no other test waits for their drain.
"""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from tests.rig.faultfs import FaultFs
from tests.rig.mounts import AcpfsMount, MakeMount

LIMIT_S = 1200.0
"""100,000 creations take a minute on a machine that is idle, and several where other tests share its two cores."""
COUNT = 100_000
REMOVED = 200
NAMES = {f"f{number}" for number in range(COUNT)}
pytestmark = [pytest.mark.mount, pytest.mark.slow, pytest.mark.timeout(LIMIT_S), pytest.mark.transports("libfuse", "native")]


def fill(directory: Path) -> None:
    directory_fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    for name in NAMES:
        os.mknod(name, dir_fd=directory_fd)
    os.close(directory_fd)


def remove_some(directory: Path) -> set[str]:
    """Returns the names that are left."""
    removed = set(random.Random(1).sample(sorted(NAMES), REMOVED))
    for name in removed:
        os.unlink(directory / name)
    return NAMES - removed


def listed(directory: Path) -> set[str]:
    names = os.listdir(directory)
    assert len(names) == len(set(names))
    return set(names)


@pytest.mark.clause("S46", "S3")
def test_a_hundred_thousand_entries_in_ram(tmp_path: Path, transport: str) -> None:
    with (
        FaultFs(tmp_path / "disk", tmp_path / "backing", watchdog_s=LIMIT_S) as faults,
        AcpfsMount(faults.path, tmp_path / "mnt", transport, watchdog_s=LIMIT_S) as mount,
    ):
        directory = mount.path / "d"
        directory.mkdir()
        faults.freeze()
        fill(directory)
        assert listed(directory) == NAMES
        assert remove_some(directory) == listed(directory)
        mount.kill()  # what is only here need not be drained
        faults.thaw()


@pytest.mark.clause("S46")
def test_a_hundred_thousand_entries_on_the_backing_directory(tmp_path: Path, make_mount: MakeMount, transport: str) -> None:
    below = tmp_path / "backing" / "d"
    below.mkdir(parents=True)
    fill(below)
    mount = make_mount(below.parent, transport, watchdog_s=LIMIT_S)
    directory = mount.path / "d"
    assert listed(directory) == NAMES
    left = remove_some(directory)
    assert listed(directory) == left
    mount.flush(timeout_s=300)
    assert listed(below) == left
