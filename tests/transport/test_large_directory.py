"""A large directory, in RAM alone and on the backing directory alone: 10,000 entries, and by
`tools/test transport` 100,000.

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
"""100,000 creations take a minute on a machine that is idle, and several where other tests share
its two cores.
"""
REMOVED = 200
pytestmark = [
    pytest.mark.mount,
    pytest.mark.timeout(LIMIT_S),
    pytest.mark.transports("libfuse", "native"),
    pytest.mark.parametrize("count", [10_000, pytest.param(100_000, marks=pytest.mark.long)]),
]


def fill(directory: Path, count: int) -> set[str]:
    """Returns the names."""
    names = {f"f{number}" for number in range(count)}
    directory_fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    for name in names:
        os.mknod(name, dir_fd=directory_fd)
    os.close(directory_fd)
    return names


def remove_some(directory: Path, names: set[str]) -> set[str]:
    """Returns the names that are left."""
    removed = set(random.Random(1).sample(sorted(names), REMOVED))
    for name in removed:
        os.unlink(directory / name)
    return names - removed


def listed(directory: Path) -> set[str]:
    names = os.listdir(directory)
    assert len(names) == len(set(names))
    return set(names)


@pytest.mark.clause("S46", "S3")
def test_many_entries_in_ram(tmp_path: Path, transport: str, count: int) -> None:
    with (
        FaultFs(tmp_path / "disk", tmp_path / "backing", watchdog_s=LIMIT_S) as faults,
        AcpfsMount(faults.path, tmp_path / "mnt", transport, watchdog_s=LIMIT_S) as mount,
    ):
        directory = mount.path / "d"
        directory.mkdir()
        faults.freeze()
        names = fill(directory, count)
        assert listed(directory) == names
        assert remove_some(directory, names) == listed(directory)
        faults.thaw()  # first: a worker in a call that hangs cannot be killed
        mount.kill()  # what is only here need not be drained


@pytest.mark.clause("S46")
def test_many_entries_on_the_backing_directory(
    tmp_path: Path, make_mount: MakeMount, transport: str, count: int
) -> None:
    below = tmp_path / "backing" / "d"
    below.mkdir(parents=True)
    names = fill(below, count)
    mount = make_mount(below.parent, transport, watchdog_s=LIMIT_S)
    directory = mount.path / "d"
    assert listed(directory) == names
    left = remove_some(directory, names)
    assert listed(directory) == left
    mount.flush(timeout_s=300)
    assert listed(below) == left
