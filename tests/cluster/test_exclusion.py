"""What two nodes grant at the same time: locks, and names that are to be made once."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

import pytest

from tests.cluster.stand import Stand

clause = pytest.mark.clause
pytestmark = [pytest.mark.mount, pytest.mark.transports("native")]


def exclusive(path: Path) -> int:
    return os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY)


@clause("S456", "S45")
def test_nodes_do_not_exclude_each_other(tmp_path: Path, shared: Path) -> None:
    with Stand(tmp_path, [shared, shared]) as stand:
        first, second = (node.path for node in stand.nodes)
        (first / "lock").write_bytes(b"")
        stand.nodes[0].flush()
        os.listdir(second)
        locked = [(path / "lock").open("r+b") for path in (first, second)]
        for file in locked:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        with (first / "lock").open("r+b") as another, pytest.raises(OSError) as caught:
            fcntl.flock(another, fcntl.LOCK_EX | fcntl.LOCK_NB)
        assert caught.value.errno == errno.EWOULDBLOCK
        for file in locked:
            file.close()
        # both are open at once: what is not closed yet has not come to the storage, where the other one would find it
        made = [exclusive(path / "once") for path in (first, second)]
        with pytest.raises(FileExistsError):
            exclusive(first / "once")
        for fd, content in zip(made, (b"first", b"second"), strict=True):
            os.write(fd, content)
            os.close(fd)
        for node in stand.nodes:
            node.flush()
        assert (shared / "once").read_bytes() in (b"first", b"second")
